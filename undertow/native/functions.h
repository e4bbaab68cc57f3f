#ifndef UNDERTOW_FUNCTIONS_H
#define UNDERTOW_FUNCTIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Of rows: a list or tuple of lists or tuples of numbers. */
PyObject *rows_counted(PyObject *module, PyObject *args); /* (rows, counts): items in all */
PyObject *rows_listed(PyObject *module, PyObject *args);  /* (rows, items): None */
PyObject *rows_made(PyObject *module, PyObject *args);    /* (values, counts): tuples of so many */
/* Of columns, as core.pyi lists them: how many edges there are. */
PyObject *hazards(PyObject *module, PyObject *args);

#endif
