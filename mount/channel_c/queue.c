/* Messages that wait. */
#include "channel.h"

#include <stdlib.h>
#include <string.h>

void queue_push(struct queue *q, struct message *m) {
    m->next = NULL;
    if (q->tail) q->tail->next = m; else q->head = m;
    q->tail = m;
}

struct message *queue_pop(struct queue *q) {
    struct message *m = q->head;
    if (m) {
        q->head = m->next;
        if (!q->head) q->tail = NULL;
    }
    return m;
}

struct message *message_new(const void *data, size_t n) {
    struct message *m = malloc(sizeof *m + n);
    if (!m) abort(); /* no memory to keep a request: the keeper starts a new process, which gets it again */
    m->len = n;
    memcpy(m->data, data, n);
    return m;
}
