/* Functions of the module that need no step: rows as arrays, hazards. */

#include "functions.h"

#include "arrays.h"
#include "hazards.h"

/* -- rows ------------------------------------------------------------------------------------- */

/* What is in a list or tuple, and how much that is; false with an exception for what is neither. */
typedef struct {
    PyObject **items; /* NULL may mean that there are none */
    Py_ssize_t count;
} Row;

static bool look_into(PyObject *sequence, Row *row) {
    if (!PyList_Check(sequence) && !PyTuple_Check(sequence)) {
        PyErr_SetString(PyExc_TypeError, "rows: neither lists nor tuples");
        return false;
    }
    *row = (Row){PySequence_Fast_ITEMS(sequence), PySequence_Fast_GET_SIZE(sequence)};
    return true;
}

PyObject *rows_counted(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *given, *out;
    Py_buffer view;
    Row rows, row;
    if (!PyArg_ParseTuple(args, "OO", &given, &out) || !look_into(given, &rows)) return NULL;
    if (!take(out, &view, "counts", INTS, rows.count, true)) return NULL;
    i64 *counts = view.buf, total = 0;
    for (Py_ssize_t k = 0; k < rows.count && look_into(rows.items[k], &row); k++)
        total += counts[k] = row.count;
    PyBuffer_Release(&view);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(total);
}

/* Plain numbers: none of them runs code of Python's, in which rows could change. */
static bool list_row(const Row *row, i64 *items) {
    for (Py_ssize_t k = 0; k < row->count; k++) {
        if (!PyLong_Check(row->items[k])) {
            PyErr_SetString(PyExc_TypeError, "rows: not of whole numbers");
            return false;
        }
        items[k] = PyLong_AsLongLong(row->items[k]);
        if (items[k] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

PyObject *rows_listed(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *given, *out;
    Py_buffer view;
    Row rows, row;
    if (!PyArg_ParseTuple(args, "OO", &given, &out) || !look_into(given, &rows)) return NULL;
    if (!take(out, &view, "items", INTS, -1, true)) return NULL;
    i64 *items = view.buf, left = view.shape[0];
    for (Py_ssize_t k = 0; k < rows.count && look_into(rows.items[k], &row); k++) {
        if (row.count > left) PyErr_SetString(PyExc_ValueError, "items: too short");
        if (row.count > left || !list_row(&row, items)) break;
        items += row.count;
        left -= row.count;
    }
    if (left && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "items: too long");
    PyBuffer_Release(&view);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *made_row(const i64 *values, i64 count) {
    PyObject *row = PyTuple_New(count);
    for (i64 k = 0; row && k < count; k++) {
        PyObject *value = PyLong_FromLongLong(values[k]);
        if (!value)
            Py_CLEAR(row);
        else
            PyTuple_SET_ITEM(row, k, value);
    }
    return row;
}

PyObject *rows_made(PyObject *Py_UNUSED(module), PyObject *args) {
    enum { VALUES, COUNTS, COLUMNS };
    PyObject *o[COLUMNS], *rows = NULL;
    Py_buffer views[COLUMNS];
    if (!PyArg_ParseTuple(args, "OO", &o[0], &o[1])) return NULL;
    const Column columns[COLUMNS] = {{"values", INTS, -1, false, false},
                                     {"counts", INTS, -1, false, false}};
    if (!take_all(o, views, columns, COLUMNS)) return NULL;
    const i64 *values = views[VALUES].buf, *counts = views[COUNTS].buf;
    i64 count = views[COUNTS].shape[0];
    if (!add_up_to(counts, count, views[VALUES].shape[0]))
        PyErr_SetString(PyExc_ValueError, "counts: not those of the rows");
    else
        rows = PyTuple_New(count);
    for (i64 k = 0; rows && k < count; k++) {
        PyObject *row = made_row(values, counts[k]);
        if (!row)
            Py_CLEAR(rows);
        else
            PyTuple_SET_ITEM(rows, k, row);
        values += counts[k];
    }
    release_all(views, COLUMNS);
    return rows;
}

/* -- hazards ---------------------------------------------------------------------------------- */

/* Rows that have so many items each; false, with an exception, if those are not all there. */
static bool rows_of(Rows *rows, const Py_buffer *counts, const Py_buffer *items, Arena *arena) {
    i64 count = counts->shape[0];
    const i64 *lengths = counts->buf;
    rows->items = items->buf;
    if (!add_up_to(lengths, count, items->shape[0])) {
        PyErr_SetString(PyExc_ValueError, "counts: not those of the rows");
        return false;
    }
    rows->begins = arena_ints(arena, count + 1);
    if (!rows->begins) {
        PyErr_NoMemory();
        return false;
    }
    for (i64 k = 0; k < count; k++) rows->begins[k + 1] = rows->begins[k] + lengths[k];
    return true;
}

PyObject *hazards(PyObject *Py_UNUSED(module), PyObject *args) {
    enum {
        KIND_OF, AWAITED_BY, READ_COUNTS, WRITE_COUNTS, AFTER_COUNTS, READS, WRITES, AFTER, THERE,
        FROM, TO, STRENGTH, BUFFER, WRITER, COLUMNS
    };
    PyObject *o[COLUMNS];
    Py_buffer v[COLUMNS];
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOOOO", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6],
                          &o[7], &o[8], &o[9], &o[10], &o[11], &o[12], &o[13]))
        return NULL;
    Py_ssize_t tasks = PyObject_Length(o[KIND_OF]), buffers = PyObject_Length(o[THERE]);
    Py_ssize_t room = PyObject_Length(o[FROM]);
    if (tasks < 0 || buffers < 0 || room < 0) return NULL;
    const Column columns[COLUMNS] = {
        {"kinds", FLAGS, tasks, false, false},       {"awaited", INTS, tasks, false, false},
        {"read_counts", INTS, tasks, false, false},  {"write_counts", INTS, tasks, false, false},
        {"after_counts", INTS, tasks, false, false}, {"reads", INTS, -1, false, false},
        {"writes", INTS, -1, false, false},          {"after", INTS, -1, false, false},
        {"is_there", FLAGS, buffers, false, false},  {"src", INTS, room, true, false},
        {"dst", INTS, room, true, false},            {"strength", INTS, room, true, false},
        {"buffer", INTS, room, true, false},         {"writer", INTS, buffers, true, false}};
    if (!take_all(o, v, columns, COLUMNS)) return NULL;
    Arena arena = {0};
    Touches given = {.tasks = tasks,
                     .buffers = buffers,
                     .kinds = v[KIND_OF].buf,
                     .is_there = v[THERE].buf,
                     .awaited = v[AWAITED_BY].buf};
    Found found = {v[FROM].buf, v[TO].buf, v[STRENGTH].buf, v[BUFFER].buf, 0};
    Derived outcome = REFUSED;
    if (rows_of(&given.reads, &v[READ_COUNTS], &v[READS], &arena) &&
        rows_of(&given.writes, &v[WRITE_COUNTS], &v[WRITES], &arena) &&
        rows_of(&given.after, &v[AFTER_COUNTS], &v[AFTER], &arena)) {
        if (most_edges(&given) > room)
            PyErr_SetString(PyExc_ValueError, "src: too short");
        else if (are_touches(&given))
            outcome = derive_hazards(&given, &found, v[WRITER].buf);
    }
    arena_free(&arena);
    release_all(v, COLUMNS);
    if (PyErr_Occurred()) return NULL;
    if (outcome == NO_ROOM) return PyErr_NoMemory();
    return PyLong_FromLongLong(outcome == DERIVED ? found.count : -1);
}
