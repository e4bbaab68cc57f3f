/* A step as flat arrays: made, renumbered, played. */

#include "step.h"

#include <stdlib.h>
#include <string.h>

/* -- memory ---------------------------------------------------------------------------------- */

struct Block {
    Block *next;
    i64 content[];
};

void *arena_take(Arena *arena, i64 count, size_t size) {
    Block *block = NULL;
    size_t items = (size_t)count + 1; /* one more: no block is empty */
    if (count >= 0 && items < (SIZE_MAX - sizeof(Block)) / size)
        block = calloc(1, sizeof(Block) + items * size);
    if (!block) {
        arena->failed = true;
        return NULL;
    }
    block->next = arena->blocks;
    arena->blocks = block;
    return block->content;
}

i64 *arena_ints(Arena *arena, i64 count) { return arena_take(arena, count, sizeof(i64)); }

u8 *arena_flags(Arena *arena, i64 count) { return arena_take(arena, count, sizeof(u8)); }

void arena_free(Arena *arena) {
    while (arena->blocks) {
        Block *next = arena->blocks->next;
        free(arena->blocks);
        arena->blocks = next;
    }
    arena->failed = false;
}

/* -- heaps ----------------------------------------------------------------------------------- */

bool is_less(Entry a, Entry b) { return a.key != b.key ? a.key < b.key : a.id < b.id; }

static void sift_up(Heap *heap, i64 at, Entry entry) {
    while (at > 0 && is_less(entry, heap->entries[(at - 1) / 2])) {
        heap->entries[at] = heap->entries[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap->entries[at] = entry;
}

static void sift_down(Heap *heap, i64 at, Entry entry) {
    for (;;) {
        i64 child = 2 * at + 1;
        if (child >= heap->count) break;
        if (child + 1 < heap->count && is_less(heap->entries[child + 1], heap->entries[child]))
            child++;
        if (!is_less(heap->entries[child], entry)) break;
        heap->entries[at] = heap->entries[child];
        at = child;
    }
    heap->entries[at] = entry;
}

void heap_push(Heap *heap, i64 key, i64 id) {
    heap->count++;
    sift_up(heap, heap->count - 1, (Entry){key, id});
}

void heap_remove(Heap *heap, i64 at) {
    heap->count--;
    if (at == heap->count) return;
    Entry last = heap->entries[heap->count];
    if (at > 0 && is_less(last, heap->entries[(at - 1) / 2]))
        sift_up(heap, at, last);
    else
        sift_down(heap, at, last);
}

Entry heap_pop(Heap *heap) {
    Entry first = heap->entries[0];
    heap_remove(heap, 0);
    return first;
}

void heap_rebuild(Heap *heap) {
    for (i64 at = heap->count / 2 - 1; at >= 0; at--) sift_down(heap, at, heap->entries[at]);
}

/* -- a step ---------------------------------------------------------------------------------- */

bool are_within(const i64 *values, i64 count, i64 low, i64 high) {
    for (i64 k = 0; k < count; k++)
        if (values[k] < low || values[k] >= high) return false;
    return true;
}

bool add_up_to(const i64 *counts, i64 count, i64 total) {
    i64 sum = 0;
    for (i64 k = 0; k < count; k++) {
        if (counts[k] < 0 || counts[k] > total - sum) return false;
        sum += counts[k];
    }
    return sum == total;
}

/* Adds what is there to a sum; whether that is still small enough. */
static bool add_small(i64 *sum, i64 value) {
    if (value < 0 || value > MOST_TOTAL - *sum) return false;
    *sum += value;
    return true;
}

static const char *check_times(i64 tasks, const i64 *ns, const i64 *launches, i64 launch_ns) {
    i64 total = 0, most = launch_ns ? MOST_TOTAL / launch_ns : MOST_TOTAL;
    for (i64 k = 0; k < tasks; k++) {
        if (launches[k] < 0 || launches[k] > most) return "launches";
        if (!add_small(&total, ns[k])) return "times";
        if (!add_small(&total, launches[k] * launch_ns)) return "times of launches";
    }
    return NULL;
}

bool are_times(const Step *step, const i64 *ns, const i64 *launches) {
    return !check_times(step->tasks, ns, launches, step->launch_ns);
}

static const char *check_sums(const Parts *parts) {
    i64 nbytes = 0, made = 0;
    if (parts->launch_ns < 0 || parts->launch_ns > MOST_TOTAL) return "the cost of a launch";
    const char *wrong = check_times(parts->tasks, parts->ns, parts->launches, parts->launch_ns);
    if (wrong) return wrong;
    for (i64 k = 0; k < parts->starts; k++)
        if (!add_small(&made, parts->made_nbytes[k])) return "bytes that starts make";
    for (i64 k = 0; k < parts->buffers; k++)
        if (!add_small(&nbytes, parts->nbytes[k])) return "bytes";
    for (i64 k = 0; k < parts->touched; k++) /* what is counted once per task that touches it */
        if (!add_small(&nbytes, parts->nbytes[parts->touches[k]])) return "bytes of tasks";
    return NULL;
}

static const char *check_links(const Parts *parts) {
    i64 load = 0;
    for (i64 k = 0; k < parts->starts; k++)
        if (!add_small(&load, parts->loads[k]) || load > MOST_LOAD) return "loads";
    if (parts->links > MOST_LINKS || parts->link_count > MOST_LINKS) return "number of links";
    if (!add_up_to(parts->link_counts, parts->streams, parts->links)) return "counts of links";
    if (!are_within(parts->links_of, parts->links, 0, parts->link_count)) return "links";
    if (!are_within(&parts->compute_slowdown, 1, 1, MOST_SLOWED)) return "slowdown";
    if (!are_within(&parts->communication_slowdown, 1, 1, MOST_SLOWED)) return "slowdown";
    return NULL;
}

const char *check_parts(const Parts *parts) {
    i64 tasks = parts->tasks, starts = 0;
    for (i64 k = 0; k < tasks; k++) {
        if (parts->kinds[k] >= KINDS) return "kinds";
        starts += parts->kinds[k] == START;
        bool is_wait = parts->kinds[k] == WAIT;
        if (parts->awaited[k] < (is_wait ? 0 : -1) || parts->awaited[k] >= (is_wait ? k : 0))
            return "awaited starts";
        if (is_wait && parts->kinds[parts->awaited[k]] != START) return "awaited starts";
    }
    if (starts != parts->starts) return "number of starts";
    if (!are_within(parts->stream, tasks, 0, parts->streams)) return "streams";
    if (!are_within(parts->touches, parts->touched, 0, parts->buffers)) return "touched buffers";
    if (!are_within(parts->givens, parts->given, 0, parts->buffers)) return "read buffers";
    if (!add_up_to(parts->touch_counts, tasks, parts->touched)) return "counts of buffers";
    if (!add_up_to(parts->given_counts, starts, parts->given)) return "counts of read buffers";
    for (i64 k = 0; k < parts->edges; k++) {
        i64 src = parts->src[k], dst = parts->dst[k];
        if (src < 0 || src >= dst || dst >= tasks) return "hazards";
        if (!k) continue;
        if (parts->dst[k - 1] > dst || (parts->dst[k - 1] == dst && parts->src[k - 1] > src))
            return "sequence of hazards";
    }
    const char *wrong = check_links(parts);
    return wrong ? wrong : check_sums(parts);
}

static Rows rows_make(Arena *arena, const i64 *counts, i64 count, const i64 *items, i64 total) {
    Rows rows = {arena_ints(arena, count + 1), arena_ints(arena, total)};
    if (arena->failed) return rows;
    for (i64 k = 0; k < count; k++) rows.begins[k + 1] = rows.begins[k] + counts[k];
    if (total) memcpy(rows.items, items, (size_t)total * sizeof(i64));
    return rows;
}

/* What comes before and after each task, each once. A pair that is there several times stands for
 * a value if all of its edges do. */
static void link(Step *step, const Parts *parts, i64 *filled) {
    i64 *before = step->before.begins, *after = step->after.begins, kept = 0;
    for (i64 k = 0; k < parts->edges; k++) {
        i64 src = parts->src[k], dst = parts->dst[k];
        bool is_again = k && parts->src[k - 1] == src && parts->dst[k - 1] == dst;
        if (is_again) continue;
        step->before.items[kept++] = src;
        before[dst + 1]++;
        after[src + 1]++;
    }
    for (i64 k = 0; k < step->tasks; k++) {
        before[k + 1] += before[k];
        after[k + 1] += after[k];
    }
    for (i64 k = 0; k < parts->edges; k++) {
        i64 src = parts->src[k], dst = parts->dst[k];
        bool is_again = k && parts->src[k - 1] == src && parts->dst[k - 1] == dst;
        i64 at = after[src] + filled[src] - is_again;
        step->is_true[at] = parts->is_true[k] && (!is_again || step->is_true[at]);
        if (is_again) continue;
        step->after.items[at] = dst;
        filled[src]++;
    }
}

static void allocate(Step *step) {
    Arena *arena = &step->arena;
    step->kinds = arena_flags(arena, step->tasks);
    step->first_wait = arena_ints(arena, step->tasks);
    step->ns = arena_ints(arena, step->tasks);
    step->stream = arena_ints(arena, step->tasks);
    step->launches = arena_ints(arena, step->tasks);
    step->awaited = arena_ints(arena, step->tasks);
    step->most_nbytes = arena_ints(arena, step->tasks);
    step->made_nbytes = arena_ints(arena, step->tasks);
    step->nbytes = arena_ints(arena, step->buffers);
    step->uses = arena_ints(arena, step->buffers);
    step->is_there = arena_flags(arena, step->buffers);
    step->stays = arena_flags(arena, step->buffers);
}

/* What is said of starts alone, by task. */
static void spread(Step *step, const Parts *parts) {
    for (i64 task = 0, n = 0; task < step->tasks; task++) {
        step->given.begins[task + 1] = step->given.begins[task];
        if (step->kinds[task] != START) continue;
        step->made_nbytes[task] = parts->made_nbytes[n];
        step->load[task] = parts->loads[n];
        step->given.begins[task + 1] += parts->given_counts[n++];
    }
    if (parts->given) memcpy(step->given.items, parts->givens, (size_t)parts->given * sizeof(i64));
}

/* What follows from the arrays that were given. */
static void derive(Step *step) {
    for (i64 task = 0; task < step->tasks; task++) {
        step->total_ns += step->ns[task] + step->launches[task] * step->launch_ns;
        i64 start = step->awaited[task]; /* which came before */
        if (start >= 0 && step->first_wait[start] < 0) step->first_wait[start] = task;
        step->first_wait[task] = -1;
        for (i64 k = step->touches.begins[task]; k < step->touches.begins[task + 1]; k++)
            step->most_nbytes[task] += step->nbytes[step->touches.items[k]];
    }
    for (i64 k = 0; k < step->touches.begins[step->tasks]; k++)
        step->uses[step->touches.items[k]]++;
}

bool step_make(Step *step, const Parts *parts) {
    i64 tasks = parts->tasks, buffers = parts->buffers;
    *step = (Step){.tasks = tasks,
                   .buffers = buffers,
                   .streams = parts->streams,
                   .link_count = parts->link_count,
                   .launch_ns = parts->launch_ns,
                   .compute_slowdown = parts->compute_slowdown,
                   .communication_slowdown = parts->communication_slowdown};
    Arena *arena = &step->arena;
    allocate(step);
    step->before = (Rows){arena_ints(arena, tasks + 1), arena_ints(arena, parts->edges)};
    step->after = (Rows){arena_ints(arena, tasks + 1), arena_ints(arena, parts->edges)};
    step->is_true = arena_flags(arena, parts->edges);
    step->touches =
        rows_make(arena, parts->touch_counts, tasks, parts->touches, parts->touched);
    step->given = (Rows){arena_ints(arena, tasks + 1), arena_ints(arena, parts->given)};
    step->links =
        rows_make(arena, parts->link_counts, parts->streams, parts->links_of, parts->links);
    step->load = arena_ints(arena, tasks);
    i64 *filled = arena_ints(arena, tasks);
    if (arena->failed) return false;
    size_t ints = (size_t)tasks * sizeof(i64);
    memcpy(step->kinds, parts->kinds, (size_t)tasks);
    memcpy(step->ns, parts->ns, ints);
    memcpy(step->stream, parts->stream, ints);
    memcpy(step->launches, parts->launches, ints);
    memcpy(step->awaited, parts->awaited, ints);
    memcpy(step->nbytes, parts->nbytes, (size_t)buffers * sizeof(i64));
    memcpy(step->is_there, parts->is_there, (size_t)buffers);
    memcpy(step->stays, parts->stays, (size_t)buffers);
    link(step, parts, filled);
    spread(step, parts);
    derive(step);
    return true;
}

/* The rows of tasks in `order`; if they name tasks, by their new places. */
static Rows rows_in_order(Arena *arena, Rows rows, const i64 *order, i64 tasks, const i64 *place) {
    Rows made = {arena_ints(arena, tasks + 1), arena_ints(arena, rows.begins[tasks])};
    if (arena->failed) return made;
    i64 filled = 0;
    for (i64 at = 0; at < tasks; at++) {
        i64 task = order[at];
        for (i64 k = rows.begins[task]; k < rows.begins[task + 1]; k++)
            made.items[filled++] = place ? place[rows.items[k]] : rows.items[k];
        made.begins[at + 1] = filled;
    }
    return made;
}

bool step_renumber(Step *step, const Step *from, const i64 *order, const i64 *place) {
    i64 tasks = from->tasks;
    *step = (Step){.tasks = tasks,
                   .buffers = from->buffers,
                   .streams = from->streams,
                   .launch_ns = from->launch_ns};
    Arena *arena = &step->arena;
    allocate(step);
    step->before = rows_in_order(arena, from->before, order, tasks, place);
    step->after = rows_in_order(arena, from->after, order, tasks, place);
    step->touches = rows_in_order(arena, from->touches, order, tasks, NULL);
    step->given = rows_in_order(arena, from->given, order, tasks, NULL);
    step->is_true = arena_flags(arena, from->after.begins[tasks]);
    if (arena->failed) return false;
    i64 filled = 0;
    for (i64 at = 0; at < tasks; at++) {
        i64 task = order[at], awaited = from->awaited[task];
        step->kinds[at] = from->kinds[task];
        step->ns[at] = from->ns[task];
        step->stream[at] = from->stream[task];
        step->launches[at] = from->launches[task];
        step->awaited[at] = awaited < 0 ? -1 : place[awaited];
        step->made_nbytes[at] = from->made_nbytes[task];
        for (i64 k = from->after.begins[task]; k < from->after.begins[task + 1]; k++)
            step->is_true[filled++] = from->is_true[k];
    }
    memcpy(step->nbytes, from->nbytes, (size_t)step->buffers * sizeof(i64));
    memcpy(step->is_there, from->is_there, (size_t)step->buffers);
    memcpy(step->stays, from->stays, (size_t)step->buffers);
    derive(step);
    return true;
}

void step_free(Step *step) { arena_free(&step->arena); }

/* -- played ---------------------------------------------------------------------------------- */

/* A host task runs when the host is free and all that it depends on is done; a start counts as
 * done once it was issued. */
i64 run_on_host(const Step *step, i64 task, i64 host, Times times) {
    for (i64 k = step->before.begins[task]; k < step->before.begins[task + 1]; k++) {
        i64 source = step->before.items[k];
        i64 done = step->kinds[source] == START ? times.ready[source] : times.end[source];
        if (done > host) host = done;
    }
    times.ready[task] = times.begin[task] = host;
    return times.end[task] = host + step->ns[task];
}

/* The compute stream waits for a collective; when it goes on. */
static i64 stand_still(Times times, i64 start, i64 compute) {
    i64 held = times.end[start] - compute;
    if (held <= 0) return compute;
    times.exposed[start] += held;
    return compute + held;
}

Played play(const Step *step, const i64 *order, Times times, i64 *total) {
    Arena arena = {0};
    i64 *free_at = arena_ints(&arena, step->streams); /* when each group's stream is free */
    if (arena.failed) return NOT_ENOUGH_MEMORY;
    i64 host = 0, compute = 0;
    for (i64 at = 0; at < step->tasks; at++) {
        i64 task = order[at];
        u8 kind = step->kinds[task];
        if (kind == VIEW) {
            times.ready[task] = times.begin[task] = times.end[task] = compute;
            continue;
        }
        host += step->launch_ns * step->launches[task];
        if (kind == HOST) {
            host = run_on_host(step, task, host, times);
            continue;
        }
        if (host > compute) compute = host;
        times.ready[task] = times.begin[task] = compute;
        if (kind == COMPUTE) {
            times.end[task] = compute += step->ns[task];
        } else if (kind == START) {
            i64 *next = &free_at[step->stream[task]];
            if (*next > compute) times.begin[task] = *next;
            times.end[task] = *next = times.begin[task] + step->ns[task];
        } else {
            times.end[task] = compute = stand_still(times, step->awaited[task], compute);
        }
    }
    for (i64 at = 0; at < step->tasks; at++) /* the step ends with what nobody waits for */
        if (step->kinds[order[at]] == START && step->first_wait[order[at]] < 0)
            compute = stand_still(times, order[at], compute);
    *total = compute > host ? compute : host;
    arena_free(&arena);
    return PLAYED;
}

bool live_bytes(const Step *step, const i64 *order, i64 *during, i64 *after) {
    Arena arena = {0};
    i64 *left = arena_ints(&arena, step->buffers), now = 0, unused = 0;
    u8 *is_alive = arena_flags(&arena, step->buffers);
    bool is_done = !arena.failed;
    for (i64 buffer = 0; is_done && buffer < step->buffers; buffer++) {
        left[buffer] = step->uses[buffer];
        is_alive[buffer] = step->is_there[buffer];
        if (is_alive[buffer]) now += step->nbytes[buffer];
        bool ends_unused = is_alive[buffer] && !left[buffer] && !step->stays[buffer];
        if (ends_unused) unused += step->nbytes[buffer];
    }
    for (i64 at = 0; is_done && at < step->tasks; at++) {
        i64 freed = at == step->tasks - 1 ? unused : 0;
        for EACH(k, step->touches, order ? order[at] : at) {
            i64 buffer = step->touches.items[k];
            if (!is_alive[buffer]) {
                is_alive[buffer] = 1;
                now += step->nbytes[buffer];
            }
            if (!--left[buffer] && !step->stays[buffer]) freed += step->nbytes[buffer];
        }
        during[at] = now;
        now -= freed;
        if (after) after[at] = now;
    }
    arena_free(&arena);
    return is_done;
}
