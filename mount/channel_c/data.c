/* READ and WRITE of attached files, answered here without Python and libfuse where the kernel's passthrough is off. */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* ---- reading the device ---- */

/* A thread that waits in read(2) and dies of SIGKILL still takes a request if there is one, and then the kernel must be
 * able to copy it: into a page of ours that is not present just then it can't (a dying task takes no page faults), and
 * it answers the program's request with EIO. So threads that wait splice into a pipe, whose pages are the kernel's
 * own; and the loop, which never waits in read(2), reads into one buffer whose pages are there from the start. */

/* A pipe needs a slot for each page and some for the headers, so half of it is used; without privileges its size is
 * limited (/proc/sys/fs/pipe-max-size), and requests are kept smaller then. */
int tube_open(struct tube *t) {
    /* setxattr carries 64 KiB, and a splice into a pipe with too few slots fails with EIO */
    const int least = page_size() > 1 << 15 ? 4 * (int)page_size() : 1 << 17;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return errno;
    t->out = ends[0];
    t->in = ends[1];
    for (int size = 2 << 20; size >= least && fcntl(t->in, F_SETPIPE_SZ, size) < 0;) size /= 2;
    int size = fcntl(t->in, F_GETPIPE_SZ);
    if (size < least) {
        tube_close(t);
        return ENOBUFS;
    }
    uint32_t most = (uint32_t)size / 2;
    if (channel.max_write > most) channel.max_write = most < page_size() ? page_size() : most;
    return 0;
}

void tube_close(const struct tube *t) {
    close(t->in);
    close(t->out);
}

/* Takes a request from the device into the pipe. Returns its length or -1. */
ssize_t tube_fill(const struct tube *t) { return splice(channel.fuse_fd, NULL, t->in, NULL, BUFFER_SIZE, 0); }

bool tube_read(const struct tube *t, unsigned char *b, size_t n) {
    while (n) {
        ssize_t got = read(t->out, b, n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        b += got;
        n -= (size_t)got;
    }
    return true;
}

unsigned char *buffer_new(void) {
    unsigned char *b = malloc(BUFFER_SIZE);
    if (!b) abort();
    memset(b, 0, BUFFER_SIZE);
    mlock(b, BUFFER_SIZE); /* where the limits allow it */
    return b;
}

/* ---- answering ---- */

void reply(uint64_t unique, int error, const void *data, size_t n) {
    struct out_header h = {(uint32_t)(sizeof h + n), -error, unique};
    struct iovec iov[2] = {{&h, sizeof h}, {(void *)(uintptr_t)data, n}};
    if (send_all(iov, n ? 2 : 1, sizeof h + n) == -1) say("answering a request", errno);
}

/* Moves the file's pages into the answer: one copy less. False: nothing was answered, the pipe is empty. */
static bool splice_read(const struct in_header *h, const struct rw_in *in, int fd, const struct tube *t,
                        unsigned char *buffer) {
    enum { LEAST = 1 << 16 }; /* below it the three calls cost more than the copy */
    struct stat st;
    if (in->size < LEAST || fstat(fd, &st) || st.st_size < (off_t)(in->offset + LEAST)) return false;
    size_t left = (size_t)st.st_size - in->offset, size = left < in->size ? left : in->size, done = 0;
    struct out_header answer = {(uint32_t)(sizeof answer + size), 0, h->unique};
    if (write(t->in, &answer, sizeof answer) != sizeof answer) abort();
    while (done < size) {
        off_t at = (off_t)(in->offset + done);
        ssize_t n = splice(fd, &at, t->in, NULL, size - done, SPLICE_F_NONBLOCK);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break; /* it was truncated meanwhile, or can't be spliced */
        done += (size_t)n;
    }
    if (done < size) {
        if (!tube_read(t, buffer, sizeof answer + done)) abort();
        return false;
    }
    ssize_t n;
    do n = splice(t->out, NULL, channel.fuse_fd, NULL, sizeof answer + size, 0); while (n < 0 && errno == EINTR);
    if (n < 0 && errno != ENOENT && errno != ENODEV) say("answering a request", errno);
    __atomic_fetch_add(&state->bytes_read, size, __ATOMIC_RELAXED);
    return true;
}

static void serve_read(const struct in_header *h, const struct rw_in *in, int fd, unsigned char *buffer,
                       const struct tube *t) {
    size_t done = 0;
    if (t && splice_read(h, in, fd, t, buffer)) return;
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
bool serve(unsigned char *b, size_t n, const struct tube *t) {
    struct in_header h;
    struct rw_in in;
    if (n < sizeof h + sizeof in) return false;
    memcpy(&h, b, sizeof h);
    if (h.opcode != OP_READ && h.opcode != OP_WRITE) return false;
    memcpy(&in, b + sizeof h, sizeof in);
    if (h.opcode == OP_WRITE ? in.size != n - sizeof h - sizeof in : in.size > MAX_WRITE) return false;
    pthread_mutex_lock(&channel.lock);
    struct row *row = row_find(h.nodeid);
    int fd = row ? row_fd(row) : -1;
    struct request *r = fd >= 0 && (h.unique & UNIQUE_RESEND) ? request_take(h.unique) : NULL;
    if (r) request_free(r);
    pthread_mutex_unlock(&channel.lock);
    if (fd < 0) return false;
    if (h.opcode == OP_WRITE) serve_write(&h, &in, fd, b + sizeof h + sizeof in, t);
    else serve_read(&h, &in, fd, b, t);
    return true;
}
