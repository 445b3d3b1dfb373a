/*
 * FUSE's messages as far as the channel looks into them. Source: the kernel's include/uapi/linux/fuse.h, protocol 7.40
 * and later; each name is the kernel's without its prefix FUSE_. Copied and not included, because the headers of the
 * machine that builds may be older than the kernel that runs. Messages come at any address: use memcpy, never a cast.
 */
#ifndef TIERFS_PROTOCOL_H
#define TIERFS_PROTOCOL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

enum {
    OP_FORGET = 2, OP_OPEN = 14, OP_READ = 15, OP_WRITE = 16, OP_RELEASE = 18, OP_INIT = 26, OP_CREATE = 35,
    OP_INTERRUPT = 36, OP_BATCH_FORGET = 42, OP_MAX = 64
};
enum { NOTIFY_RESEND = 7, NOTIFY_PRUNE = 9 /* protocol 7.45, Linux 6.18 */ };

#define UNIQUE_RESEND (1ULL << 63)
#define INIT_LEAST 56u /* an INIT request of the oldest kernels: no flags2 */

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
struct forget_one { /* of FORGET without its node id; BATCH_FORGET has a count and padding, then these */
    uint64_t nodeid, nlookup;
};
struct prune_out { /* before the node ids */
    uint32_t count, padding;
    uint64_t spare;
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
_Static_assert(sizeof(struct prune_out) == 16 && sizeof(struct forget_one) == 16, "fuse_notify_prune_out, forget");

#define ENTRY_OUT_SIZE 128u  /* struct fuse_entry_out, before fuse_open_out in a CREATE reply */
#define MAX_READAHEAD (2u << 20) /* the mount's own limit, /sys/class/bdi, is what mount.kernel_mount sets */
#define MAX_BACKGROUND 1024u /* requests that no program waits for, at a time; the kernel's default is 12 */
#define MAX_WRITE (1u << 20) /* 256 pages: what libfuse and the kernel's default limit allow */
#endif
