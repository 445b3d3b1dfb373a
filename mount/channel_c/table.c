/*
 * The open table: a row for each inode with open handles. Rows lie in the state file and outlive the process; what
 * only this process has of a row (its descriptor, its place in the index) lies beside it here.
 */
#include "channel.h"

#include <unistd.h>

enum { INDEX = 131072 };

static uint32_t row_index[INDEX], row_next[ROWS]; /* a hash of node ids to row + 1, and its chains */
static uint32_t free_rows[ROWS], free_count;
static int row_fds[ROWS];          /* descriptor + 1 of the attached file */
static uint64_t row_idle[ROWS];    /* sequence at the last attach or when the last handle went */
static uint32_t row_entries[ROWS]; /* journal entries that name the row */
static uint32_t idle_rows[ROWS], idle_count;
static bool row_listed[ROWS];      /* in idle_rows */

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

static void row_free(uint32_t i) {
    struct row *row = &state->rows[i];
    uint32_t *p = &row_index[index_of(row->nodeid)];
    while (*p != i + 1) p = &row_next[*p - 1];
    *p = row_next[i];
    row->state = ROW_CLOSING;
    barrier();
    backing_close(row->backing_id);
    if (row_fds[i]) close(row_fds[i] - 1);
    row_fds[i] = 0;
    barrier();
    row->state = ROW_FREE;
    free_rows[free_count++] = i;
}

/* Frees rows without handles. One attached by a handler that has not answered yet must stay, so a row goes only when
 * every OPEN and CREATE that was unanswered at its last attach has been answered. */
void rows_sweep(void) {
    for (uint32_t k = 0; k < idle_count;) {
        uint32_t i = idle_rows[k];
        bool idle = state->rows[i].opens == 0;
        if (idle && (row_entries[i] || requests_open_before(row_idle[i]))) {
            k++;
            continue;
        }
        row_listed[i] = false;
        idle_rows[k] = idle_rows[--idle_count];
        if (idle) row_free(i);
    }
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
        if (row->state == ROW_USED) row_link(i);
        else free_rows[free_count++] = i;
    }
}

/* After a takeover: rows without handles go once the requests that came again are answered. */
void table_settle(void) {
    for (uint32_t i = 0; i < ROWS; i++)
        if (state->rows[i].state == ROW_USED && !state->rows[i].opens) row_touch(i);
    rows_sweep();
}
