/* The native loops for Python: steps and facts as objects, arrays by the buffer protocol.
 *
 * All that comes in is checked here and in functions.c, so that the loops can trust it: lengths, types, indices, sums.
 */

#include "arrays.h"
#include "facts.h"
#include "functions.h"
#include "sweep.h"

#define INTERFACE 3 /* what undertow/native/__init__.py asks for: to count up when it changes */

typedef struct {
    PyObject_HEAD
    Step step;
} StepObject;

typedef struct {
    PyObject_HEAD
    Facts facts;
    bool is_captured;
} FactsObject;

typedef struct {
    PyTypeObject *step_type, *facts_type;
} Module;

/* -- orders ----------------------------------------------------------------------------------- */

/* Whether it is a permutation; an exception if not. `place` is its inverse. */
static bool invert(const i64 *order, i64 tasks, i64 *place) {
    for (i64 at = 0; at < tasks; at++) place[at] = -1;
    for (i64 at = 0; at < tasks; at++) {
        if (order[at] < 0 || order[at] >= tasks || place[order[at]] >= 0) {
            PyErr_SetString(PyExc_ValueError, "order: not a permutation of the tasks");
            return false;
        }
        place[order[at]] = at;
    }
    return true;
}

static bool is_permutation(const i64 *order, i64 tasks) {
    i64 *place = PyMem_Malloc((size_t)(tasks + 1) * sizeof(i64));
    if (!place) {
        PyErr_NoMemory();
        return false;
    }
    bool is_one = invert(order, tasks, place);
    PyMem_Free(place);
    return is_one;
}

/* -- steps ------------------------------------------------------------------------------------ */

enum {
    KIND, NS, STREAM, LAUNCHES, AWAITED, TOUCH_COUNTS, /* per task */
    SRC, DST, IS_TRUE,                                 /* per edge */
    MADE, LOADS, GIVEN_COUNTS,                         /* per start */
    NBYTES, IS_THERE, STAYS,                           /* per buffer */
    LINK_COUNTS,                                       /* per stream */
    TOUCHED, GIVEN, LINKS, STEP_COLUMNS
};

static PyObject *step_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"kinds",     "ns",          "streams",      "launches", "awaited",
                            "touch_counts", "src",      "dst",          "is_true",  "made",
                            "loads",     "given_counts", "nbytes",      "is_there", "stays",
                            "link_counts", "touched",   "given",        "links",    "link_count",
                            "launch_ns", "compute_slowdown", "communication_slowdown", NULL};
    PyObject *objects[STEP_COLUMNS];
    Py_buffer views[STEP_COLUMNS];
    long long link_count, launch_ns, slow_compute, slow_communication;
    PyObject **o = objects;
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "$OOOOOOOOOOOOOOOOOOOLLLL", names, &o[0], &o[1], &o[2], &o[3], &o[4],
            &o[5], &o[6], &o[7], &o[8], &o[9], &o[10], &o[11], &o[12], &o[13], &o[14], &o[15],
            &o[16], &o[17], &o[18], &link_count, &launch_ns, &slow_compute, &slow_communication))
        return NULL;
    Py_ssize_t tasks = PyObject_Length(o[KIND]), buffers = PyObject_Length(o[NBYTES]);
    Py_ssize_t edges = PyObject_Length(o[SRC]), starts = PyObject_Length(o[MADE]);
    Py_ssize_t streams = PyObject_Length(o[LINK_COUNTS]);
    if (tasks < 0 || buffers < 0 || edges < 0 || starts < 0 || streams < 0) return NULL;
    Column columns[STEP_COLUMNS];
    for (int k = 0; k < STEP_COLUMNS; k++) {
        bool are_flags = k == KIND || k == IS_TRUE || k == IS_THERE || k == STAYS;
        i64 length = k < SRC ? tasks : k < MADE ? edges : k < NBYTES ? starts : buffers;
        if (k >= LINK_COUNTS) length = k == LINK_COUNTS ? streams : -1;
        columns[k] = (Column){names[k], are_flags ? FLAGS : INTS, length, false, false};
    }
    if (!take_all(objects, views, columns, STEP_COLUMNS)) return NULL;
    Parts parts = {.tasks = tasks,
                   .starts = starts,
                   .buffers = buffers,
                   .streams = streams,
                   .edges = edges,
                   .touched = views[TOUCHED].shape[0],
                   .given = views[GIVEN].shape[0],
                   .links = views[LINKS].shape[0],
                   .link_count = link_count,
                   .compute_slowdown = slow_compute,
                   .communication_slowdown = slow_communication,
                   .loads = views[LOADS].buf,
                   .link_counts = views[LINK_COUNTS].buf,
                   .links_of = views[LINKS].buf,
                   .launch_ns = launch_ns,
                   .kinds = views[KIND].buf,
                   .is_there = views[IS_THERE].buf,
                   .stays = views[STAYS].buf,
                   .is_true = views[IS_TRUE].buf,
                   .ns = views[NS].buf,
                   .stream = views[STREAM].buf,
                   .launches = views[LAUNCHES].buf,
                   .awaited = views[AWAITED].buf,
                   .made_nbytes = views[MADE].buf,
                   .src = views[SRC].buf,
                   .dst = views[DST].buf,
                   .touch_counts = views[TOUCH_COUNTS].buf,
                   .touches = views[TOUCHED].buf,
                   .given_counts = views[GIVEN_COUNTS].buf,
                   .givens = views[GIVEN].buf,
                   .nbytes = views[NBYTES].buf};
    const char *wrong = check_parts(&parts);
    StepObject *made = NULL;
    if (wrong) {
        PyErr_Format(PyExc_ValueError, "no step for the native core: %s", wrong);
    } else if ((made = (StepObject *)type->tp_alloc(type, 0)) && !step_make(&made->step, &parts)) {
        Py_CLEAR(made);
        PyErr_NoMemory();
    }
    release_all(views, STEP_COLUMNS);
    return (PyObject *)made;
}

static void step_dealloc(StepObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    step_free(&self->step);
    type->tp_free(self);
    Py_DECREF(type);
}

/* A copy of what holds a step has none: it is made again where it is asked for. */
static PyObject *step_reduce(StepObject *self, PyObject *Py_UNUSED(none)) {
    (void)self;
    return Py_BuildValue("O()", Py_TYPE(Py_None));
}

static PyObject *step_play(StepObject *self, PyObject *args) {
    enum { ORDER, READY, BEGIN, END, EXPOSED, COLUMNS };
    PyObject *o[COLUMNS];
    Py_buffer views[COLUMNS];
    int is_contended;
    if (!PyArg_ParseTuple(args, "OOOOOp", &o[0], &o[1], &o[2], &o[3], &o[4], &is_contended))
        return NULL;
    i64 tasks = self->step.tasks, total = 0;
    const Column columns[COLUMNS] = {{"order", INTS, tasks, false, false},
                                     {"ready", INTS, tasks, true, false},
                                     {"begin", INTS, tasks, true, false},
                                     {"end", INTS, tasks, true, false},
                                     {"exposed", INTS, tasks, true, false}};
    if (!take_all(o, views, columns, COLUMNS)) return NULL;
    Times times = {views[READY].buf, views[BEGIN].buf, views[END].buf, views[EXPOSED].buf};
    bool is_legal = is_permutation(views[ORDER].buf, tasks);
    Played outcome = CANNOT_PLAY;
    if (is_legal && is_contended)
        outcome = play_contended(&self->step, views[ORDER].buf, times, &total);
    else if (is_legal)
        outcome = play(&self->step, views[ORDER].buf, times, &total);
    release_all(views, COLUMNS);
    if (!is_legal) return NULL;
    if (outcome == NOT_ENOUGH_MEMORY) return PyErr_NoMemory();
    if (outcome == CANNOT_PLAY) Py_RETURN_NONE;
    return PyLong_FromLongLong(total);
}

static PyObject *step_sweep(StepObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"order",       "new_order", "moved",        "only",  "ready",
                            "begin",       "end",       "way",          "limit", "in_flight",
                            "cheap_share", "cheap_ns",  "most_members", "steps", "total_ns",
                            NULL};
    enum { ORDER, NEW_ORDER, MOVED, ONLY, READY, BEGIN, END, COLUMNS };
    PyObject *o[COLUMNS];
    Py_buffer views[COLUMNS];
    int way;
    long long limit, in_flight, share, cheap_ns, members, steps, total_ns;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "$OOOOOOOiLLLLLLL", names, &o[0], &o[1], &o[2],
                                     &o[3], &o[4], &o[5], &o[6], &way, &limit, &in_flight, &share,
                                     &cheap_ns, &members, &steps, &total_ns))
        return NULL;
    if (way < RAISE_ALL || way > SINK_AS_NEEDED || share <= 0)
        return PyErr_Format(PyExc_ValueError, "no such pass");
    i64 tasks = self->step.tasks;
    bool has_times = way == RAISE_AS_NEEDED;
    const Column columns[COLUMNS] = {
        {"order", INTS, tasks, false, false},   {"new_order", INTS, tasks, true, false},
        {"moved", FLAGS, tasks, true, false},   {"only", FLAGS, tasks, false, true},
        {"ready", INTS, tasks, false, !has_times}, {"begin", INTS, tasks, false, !has_times},
        {"end", INTS, tasks, false, !has_times}};
    if (!take_all(o, views, columns, COLUMNS)) return NULL;
    Pass pass = {way, views[ORDER].buf, limit, in_flight, share, cheap_ns, members, steps,
                 views[ONLY].buf, views[READY].buf, views[BEGIN].buf, views[END].buf, total_ns};
    Swept swept = {views[NEW_ORDER].buf, views[MOVED].buf, 0};
    bool is_legal = is_permutation(pass.order, tasks);
    bool is_done = is_legal && sweep(&self->step, &pass, &swept);
    release_all(views, COLUMNS);
    if (!is_done) return is_legal ? PyErr_NoMemory() : NULL;
    return PyLong_FromLongLong(swept.used);
}

/* Whether each task has a leader, which leads itself; an exception if not. */
static bool are_leaders(const i64 *leader, i64 tasks) {
    for (i64 k = 0; k < tasks; k++) {
        bool is_task = leader[k] >= 0 && leader[k] < tasks;
        if (is_task && leader[leader[k]] == leader[k]) continue;
        PyErr_SetString(PyExc_ValueError, "leader: not tasks that lead themselves");
        return false;
    }
    return true;
}

static PyObject *step_contracted(StepObject *self, PyObject *args) {
    enum { LEADER, ORDER, COLUMNS };
    PyObject *o[COLUMNS];
    Py_buffer views[COLUMNS];
    if (!PyArg_ParseTuple(args, "OO", &o[0], &o[1])) return NULL;
    i64 tasks = self->step.tasks, placed = 0;
    const Column columns[COLUMNS] = {{"leader", INTS, tasks, false, false},
                                     {"order", INTS, tasks, true, false}};
    if (!take_all(o, views, columns, COLUMNS)) return NULL;
    bool is_legal = are_leaders(views[LEADER].buf, tasks);
    bool is_done =
        is_legal && contract(&self->step, views[LEADER].buf, views[ORDER].buf, &placed);
    release_all(views, COLUMNS);
    if (!is_done) return is_legal ? PyErr_NoMemory() : NULL;
    return PyLong_FromLongLong(placed);
}

static PyObject *step_ends(StepObject *self, PyObject *args) {
    enum { TAKEN, LAUNCHED, BEGIN, READY, AFTER_END, AFTER_READY, COLUMNS };
    PyObject *o[COLUMNS];
    Py_buffer views[COLUMNS];
    if (!PyArg_ParseTuple(args, "OOOOOO", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5])) return NULL;
    const Step *step = &self->step;
    Column columns[COLUMNS];
    const char *names[COLUMNS] = {"ns", "launches", "begin", "ready", "after_end", "after_ready"};
    for (int k = 0; k < COLUMNS; k++)
        columns[k] = (Column){names[k], INTS, step->tasks, k >= BEGIN, false};
    if (!take_all(o, views, columns, COLUMNS)) return NULL;
    const i64 *ns = views[TAKEN].buf, *launches = views[LAUNCHED].buf;
    bool is_small = are_times(step, ns, launches);
    bool is_done =
        is_small && find_heads(step, ns, launches, views[BEGIN].buf, views[READY].buf);
    if (is_done) find_tails(step, ns, views[AFTER_END].buf, views[AFTER_READY].buf);
    release_all(views, COLUMNS);
    if (!is_small) return PyErr_Format(PyExc_ValueError, "ns or launches: out of range");
    if (!is_done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *step_runs(StepObject *self, PyObject *args) {
    enum { STAYS_ALONE, ROOM, RUN_OF, COLUMNS };
    PyObject *o[COLUMNS];
    Py_buffer views[COLUMNS];
    long long little, short_ns, run_ns;
    if (!PyArg_ParseTuple(args, "OOOLLL", &o[0], &o[1], &o[2], &little, &short_ns, &run_ns))
        return NULL;
    i64 tasks = self->step.tasks, runs = 0;
    const Column columns[COLUMNS] = {{"stays_alone", FLAGS, tasks, false, false},
                                     {"room", INTS, tasks, false, false},
                                     {"run_of", INTS, tasks, true, false}};
    if (!take_all(o, views, columns, COLUMNS)) return NULL;
    Joining joining = {views[STAYS_ALONE].buf, views[ROOM].buf, little, short_ns, run_ns};
    bool is_done = find_runs(&self->step, &joining, views[RUN_OF].buf, &runs);
    release_all(views, COLUMNS);
    return is_done ? PyLong_FromLongLong(runs) : PyErr_NoMemory();
}

static PyObject *step_memory(StepObject *self, PyObject *args) {
    enum { ORDER, DURING, AFTERWARDS, COLUMNS };
    PyObject *o[COLUMNS];
    Py_buffer views[COLUMNS];
    if (!PyArg_ParseTuple(args, "OOO", &o[0], &o[1], &o[2])) return NULL;
    i64 tasks = self->step.tasks;
    const Column columns[COLUMNS] = {{"order", INTS, tasks, false, false},
                                     {"during", INTS, tasks, true, false},
                                     {"after", INTS, tasks, true, false}};
    if (!take_all(o, views, columns, COLUMNS)) return NULL;
    bool is_legal = is_permutation(views[ORDER].buf, tasks);
    bool is_done = is_legal && live_bytes(&self->step, views[ORDER].buf, views[DURING].buf,
                                          views[AFTERWARDS].buf);
    release_all(views, COLUMNS);
    if (!is_done) return is_legal ? PyErr_NoMemory() : NULL;
    Py_RETURN_NONE;
}

/* -- facts ------------------------------------------------------------------------------------ */

static void facts_dealloc(FactsObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    facts_free(&self->facts);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *make_facts(PyTypeObject *type, const Step *step, const i64 *order, Cheap cheap) {
    FactsObject *made = (FactsObject *)type->tp_alloc(type, 0);
    i64 *place = PyMem_Malloc((size_t)(step->tasks + 1) * sizeof(i64));
    if (!made || !place) {
        Py_CLEAR(made);
        PyErr_NoMemory();
    } else if (!invert(order, step->tasks, place)) {
        Py_CLEAR(made);
    } else {
        made->is_captured = true;
        for (i64 at = 0; at < step->tasks; at++) made->is_captured &= order[at] == at;
        bool is_done = step_renumber(&made->facts.step, step, order, place);
        if (!is_done || !facts_find(&made->facts, cheap)) {
            Py_CLEAR(made);
            PyErr_NoMemory();
        }
    }
    PyMem_Free(place);
    return (PyObject *)made;
}

static PyObject *step_facts(StepObject *self, PyTypeObject *defining, PyObject *const *args,
                            Py_ssize_t count, PyObject *keywords) {
    if (count != 3 || (keywords && PyTuple_GET_SIZE(keywords)))
        return PyErr_Format(PyExc_TypeError, "facts(order, cheap_share, cheap_ns)");
    Cheap cheap = {PyLong_AsLongLong(args[1]), PyLong_AsLongLong(args[2])};
    if (PyErr_Occurred()) return NULL;
    if (cheap.cheap_share <= 0) return PyErr_Format(PyExc_ValueError, "cheap_share");
    Py_buffer order;
    if (!take(args[0], &order, "order", INTS, self->step.tasks, false)) return NULL;
    Module *module = PyType_GetModuleState(defining);
    PyObject *made = make_facts(module->facts_type, &self->step, order.buf, cheap);
    PyBuffer_Release(&order);
    return made;
}

static PyObject *facts_construct(FactsObject *self, PyObject *args) {
    PyObject *out;
    long long horizon, window, limit, in_flight, kept, idle;
    if (!PyArg_ParseTuple(args, "OLLLLLL", &out, &horizon, &window, &limit, &in_flight, &kept,
                          &idle))
        return NULL;
    i64 tasks = self->facts.step.tasks;
    if (kept < 0 || kept > tasks || window < 0 || window > NEVER)
        return PyErr_Format(PyExc_ValueError, "kept or window: out of range");
    Py_buffer view;
    if (!take(out, &view, "order", INTS, tasks, true)) return NULL;
    Asked asked = {horizon, window, limit, in_flight, kept, idle};
    Built built = {.order = view.buf};
    Outcome outcome = construct(&self->facts, &asked, &built);
    PyBuffer_Release(&view);
    if (outcome == NO_MEMORY) return PyErr_NoMemory();
    if (outcome == STUCK) return PyErr_Format(PyExc_IndexError, "no task is ready");
    if (outcome == TOO_LONG) Py_RETURN_NONE;
    return Py_BuildValue("LO", (long long)built.reach_ns, built.was_held ? Py_True : Py_False);
}

static PyObject *facts_delayed(FactsObject *self, PyObject *args) {
    PyObject *out;
    int is_frugal;
    if (!PyArg_ParseTuple(args, "Op", &out, &is_frugal)) return NULL;
    if (!self->is_captured) return PyErr_Format(PyExc_ValueError, "not in captured order");
    Py_buffer view;
    if (!take(out, &view, "order", INTS, self->facts.step.tasks, true)) return NULL;
    bool is_done = delayed_order(&self->facts, is_frugal, view.buf);
    PyBuffer_Release(&view);
    if (!is_done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *facts_compute_ns(FactsObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(self->facts.compute_before[self->facts.step.tasks]);
}

/* -- the module ------------------------------------------------------------------------------- */

static PyMethodDef module_methods[] = {
    {"rows_counted", rows_counted, METH_VARARGS, "The lengths of rows, and their sum."},
    {"rows_listed", rows_listed, METH_VARARGS, "All that is in rows."},
    {"rows_made", rows_made, METH_VARARGS, "Values in rows."},
    {"hazards", hazards, METH_VARARGS, "Why tasks come before others."},
    {NULL, NULL, 0, NULL}};

static PyMethodDef step_methods[] = {
    {"play", (PyCFunction)step_play, METH_VARARGS, "The simulator's players."},
    {"sweep", (PyCFunction)(void (*)(void))step_sweep, METH_VARARGS | METH_KEYWORDS,
     "One pass that moves starts up or waits down."},
    {"contracted", (PyCFunction)step_contracted, METH_VARARGS, "Groups of tasks as one."},
    {"ends", (PyCFunction)step_ends, METH_VARARGS, "Heads and tails."},
    {"runs", (PyCFunction)step_runs, METH_VARARGS, "Tasks that stay together."},
    {"memory", (PyCFunction)step_memory, METH_VARARGS, "Live bytes over an order."},
    {"facts", (PyCFunction)(void (*)(void))step_facts,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, "What constructions need to know."},
    {"__reduce__", (PyCFunction)step_reduce, METH_NOARGS, "None, where it is copied."},
    {NULL, NULL, 0, NULL}};

static PyMethodDef facts_methods[] = {
    {"construct", (PyCFunction)facts_construct, METH_VARARGS, "An order built by a policy."},
    {"delayed", (PyCFunction)facts_delayed, METH_VARARGS, "Work behind blocking starts."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef facts_attributes[] = {
    {"compute_ns", (getter)facts_compute_ns, NULL, "What compute takes in all.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot step_slots[] = {{Py_tp_new, step_new},
                                   {Py_tp_dealloc, step_dealloc},
                                   {Py_tp_methods, step_methods},
                                   {0, NULL}};
static PyType_Spec step_spec = {"undertow.native.core.Step", sizeof(StepObject), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, step_slots};

static PyType_Slot facts_slots[] = {{Py_tp_dealloc, facts_dealloc},
                                    {Py_tp_methods, facts_methods},
                                    {Py_tp_getset, facts_attributes},
                                    {0, NULL}};
static PyType_Spec facts_spec = {
    "undertow.native.core.Facts", sizeof(FactsObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, facts_slots};

static int module_exec(PyObject *module) {
    Module *state = PyModule_GetState(module);
    state->step_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &step_spec, NULL);
    state->facts_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &facts_spec, NULL);
    if (!state->step_type || !state->facts_type) return -1;
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0) return -1;
    if (PyModule_AddType(module, state->step_type) < 0) return -1;
    return PyModule_AddType(module, state->facts_type);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    Module *state = PyModule_GetState(module);
    Py_VISIT(state->step_type);
    Py_VISIT(state->facts_type);
    return 0;
}

static int module_clear(PyObject *module) {
    Module *state = PyModule_GetState(module);
    Py_CLEAR(state->step_type);
    Py_CLEAR(state->facts_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                                        "core",
                                        "The solver's hot loops.",
                                        sizeof(Module),
                                        module_methods,
                                        module_slots,
                                        module_traverse,
                                        module_clear,
                                        NULL};

PyMODINIT_FUNC PyInit_core(void) { return PyModuleDef_Init(&module_def); }
