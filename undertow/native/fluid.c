/* The simulator's fluid player, for machines on which groups share links or communication and
 * compute slow each other: what undertow.program.simulate._Fluid does. Between two events all that
 * runs progresses at a constant rate. */

#include "step.h"

#define UNIT ((i64)1 << 20) /* work left is counted in 2**-20 ns */
#define WHOLE 1000          /* permille */
/* What takes less in all, and is slowed less, cannot overflow. */
#define MOST_NS ((i64)1 << 42)
#define LEAST_RATE ((i64)1 << 10)

/* A collective on the wire. */
typedef struct {
    i64 task; /* -1: nothing runs on this stream */
    i64 left; /* work left at `since` */
    i64 since, rate, ends;
} Flow;

/* What waits for its stream, in the sequence of starts; linked by `next`. */
typedef struct {
    i64 first, last;
} Queue;

typedef struct {
    const Step *step;
    Times times;
    i64 now, next_end, stretch, flowing;
    bool is_broken; /* something is slowed too much to be played here */
    Flow *flows;    /* per stream */
    Queue *queues;  /* per stream */
    i64 *next;      /* per task, or -1 */
    i64 *on_link;   /* per link: the load of what runs */
    u8 *is_unfinished; /* per task */
} Fluid;

static i64 divided_up(i64 value, i64 by) { return value > 0 ? (value - 1) / by + 1 : value / by; }

/* -- what runs -------------------------------------------------------------------------------- */

/* Each has its share of the tightest of its links. */
static i64 found_rate(const Fluid *f, i64 stream) {
    i64 tightest = WHOLE;
    for (i64 k = f->step->links.begins[stream]; k < f->step->links.begins[stream + 1]; k++) {
        i64 load = f->on_link[f->step->links.items[k]];
        if (load > tightest) tightest = load;
    }
    return UNIT * WHOLE * WHOLE / (f->stretch * tightest);
}

static void load_links(Fluid *f, i64 sign) {
    for (i64 stream = 0; stream < f->step->streams; stream++) {
        if (f->flows[stream].task < 0) continue;
        for (i64 k = f->step->links.begins[stream]; k < f->step->links.begins[stream + 1]; k++)
            f->on_link[f->step->links.items[k]] += sign * f->step->load[f->flows[stream].task];
    }
}

/* What runs now has changed: how fast it is from now on, and when the first of it ends. */
static void set_rates(Fluid *f) {
    f->next_end = NEVER;
    if (!f->flowing) return;
    load_links(f, 1);
    for (i64 stream = 0; stream < f->step->streams; stream++) {
        Flow *flow = &f->flows[stream];
        if (flow->task < 0) continue;
        i64 rate = found_rate(f, stream);
        if (rate < LEAST_RATE) {
            f->is_broken = true;
            break;
        }
        if (rate != flow->rate) {
            flow->left -= flow->rate * (f->now - flow->since);
            flow->since = f->now;
            flow->rate = rate;
            flow->ends = f->now + divided_up(flow->left, rate);
        }
        if (flow->ends < f->next_end) f->next_end = flow->ends;
    }
    load_links(f, -1);
}

static void finish(Fluid *f, i64 task) {
    f->times.end[task] = f->now;
    f->is_unfinished[task] = 0;
}

/* Begin what is next in the queue of a stream on which nothing is running. */
static void feed(Fluid *f, i64 stream) {
    Queue *queue = &f->queues[stream];
    while (queue->first >= 0 && f->flows[stream].task < 0) {
        i64 task = queue->first;
        queue->first = f->next[task];
        f->times.begin[task] = f->now;
        if (!f->step->ns[task]) {
            finish(f, task);
            continue;
        }
        f->flows[stream] = (Flow){task, f->step->ns[task] * UNIT, f->now, 0, NEVER};
        f->flowing++;
    }
}

static void start(Fluid *f, i64 task) {
    i64 stream = f->step->stream[task];
    Queue *queue = &f->queues[stream];
    f->is_unfinished[task] = 1;
    f->next[task] = -1;
    if (queue->first < 0)
        queue->first = task;
    else
        f->next[queue->last] = task;
    queue->last = task;
    if (f->flows[stream].task >= 0) return;
    feed(f, stream);
    set_rates(f);
}

/* -- time goes on ----------------------------------------------------------------------------- */

static void run_until(Fluid *f, i64 when) {
    while (f->next_end <= when && !f->is_broken) {
        f->now = f->next_end;
        for (i64 stream = 0; stream < f->step->streams; stream++) {
            Flow *flow = &f->flows[stream];
            if (flow->task < 0 || flow->ends != f->now) continue;
            finish(f, flow->task);
            flow->task = -1;
            f->flowing--;
            feed(f, stream);
        }
        set_rates(f);
    }
    f->now = when;
}

static void stand_still(Fluid *f, i64 awaited) {
    i64 since = f->now;
    while (f->is_unfinished[awaited] && f->next_end < NEVER) run_until(f, f->next_end);
    f->times.exposed[awaited] += f->now - since;
}

/* Compute that collectives slow, and that slows them. */
static void compute(Fluid *f, i64 ns) {
    i64 left = ns * UNIT, slowed = UNIT * WHOLE / f->step->compute_slowdown;
    if (slowed < LEAST_RATE) f->is_broken = true;
    f->stretch = ns ? f->step->communication_slowdown : WHOLE;
    set_rates(f);
    while (left > 0 && !f->is_broken) {
        i64 rate = f->flowing ? slowed : UNIT;
        i64 until = f->now + divided_up(left, rate);
        if (f->next_end < until) until = f->next_end;
        left -= (until - f->now) * rate;
        run_until(f, until);
    }
    f->stretch = WHOLE;
    set_rates(f);
}

static i64 play_all(Fluid *f, const i64 *order) {
    const Step *step = f->step;
    bool is_slowed = step->compute_slowdown > WHOLE || step->communication_slowdown > WHOLE;
    i64 host = 0;
    for (i64 at = 0; at < step->tasks && !f->is_broken; at++) {
        i64 task = order[at];
        u8 kind = step->kinds[task];
        if (kind != VIEW) host += step->launch_ns * step->launches[task];
        if (kind == HOST) {
            host = run_on_host(step, task, host, f->times);
            continue;
        }
        if (kind != VIEW && host > f->now) run_until(f, host);
        f->times.ready[task] = f->times.begin[task] = f->now;
        if (kind == START) {
            start(f, task);
            continue;
        }
        if (kind == WAIT)
            stand_still(f, step->awaited[task]);
        else if (kind == COMPUTE && is_slowed)
            compute(f, step->ns[task]);
        else if (kind == COMPUTE)
            run_until(f, f->now + step->ns[task]);
        f->times.end[task] = f->now;
    }
    for (i64 at = 0; at < step->tasks && !f->is_broken; at++)
        if (step->kinds[order[at]] == START && step->first_wait[order[at]] < 0)
            stand_still(f, order[at]);
    return f->now > host ? f->now : host;
}

Played play_contended(const Step *step, const i64 *order, Times times, i64 *total) {
    if (step->total_ns > MOST_NS) return CANNOT_PLAY;
    Arena arena = {0};
    Fluid f = {.step = step,
               .times = times,
               .next_end = NEVER,
               .stretch = WHOLE,
               .flows = arena_take(&arena, step->streams, sizeof(Flow)),
               .queues = arena_take(&arena, step->streams, sizeof(Queue)),
               .next = arena_ints(&arena, step->tasks),
               .on_link = arena_ints(&arena, step->link_count),
               .is_unfinished = arena_flags(&arena, step->tasks)};
    if (arena.failed) {
        arena_free(&arena);
        return NOT_ENOUGH_MEMORY;
    }
    for (i64 stream = 0; stream < step->streams; stream++)
        f.flows[stream].task = f.queues[stream].first = -1;
    *total = play_all(&f, order);
    arena_free(&arena);
    return f.is_broken ? CANNOT_PLAY : PLAYED;
}
