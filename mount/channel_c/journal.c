/*
 * Counts of open handles, exact over SIGKILL at any instruction. A count and the journal entry that says which request
 * caused it change as one, through `redo`; channel.h tells how a new process reads them.
 */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static uint32_t journal_hint;
static bool entry_seen[JOURNAL]; /* its request came again */

static void redo_apply(void) {
    const struct redo *d = &state->redo;
    state->rows[d->row].opens = d->opens;
    state->rows[d->row].writers = d->writers;
    if (d->slot < JOURNAL) state->journal[d->slot] = d->entry;
}

/* Changes a row's counts and a journal slot as one. `slot` == JOURNAL: the journal is full, counts only. */
static void change(uint32_t i, int opens, int writers, uint32_t slot, struct entry entry) {
    struct row *row = &state->rows[i];
    struct redo *d = &state->redo;
    *d = (struct redo){.row = i, .slot = slot, .entry = entry};
    d->opens = opens < 0 && !row->opens ? 0 : row->opens + (uint32_t)opens;
    d->writers = writers < 0 && !row->writers ? 0 : row->writers + (uint32_t)writers;
    if (slot < JOURNAL) row_entries_add(i, entry.unique ? 1 : -1);
    barrier();
    d->valid = 1;
    barrier();
    redo_apply();
    barrier();
    d->valid = 0;
    barrier();
}

static uint32_t slot_free(void) {
    for (uint32_t k = 0; k < JOURNAL; k++) {
        uint32_t slot = (journal_hint + k) % JOURNAL;
        if (!state->journal[slot].unique) {
            journal_hint = slot + 1;
            return slot;
        }
    }
    return JOURNAL;
}

uint32_t slot_find(uint64_t unique) {
    unique &= ~UNIQUE_RESEND;
    for (uint32_t slot = 0; slot < JOURNAL; slot++)
        if (state->journal[slot].unique == unique) return slot;
    return JOURNAL;
}

void slot_clear(uint32_t slot) {
    if (slot >= JOURNAL) return;
    uint32_t i = state->journal[slot].row;
    state->journal[slot].unique = 0;
    row_entries_add(i, -1);
    row_touch(i);
}

bool is_writer(uint32_t flags) { return (flags & O_ACCMODE) != O_RDONLY; }

/* Nobody has it open. */
void count_none(uint32_t i) {
    change(i, -(int)state->rows[i].opens, -(int)state->rows[i].writers, JOURNAL, (struct entry){0});
    row_touch(i);
}

uint32_t count_open(uint32_t i, uint64_t unique, bool writer) {
    row_trust(i);
    uint32_t slot = slot_free();
    change(i, 1, writer, slot, (struct entry){unique & ~UNIQUE_RESEND, i, OP_OPEN, writer, 0});
    return slot;
}

void uncount_open(uint32_t slot, uint32_t i, bool writer) {
    change(i, -1, -(int)writer, slot, (struct entry){0});
    row_touch(i);
}

uint32_t count_release(const struct in_header *h, uint32_t flags) {
    struct row *row = row_find(h->nodeid);
    if (!row) return JOURNAL;
    uint32_t i = row_number(row), slot = slot_free();
    change(i, -1, -(int)is_writer(flags), slot,
           (struct entry){h->unique & ~UNIQUE_RESEND, i, OP_RELEASE, is_writer(flags), 0});
    row_touch(i);
    return slot;
}

void slot_seen(uint32_t slot) { entry_seen[slot] = true; }

/* Finishes the change that a killed process was in. */
void journal_recover(void) {
    if (state->redo.valid && state->redo.row < ROWS) redo_apply();
    barrier();
    state->redo.valid = 0;
    for (uint32_t slot = 0; slot < JOURNAL; slot++)
        if (state->journal[slot].unique) row_entries_add(state->journal[slot].row % ROWS, 1);
}

/* Entries whose requests did not come again were answered, or taken back by a program that was killed. */
static void settle(void) {
    for (uint32_t slot = 0; slot < JOURNAL; slot++) {
        const struct entry *e = &state->journal[slot];
        if (!e->unique || entry_seen[slot]) continue;
        if (e->op == OP_OPEN) row_doubt(e->row);
        barrier();
        slot_clear(slot);
    }
}

/* Asks for the unanswered requests and reads them all, before anything else can be read. Returns 0 or an errno. */
int collect(void) {
    struct out_header notify = {sizeof notify, NOTIFY_RESEND, 0};
    bool settled = false;
    if (write(channel.fuse_fd, &notify, sizeof notify) < 0) return errno;
    unsigned char *b = channel.main_buffer;
    while (!settled) {
        struct in_header h;
        ssize_t n = read(channel.fuse_fd, b, BUFFER_SIZE);
        if (n < 0 && (errno == EINTR || errno == ENOENT)) continue;
        if (n < 0 && errno != EAGAIN) return errno;
        if (n < (ssize_t)sizeof h) break;
        memcpy(&h, b, sizeof h);
        if (!(h.unique & UNIQUE_RESEND) && h.opcode != OP_FORGET && h.opcode != OP_BATCH_FORGET &&
            h.opcode != OP_INTERRUPT) {
            settle(); /* the kernel puts those it sends again first: these were all */
            settled = true;
        }
        if (h.opcode == OP_INIT) state->init_state = INIT_NONE; /* not answered, or the answer was lost */
        if (inbound(b, (size_t)n)) queue_push(&channel.backlog, message_new(b, (size_t)n));
    }
    if (!settled) settle();
    return 0;
}
