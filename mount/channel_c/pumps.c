/*
 * Threads that read the device, where bytes are moved or libfuse can't be hooked; and the driver `socketpair`, whose
 * libfuse device is one end of a socket pair.
 */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static int near_fd = -1, far_fd = -1; /* libfuse's end and ours */

bool start_thread(void *(*run)(void *), void *argument) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are Python's */
    int error = pthread_create(&thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) say("starting a thread", error);
    else pthread_detach(thread);
    return !error;
}

static void start_pump(void *(*run)(void *), void *argument) {
    if (!start_thread(run, argument)) abort(); /* the keeper tries again with a new process */
}

void set_blocking(bool blocking) {
    int flags = fcntl(channel.fuse_fd, F_GETFL);
    if (flags >= 0) fcntl(channel.fuse_fd, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

static void unmounted(void) {
    atomic_store(&channel.dead, true);
    if (channel.kind == KIND_SOCKETPAIR) {
        session_exit();
        shutdown(far_fd, SHUT_RDWR); /* the loop wakes, sees the session ended, returns */
    } else {
        wake(NULL);
    }
}

/* `t`: an empty pipe, if there is one. */
static void pass_on(unsigned char *b, size_t n, const struct tube *t) {
    if (serve(b, n, t)) return;
    if (channel.kind == KIND_CUSTOMIO) {
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
        pthread_mutex_lock(&channel.lock);
        struct request *r = request_take(h.unique);
        if (r && r->op == OP_RELEASE) slot_clear(r->slot);
        if (r) request_free(r);
        pthread_mutex_unlock(&channel.lock);
        if (h.opcode != OP_FORGET && h.opcode != OP_BATCH_FORGET) reply(h.unique, error, NULL, 0);
    }
}

/* A thread that reads the device. Reads are exclusive waits in the kernel, so one thread wakes for each request. */
static void *pump_in(void *argument) {
    unsigned char *b = buffer_new();
    struct tube t;
    if (tube_open(&t)) abort();
    if (argument) { /* the first one: what the takeover found waiting */
        for (struct message *m; (m = queue_pop(&channel.backlog)); free(m)) {
            memcpy(b, m->data, m->len);
            pass_on(b, m->len, NULL);
        }
    }
    for (;;) {
        const size_t headers = sizeof(struct in_header) + sizeof(struct rw_in);
        ssize_t n = tube_fill(&t);
        if (n < 0 && errno == EAGAIN) {
            struct pollfd p = {.fd = channel.fuse_fd, .events = POLLIN};
            poll(&p, 1, -1);
        } else if (n < 0 && errno == ENOMEM) {
            poll(NULL, 0, 10);
        } else if (n < 0 && errno == ENODEV) {
            break;
        } else if (n < 0 && errno != EINTR && errno != ENOENT) {
            say("reading /dev/fuse", errno);
            abort(); /* a request may be lost on the way: the next process gets it again */
        } else if (n > 0) {
            size_t length = (size_t)n, have = length < headers ? length : headers;
            struct in_header h = {0};
            if (length > BUFFER_SIZE || !tube_read(&t, b, have)) abort();
            if (have >= sizeof h) memcpy(&h, b, sizeof h);
            bool data = h.opcode == OP_WRITE;
            if (!data && !tube_read(&t, b + have, length - have)) abort();
            pthread_mutex_lock(&channel.lock);
            bool go_on = inbound(b, length); /* of a WRITE it looks at the header only */
            pthread_mutex_unlock(&channel.lock);
            if (data && serve(b, length, &t)) continue;
            if (data && !tube_read(&t, b + have, length - have)) abort();
            if (go_on) pass_on(b, length, data ? NULL : &t);
        }
    }
    unmounted();
    tube_close(&t);
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

/* More than one thread only where bytes are moved. */
void start_pumps(void) {
    set_blocking(true);
    int count = state->passthrough ? 1 : 3;
    for (int k = 0; k < count; k++) start_pump(pump_in, k == 0 ? &channel.backlog : NULL);
}

static void *pump_first(void *argument) { /* a fresh mount: INIT comes alone, the pumps start at its answer */
    struct message *first = argument;
    if (!first) {
        unsigned char *b = channel.main_buffer;
        struct pollfd p = {.fd = channel.fuse_fd, .events = POLLIN};
        ssize_t n;
        while ((n = read(channel.fuse_fd, b, BUFFER_SIZE)) < 0 &&
               (errno == EAGAIN || errno == EINTR || errno == ENOENT))
            poll(&p, 1, -1);
        if (n < 0) {
            unmounted();
            return NULL;
        }
        pthread_mutex_lock(&channel.lock);
        inbound(b, (size_t)n);
        pthread_mutex_unlock(&channel.lock);
        first = message_new(b, (size_t)n);
    }
    pass_on(first->data, first->len, NULL);
    free(first);
    return NULL;
}

int start_socketpair(struct message *first) {
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
        if (channel.max_write > most) channel.max_write = most;
    }
    channel.kind = KIND_SOCKETPAIR;
    start_pump(pump_out, NULL);
    start_pump(pump_first, first);
    return near_fd;
}
