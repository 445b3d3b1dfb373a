/*
 * Loaded into the channel's process with LD_PRELOAD, it makes system calls fail or end the process where a file in the
 * directory $TIERFS_FAULTS orders it. Each line says what is to happen once; the file goes with its last line.
 *   backing_open   errno N | die before | die after     registering a backing file
 *   answer_open    die before | die after               the answer to an OPEN
 *   resend         wait                                 after asking for a resend, until the file `go` is there
 *   close          wait                                 before closing a file without a name, until `go` is there
 *   duplicate      same                                 a duplicated descriptor is the descriptor itself; stays
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static void path_of(const char *name, char *path, size_t size) {
    const char *directory = getenv("TIERFS_FAULTS");
    snprintf(path, size, "%s/%s", directory ? directory : "/nonexistent", name);
}

static int order(const char *name, char *text, int stays) {
    char path[4096];
    int kept = errno;
    path_of(name, path, sizeof path);
    FILE *f = fopen(path, "re");
    if (!f) {
        errno = kept;
        return 0;
    }
    char rest[256] = "";
    if (!fgets(text, 64, f)) text[0] = 0;
    text[strcspn(text, "\n")] = 0;
    size_t left = fread(rest, 1, sizeof rest, f);
    fclose(f);
    if (!stays && !left) unlink(path);
    if (!stays && left && (f = fopen(path, "we"))) {
        fwrite(rest, 1, left, f);
        fclose(f);
    }
    errno = kept;
    return 1;
}

static void die_if(const char *text, const char *when) {
    if (!strcmp(text, when)) kill(getpid(), SIGKILL);
}

int ioctl(int fd, unsigned long request, ...) {
    static int (*real)(int, unsigned long, ...);
    char text[64];
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "ioctl");
    if (request != _IOC(_IOC_WRITE, 229, 1, 16) || !order("backing_open", text, 0)) return real(fd, request, argument);
    die_if(text, "die before");
    if (!strncmp(text, "errno ", 6)) {
        errno = atoi(text + 6);
        return -1;
    }
    int got = real(fd, request, argument);
    die_if(text, "die after");
    return got;
}

ssize_t writev(int fd, const struct iovec *iov, int count) {
    static ssize_t (*real)(int, const struct iovec *, int);
    char text[64] = "";
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "writev");
    if (count == 1 && iov->iov_len == 32 && !((int32_t *)iov->iov_base)[1]) order("answer_open", text, 0);
    die_if(text, "die before");
    ssize_t n = real(fd, iov, count);
    die_if(text, "die after");
    return n;
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    char text[64], path[4096];
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "write");
    ssize_t n = real(fd, data, size);
    const int32_t *header = data;
    if (size == 16 && header[0] == 16 && header[1] == 7 && order("resend", text, 0)) {
        path_of("go", path, sizeof path);
        while (access(path, F_OK)) usleep(1000);
    }
    return n;
}

int close(int fd) {
    static int (*real)(int);
    char text[64], path[4096];
    struct stat st;
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "close");
    if (!fstat(fd, &st) && S_ISREG(st.st_mode) && !st.st_nlink && order("close", text, 0)) {
        path_of("go", path, sizeof path);
        while (access(path, F_OK)) usleep(1000);
    }
    return real(fd);
}

int fcntl(int fd, int command, ...) {
    static int (*real)(int, int, ...);
    char text[64];
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fcntl");
    if (command == F_DUPFD_CLOEXEC && order("duplicate", text, 1)) return fd;
    return real(fd, command, argument);
}

int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));
