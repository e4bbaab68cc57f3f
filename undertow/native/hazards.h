#ifndef UNDERTOW_HAZARDS_H
#define UNDERTOW_HAZARDS_H

#include "step.h"

/* What the tasks of a Program touch, in captured order. */
typedef struct {
    i64 tasks, buffers;
    const u8 *kinds, *is_there; /* per task; per buffer, whether it is there before the step */
    const i64 *awaited;         /* of a wait: its start, which comes before it; else -1 */
    Rows reads, writes, after;  /* per task: buffers, and tasks before it that it needs */
} Touches;

/* Columns with room for `most_edges`; sorted by dst, then src. */
typedef struct {
    i64 *src, *dst, *strength, *buffer;
    i64 count;
} Found;

/* REFUSED: a task races with a collective, or reads what nobody has written. */
typedef enum { DERIVED, REFUSED, NO_ROOM } Derived;

/* Whether all that the rest relies on holds: indices, and that starts come before their waits. */
bool are_touches(const Touches *given);
i64 most_edges(const Touches *given);
/* `writer` is per buffer: who wrote it last, or -1. */
Derived derive_hazards(const Touches *given, Found *found, i64 *writer);

#endif
