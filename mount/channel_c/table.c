/*
 * The open table: a row for each inode with open handles. Rows lie in the state file and outlive the process; what
 * only this process has of a row (its descriptor, its place in the index) lies beside it here.
 */
#include "channel.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { INDEX = 131072 };

static uint32_t row_index[INDEX], row_next[ROWS]; /* a hash of node ids to row + 1, and its chains */
static uint32_t free_rows[ROWS], free_count;
static int row_fds[ROWS];          /* descriptor + 1 of the attached file */
static uint64_t row_idle[ROWS];    /* sequence at the last attach or when the last handle went */
static uint32_t row_entries[ROWS]; /* journal entries that name the row */
static uint32_t idle_rows[ROWS], idle_count;
static bool row_listed[ROWS];      /* in idle_rows */
static uint32_t doubts;            /* doubtful rows */

static uint32_t index_of(uint64_t nodeid) { return (uint32_t)((nodeid * 0x9E3779B97F4A7C15ULL) >> 47) % INDEX; }

struct row *row_find(uint64_t nodeid) {
    uint32_t i = row_index[index_of(nodeid)];
    while (i && state->rows[i - 1].nodeid != nodeid) i = row_next[i - 1];
    return i ? &state->rows[i - 1] : NULL;
}

uint32_t row_number(const struct row *row) { return (uint32_t)(row - state->rows); }

static void row_link(uint32_t i) {
    uint32_t *head = &row_index[index_of(state->rows[i].nodeid)];
    row_next[i] = *head;
    *head = i + 1;
}

/* The row may now have no handle: it is looked at after each answer to an OPEN, CREATE or RELEASE. */
void row_touch(uint32_t i) {
    row_idle[i] = next_sequence();
    if (!row_listed[i]) {
        row_listed[i] = true;
        idle_rows[idle_count++] = i;
    }
}

struct row *row_make(uint64_t nodeid) { /* NULL: the table is full */
    if (!free_count) return NULL;
    uint32_t i = free_rows[--free_count];
    struct row *row = &state->rows[i];
    *row = (struct row){.nodeid = nodeid};
    barrier();
    row->state = ROW_USED;
    row_fds[i] = 0;
    row_entries[i] = 0;
    row_link(i);
    return row;
}

int row_fd(const struct row *row) { return row_fds[row_number(row)] - 1; }

void row_set_fd(const struct row *row, int fd) { row_fds[row_number(row)] = fd + 1; }

void row_entries_add(uint32_t i, int change) { row_entries[i] += (uint32_t)change; }

static void *close_slowly(void *argument) {
    close((int)(intptr_t)argument);
    return NULL;
}

/* Closing the last descriptor of a file without a name frees its pages, which takes a while for a large one: never in
 * a thread that answers requests, nor with the lock held. */
static void close_file(int fd) {
    enum { LARGE_BLOCKS = (16 << 20) / 512 };
    struct stat st;
    bool slow = !fstat(fd, &st) && !st.st_nlink && st.st_blocks > LARGE_BLOCKS;
    if (!slow || !start_thread(close_slowly, (void *)(intptr_t)fd)) close(fd);
}

static void row_free(uint32_t i) {
    struct row *row = &state->rows[i];
    uint32_t *p = &row_index[index_of(row->nodeid)];
    while (*p != i + 1) p = &row_next[*p - 1];
    *p = row_next[i];
    row_trust(i);
    row->state = ROW_CLOSING;
    barrier();
    backing_close(row->backing_id);
    if (row_fds[i]) close_file(row_fds[i] - 1);
    row_fds[i] = 0;
    barrier();
    row->state = ROW_FREE;
    free_rows[free_count++] = i;
}

/* Frees rows without handles. One attached by a handler that has not answered yet must stay, so a row goes only when
 * every request that may have attached it has been answered. Others don't matter: an OPEN can wait for minutes. */
void rows_sweep(void) {
    for (uint32_t k = 0; k < idle_count;) {
        uint32_t i = idle_rows[k];
        bool idle = state->rows[i].opens == 0;
        if (idle && (row_entries[i] || requests_may_attach(state->rows[i].nodeid, row_idle[i]))) {
            k++;
            continue;
        }
        row_listed[i] = false;
        idle_rows[k] = idle_rows[--idle_count];
        if (idle) row_free(i);
    }
}

/*
 * Doubtful rows. A program that is killed after the kernel queued its OPEN again, and before we read it, takes the OPEN
 * back, which looks as if it had been answered. The kernel forgets an inode when nobody has it open: if no other OPEN
 * was counted by then, the count is 0. From Linux 6.18 on we ask it to forget; before, it does in its time.
 */
void row_doubt(uint32_t i) {
    doubts += !state->rows[i].doubtful;
    state->rows[i].doubtful = 1;
}

void row_trust(uint32_t i) {
    doubts -= state->rows[i].doubtful != 0;
    state->rows[i].doubtful = 0;
}

static void row_forgotten(uint64_t nodeid) {
    struct row *row = row_find(nodeid);
    if (!row || !row->doubtful) return;
    row_trust(row_number(row));
    if (row->opens) count_none(row_number(row));
    rows_sweep();
}

/* A FORGET or BATCH_FORGET was read. */
void rows_forgotten(const unsigned char *b, size_t n) {
    struct in_header h;
    struct forget_one one;
    if (!doubts) return;
    memcpy(&h, b, sizeof h);
    if (h.opcode == OP_FORGET) row_forgotten(h.nodeid);
    for (size_t at = sizeof h + 8; h.opcode == OP_BATCH_FORGET && at + sizeof one <= n; at += sizeof one) {
        memcpy(&one, b + at, sizeof one);
        row_forgotten(one.nodeid);
    }
}

/* In a thread of its own and without the lock: the kernel may wait for answers to other requests meanwhile. */
static void *ask_to_forget(void *argument) {
    struct message *m = argument;
    ssize_t ignored = write(channel.fuse_fd, m->data, m->len); /* EINVAL: an older kernel */
    (void)ignored;
    free(m);
    return NULL;
}

/* Of this node, or of all (0). */
void doubts_ask(uint64_t nodeid) {
    enum { MOST = 64 };
    struct out_header h = {.error = NOTIFY_PRUNE};
    struct prune_out prune = {0};
    unsigned char b[sizeof h + sizeof prune + MOST * sizeof(uint64_t)];
    size_t n = sizeof h + sizeof prune;
    for (uint32_t i = 0; doubts && i < ROWS && prune.count < MOST; i++) {
        const struct row *row = &state->rows[i];
        if (row->state != ROW_USED || !row->doubtful || (nodeid && row->nodeid != nodeid)) continue;
        memcpy(b + n, &row->nodeid, sizeof row->nodeid);
        n += sizeof(uint64_t);
        prune.count++;
    }
    if (!prune.count) return;
    h.len = (uint32_t)n;
    memcpy(b, &h, sizeof h);
    memcpy(b + sizeof h, &prune, sizeof prune);
    struct message *m = message_new(b, n);
    if (!start_thread(ask_to_forget, m)) free(m);
}

/* Whether numbers in the state file that are used as places stay within it. */
bool table_is_sound(void) {
    const struct redo *d = &state->redo;
    if (state->init_state > INIT_ANSWERED || state->init_len > INIT_MAX) return false;
    if (state->init_state != INIT_NONE && state->init_len < INIT_LEAST) return false;
    if (state->opening > ROWS + 1 || !memchr(state->reason, 0, sizeof state->reason)) return false;
    if (d->valid && (d->row >= ROWS || d->slot > JOURNAL || (d->entry.unique && d->entry.row >= ROWS))) return false;
    for (uint32_t i = 0; i < ROWS; i++)
        if (state->rows[i].state > ROW_CLOSING || state->rows[i].handle_len > HANDLE_MAX) return false;
    for (uint32_t slot = 0; slot < JOURNAL; slot++) {
        const struct entry *e = &state->journal[slot];
        if (e->unique && (e->row >= ROWS || state->rows[e->row].state != ROW_USED)) return false;
    }
    return true;
}

/* The rows of a process that was killed, and what it left half done. */
void table_recover(void) {
    for (uint32_t i = ROWS; i-- > 0;) {
        struct row *row = &state->rows[i];
        if (row->state == ROW_CLOSING) {
            backing_close(row->backing_id);
            barrier();
            row->state = ROW_FREE;
        }
        if (row->state == ROW_USED) {
            row_link(i);
            doubts += row->doubtful != 0;
        } else {
            free_rows[free_count++] = i;
        }
    }
}

/* After a takeover: rows without handles go once the requests that came again are answered. */
void table_settle(void) {
    for (uint32_t i = 0; i < ROWS; i++)
        if (state->rows[i].state == ROW_USED && !state->rows[i].opens) row_touch(i);
    rows_sweep();
}
