/* An order built from nothing, forward in time: undertow.schedule.construct says how and why. */

#include "facts.h"

#include <string.h>

/* The state of one construction; tasks are named by their place in the base order. */
typedef struct {
    const Facts *facts;
    const Step *step;
    const Asked *asked;
    i64 *order, placed;
    i64 *missing;      /* per task: how many that come before it are not placed */
    i64 *unit_missing; /* per start: edges into its unit from what is not placed */
    i64 now, progress, reach;
    bool was_held;
    i64 *free_at;     /* per stream: when it is free */
    i64 *lands;       /* per start: when it is done */
    Heap ready;       /* compute, views and host tasks */
    Heap blocked;     /* waits, by landing */
    Heap *takers;     /* per stream: startable collectives whose results take memory, by deadline */
    Heap *givers;     /* per stream: those that free what they take */
    i64 startable;    /* how many are in those heaps */
    i64 *extra;       /* per startable taker: the bytes that it would allocate */
    i64 *no_room_until; /* per taker: up to where there is none for it */
    i64 oldest;       /* the first that is not placed and not moved by a start */
    u8 *is_passed;    /* placed, or nothing is late if it is; one more, false, for the end */
    u8 *is_alive;     /* per buffer */
    i64 *uses;        /* per buffer: touches that are left */
    i64 live, in_flight;
    i64 *ahead;       /* bytes by position, where there is a limit */
    u8 *has_landed;   /* per start: it was waited for */
} Construction;

/* -- bytes ------------------------------------------------------------------------------------ */

static bool is_limited(const Construction *c) { return c->asked->limit_nbytes < NEVER; }

static i64 needs(const Construction *c, i64 task) {
    i64 nbytes = 0;
    for EACH(k, c->step->touches, task) {
        i64 buffer = c->step->touches.items[k];
        if (!c->is_alive[buffer]) nbytes += c->step->nbytes[buffer];
    }
    return nbytes;
}

static i64 unit_needs(const Construction *c, i64 start) {
    i64 nbytes = 0;
    for EACH(k, c->facts->units, start) nbytes += needs(c, c->facts->units.items[k]);
    return nbytes;
}

/* The last position at which the base order has not made its result yet. */
static i64 before(const Construction *c, i64 start) {
    return c->facts->units.items[c->facts->units.begins[start]] - 1;
}

static bool may_fly(const Construction *c, i64 start) {
    return c->in_flight + c->step->most_nbytes[start] <= c->asked->in_flight_nbytes;
}

/* Whether all that will be alive until the result is used fits, with the result. */
static bool has_room(Construction *c, i64 start) {
    i64 limit = c->asked->limit_nbytes, extra = c->extra[start];
    if (c->oldest <= c->no_room_until[start]) return false; /* what lies ahead only ever grows */
    if (c->live + extra > limit) return false;
    i64 at = before(c, start);
    while (at >= c->oldest && c->ahead[at] <= limit - extra) at--;
    c->no_room_until[start] = at >= c->oldest ? at : -1;
    return at < c->oldest;
}

/* -- placing ---------------------------------------------------------------------------------- */

static void become_startable(Construction *c, i64 start) {
    i64 stream = c->step->stream[start];
    c->startable++;
    if (c->facts->released[start] >= 0) {
        heap_push(&c->givers[stream], start, start);
    } else {
        c->extra[start] = unit_needs(c, start);
        heap_push(&c->takers[stream], c->facts->compute_before[c->facts->first_use[start]], start);
    }
}

static void touch(Construction *c, i64 task) {
    for EACH(k, c->step->touches, task) {
        i64 buffer = c->step->touches.items[k];
        if (!c->is_alive[buffer]) {
            c->is_alive[buffer] = 1;
            c->live += c->step->nbytes[buffer];
        }
        if (!--c->uses[buffer] && !c->step->stays[buffer]) c->live -= c->step->nbytes[buffer];
    }
}

static void keep_time(Construction *c, i64 task) {
    const Step *step = c->step;
    if (step->kinds[task] == COMPUTE) {
        c->now += step->ns[task];
        c->progress += step->ns[task];
    } else if (step->kinds[task] == START) { /* the compute stream has come to it */
        i64 *free_at = &c->free_at[step->stream[task]];
        if (*free_at < c->now) *free_at = c->now;
        c->lands[task] = *free_at += step->ns[task];
        c->in_flight += step->most_nbytes[task];
    } else if (step->kinds[task] == WAIT && !c->has_landed[step->awaited[task]]) {
        c->has_landed[step->awaited[task]] = 1;
        c->in_flight -= step->most_nbytes[step->awaited[task]];
    }
}

static void place(Construction *c, i64 task) {
    const Step *step = c->step;
    const i64 *unit_of = c->facts->unit_of;
    c->order[c->placed++] = task;
    c->is_passed[task] = 1;
    touch(c, task);
    keep_time(c, task);
    for EACH(k, step->after, task) {
        i64 after = step->after.items[k], start = unit_of[after];
        c->missing[after]--;
        if (start >= 0) {
            if (start != unit_of[task] && !--c->unit_missing[start]) become_startable(c, start);
        } else if (!c->missing[after]) {
            if (step->kinds[after] == WAIT)
                heap_push(&c->blocked, c->lands[step->awaited[after]], after);
            else
                heap_push(&c->ready, after, after);
        }
    }
}

/* -- collectives ------------------------------------------------------------------------------ */

static void start_unit(Construction *c, i64 start) {
    c->startable--;
    if (is_limited(c)) {
        i64 nbytes = unit_needs(c, start), last = before(c, start);
        for (i64 at = c->oldest; at <= last; at++) c->ahead[at] += nbytes;
    }
    for EACH(k, c->facts->units, start) {
        i64 task = c->facts->units.items[k];
        if (task >= c->asked->kept) place(c, task);
    }
}

/* Whether a collective whose result takes memory is near enough and fits. */
static bool may_take(Construction *c, Entry taker) {
    i64 distance = taker.key - c->progress;
    if (distance > c->asked->horizon_ns || !may_fly(c, taker.id)) return false;
    if (is_limited(c) && !has_room(c, taker.id)) return false;
    if (distance > c->reach) c->reach = distance;
    return true;
}

/* Which collective a free stream takes next: one that would come late otherwise, then one that
 * frees memory, then one that is used later; -1 for none. */
static i64 choose(Construction *c, i64 stream, i64 next_ns) {
    Heap *takers = &c->takers[stream], *givers = &c->givers[stream];
    i64 taker = takers->count && may_take(c, takers->entries[0]) ? takers->entries[0].id : -1;
    if (givers->count && may_fly(c, givers->entries[0].id)) {
        i64 soon = c->progress + next_ns + c->step->ns[givers->entries[0].id];
        if (taker < 0 || c->facts->latest[taker] > soon) return heap_pop(givers).id;
    }
    return taker < 0 ? -1 : heap_pop(takers).id;
}

/* Start collectives that could begin before the next compute task ends. */
static void start_what_fits(Construction *c, i64 next_ns) {
    i64 until = c->now + next_ns;
    for (i64 stream = 0; stream < c->step->streams; stream++)
        while (c->free_at[stream] <= until) {
            i64 start = choose(c, stream, next_ns);
            if (start < 0) break;
            start_unit(c, start);
        }
}

/* The startable collective whose result is used first, whatever memory says; -1 for none. */
static i64 first_needed(Construction *c) {
    Heap *sides[] = {c->takers, c->givers};
    for (int side = 0; side < 2; side++) {
        Heap *best = NULL;
        for (i64 stream = 0; stream < c->step->streams; stream++) {
            Heap *heap = &sides[side][stream];
            if (heap->count && (!best || is_less(heap->entries[0], best->entries[0]))) best = heap;
        }
        if (best) return heap_pop(best).id;
    }
    return -1;
}

/* -- what comes next -------------------------------------------------------------------------- */

/* Whether a task is ready that the window lets go first. */
static bool has_next(Construction *c) {
    while (c->is_passed[c->oldest]) c->oldest++;
    if (!c->ready.count) return false;
    if (c->ready.entries[0].id <= c->oldest + c->asked->window) return true;
    c->was_held = true;
    return false;
}

/* Of the blocked waits, the one whose result is used first. */
static i64 most_urgent(const Construction *c) {
    i64 best = 0;
    Entry least = {NEVER, NEVER};
    for (i64 k = 0; k < c->blocked.count; k++) {
        i64 wait = c->blocked.entries[k].id;
        Entry urgency = {c->facts->first_use[c->step->awaited[wait]], wait};
        if (is_less(urgency, least)) {
            least = urgency;
            best = k;
        }
    }
    return best;
}

/* Nothing can run: wait for a collective, or start the one that is needed first. */
static Outcome stand_still(Construction *c) {
    if (c->blocked.count) {
        i64 at = most_urgent(c);
        Entry needed = c->blocked.entries[at];
        heap_remove(&c->blocked, at);
        if (needed.key > c->now) c->now = needed.key;
        place(c, needed.id);
        return c->now - c->progress <= c->asked->most_idle_ns ? DONE : TOO_LONG;
    }
    i64 start = first_needed(c);
    if (start >= 0) {
        start_unit(c, start);
        return DONE;
    }
    if (!c->ready.count) return STUCK;
    place(c, heap_pop(&c->ready).id); /* nothing would free memory: go on over the limit */
    return DONE;
}

/* Whether this task does not fit while something in flight would make room. */
static bool is_over_limit(const Construction *c, i64 task) {
    i64 limit = c->asked->limit_nbytes;
    if (c->live + c->step->most_nbytes[task] <= limit) return false;
    if (c->step->kinds[task] == VIEW || c->live + needs(c, task) <= limit) return false;
    for (i64 k = 0; k < c->blocked.count; k++)
        if (c->facts->freed_nbytes[c->step->awaited[c->blocked.entries[k].id]] > 0) return true;
    return false;
}

static Outcome run(Construction *c) {
    for (;;) {
        while (c->blocked.count && c->blocked.entries[0].key <= c->now) /* these cost nothing */
            place(c, heap_pop(&c->blocked).id);
        i64 placed = c->placed;
        if (placed == c->step->tasks) return DONE;
        bool is_next = has_next(c);
        if (c->startable) start_what_fits(c, is_next ? c->step->ns[c->ready.entries[0].id] : 0);
        if (!is_next && c->placed > placed) continue;
        if (!is_next || is_over_limit(c, c->ready.entries[0].id)) {
            Outcome outcome = stand_still(c);
            if (outcome != DONE) return outcome;
        } else {
            place(c, heap_pop(&c->ready).id);
        }
    }
}

/* -- the beginning ---------------------------------------------------------------------------- */

static void forget_kept(Heap *heap, i64 kept) {
    i64 left = 0;
    for (i64 k = 0; k < heap->count; k++)
        if (heap->entries[k].id >= kept) heap->entries[left++] = heap->entries[k];
    heap->count = left;
    heap_rebuild(heap);
}

/* Place the first tasks of the base order as they are. */
static void keep(Construction *c) {
    i64 kept = c->asked->kept;
    if (!kept) return;
    for (i64 task = 0; task < kept; task++) {
        i64 start = c->step->awaited[task];
        if (start >= 0 && c->lands[start] > c->now) c->now = c->lands[start];
        place(c, task);
    }
    forget_kept(&c->ready, kept);
    forget_kept(&c->blocked, kept);
    c->startable = 0;
    for (i64 stream = 0; stream < c->step->streams; stream++) {
        forget_kept(&c->takers[stream], kept);
        forget_kept(&c->givers[stream], kept);
        c->startable += c->takers[stream].count + c->givers[stream].count;
    }
}

static void allocate(Construction *c, Arena *arena) {
    const Step *step = c->step;
    i64 tasks = step->tasks, starts = c->facts->starts;
    c->missing = arena_ints(arena, tasks);
    c->unit_missing = arena_ints(arena, tasks);
    c->free_at = arena_ints(arena, step->streams);
    c->lands = arena_ints(arena, tasks);
    c->ready.entries = arena_take(arena, tasks, sizeof(Entry));
    c->blocked.entries = arena_take(arena, tasks, sizeof(Entry));
    c->takers = arena_take(arena, step->streams, sizeof(Heap));
    c->givers = arena_take(arena, step->streams, sizeof(Heap));
    c->extra = arena_ints(arena, tasks);
    c->no_room_until = arena_ints(arena, tasks);
    c->is_passed = arena_flags(arena, tasks + 1);
    c->is_alive = arena_flags(arena, step->buffers);
    c->uses = arena_ints(arena, step->buffers);
    c->ahead = arena_ints(arena, tasks);
    c->has_landed = arena_flags(arena, tasks);
    for (i64 stream = 0; stream < step->streams && !arena->failed; stream++) {
        c->takers[stream].entries = arena_take(arena, starts, sizeof(Entry));
        c->givers[stream].entries = arena_take(arena, starts, sizeof(Entry));
    }
}

static void prepare(Construction *c) {
    const Facts *facts = c->facts;
    const Step *step = c->step;
    size_t ints = (size_t)step->tasks * sizeof(i64);
    memcpy(c->missing, facts->missing, ints);
    memcpy(c->unit_missing, facts->entering, ints);
    memcpy(c->ahead, facts->live, ints);
    memcpy(c->uses, step->uses, (size_t)step->buffers * sizeof(i64));
    memcpy(c->is_alive, step->is_there, (size_t)step->buffers);
    for (i64 buffer = 0; buffer < step->buffers; buffer++)
        if (step->is_there[buffer]) c->live += step->nbytes[buffer];
    for (i64 task = 0; task < step->tasks; task++) {
        bool is_moved = step->kinds[task] == WAIT || facts->unit_of[task] >= 0;
        c->is_passed[task] = is_moved || facts->is_last[task];
        c->no_room_until[task] = -1;
        if (!c->missing[task] && facts->unit_of[task] < 0) heap_push(&c->ready, task, task);
    }
    for (i64 n = 0; n < facts->starts; n++)
        if (!facts->entering[facts->start_at[n]]) become_startable(c, facts->start_at[n]);
}

Outcome construct(const Facts *facts, const Asked *asked, Built *built) {
    Arena arena = {0};
    Construction c = {
        .facts = facts, .step = &facts->step, .asked = asked, .order = built->order};
    Outcome outcome = NO_MEMORY;
    allocate(&c, &arena);
    if (!arena.failed) {
        prepare(&c);
        keep(&c);
        outcome = run(&c);
    }
    built->reach_ns = c.reach;
    built->was_held = c.was_held;
    arena_free(&arena);
    return outcome;
}
