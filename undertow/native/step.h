/* What the native loops share: a step as flat arrays, and the memory that holds them.
 *
 * Each loop here has a Python one that says the same (undertow.program, undertow.schedule): that is
 * the reference, and tests compare them. Nothing here is decided by anything but integers.
 */

#ifndef UNDERTOW_STEP_H
#define UNDERTOW_STEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int64_t i64;
typedef uint8_t u8;

#define NEVER ((i64)1 << 62)
#define MOST_TOTAL ((i64)1 << 60) /* of nanoseconds or bytes: no sum of a few such overflows */
#define MOST_LOAD ((i64)1 << 30)  /* of all collectives, in permille */
#define MOST_LINKS ((i64)1 << 10)
#define MOST_SLOWED ((i64)1 << 20) /* permille */

enum { COMPUTE, START, WAIT, VIEW, HOST, KINDS }; /* as undertow.program.model.Kind lists them */

/* Blocks that are freed together. What could not be had is NULL, and `failed` says so: callers
 * allocate all that they need and then look once. */
typedef struct Block Block;
typedef struct {
    Block *blocks;
    bool failed;
} Arena;

void *arena_take(Arena *arena, i64 count, size_t size); /* all zero */
i64 *arena_ints(Arena *arena, i64 count);
u8 *arena_flags(Arena *arena, i64 count);
void arena_free(Arena *arena);

/* Row k is items[begins[k]] up to, without it, items[begins[k + 1]]. */
typedef struct {
    i64 *begins;
    i64 *items;
} Rows;
/* Goes through a row: `for EACH(k, rows, row) use(rows.items[k]);` */
#define EACH(k, rows, row) (i64 k = (rows).begins[row]; k < (rows).begins[(row) + 1]; k++)

/* Whether all of them are `low` or more, and less than `high`. */
bool are_within(const i64 *values, i64 count, i64 low, i64 high);
/* Whether none is negative, and `total` is their sum. */
bool add_up_to(const i64 *counts, i64 count, i64 total);

/* A binary heap, the lowest (key, id) first. Ids differ, so its sequence is that of any heap. */
typedef struct {
    i64 key, id;
} Entry;
typedef struct {
    Entry *entries;
    i64 count;
} Heap;

bool is_less(Entry a, Entry b);
void heap_push(Heap *heap, i64 key, i64 id);
void heap_remove(Heap *heap, i64 at);
Entry heap_pop(Heap *heap);
void heap_rebuild(Heap *heap);

/* Tasks in a legal order; what they are called is their place in it. */
typedef struct {
    i64 tasks, buffers, streams, link_count, launch_ns;
    i64 total_ns; /* of all tasks and launches */
    i64 compute_slowdown, communication_slowdown; /* in permille */
    Rows links; /* per stream */
    /* per task */
    u8 *kinds;
    i64 *ns, *stream, *launches;
    i64 *awaited;      /* of a wait: its start; else -1 */
    i64 *load;         /* of a start: the share of its links that it uses, in permille */
    i64 *most_nbytes;  /* what it touches */
    i64 *made_nbytes;  /* of a start: what it writes and does not read */
    i64 *first_wait;   /* of a start: the first task that waits for it, or -1 */
    Rows before, after, touches;
    Rows given; /* of a start: what is ours to free of what it reads and does not write */
    u8 *is_true; /* beside `after`: that edge is there for a value that is needed */
    /* per buffer */
    i64 *nbytes;
    i64 *uses; /* how many tasks touch it */
    u8 *is_there, *stays;
    Arena arena;
} Step;

/* What a Program consists of, checked by the caller as far as lengths go. */
typedef struct {
    i64 tasks, starts, buffers, streams, edges, touched, given, links, link_count, launch_ns;
    i64 compute_slowdown, communication_slowdown;
    const u8 *kinds, *is_there, *stays, *is_true;
    const i64 *ns, *stream, *launches, *awaited;
    const i64 *src, *dst; /* sorted by dst, then src */
    const i64 *touch_counts, *touches;
    const i64 *made_nbytes, *loads, *given_counts, *givens; /* per start alone */
    const i64 *links_of, *link_counts;                      /* per stream */
    const i64 *nbytes;
} Parts;

/* NULL, or what is wrong with the parts: what indices and sums could not be trusted. */
const char *check_parts(const Parts *parts);
bool step_make(Step *step, const Parts *parts);
/* The same step with other numbers for its tasks: `order` is legal. */
bool step_renumber(Step *step, const Step *from, const i64 *order, const i64 *place);
void step_free(Step *step);

/* The simulator's plain sweep. */
typedef struct {
    i64 *ready, *begin, *end, *exposed;
} Times;
typedef enum { PLAYED, CANNOT_PLAY, NOT_ENOUGH_MEMORY } Played;
Played play(const Step *step, const i64 *order, Times times, i64 *total);
i64 run_on_host(const Step *step, i64 task, i64 host, Times times);
/* The fluid player; it cannot play what might overflow. */
Played play_contended(const Step *step, const i64 *order, Times times, i64 *total);

/* The captured order with every task at the place of the one that leads it: all leaders that can be
 * placed, and how many these are. Of a leader `leader` says itself. */
bool contract(const Step *step, const i64 *leader, i64 *order, i64 *placed);

/* Which tasks may become one with others before them: undertow.schedule.condense. */
typedef struct {
    const u8 *stays_alone; /* per task */
    const i64 *room;       /* per task: the bytes that could be more there, up to the peak */
    i64 little, short_ns, run_ns;
} Joining;
/* Per task the run that it is in, and how many there are. */
bool find_runs(const Step *step, const Joining *joining, i64 *run_of, i64 *runs);

/* Before when no task can begin, or its place be reached, in any order; and what must follow once a
 * task has ended, or its place was reached. Times are those that are given. */
bool find_heads(const Step *step, const i64 *ns, const i64 *launches, i64 *begin, i64 *ready);
void find_tails(const Step *step, const i64 *ns, i64 *after_end, i64 *after_ready);
/* Whether such times are no more than a step may have. */
bool are_times(const Step *step, const i64 *ns, const i64 *launches);

/* Live bytes at each place of an order (NULL: that which the step is in), while the task there runs
 * and, if that is asked for, after it. */
bool live_bytes(const Step *step, const i64 *order, i64 *during, i64 *after);

#endif
