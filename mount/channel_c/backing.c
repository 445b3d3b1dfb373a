/* Files registered with the kernel for passthrough. An id that a killed process made is never lost. */
#include "channel.h"

#include <errno.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* False: there was none. */
bool backing_close(int32_t id) {
    uint32_t number = (uint32_t)id;
    if (id <= 0) return false;
    if (!ioctl(channel.fuse_fd, IOC_BACKING_CLOSE, &number)) return true;
    if (errno != ENOENT && errno != ENODEV && errno != EPERM) say("closing a backing id", errno);
    return false;
}

/* Registers the attached file with the kernel once for each inode. False: not possible, errno says why. */
bool backing_make(int fd, uint32_t opening, int32_t *id) {
    struct backing_map map = {.fd = fd};
    state->opening = opening;
    barrier();
    int got = ioctl(channel.fuse_fd, IOC_BACKING_OPEN, &map);
    if (got > 0) *id = got;
    barrier();
    if (got > 0) state->last_backing = got;
    barrier();
    state->opening = 0;
    return got > 0;
}

/* True if this process may register backing files: CAP_SYS_ADMIN in the first user namespace. */
bool is_admin(void) {
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

void probe_backing(void) {
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

/* An id may have been lost between the ioctl and the row. */
void backing_recover(void) {
    if (!state->opening) return;
    int32_t id = state->opening <= ROWS ? state->rows[state->opening - 1].backing_id : 0;
    if (id) state->last_backing = id;
    else if (backing_close(state->last_backing + 1)) state->last_backing++; /* else it was not made */
    barrier();
    state->opening = 0;
}
