/* Arrays of Python by the buffer protocol. */

#include "arrays.h"

bool take(PyObject *object, Py_buffer *view, const char *name, Items items, i64 length,
          bool is_written) {
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) < 0) return false;
    const char *formats = items == INTS ? "lq" : "?B", *format = view->format ? view->format : "B";
    bool is_known = strlen(format) == 1 && strchr(formats, format[0]) != NULL;
    if (!is_known || view->itemsize != items || view->ndim != 1)
        PyErr_Format(PyExc_TypeError, "%s: not a plain array of %s", name,
                     items == INTS ? "64-bit integers" : "flags");
    else if (view->shape[0] && (uintptr_t)view->buf % items)
        PyErr_Format(PyExc_ValueError, "%s: not aligned", name);
    else if (length >= 0 && view->shape[0] != length)
        PyErr_Format(PyExc_ValueError, "%s: %zd entries, not %lld", name, view->shape[0],
                     (long long)length);
    else
        return true;
    PyBuffer_Release(view);
    return false;
}

void release_all(Py_buffer *views, int count) {
    for (int k = 0; k < count; k++)
        if (views[k].obj) PyBuffer_Release(&views[k]);
}

bool take_all(PyObject **objects, Py_buffer *views, const Column *columns, int count) {
    memset(views, 0, (size_t)count * sizeof(Py_buffer));
    for (int k = 0; k < count; k++) {
        const Column *column = &columns[k];
        if (column->is_optional && objects[k] == Py_None) continue;
        if (take(objects[k], &views[k], column->name, column->items, column->length,
                 column->is_written))
            continue;
        views[k].obj = NULL;
        release_all(views, k);
        return false;
    }
    return true;
}
