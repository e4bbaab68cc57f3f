/* Runs of tasks that always stay together: undertow.schedule.condense says what they are. */

#include "step.h"

typedef struct {
    const Step *step;
    const Joining *joining;
    i64 *first, *last; /* per buffer: the first task that touches it, -1 if it is there before; the
                          last, which is the program's last if it stays */
    i64 *head;         /* per run, its first task */
    u8 *may_be_joined; /* per run */
    i64 runs;
    i64 *to_count; /* tasks of the last run that `freed` does not count yet */
    i64 waiting;   /* how many those are */
    i64 freed;     /* by the tasks of the last run, of what others made */
    i64 taken_ns;  /* by the tasks of the last run */
    i64 *seen_by;  /* per buffer: 1 + the last view that `is_free` was asked about */
    Arena arena;
} Search;

static void find_touchers(Search *search) {
    const Step *step = search->step;
    for (i64 b = 0; b < step->buffers; b++) search->first[b] = search->last[b] = -1;
    for (i64 task = 0; task < step->tasks; task++)
        for EACH(k, step->touches, task) {
            i64 buffer = step->touches.items[k];
            if (search->first[buffer] < 0) search->first[buffer] = task;
            search->last[buffer] = task;
        }
    for (i64 b = 0; b < step->buffers; b++) {
        if (step->is_there[b]) search->first[b] = -1;
        if (step->stays[b]) search->last[b] = step->tasks - 1;
    }
}

/* Whether a view may join the run of a wait: it touches no more than the wait does. */
static bool is_free(Search *search, i64 view, i64 wait) {
    Rows touches = search->step->touches;
    for EACH(k, touches, wait) search->seen_by[touches.items[k]] = view + 1;
    for EACH(k, touches, view)
        if (search->seen_by[touches.items[k]] != view + 1) return false;
    return true;
}

/* The bytes that end with a task, of what was there before its run. */
static i64 frees(const Search *search, i64 task, i64 head) {
    const Step *step = search->step;
    i64 freed = 0;
    for EACH(k, step->touches, task) {
        i64 buffer = step->touches.items[k];
        if (search->last[buffer] == task && search->first[buffer] < head)
            freed += step->nbytes[buffer];
    }
    return freed;
}

/* Whether a task goes on with the kernel before it; see `_goes_on`. */
static bool goes_on(Search *search, i64 task) {
    const Step *step = search->step;
    const Joining *joining = search->joining;
    if (!search->runs || joining->stays_alone[task]) return false;
    bool is_short = step->ns[task] <= joining->short_ns && !step->launches[task];
    if (!is_short && search->taken_ns + step->ns[task] > joining->run_ns) return false;
    i64 head = search->head[search->runs - 1];
    if (step->kinds[head] != COMPUTE) return false;
    for (i64 k = 0; k < search->waiting; k++)
        search->freed += frees(search, search->to_count[k], head);
    search->waiting = 0;
    return search->freed <= joining->little && search->freed <= joining->room[task];
}

/* The run that a task joins, or -1. */
static i64 joined(Search *search, i64 task, const i64 *run_of) {
    const Step *step = search->step;
    i64 into = -1;
    for EACH(k, step->before, task)
        if (run_of[step->before.items[k]] > into) into = run_of[step->before.items[k]];
    if (step->kinds[task] == VIEW) {
        i64 head = into >= 0 ? search->head[into] : -1;
        if (head >= 0 && step->kinds[head] == WAIT && !is_free(search, task, head)) return -1;
    } else if (step->kinds[task] != COMPUTE || into < search->runs - 1 || !goes_on(search, task)) {
        return -1;
    }
    return into >= 0 && search->may_be_joined[into] ? into : -1;
}

static void begin_run(Search *search, i64 task) {
    bool is_start = search->step->kinds[task] == START;
    search->head[search->runs] = task;
    search->may_be_joined[search->runs] = !is_start && !search->joining->stays_alone[task];
    search->runs++;
    search->freed = search->taken_ns = search->waiting = 0;
}

bool find_runs(const Step *step, const Joining *joining, i64 *run_of, i64 *runs) {
    Search search = {.step = step, .joining = joining};
    search.first = arena_ints(&search.arena, step->buffers);
    search.last = arena_ints(&search.arena, step->buffers);
    search.seen_by = arena_ints(&search.arena, step->buffers);
    search.head = arena_ints(&search.arena, step->tasks);
    search.to_count = arena_ints(&search.arena, step->tasks);
    search.may_be_joined = arena_flags(&search.arena, step->tasks);
    bool is_done = !search.arena.failed;
    if (is_done) find_touchers(&search);
    for (i64 task = 0; is_done && task < step->tasks; task++) {
        i64 into = joined(&search, task, run_of);
        if (into < 0) {
            into = search.runs;
            begin_run(&search, task);
        }
        run_of[task] = into;
        if (step->kinds[task] == COMPUTE) { /* then it is in the last run */
            search.taken_ns += step->ns[task];
            search.to_count[search.waiting++] = task;
        }
    }
    *runs = search.runs;
    arena_free(&search.arena);
    return is_done;
}
