/* Units, deadlines and bytes of the collectives of a step; work to put behind them. */

#include "facts.h"

#include <stdlib.h>
#include <string.h>

static bool is_collective(const Step *step, i64 task) { return step->kinds[task] == START; }

/* -- what is last in its line ----------------------------------------------------------------- */

static void find_last(const Step *step, u8 *is_last, u8 *is_behind) {
    for (i64 task = 0; task < step->tasks; task++) { /* some collective comes before it */
        if (!is_behind[task] && step->kinds[task] != WAIT) continue;
        is_behind[task] = 1;
        for EACH(k, step->after, task) is_behind[step->after.items[k]] = 1;
    }
    for (i64 task = step->tasks - 1; task >= 0; task--) {
        is_last[task] = is_behind[task] && !is_collective(step, task);
        for EACH(k, step->after, task) is_last[task] &= is_last[step->after.items[k]];
    }
}

/* -- bytes ------------------------------------------------------------------------------------ */

/* What is freed once a collective was waited for: what it reads last, waits aside. */
static void find_released(Facts *facts, i64 *last_use) {
    const Step *step = &facts->step;
    for (i64 buffer = 0; buffer < step->buffers; buffer++) last_use[buffer] = -1;
    for (i64 task = 0; task < step->tasks; task++)
        if (step->kinds[task] != WAIT)
            for EACH(k, step->touches, task) last_use[step->touches.items[k]] = task;
    for (i64 n = 0; n < facts->starts; n++) {
        i64 start = facts->start_at[n], freed = 0;
        if (step->first_wait[start] >= 0)
            for EACH(k, step->given, start) {
                i64 buffer = step->given.items[k];
                if (last_use[buffer] == start) freed += step->nbytes[buffer];
            }
        facts->freed_nbytes[start] = freed;
        facts->released[start] = freed - step->made_nbytes[start];
    }
}

/* -- units ------------------------------------------------------------------------------------ */

typedef struct {
    i64 *others; /* per task: how many follow it that are not found yet */
    i64 *seen;   /* the task is counted for the start with this number, plus one */
    i64 *found, count;
} Serving;

static int compare(const void *a, const void *b) {
    i64 x = *(const i64 *)a, y = *(const i64 *)b;
    return (x > y) - (x < y);
}

/* A start and the cheap tasks before it that all lead to it alone, ascending. */
static void find_serving(const Step *step, i64 start, Cheap cheap, Serving *serving) {
    i64 most_ns = step->ns[start] / cheap.cheap_share;
    if (most_ns < cheap.cheap_ns) most_ns = cheap.cheap_ns;
    serving->found[0] = start;
    serving->count = 1;
    for (i64 done = 0; done < serving->count; done++)
        for EACH(k, step->before, serving->found[done]) {
            i64 task = step->before.items[k];
            if (serving->seen[task] != start + 1) {
                serving->seen[task] = start + 1;
                serving->others[task] = step->after.begins[task + 1] - step->after.begins[task];
            }
            bool is_movable = step->kinds[task] == COMPUTE || step->kinds[task] == VIEW;
            if (!--serving->others[task] && is_movable && step->ns[task] <= most_ns)
                serving->found[serving->count++] = task;
        }
    qsort(serving->found, (size_t)serving->count, sizeof(i64), compare);
}

/* Units are disjoint: what is in one leads to no other start. */
static void find_units(Facts *facts, Cheap cheap, Serving *serving) {
    const Step *step = &facts->step;
    i64 filled = 0, next = 0;
    for (i64 task = 0; task < step->tasks; task++) facts->unit_of[task] = -1;
    for (i64 n = 0; n < facts->starts; n++) {
        i64 start = facts->start_at[n];
        serving->found[0] = start;
        serving->count = 1;
        if (facts->released[start] < 0) find_serving(step, start, cheap, serving);
        while (next <= start) facts->units.begins[next++] = filled;
        for (i64 k = 0; k < serving->count; k++) {
            facts->units.items[filled++] = serving->found[k];
            facts->unit_of[serving->found[k]] = start;
        }
    }
    while (next <= step->tasks) facts->units.begins[next++] = filled;
}

static void find_entering(Facts *facts) {
    const Step *step = &facts->step;
    for (i64 n = 0; n < facts->starts; n++) {
        i64 start = facts->start_at[n], entering = 0;
        for EACH(k, facts->units, start) {
            i64 task = facts->units.items[k];
            entering += facts->missing[task];
            for EACH(j, step->after, task)
                entering -= facts->unit_of[step->after.items[j]] == start;
        }
        facts->entering[start] = entering;
    }
}

/* -- deadlines -------------------------------------------------------------------------------- */

/* The first task that needs a result, looking through views, what moves for free and what is last
 * in its line. */
static void find_first_uses(Facts *facts, i64 *need) {
    const Step *step = &facts->step;
    i64 count = step->tasks;
    for (i64 task = count - 1; task >= 0; task--) {
        bool is_work = step->kinds[task] == COMPUTE || step->kinds[task] == HOST;
        need[task] = is_work && !facts->is_last[task] ? task : count;
        if (need[task] == task) continue;
        for EACH(k, step->after, task) {
            i64 after = need[step->after.items[k]];
            if (after < need[task]) need[task] = after;
        }
    }
    for (i64 n = 0; n < facts->starts; n++) facts->first_use[facts->start_at[n]] = count;
    for (i64 task = 0; task < count; task++) {
        if (step->awaited[task] < 0) continue;
        i64 *first_use = &facts->first_use[step->awaited[task]];
        if (need[task] < *first_use) *first_use = need[task];
    }
}

/* From what is used last back: each must begin before the next one of its stream. */
static void find_latest(Facts *facts, Entry *takers, i64 *next_begins) {
    const Step *step = &facts->step;
    Heap heap = {takers, 0};
    for (i64 n = 0; n < facts->starts; n++) {
        i64 start = facts->start_at[n];
        if (facts->released[start] < 0) heap_push(&heap, -facts->first_use[start], -start);
    }
    for (i64 stream = 0; stream < step->streams; stream++) next_begins[stream] = NEVER;
    while (heap.count) {
        i64 start = -heap_pop(&heap).id;
        i64 *next = &next_begins[step->stream[start]];
        i64 deadline = facts->compute_before[facts->first_use[start]];
        *next = (deadline < *next ? deadline : *next) - step->ns[start];
        facts->latest[start] = *next;
    }
}

/* -- all of it -------------------------------------------------------------------------------- */

static void allocate(Facts *facts) {
    i64 tasks = facts->step.tasks;
    Arena *arena = &facts->arena;
    facts->start_at = arena_ints(arena, tasks);
    facts->is_last = arena_flags(arena, tasks);
    facts->missing = arena_ints(arena, tasks);
    facts->unit_of = arena_ints(arena, tasks);
    facts->units = (Rows){arena_ints(arena, tasks + 1), arena_ints(arena, tasks)};
    facts->entering = arena_ints(arena, tasks);
    facts->freed_nbytes = arena_ints(arena, tasks);
    facts->released = arena_ints(arena, tasks);
    facts->first_use = arena_ints(arena, tasks);
    facts->latest = arena_ints(arena, tasks);
    facts->compute_before = arena_ints(arena, tasks + 1);
    facts->live = arena_ints(arena, tasks);
}

bool facts_find(Facts *facts, Cheap cheap) {
    const Step *step = &facts->step;
    Arena scratch = {0};
    i64 *ints = arena_ints(&scratch, step->tasks > step->buffers ? step->tasks : step->buffers);
    u8 *flags = arena_flags(&scratch, step->tasks);
    Serving serving = {arena_ints(&scratch, step->tasks), arena_ints(&scratch, step->tasks),
                       arena_ints(&scratch, step->tasks), 0};
    Entry *entries = arena_take(&scratch, step->tasks, sizeof(Entry));
    i64 *by_stream = arena_ints(&scratch, step->streams);
    allocate(facts);
    bool is_done = !scratch.failed && !facts->arena.failed &&
                   live_bytes(step, NULL, facts->live, NULL);
    if (is_done) {
        for (i64 task = 0; task < step->tasks; task++) {
            bool is_compute = step->kinds[task] == COMPUTE;
            facts->missing[task] = step->before.begins[task + 1] - step->before.begins[task];
            facts->compute_before[task + 1] =
                facts->compute_before[task] + (is_compute ? step->ns[task] : 0);
            if (is_collective(step, task)) facts->start_at[facts->starts++] = task;
        }
        find_last(step, facts->is_last, flags);
        find_released(facts, ints);
        find_units(facts, cheap, &serving);
        find_entering(facts);
        find_first_uses(facts, ints);
        find_latest(facts, entries, by_stream);
    }
    arena_free(&scratch);
    return is_done;
}

void facts_free(Facts *facts) {
    arena_free(&facts->arena);
    step_free(&facts->step);
}

/* -- work behind blocking starts -------------------------------------------------------------- */

typedef struct {
    const Facts *facts;
    i64 *chain, chained; /* collectives with nothing but views between, the last one first */
    u8 *is_chained;
    u8 *is_needed; /* by the blocking start that work is put behind */
    i64 *moved;    /* what is put behind it, backwards */
    i64 *order, placed;
} Delay;

static void find_chain(Delay *delay) {
    const Step *step = &delay->facts->step;
    i64 task = delay->facts->start_at[delay->facts->starts - 1];
    delay->chain[delay->chained++] = task;
    while (step->before.begins[task] < step->before.begins[task + 1]) {
        task = step->before.items[step->before.begins[task + 1] - 1];
        if (step->kinds[task] == WAIT) {
            task = step->awaited[task];
            delay->chain[delay->chained++] = task;
        } else if (step->kinds[task] != VIEW) {
            break;
        }
    }
    for (i64 k = 0; k < delay->chained; k++) delay->is_chained[delay->chain[k]] = 1;
}

/* Whether compute must produce its input first and needs its result before it can be done. */
static bool is_blocking(const Facts *facts, i64 start) {
    i64 used = facts->compute_before[facts->first_use[start]];
    if (used - facts->compute_before[start] >= facts->step.ns[start]) return false;
    for EACH(k, facts->step.before, start)
        if (facts->unit_of[facts->step.before.items[k]] != start) return true;
    return false;
}

/* Puts what comes before `start`, from `begin` on, into the order, and behind it what it does not
 * depend on: what is nearest to it, until its compute covers `ns`, or as much as gains most. */
static void put_behind(Delay *delay, i64 begin, i64 start, i64 ns, i64 last_stream) {
    const Step *step = &delay->facts->step;
    i64 count = 0, cover = 0, debt = 0, most = 0, kept = 0;
    memset(delay->is_needed + begin, 0, (size_t)(start - begin));
    for EACH(k, step->before, start) delay->is_needed[step->before.items[k]] = 1;
    for (i64 task = start - 1; task >= begin && cover < ns; task--) {
        if (delay->is_needed[task]) {
            for EACH(k, step->before, task) delay->is_needed[step->before.items[k]] = 1;
            continue;
        }
        delay->moved[count++] = task;
        if (step->kinds[task] == COMPUTE)
            cover += step->ns[task];
        else if (step->kinds[task] == START && step->stream[task] == last_stream)
            debt += step->ns[task];
        if (cover - debt > most) {
            most = cover - debt;
            kept = count;
        }
    }
    if (last_stream >= 0) count = kept;
    i64 next = count - 1; /* of those that move, the earliest that was not passed yet */
    for (i64 task = begin; task < start; task++) {
        if (next >= 0 && delay->moved[next] == task)
            next--;
        else
            delay->order[delay->placed++] = task;
    }
    delay->order[delay->placed++] = start;
    while (count > 0) delay->order[delay->placed++] = delay->moved[--count];
}

static void put_all(Delay *delay, bool is_frugal) {
    const Facts *facts = delay->facts;
    const Step *step = &facts->step;
    i64 begin = 0;
    if (facts->starts) find_chain(delay);
    for (i64 n = 0; n < facts->starts; n++) {
        i64 start = facts->start_at[n], ns = step->ns[start], last_stream = -1;
        bool is_used = facts->first_use[start] < step->tasks;
        if (delay->is_chained[start] || !is_used || !is_blocking(facts, start)) {
            bool is_first = start == delay->chain[delay->chained - 1];
            if (!is_first || !is_blocking(facts, delay->chain[0])) continue;
            ns = 0;
            for (i64 k = 0; k < delay->chained; k++) ns += step->ns[delay->chain[k]];
            if (is_frugal) last_stream = step->stream[delay->chain[0]];
        }
        put_behind(delay, begin, start, ns, last_stream);
        begin = start + 1;
    }
    for (i64 task = begin; task < step->tasks; task++) delay->order[delay->placed++] = task;
}

bool delayed_order(const Facts *facts, bool is_frugal, i64 *order) {
    Arena arena = {0};
    i64 tasks = facts->step.tasks;
    Delay delay = {.facts = facts,
                   .chain = arena_ints(&arena, tasks),
                   .is_chained = arena_flags(&arena, tasks),
                   .is_needed = arena_flags(&arena, tasks),
                   .moved = arena_ints(&arena, tasks),
                   .order = order};
    bool is_done = !arena.failed;
    if (is_done) put_all(&delay, is_frugal);
    arena_free(&arena);
    return is_done;
}
