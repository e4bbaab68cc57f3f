#ifndef UNDERTOW_ARRAYS_H
#define UNDERTOW_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "step.h"

typedef enum { FLAGS = 1, INTS = 8 } Items;

/* The array behind an object, or false with an exception. `length` is what it must have, if any. */
bool take(PyObject *object, Py_buffer *view, const char *name, Items items, i64 length,
          bool is_written);

/* Several of them at once. */
typedef struct {
    const char *name;
    Items items;
    i64 length;
    bool is_written;
    bool is_optional; /* it may be None: then there is no array */
} Column;

bool take_all(PyObject **objects, Py_buffer *views, const Column *columns, int count);
void release_all(Py_buffer *views, int count);

#endif
