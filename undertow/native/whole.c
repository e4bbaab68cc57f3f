/* Loops over a whole step in captured order: groups of tasks as one, heads and tails.
 * undertow.schedule.contract and undertow.program.bounds say what they are for. */

#include "step.h"

/* -- groups as one ---------------------------------------------------------------------------- */

typedef struct {
    const i64 *leader;
    Rows led;     /* per leader: all that it leads, itself too, in captured order */
    i64 *missing; /* per leader: edges into its group from what is not placed */
    Heap late;    /* became ready after their place was passed */
} Groups;

static void gather_led(Groups *groups, i64 tasks, i64 *filled) {
    for (i64 k = 0; k < tasks; k++) groups->led.begins[groups->leader[k] + 1]++;
    for (i64 k = 0; k < tasks; k++) groups->led.begins[k + 1] += groups->led.begins[k];
    for (i64 k = 0; k < tasks; k++) {
        i64 first = groups->leader[k];
        groups->led.items[groups->led.begins[first] + filled[first]++] = k;
    }
}

static void count_missing(Groups *groups, const Step *step) {
    for (i64 task = 0; task < step->tasks; task++)
        for EACH(k, step->before, task) {
            i64 first = groups->leader[task];
            groups->missing[first] += groups->leader[step->before.items[k]] != first;
        }
}

/* What follows a group that was placed misses it no longer. */
static void pass(Groups *groups, const Step *step, i64 first, i64 place) {
    for EACH(m, groups->led, first)
        for EACH(k, step->after, groups->led.items[m]) {
            i64 target = groups->leader[step->after.items[k]];
            if (target == first || --groups->missing[target]) continue;
            if (target < place) heap_push(&groups->late, target, target);
        }
}

bool contract(const Step *step, const i64 *leader, i64 *order, i64 *placed) {
    Arena arena = {0};
    i64 tasks = step->tasks, *filled = arena_ints(&arena, tasks), count = 0;
    Groups groups = {.leader = leader,
                     .led = {arena_ints(&arena, tasks + 1), arena_ints(&arena, tasks)},
                     .missing = arena_ints(&arena, tasks),
                     .late = {arena_take(&arena, tasks, sizeof(Entry)), 0}};
    bool is_done = !arena.failed;
    if (is_done) {
        gather_led(&groups, tasks, filled);
        count_missing(&groups, step);
        for (i64 place = 0; place < tasks; place++) {
            if (leader[place] != place || groups.missing[place]) continue;
            order[count++] = place;
            pass(&groups, step, place, place);
            while (groups.late.count) {
                order[count] = heap_pop(&groups.late).id;
                pass(&groups, step, order[count++], place);
            }
        }
    }
    *placed = count;
    arena_free(&arena);
    return is_done;
}

/* -- heads and tails -------------------------------------------------------------------------- */

/* Whether a task must begin after the *end* of the collective that `start` starts. */
static bool queues_behind(const Step *step, i64 task, i64 start) {
    if (step->kinds[start] != START) return false;
    if (step->kinds[task] == WAIT) return step->awaited[task] == start;
    return step->kinds[task] == START && step->stream[task] == step->stream[start];
}

static i64 larger(i64 a, i64 b) { return a > b ? a : b; }

bool find_heads(const Step *step, const i64 *ns, const i64 *launches, i64 *begin, i64 *ready) {
    Arena arena = {0};
    i64 *passed = arena_ints(&arena, step->tasks); /* when the stream is past a task, */
    i64 *launched = arena_ints(&arena, step->tasks); /* and when the host is */
    bool is_done = !arena.failed;
    for (i64 task = 0; is_done && task < step->tasks; task++) {
        i64 place = 0, on_host = 0;
        u8 kind = step->kinds[task];
        for EACH(k, step->before, task) {
            place = larger(place, passed[step->before.items[k]]);
            on_host = larger(on_host, launched[step->before.items[k]]);
        }
        if (kind != VIEW) {
            on_host += step->launch_ns * launches[task];
            place = larger(place, on_host);
        }
        ready[task] = place;
        if (kind == START || kind == WAIT)
            for EACH(k, step->before, task) {
                i64 source = step->before.items[k];
                if (queues_behind(step, task, source))
                    place = larger(place, begin[source] + ns[source]);
            }
        begin[task] = place;
        passed[task] = kind == START ? ready[task] : place + ns[task];
        launched[task] = kind == HOST ? passed[task] : on_host;
    }
    arena_free(&arena);
    return is_done;
}

void find_tails(const Step *step, const i64 *ns, i64 *after_end, i64 *after_ready) {
    for (i64 task = step->tasks - 1; task >= 0; task--) {
        i64 follows = 0, ends = 0;
        for EACH(k, step->after, task) {
            i64 target = step->after.items[k];
            follows = larger(follows, after_ready[target]);
            /* Its stream holds up the collective itself, not its place in the order. */
            if (queues_behind(step, target, task))
                ends = larger(ends, ns[target] + after_end[target]);
        }
        bool is_start = step->kinds[task] == START;
        after_end[task] = is_start ? ends : follows;
        after_ready[task] = is_start ? larger(follows, ns[task] + ends) : ns[task] + follows;
    }
}
