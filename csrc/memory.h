// What tensors are in memory, asked of torch's stable C interface (aoti_torch/c/shim.h) in about 20
// ns for each: a step asks it of every parameter and all of its state. Python looks up the
// functions, so that this module is built without torch and runs beside any.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

namespace hdet {

// Where tensors lay when this was made, and their types, shapes and strides. Not usable where torch
// lacks a function, or one of them is no dense tensor.
class NotedMemory {
 public:
  // `functions`: addresses of aoti_torch_get_data_ptr, dtype, dim, sizes and strides, or none.
  NotedMemory(const std::vector<std::uintptr_t>& functions, const pybind11::list& tensors)
      : functions_(functions) {
    usable_ =
        functions.size() == 5 && find_tensors(tensors) && describe(tensors, [this](int64_t number) {
          known_.push_back(number);
          return true;
        });
  }

  bool usable() const { return usable_; }

  bool same(const pybind11::list& tensors) const {
    size_t place = 0;
    const bool alike = describe(tensors, [&](int64_t number) {
      return place < known_.size() && known_[place++] == number;
    });
    return alike && place == known_.size();
  }

 private:
  // In which word of its Python object a tensor has its at::Tensor, a pointer to its
  // implementation.
  bool find_tensors(const pybind11::list& tensors) {
    for (const pybind11::handle tensor : tensors) {
      const auto implementation = tensor.attr("_cdata").cast<std::uintptr_t>();
      const auto* const words = reinterpret_cast<const std::uintptr_t*>(tensor.ptr());
      const size_t size = Py_TYPE(tensor.ptr())->tp_basicsize / sizeof(std::uintptr_t);
      size_t word = word_ == 0 ? sizeof(PyObject) / sizeof(std::uintptr_t) : word_;
      while (word_ == 0 && word < size && words[word] != implementation) ++word;
      if (word >= size || words[word] != implementation) return false;
      word_ = word;
    }
    return true;
  }

  const std::uintptr_t* word_of(const pybind11::list& tensors, size_t i) const {
    return reinterpret_cast<std::uintptr_t*>(PyList_GET_ITEM(tensors.ptr(), i)) + word_;
  }

  template <class Result>
  bool ask(size_t function, const void* tensor, Result* out) const {
    using Function = int32_t (*)(const void*, Result*);
    return reinterpret_cast<Function>(functions_[function])(tensor, out) == 0;
  }

  // Shows numbers that describe the tensors until `look` says no, or a tensor is not described.
  template <class Look>
  bool describe(const pybind11::list& tensors, const Look& look) const {
    constexpr size_t kAhead = 8;  // the next ones are fetched meanwhile
    const size_t count = tensors.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + 2 * kAhead < count) __builtin_prefetch(word_of(tensors, i + 2 * kAhead));
      if (i + kAhead < count) {
        const auto* const next = reinterpret_cast<const char*>(*word_of(tensors, i + kAhead));
        for (int line = 0; line < 3; ++line) __builtin_prefetch(next + 64 * line);
      }
      const std::uintptr_t* const tensor = word_of(tensors, i);
      const auto type = reinterpret_cast<int64_t>(Py_TYPE(PyList_GET_ITEM(tensors.ptr(), i)));
      void* data = nullptr;
      int32_t dtype = 0;
      int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
      if (!look(type) || !ask(0, tensor, &data) || !ask(1, tensor, &dtype) ||
          !ask(2, tensor, &dim) || !ask(3, tensor, &sizes) || !ask(4, tensor, &strides) ||
          !look(reinterpret_cast<int64_t>(data)) || !look(dtype) || !look(dim))
        return false;
      for (int64_t d = 0; d < dim; ++d) {
        if (!look(sizes[d]) || !look(strides[d])) return false;
      }
    }
    return true;
  }

  std::vector<std::uintptr_t> functions_;
  std::vector<int64_t> known_;
  size_t word_ = 0;
  bool usable_ = false;
};

}  // namespace hdet
