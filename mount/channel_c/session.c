/* libfuse's names that this library defines, to get hold of pyfuse3's session. See channel.h, "two drivers". */
#include "channel.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t session_lock = PTHREAD_MUTEX_INITIALIZER;
static void *session; /* NULL again when libfuse frees it, which threads that still read the device must know */
static void (*real_session_exit)(void *);

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

void *libfuse_symbol(const char *name) { return libfuse() ? dlsym(libfuse(), name) : NULL; }

/* Makes libfuse's loop return. */
void session_exit(void) {
    pthread_mutex_lock(&session_lock);
    if (session && real_session_exit) real_session_exit(session);
    pthread_mutex_unlock(&session_lock);
}

static void *hook_session(void *made) {
    if (!made || channel.fuse_fd < 0 || !channel.kind) return made;
    session = made;
    *(void **)&real_session_exit = libfuse_symbol("fuse_session_exit");
    if (channel.kind != KIND_CUSTOMIO) return made;
    int failed = customio_hook(made);
    if (failed) fprintf(stderr, "tierfs channel: libfuse refused the custom I/O\n");
    return failed ? NULL : made;
}

/* libfuse's own names, found before its own. Those with a version argument are what the macros of 3.17 and newer
 * stand for. libfuse may call one from another, so only the outermost sets the hook. */
static _Thread_local int depth;

#define CALL_REAL(name, type, ...)                          \
    do {                                                    \
        type real;                                          \
        *(void **)&real = libfuse_symbol(name);             \
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

EXPORT void fuse_session_destroy(void *made);

void fuse_session_destroy(void *made) {
    void (*real)(void *);
    *(void **)&real = libfuse_symbol("fuse_session_destroy");
    pthread_mutex_lock(&session_lock);
    if (made == session) session = NULL;
    pthread_mutex_unlock(&session_lock);
    if (real) real(made);
}
