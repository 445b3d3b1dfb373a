/* Requests that were read and are not answered, of the kinds where the answer matters to the channel. */
#include "channel.h"

#include <stdlib.h>

enum { BUCKETS = 4096 };

static struct request *buckets[BUCKETS], *open_head, *open_tail, *spare; /* open_*: OPEN and CREATE, oldest first */
static uint32_t resent_open; /* how many of them came again */
static uint64_t sequence;

uint64_t next_sequence(void) { return ++sequence; }

static uint32_t bucket_of(uint64_t unique) { return (uint32_t)((unique >> 1) % BUCKETS); }

struct request *request_add(const struct in_header *h, uint32_t flags, uint32_t slot) {
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
struct request *request_take(uint64_t unique) {
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

void request_free(struct request *r) {
    r->hash_next = spare;
    spare = r;
}

/* Whether a request that was read before `when`, and has no answer yet, may have attached the file of this node: an
 * OPEN of it, or a CREATE, which doesn't say of which. */
bool requests_may_attach(uint64_t nodeid, uint64_t when) {
    for (const struct request *r = open_head; r && r->sequence < when; r = r->open_next)
        if (r->op == OP_CREATE || r->nodeid == nodeid) return true;
    return false;
}

bool requests_any(uint32_t op) {
    for (uint32_t k = 0; k < BUCKETS; k++)
        for (struct request *r = buckets[k]; r; r = r->hash_next)
            if (r->op == op) return true;
    return false;
}

/* Whether a request of this kind on this node came again; `op` 0: any request at all. */
bool requests_resent(uint32_t op, uint64_t nodeid) {
    if (!op || !resent_open) return resent_open > 0;
    for (uint32_t k = 0; k < BUCKETS; k++)
        for (struct request *r = buckets[k]; r; r = r->hash_next)
            if (r->resent && r->op == op && r->nodeid == nodeid) return true;
    return false;
}
