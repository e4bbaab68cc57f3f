/* What a construction needs to know of a step, whatever the policy (undertow.schedule.facts), and
 * the constructions themselves (undertow.schedule.construct, undertow.schedule.delay). */

#ifndef UNDERTOW_FACTS_H
#define UNDERTOW_FACTS_H

#include "step.h"

typedef struct {
    Step step; /* in the base order */
    i64 starts;
    i64 *start_at; /* those, ascending */
    /* per task */
    u8 *is_last;  /* no collective and no compute but such tasks follow it */
    i64 *missing; /* how many tasks must come before it */
    i64 *unit_of; /* the start that it moves with, or -1 */
    /* per task, for starts alone */
    Rows units;         /* itself and what moves with it, in order */
    i64 *entering;      /* how many edges come into its unit from outside */
    i64 *freed_nbytes;  /* once it was waited for */
    i64 *released;      /* the same, less what it allocates */
    i64 *first_use;     /* the first task that needs its result; how many there are if none does */
    i64 *latest;        /* how much compute may be done before it must begin, if it takes memory */
    i64 *compute_before; /* per task, and once more for the end */
    i64 *live;           /* bytes while it runs */
    Arena arena;
} Facts;

typedef struct {
    i64 cheap_share, cheap_ns; /* of a start's time: what may move with it */
} Cheap;

/* Finds them for the step that is in `facts`. */
bool facts_find(Facts *facts, Cheap cheap);
void facts_free(Facts *facts);

/* Independent work moved behind blocking starts; of a step in its captured order. */
bool delayed_order(const Facts *facts, bool is_frugal, i64 *order);

typedef struct {
    i64 horizon_ns, window;
    i64 limit_nbytes, in_flight_nbytes; /* NEVER: none */
    i64 kept;                           /* tasks that keep their place at the beginning */
    i64 most_idle_ns;
} Asked;

typedef struct {
    i64 *order; /* where it is written */
    i64 reach_ns;
    bool was_held;
} Built;

typedef enum { DONE, TOO_LONG, STUCK, NO_MEMORY } Outcome;

Outcome construct(const Facts *facts, const Asked *asked, Built *built);

#endif
