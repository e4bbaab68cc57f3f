/* One pass over an order that holds some tasks back and lets all others go on: what
 * undertow.schedule.sweep does, with its directors for starts (early_starts) and for waits
 * (late_waits), but without a record of what limited each move. */

#include "sweep.h"

/* A start or wait that is held back, and what travels with it; there is one per task that could be
 * one. Its members are a list in the sequence of arrival, linked by `next_member`. */
typedef struct {
    i64 arrived, until, last_member, members;
    i64 served_ns; /* what its members take, the first aside */
    bool is_held, is_holding, is_going;
} Unit;

/* Units in the sequence in which they came in; those that have gone since are skipped. */
typedef struct {
    i64 *heads, first, count;
} Queue;

typedef struct {
    const Step *step;
    const Pass *pass;
    Swept *swept;
    bool is_backward;
    i64 placed, progress;
    Rows first;       /* per task: what must be placed before it, in the direction of the pass */
    i64 *next_start;  /* backward, per start: the next one on its stream, else -1 */
    Unit *units;      /* by their first task, the head */
    i64 *next_member; /* per task, or -1 */
    i64 *unit_of;     /* per task: the head of the unit that it is in, or -1 */
    Queue held, holding;
    i64 held_count;
    Heap due; /* (until, head) */
    i64 *blockers; /* scratch: heads */
    i64 *going;    /* scratch: heads that are let go together */
    /* memory, per buffer or task */
    u8 *is_present, *leaves;
    i64 *left, *flight;
    i64 live, in_flight;
    /* time: raising */
    i64 *reached;    /* per task: when the compute stream got there */
    i64 *next_begin; /* per stream: when its next collective must begin */
    /* time: sinking */
    i64 compute, host;
    i64 *done, *issued, *free_at;
} Sweep;

/* -- memory ----------------------------------------------------------------------------------- */

static i64 allocates(const Sweep *s, i64 task) {
    i64 nbytes = 0;
    for EACH(k, s->step->touches, task) {
        i64 buffer = s->step->touches.items[k];
        if (!s->is_present[buffer]) nbytes += s->step->nbytes[buffer];
    }
    return nbytes;
}

/* Whether a task can hold memory by not having been placed. */
static bool holds_memory(const Sweep *s, i64 task) {
    for EACH(k, s->step->touches, task) {
        i64 buffer = s->step->touches.items[k];
        if (s->leaves[buffer] && s->step->nbytes[buffer] > 0) return true;
    }
    return false;
}

static bool is_over_limit(const Sweep *s, i64 task) {
    i64 limit = s->pass->limit_nbytes;
    if (s->live + s->step->most_nbytes[task] <= limit) return false;
    return s->live + allocates(s, task) > limit;
}

static bool is_too_much_in_flight(const Sweep *s, i64 task) {
    return s->flight[task] > 0 && s->in_flight + s->flight[task] > s->pass->in_flight_nbytes;
}

static void place_memory(Sweep *s, i64 task) {
    i64 freed = 0;
    for EACH(k, s->step->touches, task) {
        i64 buffer = s->step->touches.items[k];
        if (!s->is_present[buffer]) {
            s->is_present[buffer] = 1;
            s->live += s->step->nbytes[buffer];
        }
        if (!--s->left[buffer] && s->leaves[buffer]) {
            freed += s->step->nbytes[buffer];
            s->is_present[buffer] = 0;
        }
    }
    s->live -= freed;
    s->in_flight += s->flight[task];
}

/* A collective holds what it touches from its start to its first wait. */
static void prepare_memory(Sweep *s) {
    const Step *step = s->step;
    i64 sign = s->is_backward ? -1 : 1;
    for (i64 buffer = 0; buffer < step->buffers; buffer++) {
        bool is_there = step->is_there[buffer], stays = step->stays[buffer];
        s->left[buffer] = step->uses[buffer];
        s->is_present[buffer] = s->is_backward && step->uses[buffer] ? stays : is_there;
        s->leaves[buffer] = s->is_backward ? !is_there : !stays;
        if (s->is_present[buffer]) s->live += step->nbytes[buffer];
    }
    for (i64 start = 0; start < step->tasks; start++) {
        if (step->kinds[start] != START) continue;
        i64 nbytes = step->most_nbytes[start], wait = step->first_wait[start];
        s->flight[start] = sign * nbytes;
        if (wait >= 0)
            s->flight[wait] = -sign * nbytes;
        else if (s->is_backward)
            s->in_flight += nbytes;
    }
}

/* -- time ------------------------------------------------------------------------------------- */

/* When the compute stream reached each task's place; the host has its own clock. */
static void find_reached(Sweep *s) {
    i64 now = 0;
    for (i64 at = 0; at < s->step->tasks; at++) {
        i64 task = s->pass->order[at];
        if (s->pass->ready[task] > now && s->step->kinds[task] != HOST) now = s->pass->ready[task];
        s->reached[task] = now;
    }
}

/* When a start must begin to be done in time, for its waits and for the next on its stream. */
static i64 latest_begin(Sweep *s, i64 start, const i64 *first_reached) {
    const Step *step = s->step;
    i64 *next = &s->next_begin[step->stream[start]];
    i64 end = first_reached[start] < *next ? first_reached[start] : *next;
    i64 latest = end - (s->pass->end[start] - s->pass->begin[start]);
    /* What its producers do not allow, the collectives before it need not make room for. */
    *next = latest;
    for EACH(k, step->before, start) {
        i64 produced = s->reached[step->before.items[k]];
        if (produced > *next) *next = produced;
    }
    return latest;
}

static void tick_host(Sweep *s, i64 task) {
    for EACH(k, s->step->before, task) {
        i64 source = s->step->before.items[k];
        i64 done = s->step->kinds[source] == START ? s->issued[source] : s->done[source];
        if (done > s->host) s->host = done;
    }
    s->done[task] = s->host += s->step->ns[task];
}

/* The simulator's plain sweep, one task at a time. */
static void tick(Sweep *s, i64 task) {
    const Step *step = s->step;
    u8 kind = step->kinds[task];
    if (kind != VIEW) s->host += step->launch_ns * step->launches[task];
    if (kind == HOST) {
        tick_host(s, task);
        return;
    }
    if (kind != VIEW && s->host > s->compute) s->compute = s->host;
    if (kind == START) {
        i64 *free_at = &s->free_at[step->stream[task]];
        s->issued[task] = s->compute;
        s->done[task] = *free_at = (*free_at > s->compute ? *free_at : s->compute) + step->ns[task];
        return;
    }
    if (kind == COMPUTE) s->compute += step->ns[task];
    if (kind == WAIT && s->done[step->awaited[task]] > s->compute)
        s->compute = s->done[step->awaited[task]];
    s->done[task] = s->compute;
}

/* -- what a pass decides ---------------------------------------------------------------------- */

static bool may_move(Sweep *s, i64 start) {
    if (s->pass->only && !s->pass->only[start]) return false;
    if (s->swept->used >= s->pass->steps) return false;
    s->swept->used++;
    return true;
}

/* Whether to hold a task back, and until which progress. */
static bool is_held_back(Sweep *s, i64 task, i64 *until, const i64 *first_reached) {
    u8 kind = s->step->kinds[task];
    *until = FOREVER;
    if (kind != (s->is_backward ? START : WAIT)) return false;
    if (s->pass->way == RAISE_AS_NEEDED) {
        i64 latest = latest_begin(s, task, first_reached);
        *until = s->pass->total_ns - latest;
        return s->reached[task] > latest && may_move(s, task);
    }
    if (s->pass->way == SINK_AS_NEEDED) {
        i64 start = s->step->awaited[task];
        *until = s->done[start];
        return s->done[start] > s->progress && may_move(s, start);
    }
    return true;
}

/* Whether nobody but the members of a unit needs what a task makes, and somebody does. */
static bool serves_only(const Sweep *s, i64 task, i64 head) {
    bool is_needed = false;
    for EACH(k, s->step->after, task) {
        if (!s->step->is_true[k]) continue;
        if (s->unit_of[s->step->after.items[k]] != head) return false;
        is_needed = true;
    }
    return is_needed;
}

/* Whether a task that cannot pass a unit may travel with it. */
static bool joins(Sweep *s, i64 task, i64 head) {
    const Step *step = s->step;
    u8 kind = step->kinds[task];
    Unit *unit = &s->units[head];
    if (!s->is_backward) return kind == VIEW;
    if ((kind != VIEW && kind != COMPUTE) || unit->members == s->pass->most_members) return false;
    i64 allowed = step->ns[head] / s->pass->cheap_share;
    if (allowed < s->pass->cheap_ns) allowed = s->pass->cheap_ns;
    if (unit->served_ns + step->ns[task] > allowed || !serves_only(s, task, head)) return false;
    if (s->pass->way == RAISE_AS_NEEDED) unit->until += step->ns[task]; /* it runs before */
    return true;
}

/* -- holding and placing ---------------------------------------------------------------------- */

static i64 front(const Sweep *s, Queue *queue) {
    while (queue->first < queue->count && !s->units[queue->heads[queue->first]].is_held)
        queue->first++;
    return queue->first < queue->count ? queue->heads[queue->first] : -1;
}

static void place(Sweep *s, i64 task) {
    i64 at = s->is_backward ? s->step->tasks - 1 - s->placed : s->placed;
    s->placed++;
    s->swept->order[at] = task;
    place_memory(s, task);
    if (s->pass->way == RAISE_AS_NEEDED) {
        i64 done = s->pass->total_ns - s->reached[task];
        if (done > s->progress) s->progress = done;
    } else if (s->pass->way == SINK_AS_NEEDED) {
        tick(s, task);
        s->progress = s->compute;
    }
}

static void hold(Sweep *s, i64 head, i64 task) {
    Unit *unit = &s->units[head];
    if (unit->members++) {
        s->next_member[unit->last_member] = task;
        unit->served_ns += s->step->ns[task];
    } else {
        unit->is_held = true;
        s->held.heads[s->held.count++] = head;
        s->held_count++;
    }
    unit->last_member = task;
    s->unit_of[task] = head;
    if (!unit->is_holding && holds_memory(s, task)) {
        unit->is_holding = true;
        s->holding.heads[s->holding.count++] = head;
    }
    if (unit->until != FOREVER) heap_push(&s->due, unit->until, head);
}

/* Sorts heads by their arrival: a few, and nearly in that sequence. */
static void sort_by_arrival(const Sweep *s, i64 *heads, i64 count) {
    for (i64 k = 1; k < count; k++) {
        i64 head = heads[k], at = k;
        while (at > 0 && s->units[heads[at - 1]].arrived > s->units[head].arrived) {
            heads[at] = heads[at - 1];
            at--;
        }
        heads[at] = head;
    }
}

static i64 add_blocker(Sweep *s, i64 other, i64 count, i64 *heads) {
    i64 head = s->unit_of[other];
    if (head < 0) return count;
    for (i64 k = 0; k < count; k++)
        if (heads[k] == head) return count;
    heads[count] = head;
    return count + 1;
}

/* The units that a task must not pass. */
static i64 find_blockers(Sweep *s, i64 task, i64 *heads) {
    i64 count = 0;
    for EACH(k, s->first, task) count = add_blocker(s, s->first.items[k], count, heads);
    if (s->is_backward && s->next_start[task] >= 0)
        count = add_blocker(s, s->next_start[task], count, heads);
    return count;
}

static void add_going(Sweep *s, i64 other, i64 *count) {
    i64 head = s->unit_of[other];
    if (head < 0 || s->units[head].is_going) return;
    s->units[head].is_going = true;
    s->going[(*count)++] = head;
}

/* Place a unit here, after every unit that must come before one of its members. */
static void let_go(Sweep *s, i64 head) {
    if (!s->units[head].is_held) return; /* went with another one */
    i64 count = 1;
    s->going[0] = head;
    s->units[head].is_going = true;
    for (i64 done = 0; done < count; done++)
        for (i64 member = s->going[done]; member >= 0; member = s->next_member[member]) {
            for EACH(k, s->first, member) add_going(s, s->first.items[k], &count);
            if (s->is_backward && s->next_start[member] >= 0)
                add_going(s, s->next_start[member], &count);
        }
    sort_by_arrival(s, s->going, count);
    for (i64 k = 0; k < count; k++) {
        s->units[s->going[k]].is_held = false;
        s->held_count--;
        for (i64 member = s->going[k]; member >= 0; member = s->next_member[member]) {
            s->unit_of[member] = -1;
            place(s, member);
        }
    }
}

static void make_room(Sweep *s, i64 task) {
    i64 head;
    while ((head = front(s, &s->holding)) >= 0 && is_over_limit(s, task)) let_go(s, head);
    while ((head = front(s, &s->held)) >= 0 && is_too_much_in_flight(s, task)) let_go(s, head);
}

/* What a task cannot pass is let go, unless that is one unit that it travels with: whether it does.
 */
static bool pass_or_join(Sweep *s, i64 task) {
    i64 count = find_blockers(s, task, s->blockers);
    sort_by_arrival(s, s->blockers, count);
    for (i64 k = 0; k < count; k++) {
        i64 head = s->blockers[k];
        if (count == 1 && allocates(s, task) == 0 && joins(s, task, head)) {
            hold(s, head, task);
            return true;
        }
        let_go(s, head);
    }
    return false;
}

static void step_over(Sweep *s, i64 task, i64 at, const i64 *first_reached) {
    i64 until;
    if (is_held_back(s, task, &until, first_reached)) {
        s->units[task] = (Unit){.arrived = at, .until = until};
        hold(s, task, task);
        return;
    }
    if (s->held_count) {
        if (pass_or_join(s, task)) return;
        make_room(s, task);
    }
    place(s, task);
    while (s->due.count && s->due.entries[0].key <= s->progress) {
        i64 head = heap_pop(&s->due).id;
        if (s->units[head].is_held && s->units[head].until <= s->progress) let_go(s, head);
    }
}

/* -- the pass --------------------------------------------------------------------------------- */

static void find_sequences(Sweep *s, i64 *last) {
    for (i64 stream = 0; stream < s->step->streams; stream++) last[stream] = -1;
    for (i64 at = 0; at < s->step->tasks; at++) {
        i64 task = s->pass->order[at];
        s->next_start[task] = -1;
        if (s->step->kinds[task] != START) continue;
        i64 *known = &last[s->step->stream[task]];
        if (*known >= 0) s->next_start[*known] = task;
        *known = task;
    }
}

/* When the compute stream first waited for each start; the end of the step if nobody does. */
static void find_first_reached(const Sweep *s, i64 *first_reached) {
    for (i64 task = 0; task < s->step->tasks; task++) first_reached[task] = s->pass->total_ns;
    for (i64 task = 0; task < s->step->tasks; task++) {
        i64 start = s->step->awaited[task];
        if (start >= 0 && s->reached[task] < first_reached[start])
            first_reached[start] = s->reached[task];
    }
}

static void allocate(Sweep *s, Arena *arena) {
    i64 tasks = s->step->tasks, buffers = s->step->buffers, streams = s->step->streams;
    s->next_start = arena_ints(arena, tasks);
    s->units = arena_take(arena, tasks, sizeof(Unit));
    s->next_member = arena_ints(arena, tasks);
    s->unit_of = arena_ints(arena, tasks);
    s->held.heads = arena_ints(arena, tasks);
    s->holding.heads = arena_ints(arena, tasks);
    s->due.entries = arena_take(arena, tasks, sizeof(Entry));
    s->blockers = arena_ints(arena, tasks);
    s->going = arena_ints(arena, tasks);
    s->is_present = arena_flags(arena, buffers);
    s->leaves = arena_flags(arena, buffers);
    s->left = arena_ints(arena, buffers);
    s->flight = arena_ints(arena, tasks);
    s->reached = arena_ints(arena, tasks);
    s->next_begin = arena_ints(arena, streams);
    s->done = arena_ints(arena, tasks);
    s->issued = arena_ints(arena, tasks);
    s->free_at = arena_ints(arena, streams);
}

static void run(Sweep *s, i64 *scratch) {
    const Step *step = s->step;
    for (i64 task = 0; task < step->tasks; task++) s->unit_of[task] = s->next_member[task] = -1;
    prepare_memory(s);
    if (s->is_backward) find_sequences(s, s->next_begin);
    for (i64 stream = 0; stream < step->streams; stream++) s->next_begin[stream] = NEVER;
    if (s->pass->way == RAISE_AS_NEEDED) {
        find_reached(s);
        find_first_reached(s, scratch);
    }
    for (i64 at = 0; at < step->tasks; at++)
        step_over(s, s->pass->order[s->is_backward ? step->tasks - 1 - at : at], at, scratch);
    for (i64 head; (head = front(s, &s->held)) >= 0;) let_go(s, head);
}

static void note_moved(const Sweep *s, i64 *place_before) {
    for (i64 at = 0; at < s->step->tasks; at++) place_before[s->pass->order[at]] = at;
    for (i64 at = 0; at < s->step->tasks; at++) {
        i64 task = s->swept->order[at];
        if (!s->units[task].members) continue; /* it was never held back */
        i64 start = s->is_backward ? task : s->step->awaited[task];
        bool is_further = s->is_backward ? at < place_before[task] : at > place_before[task];
        if (is_further) s->swept->moved[start] = 1;
    }
}

bool sweep(const Step *step, const Pass *pass, Swept *swept) {
    Arena arena = {0};
    bool is_backward = pass->way == RAISE_ALL || pass->way == RAISE_AS_NEEDED;
    Sweep s = {.step = step, .pass = pass, .swept = swept, .is_backward = is_backward};
    s.first = is_backward ? step->after : step->before;
    allocate(&s, &arena);
    i64 *scratch = arena_ints(&arena, step->tasks);
    bool is_done = !arena.failed;
    if (is_done) {
        run(&s, scratch);
        note_moved(&s, scratch);
    }
    arena_free(&arena);
    return is_done;
}
