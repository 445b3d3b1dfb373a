/* What Python calls, through ctypes (mount/channel.py): start and takeover, attaching files, questions. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t MAGIC = 0x3248436672656974ULL; /* "tierfCH2" */

struct channel channel = {.lock = PTHREAD_MUTEX_INITIALIZER, .fuse_fd = -1, .max_write = MAX_WRITE};
struct state *state;

/* ---- start and takeover ---- */

/* Maps the state file, made anew with room for all of it, or in a takeover as it is. Returns 0 or an errno. */
static int map_state(const char *path, bool takeover) {
    int file = open(path, O_RDWR | O_CLOEXEC | (takeover ? 0 : O_CREAT | O_TRUNC), 0600);
    if (file < 0) return takeover && errno == ENOENT ? EPROTO : errno;
    struct stat st;
    int error = fstat(file, &st) ? errno : 0;
    if (!error && takeover && st.st_size != (off_t)sizeof *state) error = EPROTO;
    /* Stores into a hole of a full tmpfs would end the process with SIGBUS. */
    if (!error) error = posix_fallocate(file, 0, sizeof *state);
    if (!error) {
        void *mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (mapped == MAP_FAILED) error = errno;
        else state = mapped;
    }
    close(file);
    return error;
}

/* What the killed process left; reads what the kernel sends again. Returns 0 or an errno. */
static int take_over(void) {
    if (state->magic != MAGIC || state->size != sizeof *state || !table_is_sound()) return EPROTO;
    if (state->init_state == INIT_ANSWERED && !state->resend) return EOPNOTSUPP;
    journal_recover();
    backing_recover();
    table_recover();
    state->takeovers++;
    int error = collect();
    if (error) return error;
    /* The kernel sends nothing else before INIT is answered, so if INIT did not come again, it was. */
    if (state->init_state == INIT_SEEN && !requests_any(OP_INIT)) state->init_state = INIT_ANSWERED;
    table_settle();
    doubts_ask(0);
    return 0;
}

/* To be called once in a process. Returns 0 or an errno; EPROTO: the file is not ours; EOPNOTSUPP: the connection was
 * made without resend, so it can't be taken over; ENOBUFS: pipes are too small. */
EXPORT int tierfs_channel_open(int fd, const char *path, int passthrough, int resend, int takeover) {
    static bool opened;
    if (opened) return EBUSY;
    struct tube probe; /* bounds max_write, which is agreed before the threads make theirs */
    int error = tube_open(&probe);
    if (error) return error;
    tube_close(&probe);
    if ((error = map_state(path, takeover))) return error;
    channel.fuse_fd = fd;
    channel.want_passthrough = passthrough;
    channel.want_resend = resend;
    channel.may_passthrough = is_admin();
    channel.main_buffer = buffer_new();
    set_blocking(false);
    fcntl(fd, F_SETFD, FD_CLOEXEC); /* a child with it would keep the mount from ending */
    if (takeover) {
        error = take_over();
    } else {
        table_recover();
        state->size = sizeof *state;
        barrier();
        state->magic = MAGIC;
    }
    opened = !error || (error != EPROTO && error != EOPNOTSUPP); /* later, the tables are not empty any more */
    if (error) {
        munmap(state, sizeof *state);
        free(channel.main_buffer);
        state = NULL;
        channel.fuse_fd = -1;
    }
    return error;
}

/* Chooses the driver and makes libfuse's device. Returns its descriptor or -errno. */
EXPORT int tierfs_channel_start(int wanted) {
    if (!state || channel.kind) return -EINVAL;
    bool custom = customio_exists();
    if (wanted == KIND_CUSTOMIO && !custom) return -ENOSYS;
    if (wanted == KIND_AUTO) wanted = custom ? KIND_CUSTOMIO : KIND_SOCKETPAIR;
    struct message *first = NULL;
    if (state->init_state == INIT_ANSWERED) {
        channel.feeding = true;
        first = message_new(state->init, state->init_len);
        memcpy(&channel.feed_unique, state->init + 8, 8);
    } else {
        first = queue_pop(&channel.backlog); /* an INIT that came again, or nothing */
    }
    return wanted == KIND_CUSTOMIO ? start_customio(first) : start_socketpair(first);
}

/* ---- questions ---- */

EXPORT int tierfs_channel_attach(uint64_t nodeid, int fd, const uint8_t *handle, size_t handle_len) {
    if (!state || handle_len > HANDLE_MAX) return EINVAL;
    int error = 0;
    pthread_mutex_lock(&channel.lock);
    struct row *row = row_find(nodeid);
    if (!row) row = row_make(nodeid);
    if (!row) {
        error = ENFILE;
    } else {
        row_touch(row_number(row));
        if (row_fd(row) < 0) {
            int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
            if (copy < 0) error = errno;
            else row_set_fd(row, copy);
        }
        if (!row->handle_len) {
            memcpy(row->handle, handle, handle_len);
            barrier();
            row->handle_len = (uint16_t)handle_len;
        }
    }
    pthread_mutex_unlock(&channel.lock);
    return error;
}

EXPORT int tierfs_channel_fd(uint64_t nodeid) {
    pthread_mutex_lock(&channel.lock);
    struct row *row = state ? row_find(nodeid) : NULL;
    int fd = row ? row_fd(row) : -1;
    pthread_mutex_unlock(&channel.lock);
    return fd;
}

EXPORT uint64_t tierfs_channel_handles(uint64_t nodeid) { /* opens in the low half, writers in the high half */
    pthread_mutex_lock(&channel.lock);
    struct row *row = state ? row_find(nodeid) : NULL;
    uint64_t both = row ? (uint64_t)row->writers << 32 | row->opens : 0;
    pthread_mutex_unlock(&channel.lock);
    return both;
}

/* The row at or after `from`; returns where to go on, 0 at the end. */
EXPORT uint32_t tierfs_channel_row(uint32_t from, uint64_t *nodeid, uint32_t *counts, uint8_t *handle, uint32_t *len) {
    uint32_t next = 0;
    pthread_mutex_lock(&channel.lock);
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
    pthread_mutex_unlock(&channel.lock);
    return next;
}

/* A request of this kind on this node came again and is not answered; opcode 0: any request at all. */
EXPORT int tierfs_channel_resent(uint32_t opcode, uint64_t nodeid) {
    pthread_mutex_lock(&channel.lock);
    bool found = requests_resent(opcode, nodeid);
    pthread_mutex_unlock(&channel.lock);
    return found;
}

/* kind (0: not begun), passthrough, resend, major, minor, takeovers, INIT answered; `reason` takes 200 bytes. */
EXPORT void tierfs_channel_info(uint32_t *numbers, char *reason) {
    pthread_mutex_lock(&channel.lock);
    const uint32_t values[7] = {channel.kind, state->passthrough, state->resend,     state->major,
                                state->minor, state->takeovers,   channel.negotiated};
    memcpy(numbers, values, sizeof values);
    memcpy(reason, state->reason, sizeof state->reason);
    pthread_mutex_unlock(&channel.lock);
}

/* Requests by opcode (64 numbers), bytes read, bytes written, requests that came again. */
EXPORT void tierfs_channel_counters(uint64_t *numbers) {
    pthread_mutex_lock(&channel.lock);
    memcpy(numbers, state->counters, sizeof state->counters);
    numbers[OP_MAX] = state->bytes_read;
    numbers[OP_MAX + 1] = state->bytes_written;
    numbers[OP_MAX + 2] = state->resent;
    pthread_mutex_unlock(&channel.lock);
}

/* Importable so that setuptools builds and finds it; everything is called through ctypes (mount/channel.py). */
PyMODINIT_FUNC PyInit__channel(void);
PyMODINIT_FUNC PyInit__channel(void) {
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_channel", NULL, -1, NULL, NULL, NULL, NULL, NULL};
    return PyModule_Create(&module);
}
