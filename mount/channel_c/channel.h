/*
 * The kernel channel: what stands between /dev/fuse and libfuse (below pyfuse3).
 *
 * It changes three messages (INIT, OPEN, CREATE), counts open handles, and can hand a live connection from a
 * killed process to a new one. All else passes untouched. Nothing of libfuse is included, so that this builds with
 * any version of it, or none. Facts about the kernel come from fs/fuse/{dev,inode,file,iomode,passthrough,backing}.c.
 *
 * The files, in the order of reading:
 *   protocol.h   FUSE's messages and numbers
 *   channel.h    this overview, the state file, what the files share
 *   transform.c  what is looked at and changed in messages
 *   table.c      a row for each open inode        journal.c   exact counts over SIGKILL, and the takeover
 *   backing.c    files registered for passthrough requests.c  requests without an answer
 *   data.c       READ and WRITE without Python
 *   customio.c   one driver                       pumps.c     the other, and the threads
 *   session.c    how libfuse is hooked            api.c       what Python calls
 *
 * TWO DRIVERS carry the messages.
 *   customio    libfuse >= 3.14 lets a program replace its read() and writev() of the device. This library defines
 *               fuse_session_new; loaded RTLD_GLOBAL before pyfuse3, it is found first, calls libfuse's own and sets
 *               the hook. libfuse's device is then an epoll descriptor over /dev/fuse and an event counter.
 *   socketpair  for older libfuse: a SOCK_SEQPACKET pair as its device and a thread in each direction.
 *
 * THE DATA PATH where the kernel's passthrough is not to be had: threads read /dev/fuse and answer READ and WRITE of
 * attached files themselves, without Python and without libfuse. All other requests go on through the driver.
 *
 * THE STATE FILE is mapped shared, so every store survives SIGKILL. It holds the INIT message (a takeover replays it
 * to a new libfuse), one row for each open inode (counts, backing id, file handle) and a small journal.
 *   - Counts and journal change together through `redo`: the new values are written there, then `redo.valid`, then
 *     the real places, then `redo.valid` again. A new process applies a valid redo once more (absolute values).
 *   - OPEN/CREATE: counted and journalled before the answer is written, the entry removed after. A RELEASE is counted
 *     and journalled when read, the entry removed when answered.
 *   - After a death the kernel sends every request again that it has no answer to (FUSE_NOTIFY_RESEND), before any
 *     other, bit 63 set in `unique`. So: a journalled OPEN that comes again never reached the kernel: its count is
 *     taken back. A journalled RELEASE that comes again is already counted. An entry whose request does not come
 *     again was answered. (One exception: its program was killed just then. The row is `doubtful`, and when the kernel
 *     forgets the inode, nobody has it open; table.c.)
 *   - A backing id is in its row before the answer that names it goes out. The kernel hands ids out in order
 *     (idr_alloc_cyclic), so an id lost between ioctl and row is `last_backing + 1`, and a new process closes it.
 * Only one process at a time uses the file. Within it, `channel.lock` guards all that is declared here, and the loop's
 * queue has a lock of its own (customio.c).
 */
#ifndef TIERFS_CHANNEL_H
#define TIERFS_CHANNEL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#ifndef _FILE_OFFSET_BITS
#define _FILE_OFFSET_BITS 64
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "protocol.h"

_Static_assert(sizeof(off_t) == 8, "offsets of 64 bits");

#define EXPORT __attribute__((visibility("default"))) /* all else is hidden: the library is loaded RTLD_GLOBAL */
#define BUFFER_SIZE (MAX_WRITE + (1u << 16)) /* a request: header and names besides the data */

/* ---- the state file ------------------------------------------------------------------------------------------ */

enum { ROWS = 65536, JOURNAL = 4096, HANDLE_MAX = 136, INIT_MAX = 256 };
enum { ROW_FREE = 0, ROW_USED = 1, ROW_CLOSING = 2 };
enum { INIT_NONE = 0, INIT_SEEN = 1, INIT_ANSWERED = 2 };

struct row {
    uint64_t nodeid;
    int32_t backing_id; /* 0: none */
    uint32_t opens, writers;
    uint16_t state, handle_len;
    uint32_t doubtful; /* an OPEN counted by a killed process may never have reached the kernel */
    uint8_t handle[HANDLE_MAX];
};
struct entry {
    uint64_t unique; /* without bit 63; 0: free */
    uint32_t row, op, writer, padding;
};
struct redo {
    uint32_t valid, row, opens, writers, slot, padding;
    struct entry entry;
};
struct state {
    uint64_t magic;
    uint32_t size, takeovers;
    uint32_t init_state, init_len;
    uint32_t passthrough, resend, allow_mmap; /* what was negotiated */
    uint32_t major, minor;
    int32_t last_backing;
    uint32_t opening; /* row + 1 whose backing id is being made, ROWS + 1 for the probe, 0: none */
    uint8_t init[INIT_MAX];
    char reason[200];
    uint64_t counters[OP_MAX], bytes_read, bytes_written, resent;
    struct redo redo;
    struct entry journal[JOURNAL];
    struct row rows[ROWS];
};
extern struct state *state;

/* Stores before it are in the mapping before those after it: a killed process leaves what it did in program order. */
static inline void barrier(void) { atomic_signal_fence(memory_order_seq_cst); }

/* ---- messages that wait: queue.c ------------------------------------------------------------------------------ */

struct message {
    struct message *next;
    size_t len;
    unsigned char data[];
};
struct queue {
    struct message *head, *tail;
};
void queue_push(struct queue *q, struct message *m);
struct message *queue_pop(struct queue *q);
struct message *message_new(const void *data, size_t n);

/* ---- the process's one channel: api.c ------------------------------------------------------------------------- */

enum { KIND_AUTO = 0, KIND_CUSTOMIO = 1, KIND_SOCKETPAIR = 2 };

struct channel {
    pthread_mutex_t lock;
    int fuse_fd;
    uint32_t kind;      /* 0: libfuse has no device yet */
    uint32_t max_write; /* most bytes of a READ or WRITE */
    bool want_passthrough, want_resend, may_passthrough;
    bool feeding;         /* a takeover: libfuse gets the kept INIT message, whose answer is not for the kernel */
    uint64_t feed_unique; /* of that message */
    bool negotiated;      /* libfuse answered INIT */
    atomic_bool dead;     /* unmounted */
    struct queue backlog; /* what a takeover found waiting */
    unsigned char *main_buffer; /* of the loop's thread, and before there are others */
};
extern struct channel channel;

/* ---- requests without an answer: requests.c ------------------------------------------------------------------- */

struct request {
    uint64_t unique, nodeid, sequence;
    uint32_t op, flags, slot; /* slot: of a RELEASE in the journal */
    bool resent;
    struct request *hash_next, *open_prev, *open_next;
};
uint64_t next_sequence(void);
struct request *request_add(const struct in_header *h, uint32_t flags, uint32_t slot);
struct request *request_take(uint64_t unique);
void request_free(struct request *r);
bool requests_may_attach(uint64_t nodeid, uint64_t when);
bool requests_any(uint32_t op);
bool requests_resent(uint32_t op, uint64_t nodeid);

/* ---- the open table: table.c ---------------------------------------------------------------------------------- */

struct row *row_find(uint64_t nodeid);
struct row *row_make(uint64_t nodeid);
uint32_t row_number(const struct row *row);
int row_fd(const struct row *row); /* -1: no file is attached */
void row_set_fd(const struct row *row, int fd);
void row_touch(uint32_t i);
void row_entries_add(uint32_t i, int change);
void rows_sweep(void);
void row_doubt(uint32_t i);
void row_trust(uint32_t i);
void rows_forgotten(const unsigned char *b, size_t n);
void doubts_ask(uint64_t nodeid);
bool table_is_sound(void);
void table_recover(void);
void table_settle(void);

/* ---- counts: journal.c ---------------------------------------------------------------------------------------- */

/* A slot is a place in the journal; JOURNAL stands for none. */
bool is_writer(uint32_t flags);
uint32_t slot_find(uint64_t unique);
void slot_seen(uint32_t slot);
void slot_clear(uint32_t slot);
uint32_t count_open(uint32_t i, uint64_t unique, bool writer);
void uncount_open(uint32_t slot, uint32_t i, bool writer);
void count_none(uint32_t i);
uint32_t count_release(const struct in_header *h, uint32_t flags);
void journal_recover(void);
int collect(void);

/* ---- passthrough: backing.c ----------------------------------------------------------------------------------- */

bool is_admin(void);
bool backing_make(int fd, uint32_t opening, int32_t *id);
bool backing_close(int32_t id);
void backing_recover(void);
void probe_backing(void);

/* ---- messages: transform.c ------------------------------------------------------------------------------------ */

enum { UNWANTED = -2 };
bool inbound(unsigned char *b, size_t n);
ssize_t outbound(const struct iovec *iov, int count);
ssize_t send_all(const struct iovec *iov, int count, size_t total);
void reason_add(const char *text);
void say(const char *what, int error);
uint32_t page_size(void);

/* ---- bytes: data.c -------------------------------------------------------------------------------------------- */

struct tube {
    int out, in; /* a pipe's reading and writing end */
};
int tube_open(struct tube *t);
void tube_close(const struct tube *t);
ssize_t tube_fill(const struct tube *t);
bool tube_read(const struct tube *t, unsigned char *b, size_t n);
unsigned char *buffer_new(void);
void reply(uint64_t unique, int error, const void *data, size_t n);
bool serve(unsigned char *b, size_t n, const struct tube *t);

/* ---- drivers: pumps.c, customio.c, session.c ------------------------------------------------------------------- */

bool start_thread(void *(*run)(void *), void *argument);
void set_blocking(bool blocking);
void start_pumps(void);
int start_socketpair(struct message *first);
int start_customio(struct message *first);
bool customio_exists(void);
int customio_hook(void *session);
void customio_leave_device(void);
void wake(struct message *m);
void *libfuse_symbol(const char *name);
void session_exit(void);

#endif
