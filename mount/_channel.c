/*
 * The kernel channel: what stands between /dev/fuse and libfuse (below pyfuse3).
 *
 * It changes three messages (INIT, OPEN, CREATE), counts open handles, and can hand a live connection from a
 * killed process to a new one. All else passes untouched. Sources of every number here: the kernel's
 * include/uapi/linux/fuse.h (protocol 7.40+), fs/fuse/{dev,inode,file,iomode,passthrough,backing}.c, and libfuse's
 * include/fuse_lowlevel.h. Nothing of libfuse is included, so that this builds with any version of it, or none.
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
 *     again was answered.
 *   - A backing id is in its row before the answer that names it goes out. The kernel hands ids out in order
 *     (idr_alloc_cyclic), so an id lost between ioctl and row is `last_backing + 1`, and a new process closes it.
 * Only one process at a time uses the file. Within it, `lock` guards everything but the queue (`queue_lock`).
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/capability.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- the protocol ------------------------------------------------------------------------------------------- */

enum {
    OP_FORGET = 2, OP_OPEN = 14, OP_READ = 15, OP_WRITE = 16, OP_RELEASE = 18, OP_INIT = 26, OP_CREATE = 35,
    OP_INTERRUPT = 36, OP_BATCH_FORGET = 42, OP_MAX = 64
};
enum { NOTIFY_RESEND = 7 };

#define UNIQUE_RESEND (1ULL << 63)

/* INIT flags; those of bit 32 and up are written as they stand in flags2 */
#define INIT_SPLICE (7u << 7) /* SPLICE_WRITE, SPLICE_MOVE, SPLICE_READ */
#define INIT_MAX_PAGES (1u << 22)
#define INIT_HANDLE_KILLPRIV_V2 (1u << 28)
#define INIT_EXT (1u << 30)
#define INIT2_DIRECT_IO_ALLOW_MMAP (1u << 4) /* bit 36 */
#define INIT2_PASSTHROUGH (1u << 5)          /* bit 37 */
#define INIT2_HAS_RESEND (1u << 7)           /* bit 39 */

#define FOPEN_DIRECT_IO (1u << 0)
#define FOPEN_KEEP_CACHE (1u << 1)
#define FOPEN_NOFLUSH (1u << 5)
#define FOPEN_PASSTHROUGH (1u << 7)

#define WRITE_KILL_SUIDGID (1u << 2)

struct in_header {
    uint32_t len, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid;
    uint16_t total_extlen, padding;
};
struct out_header {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};
struct init_in {
    uint32_t major, minor, max_readahead, flags, flags2;
};
struct init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth, unused[6];
};
struct open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};
struct release_in {
    uint64_t fh;
    uint32_t flags, release_flags;
    uint64_t lock_owner;
};
struct rw_in { /* fuse_read_in and fuse_write_in have the same layout */
    uint64_t fh, offset;
    uint32_t size, rw_flags;
    uint64_t lock_owner;
    uint32_t flags, padding;
};
struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};
#define IOC_BACKING_OPEN _IOW(229, 1, struct backing_map)
#define IOC_BACKING_CLOSE _IOW(229, 2, uint32_t)

_Static_assert(sizeof(struct in_header) == 40 && sizeof(struct out_header) == 16, "fuse headers");
_Static_assert(sizeof(struct init_out) == 64 && offsetof(struct init_out, flags2) == 32, "fuse_init_out");
_Static_assert(sizeof(struct open_out) == 16 && sizeof(struct rw_in) == 40, "fuse_open_out, fuse_write_in");
_Static_assert(sizeof(struct release_in) == 24 && sizeof(struct backing_map) == 16, "fuse_release_in, backing map");

#define ENTRY_OUT_SIZE 128u           /* struct fuse_entry_out, before fuse_open_out in a CREATE reply */
#define MAX_WRITE (1u << 20)          /* 256 pages: what libfuse and the kernel's default limit allow */
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
static const uint64_t MAGIC = 0x3148436672656974ULL; /* "tierfCH1" */

/* ---- what this process holds --------------------------------------------------------------------------------- */

struct request { /* one that was read and is not answered, where the answer matters */
    uint64_t unique, nodeid, sequence;
    uint32_t op, flags, slot; /* slot: of a RELEASE in the journal */
    bool resent;
    struct request *hash_next, *open_prev, *open_next;
};
struct message {
    struct message *next;
    size_t len;
    unsigned char data[];
};
struct queue {
    struct message *head, *tail;
};

struct tube {
    int out, in; /* a pipe's reading and writing end */
};

enum { BUCKETS = 4096, INDEX = 131072, PUMPS_MAX = 4, KIND_AUTO = 0, KIND_CUSTOMIO = 1, KIND_SOCKETPAIR = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, queue_lock = PTHREAD_MUTEX_INITIALIZER;
static struct state *state;
static int fuse_fd = -1, epoll_fd = -1, wake_fd = -1, near_fd = -1, far_fd = -1;
static uint32_t kind, max_write = MAX_WRITE;
static unsigned char *main_buffer; /* of the loop's thread, and before there are others */
static bool want_passthrough, want_resend, may_passthrough, feeding, negotiated, pumping, woken;
static atomic_bool dead;
static uint64_t sequence, feed_unique;
static uint32_t resent_open;
static struct request *buckets[BUCKETS], *open_head, *open_tail, *spare;
static uint32_t row_index[INDEX], row_next[ROWS], free_rows[ROWS], free_count, journal_hint; /* index holds row + 1 */
static int row_fd[ROWS];             /* descriptor + 1 of the attached file */
static uint64_t row_idle[ROWS];      /* sequence at the last attach or when the last handle went */
static uint32_t row_entries[ROWS];   /* journal entries that name the row */
static uint32_t idle_rows[ROWS], idle_count;
static bool row_listed[ROWS];        /* in idle_rows */
static bool entry_seen[JOURNAL];
static struct queue to_libfuse, backlog;
static void *session;
static void (*real_session_exit)(void *);

/* Stores before it are in the mapping before those after it: a killed process leaves what it did in program order. */
static void barrier(void) { atomic_signal_fence(memory_order_seq_cst); }

static void queue_push(struct queue *q, struct message *m) {
    m->next = NULL;
    if (q->tail) q->tail->next = m; else q->head = m;
    q->tail = m;
}

static struct message *queue_pop(struct queue *q) {
    struct message *m = q->head;
    if (m) {
        q->head = m->next;
        if (!q->head) q->tail = NULL;
    }
    return m;
}

static struct message *message_new(const void *data, size_t n) {
    struct message *m = malloc(sizeof *m + n);
    if (!m) abort(); /* no memory to keep a request: the keeper starts a new process, which gets it again */
    m->len = n;
    memcpy(m->data, data, n);
    return m;
}

static uint32_t page_size(void) { return (uint32_t)sysconf(_SC_PAGESIZE); }

static void say(const char *what, int error) { fprintf(stderr, "tierfs channel: %s: %s\n", what, strerror(error)); }

/* ---- requests without an answer ------------------------------------------------------------------------------ */

static uint32_t bucket_of(uint64_t unique) { return (uint32_t)((unique >> 1) % BUCKETS); }

static struct request *request_add(const struct in_header *h, uint32_t flags, uint32_t slot) {
    struct request *r = spare;
    if (r) spare = r->hash_next; else if (!(r = malloc(sizeof *r))) abort();
    *r = (struct request){.unique = h->unique, .nodeid = h->nodeid, .sequence = ++sequence, .op = h->opcode,
                          .flags = flags, .slot = slot, .resent = (h->unique & UNIQUE_RESEND) != 0};
    r->hash_next = buckets[bucket_of(r->unique)];
    buckets[bucket_of(r->unique)] = r;
    if (r->op == OP_OPEN || r->op == OP_CREATE) {
        r->open_prev = open_tail;
        if (open_tail) open_tail->open_next = r; else open_head = r;
        open_tail = r;
    }
    resent_open += r->resent;
    return r;
}

/* Removes it from the table; the caller owns it until request_free. */
static struct request *request_take(uint64_t unique) {
    struct request **p = &buckets[bucket_of(unique)], *r;
    while ((r = *p) && r->unique != unique) p = &r->hash_next;
    if (!r) return NULL;
    *p = r->hash_next;
    if (r->op == OP_OPEN || r->op == OP_CREATE) {
        if (r->open_prev) r->open_prev->open_next = r->open_next; else open_head = r->open_next;
        if (r->open_next) r->open_next->open_prev = r->open_prev; else open_tail = r->open_prev;
    }
    resent_open -= r->resent;
    return r;
}

static void request_free(struct request *r) {
    r->hash_next = spare;
    spare = r;
}

/* ---- rows ---------------------------------------------------------------------------------------------------- */

static uint32_t index_of(uint64_t nodeid) { return (uint32_t)((nodeid * 0x9E3779B97F4A7C15ULL) >> 47) % INDEX; }

static struct row *row_find(uint64_t nodeid) {
    uint32_t i = row_index[index_of(nodeid)];
    while (i && state->rows[i - 1].nodeid != nodeid) i = row_next[i - 1];
    return i ? &state->rows[i - 1] : NULL;
}

static uint32_t row_number(const struct row *row) { return (uint32_t)(row - state->rows); }

static void row_link(uint32_t i) {
    uint32_t *head = &row_index[index_of(state->rows[i].nodeid)];
    row_next[i] = *head;
    *head = i + 1;
}

/* The row may now have no handle: it is looked at after each answer to an OPEN, CREATE or RELEASE. */
static void row_touch(uint32_t i) {
    row_idle[i] = ++sequence;
    if (!row_listed[i]) {
        row_listed[i] = true;
        idle_rows[idle_count++] = i;
    }
}

static struct row *row_make(uint64_t nodeid) { /* NULL: the table is full */
    if (!free_count) return NULL;
    uint32_t i = free_rows[--free_count];
    struct row *row = &state->rows[i];
    *row = (struct row){.nodeid = nodeid};
    barrier();
    row->state = ROW_USED;
    row_fd[i] = 0;
    row_entries[i] = 0;
    row_link(i);
    return row;
}

static void backing_close(int32_t id) {
    uint32_t number = (uint32_t)id;
    if (id > 0 && ioctl(fuse_fd, IOC_BACKING_CLOSE, &number) && errno != ENOENT && errno != ENODEV && errno != EPERM)
        say("closing a backing id", errno);
}

static void row_free(uint32_t i) {
    struct row *row = &state->rows[i];
    uint32_t *p = &row_index[index_of(row->nodeid)];
    while (*p != i + 1) p = &row_next[*p - 1];
    *p = row_next[i];
    row->state = ROW_CLOSING;
    barrier();
    backing_close(row->backing_id);
    if (row_fd[i]) close(row_fd[i] - 1);
    row_fd[i] = 0;
    barrier();
    row->state = ROW_FREE;
    free_rows[free_count++] = i;
}

/* Frees rows without handles. One attached by a handler that has not answered yet must stay, so a row goes only when
 * every OPEN and CREATE that was unanswered at its last attach has been answered. */
static void rows_sweep(void) {
    for (uint32_t k = 0; k < idle_count;) {
        uint32_t i = idle_rows[k];
        bool idle = state->rows[i].opens == 0;
        if (idle && (row_entries[i] || (open_head && open_head->sequence < row_idle[i]))) {
            k++;
            continue;
        }
        row_listed[i] = false;
        idle_rows[k] = idle_rows[--idle_count];
        if (idle) row_free(i);
    }
}

/* Registers the attached file with the kernel once for each inode. False: not possible, errno says why. */
static bool backing_make(int fd, uint32_t opening, int32_t *id) {
    struct backing_map map = {.fd = fd};
    state->opening = opening;
    barrier();
    int got = ioctl(fuse_fd, IOC_BACKING_OPEN, &map);
    if (got > 0) *id = got;
    barrier();
    if (got > 0) state->last_backing = got;
    barrier();
    state->opening = 0;
    return got > 0;
}

/* ---- the journal --------------------------------------------------------------------------------------------- */

static void redo_apply(void) {
    const struct redo *d = &state->redo;
    state->rows[d->row].opens = d->opens;
    state->rows[d->row].writers = d->writers;
    if (d->slot < JOURNAL) state->journal[d->slot] = d->entry;
}

/* Changes a row's counts and a journal slot as one. `slot` == JOURNAL: the journal is full, counts only. */
static void change(uint32_t i, int opens, int writers, uint32_t slot, struct entry entry) {
    struct row *row = &state->rows[i];
    struct redo *d = &state->redo;
    *d = (struct redo){.row = i, .slot = slot, .entry = entry};
    d->opens = opens < 0 && !row->opens ? 0 : row->opens + (uint32_t)opens;
    d->writers = writers < 0 && !row->writers ? 0 : row->writers + (uint32_t)writers;
    if (slot < JOURNAL) {
        if (entry.unique) row_entries[i]++; else row_entries[i]--;
    }
    barrier();
    d->valid = 1;
    barrier();
    redo_apply();
    barrier();
    d->valid = 0;
    barrier();
}

static uint32_t slot_free(void) {
    for (uint32_t k = 0; k < JOURNAL; k++) {
        uint32_t slot = (journal_hint + k) % JOURNAL;
        if (!state->journal[slot].unique) {
            journal_hint = slot + 1;
            return slot;
        }
    }
    return JOURNAL;
}

static uint32_t slot_find(uint64_t unique) {
    unique &= ~UNIQUE_RESEND;
    for (uint32_t slot = 0; slot < JOURNAL; slot++)
        if (state->journal[slot].unique == unique) return slot;
    return JOURNAL;
}

static void slot_clear(uint32_t slot) {
    if (slot >= JOURNAL) return;
    uint32_t i = state->journal[slot].row;
    state->journal[slot].unique = 0;
    row_entries[i]--;
    row_touch(i);
}

static bool is_writer(uint32_t flags) { return (flags & O_ACCMODE) != O_RDONLY; }

static uint32_t count_open(uint32_t i, uint64_t unique, bool writer) {
    uint32_t slot = slot_free();
    change(i, 1, writer, slot, (struct entry){unique & ~UNIQUE_RESEND, i, OP_OPEN, writer, 0});
    return slot;
}

static void uncount_open(uint32_t slot, uint32_t i, bool writer) {
    change(i, -1, -(int)writer, slot, (struct entry){0});
    row_touch(i);
}

static uint32_t count_release(const struct in_header *h, uint32_t flags) {
    struct row *row = row_find(h->nodeid);
    if (!row) return JOURNAL;
    uint32_t i = row_number(row), slot = slot_free();
    change(i, -1, -(int)is_writer(flags), slot,
           (struct entry){h->unique & ~UNIQUE_RESEND, i, OP_RELEASE, is_writer(flags), 0});
    row_touch(i);
    return slot;
}

/* ---- from the kernel ----------------------------------------------------------------------------------------- */

static void keep_init(unsigned char *b, size_t n) {
    struct init_in in = {0};
    memcpy(&in, b + 40, n - 40 < sizeof in ? n - 40 : sizeof in);
    in.flags &= ~INIT_SPLICE; /* libfuse must not splice from our device */
    memcpy(b + 40 + offsetof(struct init_in, flags), &in.flags, 4);
    state->init_len = (uint32_t)(n < INIT_MAX ? n : INIT_MAX);
    memcpy(state->init, b, state->init_len);
    state->major = in.major;
    state->minor = in.minor;
    barrier();
    state->init_state = INIT_SEEN;
}

/* Looks at a request that was just read. False: it goes no further. */
static bool inbound(unsigned char *b, size_t n) {
    struct in_header h;
    if (n < sizeof h) return false;
    memcpy(&h, b, sizeof h);
    bool resent = (h.unique & UNIQUE_RESEND) != 0;
    uint32_t flags = 0, slot = resent ? slot_find(h.unique) : JOURNAL;
    state->counters[h.opcode < OP_MAX ? h.opcode : 0]++;
    state->resent += resent;
    switch (h.opcode) {
    case OP_INTERRUPT: /* needs no answer, and pyfuse3 can't interrupt a handler: the request itself is answered */
        return false;
    case OP_INIT:
        if (n >= 56) keep_init(b, n);
        break;
    case OP_OPEN:
    case OP_CREATE:
        if (n >= 44) memcpy(&flags, b + 40, 4);
        if (slot < JOURNAL) uncount_open(slot, state->journal[slot].row, state->journal[slot].writer);
        break;
    case OP_RELEASE:
        if (n >= 40 + sizeof(struct release_in)) memcpy(&flags, b + 40 + offsetof(struct release_in, flags), 4);
        if (slot < JOURNAL) entry_seen[slot] = true;
        else slot = count_release(&h, flags);
        break;
    default:
        if (!resent) return true;
    }
    request_add(&h, flags, slot);
    return true;
}

/* ---- to the kernel ------------------------------------------------------------------------------------------- */

/* Returns `total`; UNWANTED where nobody waits for the answer: interrupted (ENOENT) or unmounted (ENODEV); else -1. */
enum { UNWANTED = -2 };
static ssize_t send_all(const struct iovec *iov, int count, size_t total) {
    ssize_t n;
    do n = writev(fuse_fd, iov, count); while (n < 0 && errno == EINTR);
    if (n >= 0) return (ssize_t)total;
    return errno == ENOENT || errno == ENODEV ? UNWANTED : -1;
}

/* True if this process may register backing files: CAP_SYS_ADMIN in the first user namespace. */
static bool is_admin(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0, 0, 0}, {0, 0, 0}};
    if (syscall(SYS_capget, &head, data) || !(data[0].effective & (1u << CAP_SYS_ADMIN))) return false;
    unsigned first = 1, outside = 1, count = 0;
    FILE *f = fopen("/proc/self/uid_map", "re");
    if (!f) return true;
    int got = fscanf(f, "%u %u %u", &first, &outside, &count);
    fclose(f);
    return got == 3 && first == 0 && outside == 0 && count == UINT32_MAX;
}

static void reason_add(const char *text) {
    size_t n = strlen(state->reason);
    snprintf(state->reason + n, sizeof state->reason - n, "%s%s", n ? "; " : "", text);
}

/* libfuse's answer to INIT, its length depending on the version: turns on what the kernel offered and we want. */
static void shape_init(unsigned char *b, size_t *n) {
    struct init_in in = {0};
    struct init_out out = {0};
    memcpy(&in, state->init + 40, state->init_len - 40 < sizeof in ? state->init_len - 40 : sizeof in);
    memcpy(&out, b + 16, *n - 16 < sizeof out ? *n - 16 : sizeof out);
    bool ext = (in.flags & INIT_EXT) && state->init_len >= 40 + sizeof in;
    uint32_t offered2 = ext ? in.flags2 : 0;
    state->reason[0] = 0;
    if (!want_passthrough) reason_add("passthrough is turned off by a setting");
    else if (!(offered2 & INIT2_PASSTHROUGH)) reason_add("this kernel has no FUSE passthrough (Linux 6.9 has)");
    else if (!may_passthrough) reason_add("passthrough needs CAP_SYS_ADMIN");
    state->passthrough = want_passthrough && (offered2 & INIT2_PASSTHROUGH) && may_passthrough;
    if (!want_resend) reason_add("resend is turned off by a setting");
    else if (!(offered2 & INIT2_HAS_RESEND)) reason_add("this kernel can't resend requests (Linux 6.9 can)");
    state->resend = want_resend && (offered2 & INIT2_HAS_RESEND);
    state->allow_mmap = !state->passthrough && (offered2 & INIT2_DIRECT_IO_ALLOW_MMAP);
    out.flags |= in.flags & INIT_HANDLE_KILLPRIV_V2;
    if (ext) {
        out.flags |= INIT_EXT;
        if (state->passthrough) {
            out.flags2 |= INIT2_PASSTHROUGH;
            out.max_stack_depth = 1;
        }
        if (state->resend) out.flags2 |= INIT2_HAS_RESEND;
        if (state->allow_mmap) out.flags2 |= INIT2_DIRECT_IO_ALLOW_MMAP;
    }
    if (out.max_write > max_write) { /* pipes and socket pairs without privileges carry less */
        out.max_write = max_write;
        if (out.flags & INIT_MAX_PAGES) out.max_pages = (uint16_t)(max_write / page_size());
    }
    memcpy(b + 16, &out, sizeof out);
    *n = 16 + sizeof out;
    uint32_t len = (uint32_t)*n;
    memcpy(b, &len, 4);
}

static void probe_backing(void) {
    int32_t id = 0;
    int fd = (int)syscall(SYS_memfd_create, "tierfs-probe", 1u /* MFD_CLOEXEC */);
    if (fd < 0 || !backing_make(fd, ROWS + 1, &id)) {
        char text[100];
        snprintf(text, sizeof text, "passthrough was refused: %s", strerror(errno));
        reason_add(text);
        state->passthrough = 0;
    }
    backing_close(id);
    if (fd >= 0) close(fd);
}

static void start_pumps(void);
static void wake(struct message *m);

/* libfuse answered INIT, so it takes requests now. */
static void begin(void) {
    negotiated = true;
    if (kind == KIND_CUSTOMIO && !state->passthrough) {
        pumping = true;
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fuse_fd, NULL);
    }
    if (kind == KIND_SOCKETPAIR || pumping) {
        start_pumps();
        return;
    }
    for (struct message *m; (m = queue_pop(&backlog));) wake(m);
}

/* The answer to an OPEN or CREATE: `o` is in `b` at `at`. Returns what send_all returned. */
static ssize_t answer_open(const struct request *r, unsigned char *b, size_t n, uint32_t *slot_out) {
    struct out_header h;
    struct open_out o;
    uint64_t nodeid = r->nodeid;
    size_t at = 16;
    memcpy(&h, b, sizeof h);
    if (r->op == OP_CREATE) {
        memcpy(&nodeid, b + 16, 8);
        at += ENTRY_OUT_SIZE;
    }
    memcpy(&o, b + at, sizeof o);
    struct iovec iov = {b, n};
    struct row *row = row_find(nodeid);
    if (!row && !(row = row_make(nodeid))) {
        h.len = sizeof h;
        h.error = -ENFILE;
        memcpy(b, &h, sizeof h);
        iov.iov_len = sizeof h;
        return send_all(&iov, 1, n);
    }
    uint32_t i = row_number(row);
    bool attached = row->backing_id || row_fd[i];
    if (state->passthrough && attached && !row->backing_id && !backing_make(row_fd[i] - 1, i + 1, &row->backing_id))
        say("registering a backing file", errno);
    if (state->passthrough && row->backing_id) {
        /* all other flags are refused beside it (FOPEN_PASSTHROUGH_MASK in fs/fuse/iomode.c) */
        o.open_flags = (o.open_flags & FOPEN_NOFLUSH) | FOPEN_PASSTHROUGH;
        o.backing_id = row->backing_id;
    } else if (state->passthrough) {
        /* a handle on the page cache would keep later opens of the inode from passthrough */
        o.open_flags = (o.open_flags & ~FOPEN_KEEP_CACHE) | FOPEN_DIRECT_IO;
    } else if (state->allow_mmap && row_fd[i] && is_writer(r->flags)) {
        o.open_flags = (o.open_flags & ~FOPEN_KEEP_CACHE) | FOPEN_DIRECT_IO;
    }
    memcpy(b + at, &o, sizeof o);
    uint32_t slot = count_open(i, r->unique, is_writer(r->flags));
    ssize_t sent = send_all(&iov, 1, n);
    if (sent < 0) {
        int error = errno;
        uncount_open(slot, i, is_writer(r->flags));
        errno = error;
    } else {
        *slot_out = slot;
    }
    return sent;
}

static ssize_t answer_init(unsigned char *b, size_t n, const struct out_header *h) {
    if (feeding) { /* the kernel had its answer from the process before */
        feeding = false;
        begin();
        return (ssize_t)n;
    }
    size_t total = n;
    if (!h->error) shape_init(b, &n);
    ssize_t sent = send_all(&(struct iovec){b, n}, 1, total);
    if (sent >= 0 && !h->error) {
        state->init_state = INIT_ANSWERED;
        if (state->passthrough) probe_backing();
        begin();
    }
    return sent;
}

/* Takes an answer or a notification from libfuse. Returns like writev. */
static ssize_t outbound(const struct iovec *iov, int count) {
    unsigned char b[512];
    struct out_header h;
    size_t total = 0, have = 0;
    for (int k = 0; k < count; k++) {
        size_t take = iov[k].iov_len < sizeof b - have ? iov[k].iov_len : sizeof b - have;
        if (take) memcpy(b + have, iov[k].iov_base, take);
        have += take;
        total += iov[k].iov_len;
    }
    if (total < sizeof h) {
        errno = EINVAL;
        return -1;
    }
    memcpy(&h, b, sizeof h);
    ssize_t sent;
    pthread_mutex_lock(&lock);
    bool feed = feeding && h.unique == feed_unique;
    struct request *r = h.unique && !feed ? request_take(h.unique) : NULL;
    uint32_t slot = JOURNAL;
    if (feed || (r && r->op == OP_INIT && total < sizeof b - sizeof(struct init_out))) {
        sent = answer_init(b, total, &h);
    } else if (r && !h.error && total < sizeof b &&
               ((r->op == OP_OPEN && total >= 32) || (r->op == OP_CREATE && total >= 32 + ENTRY_OUT_SIZE))) {
        sent = answer_open(r, b, total, &slot);
    } else if (r) {
        sent = send_all(iov, count, total);
        if (r->op == OP_RELEASE) slot = r->slot;
    } else { /* nothing of ours: no need to hold the lock */
        pthread_mutex_unlock(&lock);
        sent = send_all(iov, count, total);
        return sent == UNWANTED ? (ssize_t)total : sent;
    }
    int error = errno;
    slot_clear(slot);
    if (r) request_free(r);
    rows_sweep();
    pthread_mutex_unlock(&lock);
    errno = error;
    return sent == UNWANTED ? (ssize_t)total : sent;
}

/* ---- reading the device -------------------------------------------------------------------------------------- */

/* A thread that waits in read(2) and dies of SIGKILL still takes a request if there is one, and then the kernel must be
 * able to copy it: into a page of ours that is not present just then it can't (a dying task takes no page faults), and
 * it answers the program's request with EIO. So threads that wait splice into a pipe, whose pages are the kernel's
 * own; and the loop, which never waits in read(2), reads into one buffer whose pages are there from the start. */
/* A pipe needs a slot for each page and some for the headers, so half of it is used; without privileges its size is
 * limited (/proc/sys/fs/pipe-max-size), and requests are kept smaller then. */
static int tube_open(struct tube *t) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return errno;
    t->out = ends[0];
    t->in = ends[1];
    if (fcntl(t->in, F_SETPIPE_SZ, 2 << 20) < 0) fcntl(t->in, F_SETPIPE_SZ, 1 << 20);
    int size = fcntl(t->in, F_GETPIPE_SZ);
    uint32_t most = size < 0 ? 0 : (uint32_t)size / 2;
    if (max_write > most) max_write = most < page_size() ? page_size() : most;
    return 0;
}

/* Takes a request from the device into the pipe. Returns its length or -1. */
static ssize_t tube_fill(const struct tube *t) { return splice(fuse_fd, NULL, t->in, NULL, BUFFER_SIZE, 0); }

static bool tube_read(const struct tube *t, unsigned char *b, size_t n) {
    while (n) {
        ssize_t got = read(t->out, b, n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        b += got;
        n -= (size_t)got;
    }
    return true;
}

static unsigned char *buffer_new(void) {
    unsigned char *b = malloc(BUFFER_SIZE);
    if (!b) abort();
    memset(b, 0, BUFFER_SIZE);
    mlock(b, BUFFER_SIZE); /* where the limits allow it */
    return b;
}

/* ---- the data path ------------------------------------------------------------------------------------------- */

static void reply(uint64_t unique, int error, const void *data, size_t n) {
    struct out_header h = {(uint32_t)(sizeof h + n), -error, unique};
    struct iovec iov[2] = {{&h, sizeof h}, {(void *)(uintptr_t)data, n}};
    if (send_all(iov, n ? 2 : 1, sizeof h + n) == -1) say("answering a request", errno);
}

static void serve_read(const struct in_header *h, const struct rw_in *in, int fd, unsigned char *buffer) {
    size_t done = 0;
    while (done < in->size) {
        ssize_t n = pread(fd, buffer + done, in->size - done, (off_t)(in->offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && !done) {
            reply(h->unique, errno, NULL, 0);
            return;
        }
        if (n <= 0) break;
        done += (size_t)n;
    }
    __atomic_fetch_add(&state->bytes_read, done, __ATOMIC_RELAXED);
    reply(h->unique, 0, buffer, done);
}

/* The data is still in the pipe, if there is one, else in `data`, which also takes what the pipe must be rid of. */
static void serve_write(const struct in_header *h, const struct rw_in *in, int fd, unsigned char *data,
                        const struct tube *t) {
    struct stat st;
    size_t done = 0;
    int error = 0;
    /* The kernel asks for this where the writer may not keep the bits (FUSE_HANDLE_KILLPRIV_V2). */
    if ((in->rw_flags & WRITE_KILL_SUIDGID) && !fstat(fd, &st) && (st.st_mode & (S_ISUID | S_ISGID))) {
        mode_t drop = S_ISUID | (st.st_mode & S_IXGRP ? S_ISGID : 0);
        if (fchmod(fd, st.st_mode & 07777 & ~drop)) say("dropping set-user-id bits", errno);
    }
    for (size_t left; (left = in->size - done) && !error;) {
        off_t at = (off_t)(in->offset + done);
        ssize_t n = t ? splice(t->out, NULL, fd, &at, left, 0) : pwrite(fd, data + done, left, at);
        if (n > 0) done += (size_t)n;
        else if (n == 0 || errno != EINTR) error = n ? errno : EIO;
        if (error == EINVAL && t) { /* a file system that can't be spliced to */
            if (!tube_read(t, data + done, left)) abort();
            t = NULL;
            error = 0;
        }
    }
    if (error && t && !tube_read(t, data + done, in->size - done)) abort();
    if (error && !done) { /* after a part, a short write now, and the error with the next one */
        reply(h->unique, error, NULL, 0);
        return;
    }
    __atomic_fetch_add(&state->bytes_written, done, __ATOMIC_RELAXED);
    uint32_t out[2] = {(uint32_t)done, 0};
    reply(h->unique, 0, out, sizeof out);
}

/* Answers READ and WRITE of an attached file. False: the request is for libfuse. The descriptor can't go away
 * meanwhile: the kernel sends RELEASE only after the last request of a handle was answered. With `t`, only the 80
 * bytes of a WRITE's headers are in `b` yet. */
static bool serve(unsigned char *b, size_t n, const struct tube *t) {
    struct in_header h;
    struct rw_in in;
    if (n < sizeof h + sizeof in) return false;
    memcpy(&h, b, sizeof h);
    if (h.opcode != OP_READ && h.opcode != OP_WRITE) return false;
    memcpy(&in, b + sizeof h, sizeof in);
    if (h.opcode == OP_WRITE ? in.size != n - sizeof h - sizeof in : in.size > MAX_WRITE) return false;
    pthread_mutex_lock(&lock);
    struct row *row = row_find(h.nodeid);
    int fd = row ? row_fd[row_number(row)] - 1 : -1;
    struct request *r = fd >= 0 && (h.unique & UNIQUE_RESEND) ? request_take(h.unique) : NULL;
    if (r) request_free(r);
    pthread_mutex_unlock(&lock);
    if (fd < 0) return false;
    if (h.opcode == OP_WRITE) serve_write(&h, &in, fd, b + sizeof h + sizeof in, t);
    else serve_read(&h, &in, fd, b);
    return true;
}

/* ---- the drivers --------------------------------------------------------------------------------------------- */

/* Hands a request to libfuse through the custom I/O's queue. */
static void wake(struct message *m) {
    uint64_t one = 1;
    pthread_mutex_lock(&queue_lock);
    if (m) queue_push(&to_libfuse, m);
    if (!woken && write(wake_fd, &one, sizeof one) < 0) say("waking the loop", errno);
    woken = true;
    pthread_mutex_unlock(&queue_lock);
}

static void unmounted(void) {
    atomic_store(&dead, true);
    if (session && real_session_exit && kind == KIND_SOCKETPAIR) real_session_exit(session);
    if (kind == KIND_SOCKETPAIR) shutdown(far_fd, SHUT_RDWR); /* the loop wakes, sees the session ended, returns */
    else wake(NULL);
}

static void pass_on(unsigned char *b, size_t n) {
    if (serve(b, n, NULL)) return;
    if (kind == KIND_CUSTOMIO) {
        wake(message_new(b, n));
        return;
    }
    ssize_t sent;
    do sent = send(far_fd, b, n, MSG_NOSIGNAL); while (sent < 0 && errno == EINTR);
    if (sent < 0 && errno != EPIPE && errno != ENOTCONN) {
        struct in_header h;
        int error = errno;
        memcpy(&h, b, sizeof h);
        say("passing a request on", error);
        pthread_mutex_lock(&lock);
        struct request *r = request_take(h.unique);
        if (r) request_free(r);
        pthread_mutex_unlock(&lock);
        if (h.opcode != OP_FORGET && h.opcode != OP_BATCH_FORGET) reply(h.unique, error, NULL, 0);
    }
}

/* A thread that reads the device. Reads are exclusive waits in the kernel, so one thread wakes for each request. */
static void *pump_in(void *argument) {
    unsigned char *b = buffer_new();
    struct tube t;
    if (tube_open(&t)) abort();
    if (argument) { /* the first one: what the takeover found waiting */
        for (struct message *m; (m = queue_pop(&backlog)); free(m)) {
            memcpy(b, m->data, m->len);
            pass_on(b, m->len);
        }
    }
    for (;;) {
        const size_t headers = sizeof(struct in_header) + sizeof(struct rw_in);
        ssize_t n = tube_fill(&t);
        if (n < 0 && errno == EAGAIN) {
            struct pollfd p = {.fd = fuse_fd, .events = POLLIN};
            poll(&p, 1, -1);
        } else if (n < 0 && errno != EINTR && errno != ENOENT) {
            if (errno != ENODEV) say("reading /dev/fuse", errno);
            break;
        } else if (n > 0) {
            size_t length = (size_t)n, have = length < headers ? length : headers;
            struct in_header h = {0};
            if (length > BUFFER_SIZE || !tube_read(&t, b, have)) abort();
            if (have >= sizeof h) memcpy(&h, b, sizeof h);
            bool data = h.opcode == OP_WRITE;
            if (!data && !tube_read(&t, b + have, length - have)) abort();
            pthread_mutex_lock(&lock);
            bool go_on = inbound(b, length); /* of a WRITE it looks at the header only */
            pthread_mutex_unlock(&lock);
            if (data && serve(b, length, &t)) continue;
            if (data && !tube_read(&t, b + have, length - have)) abort();
            if (go_on) pass_on(b, length);
        }
    }
    unmounted();
    close(t.in);
    close(t.out);
    free(b);
    return NULL;
}

static void *pump_out(void *argument) {
    (void)argument;
    unsigned char *b = buffer_new();
    for (;;) {
        ssize_t n = recv(far_fd, b, BUFFER_SIZE, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        if (outbound(&(struct iovec){b, (size_t)n}, 1) < 0) say("answering a request", errno);
    }
    free(b);
    return NULL;
}

static void start_thread(void *(*run)(void *), void *argument) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are Python's */
    int error = pthread_create(&thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        say("starting a thread", error);
        abort();
    }
    pthread_detach(thread);
}

static void set_blocking(bool blocking) {
    int flags = fcntl(fuse_fd, F_GETFL);
    if (flags >= 0) fcntl(fuse_fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

/* More than one thread only where bytes are moved. */
static void start_pumps(void) {
    set_blocking(true);
    int count = state->passthrough ? 1 : 3;
    for (int k = 0; k < count; k++) start_thread(pump_in, k == 0 ? &backlog : NULL);
}

static ssize_t deliver(void *buffer, size_t size, const unsigned char *data, size_t n) {
    if (n > size) { /* can't be: libfuse's buffer holds what INIT allowed */
        errno = EIO;
        return -1;
    }
    memcpy(buffer, data, n);
    return (ssize_t)n;
}

static ssize_t hook_read(int fd, void *buffer, size_t size, void *userdata) {
    (void)fd;
    (void)userdata;
    for (;;) {
        pthread_mutex_lock(&queue_lock);
        struct message *m = queue_pop(&to_libfuse);
        uint64_t ignored;
        if (woken && !to_libfuse.head && !atomic_load(&dead)) {
            if (read(wake_fd, &ignored, sizeof ignored) < 0) say("reading the event counter", errno);
            woken = false;
        }
        pthread_mutex_unlock(&queue_lock);
        if (m) {
            ssize_t n = deliver(buffer, size, m->data, m->len);
            free(m);
            return n;
        }
        if (pumping || feeding) {
            errno = atomic_load(&dead) ? ENODEV : EINTR;
            return -1;
        }
        ssize_t n = read(fuse_fd, main_buffer, BUFFER_SIZE);
        if (n < 0) { /* pyfuse3 goes on after EINTR only; libfuse ends its session at ENODEV */
            if (errno == EAGAIN || errno == ENOENT) errno = EINTR;
            return -1;
        }
        pthread_mutex_lock(&lock);
        bool go_on = inbound(main_buffer, (size_t)n);
        pthread_mutex_unlock(&lock);
        if (go_on && !serve(main_buffer, (size_t)n, NULL)) return deliver(buffer, size, main_buffer, (size_t)n);
    }
}

static ssize_t hook_writev(int fd, struct iovec *iov, int count, void *userdata) {
    (void)fd;
    (void)userdata;
    return outbound(iov, count);
}

/* As in fuse_lowlevel.h; clone_fd was added in 3.17, the name with its size argument too. */
struct custom_io {
    ssize_t (*writev)(int, struct iovec *, int, void *);
    ssize_t (*read)(int, void *, size_t, void *);
    void *splice_receive, *splice_send, *clone_fd;
};
static struct custom_io hooks = {.writev = hook_writev, .read = hook_read};

static int find_library(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    if (!info->dlpi_name || !strstr(info->dlpi_name, "libfuse3")) return 0;
    *(void **)found = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    return *(void **)found != NULL;
}

/* The libfuse that pyfuse3 uses, be it the system's or one inside a wheel. */
static void *libfuse(void) {
    static void *library;
    if (!library) dl_iterate_phdr(find_library, &library);
    if (!library) library = dlopen("libfuse3.so.3", RTLD_LAZY);
    if (!library) library = dlopen("libfuse3.so.4", RTLD_LAZY);
    return library;
}

static void *symbol(const char *name) { return libfuse() ? dlsym(libfuse(), name) : NULL; }

static void *hook_session(void *made) {
    if (!made || fuse_fd < 0 || !kind) return made;
    session = made;
    *(void **)&real_session_exit = symbol("fuse_session_exit");
    if (kind != KIND_CUSTOMIO) return made;
    int (*newer)(void *, const struct custom_io *, size_t, int);
    int (*older)(void *, const struct custom_io *, int);
    *(void **)&newer = symbol("fuse_session_custom_io_317");
    *(void **)&older = symbol("fuse_session_custom_io");
    int failed = newer ? newer(made, &hooks, sizeof hooks, epoll_fd) : older ? older(made, &hooks, epoll_fd) : -1;
    if (failed) fprintf(stderr, "tierfs channel: libfuse refused the custom I/O\n");
    return failed ? NULL : made;
}

/* libfuse's own names, found before its own. Those with a version argument are what the macros of 3.17 and newer
 * stand for. libfuse may call one from another, so only the outermost sets the hook. */
static _Thread_local int depth;

#define CALL_REAL(name, type, ...)                          \
    do {                                                    \
        type real;                                          \
        *(void **)&real = symbol(name);                     \
        if (!real) return NULL;                             \
        depth++;                                            \
        void *made = real(__VA_ARGS__);                     \
        depth--;                                            \
        return depth ? made : hook_session(made);           \
    } while (0)

typedef void *(*new_plain)(void *, const void *, size_t, void *);
typedef void *(*new_versioned)(void *, const void *, size_t, void *, void *);

EXPORT void *fuse_session_new(void *args, const void *op, size_t op_size, void *userdata);
EXPORT void *fuse_session_new_versioned(void *args, const void *op, size_t op_size, void *version, void *userdata);
EXPORT void *_fuse_session_new_317(void *args, const void *op, size_t op_size, void *version, void *userdata);
EXPORT void *_fuse_session_new(void *args, const void *op, size_t op_size, void *version, void *userdata);

void *fuse_session_new(void *args, const void *op, size_t op_size, void *userdata) {
    CALL_REAL("fuse_session_new", new_plain, args, op, op_size, userdata);
}
void *fuse_session_new_versioned(void *args, const void *op, size_t op_size, void *version, void *userdata) {
    CALL_REAL("fuse_session_new_versioned", new_versioned, args, op, op_size, version, userdata);
}
void *_fuse_session_new_317(void *args, const void *op, size_t op_size, void *version, void *userdata) {
    CALL_REAL("_fuse_session_new_317", new_versioned, args, op, op_size, version, userdata);
}
void *_fuse_session_new(void *args, const void *op, size_t op_size, void *version, void *userdata) {
    CALL_REAL("_fuse_session_new", new_versioned, args, op, op_size, version, userdata);
}

/* ---- start and takeover -------------------------------------------------------------------------------------- */

/* What the killed process left half done. */
static void recover(void) {
    if (state->redo.valid && state->redo.row < ROWS) redo_apply();
    barrier();
    state->redo.valid = 0;
    if (state->opening) {
        int32_t id = state->opening <= ROWS ? state->rows[state->opening - 1].backing_id : 0;
        if (id) state->last_backing = id;
        else backing_close(++state->last_backing); /* it may not have been made: ENOENT then, and the next is newer */
        barrier();
        state->opening = 0;
    }
    for (uint32_t i = ROWS; i-- > 0;) {
        struct row *row = &state->rows[i];
        if (row->state == ROW_CLOSING) {
            backing_close(row->backing_id);
            barrier();
            row->state = ROW_FREE;
        }
        if (row->state == ROW_USED) row_link(i);
        else free_rows[free_count++] = i;
    }
    for (uint32_t slot = 0; slot < JOURNAL; slot++)
        if (state->journal[slot].unique) row_entries[state->journal[slot].row % ROWS]++;
}

/* Entries whose requests did not come again were answered. */
static void settle(void) {
    for (uint32_t slot = 0; slot < JOURNAL; slot++)
        if (state->journal[slot].unique && !entry_seen[slot]) slot_clear(slot);
}

/* Asks for the unanswered requests and reads them all, before anything else can be read. Returns 0 or an errno. */
static int collect(void) {
    struct out_header notify = {sizeof notify, NOTIFY_RESEND, 0};
    bool settled = false;
    if (write(fuse_fd, &notify, sizeof notify) < 0) return errno;
    unsigned char *b = main_buffer;
    while (!settled) {
        struct in_header h;
        ssize_t n = read(fuse_fd, b, BUFFER_SIZE);
        if (n < 0 && (errno == EINTR || errno == ENOENT)) continue;
        if (n < 0 && errno != EAGAIN) return errno;
        if (n < (ssize_t)sizeof h) break;
        memcpy(&h, b, sizeof h);
        if (!(h.unique & UNIQUE_RESEND) && h.opcode != OP_FORGET && h.opcode != OP_BATCH_FORGET &&
            h.opcode != OP_INTERRUPT) {
            settle(); /* the kernel puts those it sends again first: these were all */
            settled = true;
        }
        if (h.opcode == OP_INIT) state->init_state = INIT_NONE; /* not answered, or the answer was lost */
        if (inbound(b, (size_t)n)) queue_push(&backlog, message_new(b, (size_t)n));
    }
    if (!settled) settle();
    return 0;
}

/* Maps the state file and, in a takeover, recovers it. Returns 0 or an errno; EPROTO: the file is not ours;
 * EOPNOTSUPP: the connection was made without resend, so it can't be taken over. */
EXPORT int tierfs_channel_open(int fd, const char *path, int passthrough, int resend, int takeover) {
    if (state) return EBUSY;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | (takeover ? 0 : O_TRUNC), 0600);
    struct stat st;
    if (file < 0) return errno;
    if (fstat(file, &st) || (takeover && st.st_size != (off_t)sizeof *state) || ftruncate(file, sizeof *state)) {
        int error = takeover ? EPROTO : errno;
        close(file);
        return error;
    }
    void *mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    int error = errno;
    close(file);
    if (mapped == MAP_FAILED) return error;
    state = mapped;
    fuse_fd = fd;
    want_passthrough = passthrough;
    want_resend = resend;
    may_passthrough = is_admin();
    main_buffer = buffer_new();
    struct tube probe; /* bounds max_write, which is agreed before the threads make theirs */
    if ((error = tube_open(&probe))) goto fail;
    close(probe.in);
    close(probe.out);
    set_blocking(false);
    if (!takeover) {
        state->size = sizeof *state;
        barrier();
        state->magic = MAGIC;
    } else if (state->magic != MAGIC || state->size != sizeof *state) {
        error = EPROTO;
        goto fail;
    } else if (state->init_state == INIT_ANSWERED && !state->resend) {
        error = EOPNOTSUPP;
        goto fail;
    }
    recover();
    if (!takeover) return 0;
    state->takeovers++;
    error = collect();
    if (error) goto fail;
    /* The kernel sends nothing else before INIT is answered, so if INIT did not come again, it was. */
    bool waiting = false;
    for (uint32_t k = 0; k < BUCKETS; k++)
        for (struct request *r = buckets[k]; r; r = r->hash_next) waiting |= r->op == OP_INIT;
    if (state->init_state == INIT_SEEN && !waiting) state->init_state = INIT_ANSWERED;
    for (uint32_t i = 0; i < ROWS; i++)
        if (state->rows[i].state == ROW_USED && !state->rows[i].opens) row_touch(i);
    rows_sweep();
    return 0;
fail:
    munmap(mapped, sizeof *state);
    state = NULL;
    fuse_fd = -1;
    return error;
}

static int start_customio(struct message *first) {
    struct epoll_event event = {.events = EPOLLIN};
    wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (wake_fd < 0 || epoll_fd < 0 || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wake_fd, &event) ||
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fuse_fd, &event))
        return -errno;
    kind = KIND_CUSTOMIO;
    if (first) wake(first);
    return epoll_fd;
}

static void *pump_first(void *argument) { /* a fresh mount: INIT comes alone, the pumps start at its answer */
    struct message *first = argument;
    if (!first) {
        unsigned char *b = main_buffer;
        struct pollfd p = {.fd = fuse_fd, .events = POLLIN};
        ssize_t n;
        while ((n = read(fuse_fd, b, BUFFER_SIZE)) < 0 && (errno == EAGAIN || errno == EINTR || errno == ENOENT))
            poll(&p, 1, -1);
        if (n < 0) {
            unmounted();
            return NULL;
        }
        pthread_mutex_lock(&lock);
        inbound(b, (size_t)n);
        pthread_mutex_unlock(&lock);
        first = message_new(b, (size_t)n);
    }
    pass_on(first->data, first->len);
    free(first);
    return NULL;
}

static int start_socketpair(struct message *first) {
    int pair[2], size = 8 << 20;
    socklen_t n = sizeof size;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return -errno;
    near_fd = pair[0];
    far_fd = pair[1];
    for (int k = 0; k < 2; k++) {
        if (setsockopt(pair[k], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size))
            setsockopt(pair[k], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        if (setsockopt(pair[k], SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size))
            setsockopt(pair[k], SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    }
    int got = 0;
    if (!getsockopt(near_fd, SOL_SOCKET, SO_SNDBUF, &got, &n)) { /* a message fits if data and bookkeeping do */
        uint32_t most = got > 65536 ? ((uint32_t)got / 2 - 8192) & ~4095u : 16384;
        if (max_write > most) max_write = most;
    }
    kind = KIND_SOCKETPAIR;
    start_thread(pump_out, NULL);
    start_thread(pump_first, first);
    return near_fd;
}

/* Chooses the driver and makes libfuse's device. Returns its descriptor or -errno. */
EXPORT int tierfs_channel_start(int wanted) {
    if (!state || kind) return -EINVAL;
    bool custom = symbol("fuse_session_custom_io_317") || symbol("fuse_session_custom_io");
    if (wanted == KIND_CUSTOMIO && !custom) return -ENOSYS;
    if (wanted == KIND_AUTO) wanted = custom ? KIND_CUSTOMIO : KIND_SOCKETPAIR;
    struct message *first = NULL;
    if (state->init_state == INIT_ANSWERED) {
        feeding = true;
        first = message_new(state->init, state->init_len);
        memcpy(&feed_unique, state->init + 8, 8);
    } else {
        first = queue_pop(&backlog); /* an INIT that came again, or nothing */
    }
    return wanted == KIND_CUSTOMIO ? start_customio(first) : start_socketpair(first);
}

/* ---- what Python asks ---------------------------------------------------------------------------------------- */

EXPORT int tierfs_channel_attach(uint64_t nodeid, int fd, const uint8_t *handle, size_t handle_len) {
    if (!state || handle_len > HANDLE_MAX) return EINVAL;
    int error = 0;
    pthread_mutex_lock(&lock);
    struct row *row = row_find(nodeid);
    if (!row) row = row_make(nodeid);
    if (!row) {
        error = ENFILE;
    } else {
        uint32_t i = row_number(row);
        row_touch(i);
        if (!row_fd[i]) {
            int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
            if (copy < 0) error = errno;
            else row_fd[i] = copy + 1;
        }
        if (!row->handle_len) {
            memcpy(row->handle, handle, handle_len);
            barrier();
            row->handle_len = (uint16_t)handle_len;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT int tierfs_channel_fd(uint64_t nodeid) {
    pthread_mutex_lock(&lock);
    struct row *row = state ? row_find(nodeid) : NULL;
    int fd = row ? row_fd[row_number(row)] - 1 : -1;
    pthread_mutex_unlock(&lock);
    return fd;
}

EXPORT uint64_t tierfs_channel_handles(uint64_t nodeid) { /* opens in the low half, writers in the high half */
    pthread_mutex_lock(&lock);
    struct row *row = state ? row_find(nodeid) : NULL;
    uint64_t both = row ? (uint64_t)row->writers << 32 | row->opens : 0;
    pthread_mutex_unlock(&lock);
    return both;
}

/* The row at or after `from`; returns where to go on, 0 at the end. */
EXPORT uint32_t tierfs_channel_row(uint32_t from, uint64_t *nodeid, uint32_t *counts, uint8_t *handle, uint32_t *len) {
    uint32_t next = 0;
    pthread_mutex_lock(&lock);
    for (uint32_t i = from; state && i < ROWS && !next; i++) {
        const struct row *row = &state->rows[i];
        if (row->state != ROW_USED) continue;
        *nodeid = row->nodeid;
        counts[0] = row->opens;
        counts[1] = row->writers;
        *len = row->handle_len;
        memcpy(handle, row->handle, row->handle_len);
        next = i + 1;
    }
    pthread_mutex_unlock(&lock);
    return next;
}

/* A request of this kind on this node came again and is not answered; opcode 0: any request at all. */
EXPORT int tierfs_channel_resent(uint32_t opcode, uint64_t nodeid) {
    bool found = false;
    pthread_mutex_lock(&lock);
    if (!opcode) found = resent_open > 0;
    for (uint32_t k = 0; opcode && resent_open && k < BUCKETS; k++)
        for (struct request *r = buckets[k]; r; r = r->hash_next)
            found |= r->resent && r->op == opcode && r->nodeid == nodeid;
    pthread_mutex_unlock(&lock);
    return found;
}

/* kind (0: not begun), passthrough, resend, major, minor, takeovers, INIT answered; `reason` takes 200 bytes. */
EXPORT void tierfs_channel_info(uint32_t *numbers, char *reason) {
    pthread_mutex_lock(&lock);
    const uint32_t values[7] = {kind, state->passthrough, state->resend, state->major, state->minor, state->takeovers,
                                negotiated};
    memcpy(numbers, values, sizeof values);
    memcpy(reason, state->reason, sizeof state->reason);
    pthread_mutex_unlock(&lock);
}

/* Requests by opcode (64 numbers), bytes read, bytes written, requests that came again. */
EXPORT void tierfs_channel_counters(uint64_t *numbers) {
    pthread_mutex_lock(&lock);
    memcpy(numbers, state->counters, sizeof state->counters);
    numbers[OP_MAX] = state->bytes_read;
    numbers[OP_MAX + 1] = state->bytes_written;
    numbers[OP_MAX + 2] = state->resent;
    pthread_mutex_unlock(&lock);
}

/* Importable so that setuptools builds and finds it; everything is called through ctypes (mount/channel.py). */
PyMODINIT_FUNC PyInit__channel(void);
PyMODINIT_FUNC PyInit__channel(void) {
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_channel", NULL, -1, NULL, NULL, NULL, NULL, NULL};
    return PyModule_Create(&module);
}
