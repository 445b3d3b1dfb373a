/* What the channel looks at and changes in the messages between the kernel and libfuse. */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- from the kernel ---- */

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
bool inbound(unsigned char *b, size_t n) {
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
    case OP_FORGET:
    case OP_BATCH_FORGET:
        rows_forgotten(b, n);
        return true;
    case OP_INIT:
        if (n >= INIT_LEAST) keep_init(b, n);
        break;
    case OP_OPEN:
    case OP_CREATE:
        if (n >= 44) memcpy(&flags, b + 40, 4);
        if (slot < JOURNAL) uncount_open(slot, state->journal[slot].row, state->journal[slot].writer);
        break;
    case OP_RELEASE:
        if (n >= 40 + sizeof(struct release_in)) memcpy(&flags, b + 40 + offsetof(struct release_in, flags), 4);
        if (slot < JOURNAL) slot_seen(slot);
        else slot = count_release(&h, flags);
        break;
    default:
        if (!resent) return true;
    }
    request_add(&h, flags, slot);
    return true;
}

/* ---- to the kernel ---- */

void say(const char *what, int error) { fprintf(stderr, "tierfs channel: %s: %s\n", what, strerror(error)); }

uint32_t page_size(void) { return (uint32_t)sysconf(_SC_PAGESIZE); }

ssize_t send_all(const struct iovec *iov, int count, size_t total) {
    ssize_t n;
    do n = writev(channel.fuse_fd, iov, count); while (n < 0 && errno == EINTR);
    if (n >= 0) return (ssize_t)total;
    return errno == ENOENT || errno == ENODEV ? UNWANTED : -1;
}

void reason_add(const char *text) {
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
    if (!channel.want_passthrough) reason_add("passthrough is turned off by a setting");
    else if (!(offered2 & INIT2_PASSTHROUGH)) reason_add("this kernel has no FUSE passthrough (Linux 6.9 has)");
    else if (!channel.may_passthrough) reason_add("passthrough needs CAP_SYS_ADMIN");
    state->passthrough = channel.want_passthrough && (offered2 & INIT2_PASSTHROUGH) && channel.may_passthrough;
    if (!channel.want_resend) reason_add("resend is turned off by a setting");
    else if (!(offered2 & INIT2_HAS_RESEND)) reason_add("this kernel can't resend requests (Linux 6.9 can)");
    state->resend = channel.want_resend && (offered2 & INIT2_HAS_RESEND);
    state->allow_mmap = (offered2 & INIT2_DIRECT_IO_ALLOW_MMAP) != 0; /* stubs are mapped, too (Linux 6.6) */
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
    if (out.max_background < MAX_BACKGROUND) { /* RELEASEs must not queue behind reads that wait for a stub's bytes */
        out.max_background = MAX_BACKGROUND;
        out.congestion_threshold = MAX_BACKGROUND / 4 * 3;
    }
    if (out.max_readahead < MAX_READAHEAD) out.max_readahead = MAX_READAHEAD; /* libfuse knows the limit at the start */
    if (out.max_write > channel.max_write) { /* pipes and socket pairs without privileges carry less */
        out.max_write = channel.max_write;
        if (out.flags & INIT_MAX_PAGES) out.max_pages = (uint16_t)(channel.max_write / page_size());
    }
    memcpy(b + 16, &out, sizeof out);
    *n = 16 + sizeof out;
    uint32_t len = (uint32_t)*n;
    memcpy(b, &len, 4);
}

/* libfuse answered INIT, so it takes requests now. */
static void begin(void) {
    channel.negotiated = true;
    if (channel.kind == KIND_CUSTOMIO && state->passthrough) {
        for (struct message *m; (m = queue_pop(&channel.backlog));) wake(m);
        return;
    }
    if (channel.kind == KIND_CUSTOMIO) customio_leave_device();
    start_pumps();
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
    bool attached = row->backing_id || row_fd(row) >= 0;
    /* The kernel does not mix passthrough with handles that are not, and may be mapped: they stay among themselves. */
    bool is_first = !row->opens;
    if (state->passthrough && attached && is_first && !row->backing_id && !backing_make(row_fd(row), i + 1, &row->backing_id))
        say("registering a backing file", errno);
    if (state->passthrough && row->backing_id) {
        /* all other flags are refused beside it (FOPEN_PASSTHROUGH_MASK in fs/fuse/iomode.c) */
        o.open_flags = (o.open_flags & FOPEN_NOFLUSH) | FOPEN_PASSTHROUGH;
        o.backing_id = row->backing_id;
    } else if (state->passthrough) {
        /* a handle on the page cache would keep later opens of the inode from passthrough */
        o.open_flags = (o.open_flags & ~FOPEN_KEEP_CACHE) | FOPEN_DIRECT_IO;
    } else if (state->allow_mmap && row_fd(row) >= 0 && is_writer(r->flags)) {
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
    if (channel.feeding) { /* the kernel had its answer from the process before */
        channel.feeding = false;
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
ssize_t outbound(const struct iovec *iov, int count) {
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
    pthread_mutex_lock(&channel.lock);
    bool feed = channel.feeding && h.unique == channel.feed_unique;
    struct request *r = h.unique && !feed ? request_take(h.unique) : NULL;
    uint32_t slot = JOURNAL;
    if (feed || (r && r->op == OP_INIT && total < sizeof b - sizeof(struct init_out))) {
        sent = answer_init(b, total, &h);
    } else if (r && !h.error && total < sizeof b &&
               ((r->op == OP_OPEN && total >= 32) || (r->op == OP_CREATE && total >= 32 + ENTRY_OUT_SIZE))) {
        sent = answer_open(r, b, total, &slot);
    } else if (r && r->op == OP_RELEASE) {
        slot = r->slot; /* keeps the row; the kernel may drop the inode and its whole page cache before it returns */
        pthread_mutex_unlock(&channel.lock);
        sent = send_all(iov, count, total);
        pthread_mutex_lock(&channel.lock);
    } else if (r) {
        sent = send_all(iov, count, total);
    } else { /* nothing of ours: no need to hold the lock */
        pthread_mutex_unlock(&channel.lock);
        sent = send_all(iov, count, total);
        return sent == UNWANTED ? (ssize_t)total : sent;
    }
    int error = errno;
    slot_clear(slot);
    if (r && r->op == OP_RELEASE) doubts_ask(r->nodeid);
    if (r) request_free(r);
    rows_sweep();
    pthread_mutex_unlock(&channel.lock);
    errno = error;
    return sent == UNWANTED ? (ssize_t)total : sent;
}
