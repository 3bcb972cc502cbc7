// What an optimizer's step looks at for every tensor, of Python objects: hdet/optim/lists.py has
// the same in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace hdet {

// The same objects in the same places.
inline bool same(const pybind11::list& a, const pybind11::list& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (PyList_GET_ITEM(a.ptr(), i) != PyList_GET_ITEM(b.ptr(), i)) return false;
  }
  return true;
}

// [p.grad for p in params]
inline pybind11::list gradients(const pybind11::list& params) {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  pybind11::list result(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    PyObject* const gradient = PyObject_GetAttr(PyList_GET_ITEM(params.ptr(), i), name);
    if (gradient == nullptr) throw pybind11::error_already_set();
    PyList_SET_ITEM(result.ptr(), i, gradient);
  }
  return result;
}

// The places of None.
inline std::vector<int64_t> absent(const pybind11::list& items) {
  std::vector<int64_t> places;
  for (size_t i = 0; i < items.size(); ++i) {
    if (PyList_GET_ITEM(items.ptr(), i) == Py_None) places.push_back(static_cast<int64_t>(i));
  }
  return places;
}

// Shows all keys and values of a dictionary, and of the dictionaries in it, until `look` says no.
template <class Look>
bool visit(PyObject* dict, bool outer, const Look& look) {
  PyObject *key, *value;
  Py_ssize_t place = 0;
  while (PyDict_Next(dict, &place, &key, &value) != 0) {
    if (!look(key) || !look(value)) return false;
    if (outer && PyDict_Check(value) && !visit(value, false, look)) return false;
  }
  return true;
}

// Everything in a dictionary of dictionaries, in a list: a Python object, so that the garbage
// collector sees who holds whom.
inline pybind11::list contents(const pybind11::dict& outer) {
  pybind11::list found;
  visit(outer.ptr(), true, [&found](PyObject* object) {
    found.append(pybind11::reinterpret_borrow<pybind11::object>(object));
    return true;
  });
  return found;
}

// Whether contents(outer) would be a list of these objects.
inline bool same_contents(const pybind11::dict& outer, const pybind11::list& known) {
  size_t place = 0;
  const size_t count = known.size();
  const bool alike = visit(outer.ptr(), true, [&](PyObject* object) {
    return place < count && PyList_GET_ITEM(known.ptr(), place++) == object;
  });
  return alike && place == count;
}

}  // namespace hdet
