/* Passes over an order that move starts up or waits down (undertow.schedule.sweep). */

#ifndef UNDERTOW_SWEEP_H
#define UNDERTOW_SWEEP_H

#include "step.h"

#define FOREVER (-1)

typedef enum { RAISE_ALL, RAISE_AS_NEEDED, SINK_ALL, SINK_AS_NEEDED } Way;

typedef struct {
    Way way;
    const i64 *order;                   /* what comes in: a legal order */
    i64 limit_nbytes, in_flight_nbytes; /* NEVER: none */
    i64 cheap_share, cheap_ns, most_members; /* of what goes up with a start */
    /* Only as needed: */
    i64 steps;      /* how many may be held back */
    const u8 *only; /* per start: it may be moved; NULL: all may */
    const i64 *ready, *begin, *end; /* raising: times of the incoming order */
    i64 total_ns;
} Pass;

typedef struct {
    i64 *order; /* where the new one is written */
    u8 *moved;  /* per start, all zero before: it is started earlier, or waited for later */
    i64 used;   /* how many were held back */
} Swept;

bool sweep(const Step *step, const Pass *pass, Swept *swept);

#endif
