/* Why tasks come before others, from what they read and write: ProgramBuilder's rules. */

#include "hazards.h"

enum { WAR = 1, WAW, RAW }; /* as undertow.program.hazards ranks them; a policy is 0 */

/* Lists of tasks, one per buffer; entries are never used again. */
typedef struct {
    i64 *first, *last; /* per buffer: -1 if there are none */
    i64 *task, *next;  /* per entry */
    i64 used;
} Lists;

typedef struct {
    const Touches *given;
    i64 *writer;    /* per buffer, the last that wrote it, or -1 */
    i64 *filled_by; /* per buffer, the start in flight that writes it, or -1 */
    Lists readers;  /* since that write; views read no data */
    Lists senders;  /* starts in flight that read it */
    u8 *is_released; /* per start, whether it has been waited for */
    i64 *slot;       /* per task, the edge from it to the one that is looked at, if it is new */
    Found *found;
    i64 begin; /* of the edges of the one that is looked at */
    Arena arena;
} Walk;

static bool make_lists(Arena *arena, Lists *lists, i64 buffers, i64 entries) {
    lists->first = arena_ints(arena, buffers);
    lists->last = arena_ints(arena, buffers);
    lists->task = arena_ints(arena, entries);
    lists->next = arena_ints(arena, entries);
    for (i64 k = 0; !arena->failed && k < buffers; k++) lists->first[k] = -1;
    return !arena->failed;
}

static void append(Lists *lists, i64 buffer, i64 task) {
    i64 entry = lists->used++;
    lists->task[entry] = task;
    lists->next[entry] = -1;
    if (lists->first[buffer] < 0)
        lists->first[buffer] = entry;
    else
        lists->next[lists->last[buffer]] = entry;
    lists->last[buffer] = entry;
}

static void drop(Lists *lists, i64 buffer, i64 task) {
    i64 before = -1;
    for (i64 entry = lists->first[buffer]; entry >= 0; entry = lists->next[entry]) {
        if (lists->task[entry] != task) {
            before = entry;
            continue;
        }
        if (before < 0)
            lists->first[buffer] = lists->next[entry];
        else
            lists->next[before] = lists->next[entry];
        if (lists->last[buffer] == entry) lists->last[buffer] = before;
    }
}

/* Notes that the task depends on `src`; the strongest reason stays, of several the first. */
static void depend(Walk *walk, i64 src, i64 strength, i64 buffer) {
    Found *found = walk->found;
    i64 at = walk->slot[src];
    bool is_known = at >= walk->begin && at < found->count && found->src[at] == src;
    if (is_known && found->strength[at] >= strength) return;
    if (!is_known) {
        at = walk->slot[src] = found->count++;
        found->src[at] = src;
    }
    found->strength[at] = strength;
    found->buffer[at] = buffer;
}

static bool read_all(Walk *walk, i64 task) {
    const Touches *given = walk->given;
    for EACH(k, given->reads, task) {
        i64 buffer = given->reads.items[k], writer = walk->writer[buffer];
        if (writer < 0 && !given->is_there[buffer]) return false; /* nobody has written it */
        if (given->kinds[task] != VIEW) {
            if (walk->filled_by[buffer] >= 0) return false; /* a race */
            append(&walk->readers, buffer, task);
        }
        if (writer >= 0) depend(walk, writer, RAW, buffer);
    }
    return true;
}

static bool write_all(Walk *walk, i64 task) {
    const Touches *given = walk->given;
    i64 start = given->awaited[task];
    for EACH(k, given->writes, task) {
        i64 buffer = given->writes.items[k], filled_by = walk->filled_by[buffer];
        if (filled_by >= 0 && filled_by != start) return false; /* a race, as below */
        for (i64 e = walk->senders.first[buffer]; e >= 0; e = walk->senders.next[e])
            if (walk->senders.task[e] != start) return false;
        if (walk->writer[buffer] >= 0) depend(walk, walk->writer[buffer], WAW, buffer);
        for (i64 e = walk->readers.first[buffer]; e >= 0; e = walk->readers.next[e])
            if (walk->readers.task[e] != task) depend(walk, walk->readers.task[e], WAR, buffer);
        walk->writer[buffer] = task;
        walk->readers.first[buffer] = -1;
    }
    return true;
}

static void send_all(Walk *walk, i64 task) {
    const Touches *given = walk->given;
    for EACH(k, given->reads, task) append(&walk->senders, given->reads.items[k], task);
    for EACH(k, given->writes, task) walk->filled_by[given->writes.items[k]] = task;
}

/* After its first wait a collective holds nothing; later writers depend on that wait. */
static void release(Walk *walk, i64 task) {
    const Touches *given = walk->given;
    i64 start = given->awaited[task];
    depend(walk, start, RAW, -1);
    for EACH(k, given->writes, task) walk->filled_by[given->writes.items[k]] = -1;
    if (walk->is_released[start]) return;
    walk->is_released[start] = 1;
    for EACH(k, given->reads, start) {
        i64 buffer = given->reads.items[k];
        bool is_written = false;
        drop(&walk->senders, buffer, start);
        for EACH(w, given->writes, task) is_written |= given->writes.items[w] == buffer;
        if (!is_written) append(&walk->readers, buffer, task);
    }
}

/* The edges of one task by their source: most have one or two, already in this sequence. */
static void sort_edges(Found *found, i64 begin) {
    for (i64 k = begin + 1; k < found->count; k++) {
        i64 src = found->src[k], strength = found->strength[k], buffer = found->buffer[k], at = k;
        for (; at > begin && found->src[at - 1] > src; at--) {
            found->src[at] = found->src[at - 1];
            found->strength[at] = found->strength[at - 1];
            found->buffer[at] = found->buffer[at - 1];
        }
        found->src[at] = src;
        found->strength[at] = strength;
        found->buffer[at] = buffer;
    }
}

static bool look_at(Walk *walk, i64 task) {
    const Touches *given = walk->given;
    walk->begin = walk->found->count;
    for EACH(k, given->after, task) depend(walk, given->after.items[k], RAW, -1);
    if (!read_all(walk, task) || !write_all(walk, task)) return false;
    if (given->kinds[task] == START) send_all(walk, task);
    if (given->kinds[task] == WAIT) release(walk, task);
    sort_edges(walk->found, walk->begin);
    for (i64 k = walk->begin; k < walk->found->count; k++) walk->found->dst[k] = task;
    return true;
}

bool are_touches(const Touches *given) {
    i64 tasks = given->tasks, buffers = given->buffers;
    if (!are_within(given->reads.items, given->reads.begins[tasks], 0, buffers)) return false;
    if (!are_within(given->writes.items, given->writes.begins[tasks], 0, buffers)) return false;
    for (i64 task = 0; task < tasks; task++) {
        i64 start = given->awaited[task];
        bool is_wait = given->kinds[task] == WAIT;
        if (given->kinds[task] >= KINDS || start < -1 || start >= task) return false;
        if (is_wait != (start >= 0) || (is_wait && given->kinds[start] != START)) return false;
        for EACH(k, given->after, task)
            if (given->after.items[k] < 0 || given->after.items[k] >= task) return false;
    }
    return true;
}

i64 most_edges(const Touches *given) {
    i64 tasks = given->tasks;
    return given->after.begins[tasks] + 3 * given->reads.begins[tasks] +
           given->writes.begins[tasks] + tasks;
}

Derived derive_hazards(const Touches *given, Found *found, i64 *writer) {
    Walk walk = {.given = given, .found = found, .writer = writer};
    Arena *arena = &walk.arena;
    i64 reads = given->reads.begins[given->tasks];
    walk.filled_by = arena_ints(arena, given->buffers);
    walk.is_released = arena_flags(arena, given->tasks);
    walk.slot = arena_ints(arena, given->tasks);
    make_lists(arena, &walk.readers, given->buffers, 2 * reads);
    make_lists(arena, &walk.senders, given->buffers, reads);
    Derived outcome = arena->failed ? NO_ROOM : DERIVED;
    for (i64 k = 0; outcome == DERIVED && k < given->buffers; k++)
        writer[k] = walk.filled_by[k] = -1;
    found->count = 0;
    for (i64 task = 0; outcome == DERIVED && task < given->tasks; task++)
        if (!look_at(&walk, task)) outcome = REFUSED;
    arena_free(arena);
    return outcome;
}
