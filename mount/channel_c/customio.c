/*
 * The driver `customio`: libfuse (>= 3.14) calls our read and writev in place of its own. What it polls as its device
 * is an epoll descriptor over /dev/fuse and an event counter, which tells of requests that threads put in the queue.
 */
#include "channel.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER; /* guards these two */
static struct queue to_libfuse;
static bool woken; /* the event counter is set */

static int epoll_fd = -1, wake_fd = -1;
static bool pumping; /* threads read the device, not the loop */

/* Hands a request to libfuse through the custom I/O's queue. */
void wake(struct message *m) {
    uint64_t one = 1;
    pthread_mutex_lock(&queue_lock);
    if (m) queue_push(&to_libfuse, m);
    if (!woken && write(wake_fd, &one, sizeof one) < 0) say("waking the loop", errno);
    woken = true;
    pthread_mutex_unlock(&queue_lock);
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
        if (woken && !to_libfuse.head && !atomic_load(&channel.dead)) {
            if (read(wake_fd, &ignored, sizeof ignored) < 0) say("reading the event counter", errno);
            woken = false;
        }
        pthread_mutex_unlock(&queue_lock);
        if (m) {
            ssize_t n = deliver(buffer, size, m->data, m->len);
            free(m);
            return n;
        }
        if (pumping || channel.feeding) {
            errno = atomic_load(&channel.dead) ? ENODEV : EINTR;
            return -1;
        }
        ssize_t n = read(channel.fuse_fd, channel.main_buffer, BUFFER_SIZE);
        if (n < 0) { /* pyfuse3 goes on after EINTR only; libfuse ends its session at ENODEV */
            if (errno == EAGAIN || errno == ENOENT) errno = EINTR;
            return -1;
        }
        pthread_mutex_lock(&channel.lock);
        bool go_on = inbound(channel.main_buffer, (size_t)n);
        pthread_mutex_unlock(&channel.lock);
        if (go_on && !serve(channel.main_buffer, (size_t)n, NULL))
            return deliver(buffer, size, channel.main_buffer, (size_t)n);
    }
}

static ssize_t hook_writev(int fd, struct iovec *iov, int count, void *userdata) {
    (void)fd;
    (void)userdata;
    return outbound(iov, count);
}

/* From now on threads read the device. */
void customio_leave_device(void) {
    pumping = true;
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, channel.fuse_fd, NULL);
}

/* As in fuse_lowlevel.h; clone_fd was added in 3.17, the name with its size argument too. */
struct custom_io {
    ssize_t (*writev)(int, struct iovec *, int, void *);
    ssize_t (*read)(int, void *, size_t, void *);
    void *splice_receive, *splice_send, *clone_fd;
};
static struct custom_io hooks = {.writev = hook_writev, .read = hook_read};

int start_customio(struct message *first) {
    struct epoll_event event = {.events = EPOLLIN};
    wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (wake_fd < 0 || epoll_fd < 0 || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wake_fd, &event) ||
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, channel.fuse_fd, &event))
        return -errno;
    channel.kind = KIND_CUSTOMIO;
    if (first) wake(first);
    return epoll_fd;
}

bool customio_exists(void) {
    return libfuse_symbol("fuse_session_custom_io_317") || libfuse_symbol("fuse_session_custom_io");
}

/* 0, or another number where libfuse refused. */
int customio_hook(void *session) {
    int (*newer)(void *, const struct custom_io *, size_t, int);
    int (*older)(void *, const struct custom_io *, int);
    *(void **)&newer = libfuse_symbol("fuse_session_custom_io_317");
    *(void **)&older = libfuse_symbol("fuse_session_custom_io");
    return newer ? newer(session, &hooks, sizeof hooks, epoll_fd) : older ? older(session, &hooks, epoll_fd) : -1;
}
