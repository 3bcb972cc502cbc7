// Where tensors lie, asked of torch in about 20 ns for each, because a Python call for each
// attribute of 300 gradients would take longer than the step's launch.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/numbers.h"

namespace hdet {

// torch's stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h). Python looks it up, so this
// module is built without torch and runs beside any. An at::Tensor is a pointer to what torch
// knows.
struct Torch {
  using Tensor = const std::uintptr_t*;
  template <class Result>
  using Function = int32_t (*)(Tensor, Result*);

  std::uintptr_t word;  // in which a Python object has its at::Tensor
  Function<void*> get_data;
  Function<int32_t> get_dtype, get_layout, get_device_type, get_device_index;
  Function<int64_t> get_dim;
  Function<int64_t*> get_sizes, get_strides;

  struct View {
    void* data;
    int32_t dtype;
    int64_t dim, *sizes, *strides;
  };

  explicit Torch(const std::vector<std::uintptr_t>& interface) {
    static_assert(sizeof(Torch) == 9 * sizeof(std::uintptr_t));
    if (interface.size() != 9) throw pybind11::value_error("not torch's interface");
    std::memcpy(static_cast<void*>(this), interface.data(), sizeof(Torch));
  }

  Tensor tensor(const pybind11::list& list, size_t i) const {
    return reinterpret_cast<Tensor>(PyList_GET_ITEM(list.ptr(), i)) + word;
  }

  bool view(Tensor t, View* out) const {
    int32_t layout = 0;
    return get_layout(t, &layout) == 0 && layout == 0 && get_data(t, &out->data) == 0 &&
           get_dtype(t, &out->dtype) == 0 && get_dim(t, &out->dim) == 0 &&
           get_sizes(t, &out->sizes) == 0 && get_strides(t, &out->strides) == 0;
  }

  static DType dtype_of(const View& v) {
    return v.dtype == 6    ? DType::f32
           : v.dtype == 15 ? DType::bf16
           : v.dtype == 5  ? DType::f16
                           : DType::none;
  }

  static int64_t elements(const View& v) {
    int64_t count = 1;
    for (int64_t i = 0; i < v.dim; ++i) count *= v.sizes[i];
    return count;
  }

  static bool is_contiguous(const View& v) {
    int64_t expected = 1;
    for (int64_t i = v.dim; i-- > 0;) {
      if (v.sizes[i] != 1 && v.strides[i] != expected) return false;
      expected *= v.sizes[i];
    }
    return true;
  }
};

// Where tensors lay when this was made, and their types, shapes and strides.
class NotedMemory {
 public:
  NotedMemory(const Torch& torch, const pybind11::list& tensors) : torch_(torch) {
    describe(tensors, [this](int64_t number) {
      known_.push_back(number);
      return true;
    });
  }

  bool same(const pybind11::list& tensors) const {
    size_t place = 0;
    const bool alike = describe(tensors, [&](int64_t number) {
      return place < known_.size() && known_[place++] == number;
    });
    return alike && place == known_.size();
  }

 private:
  // Shows numbers that describe the tensors until `look` says no, or one of them is not dense.
  template <class Look>
  bool describe(const pybind11::list& tensors, const Look& look) const {
    constexpr size_t kAhead = 8;  // the next ones are fetched meanwhile
    const size_t count = tensors.size();
    for (size_t i = 0; i < count; ++i) {
      if (i + 2 * kAhead < count) __builtin_prefetch(torch_.tensor(tensors, i + 2 * kAhead));
      if (i + kAhead < count) {
        const auto* const next = reinterpret_cast<const char*>(*torch_.tensor(tensors, i + kAhead));
        for (int line = 0; line < 3; ++line) __builtin_prefetch(next + 64 * line);
      }
      Torch::View v{};
      if (!look(reinterpret_cast<int64_t>(Py_TYPE(PyList_GET_ITEM(tensors.ptr(), i)))) ||
          !torch_.view(torch_.tensor(tensors, i), &v) || !look(reinterpret_cast<int64_t>(v.data)) ||
          !look(v.dtype) || !look(v.dim))
        return false;
      for (int64_t d = 0; d < v.dim; ++d) {
        if (!look(v.sizes[d]) || !look(v.strides[d])) return false;
      }
    }
    return true;
  }

  Torch torch_;
  std::vector<int64_t> known_;
};

// The gradients of one list of parameters; None: there is none. read() takes what a step can use as
// it is: plain tensors of the parameters' shapes, on their device, contiguous, of a type that
// Formats knows. For anything else it says so, and Python finds out what it is.
class Gradients {
 public:
  // `type` is torch.Tensor.
  Gradients(const pybind11::object& type, const Torch& torch, const pybind11::list& params)
      : type_(type), torch_(torch) {
    for (size_t i = 0; i < params.size(); ++i) {
      Torch::View v{};
      const Torch::Tensor param = torch_.tensor(params, i);
      if (!torch_.view(param, &v)) break;  // and no list is as long as shapes_
      shapes_.emplace_back(v.sizes, v.sizes + v.dim);
      torch_.get_device_type(param, &device_type_);
      torch_.get_device_index(param, &device_index_);
    }
    forget();
  }

  static constexpr int kUnusual = -1, kMoved = 1, kRetyped = 2;
  static constexpr std::uintptr_t kEmpty =
      64;  // where an empty gradient lies, which is there and which nobody reads

  // kUnusual, or a sum of what has changed since the last call. A gradient that goes or comes has
  // moved.
  int read(const pybind11::list& gradients) {
    if (gradients.size() != shapes_.size()) return kUnusual;
    int changes = 0;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      PyObject* const gradient = PyList_GET_ITEM(gradients.ptr(), i);
      std::uintptr_t address = 0;
      if (gradient != Py_None) {
        Torch::View v{};
        const Torch::Tensor t = torch_.tensor(gradients, i);
        if (reinterpret_cast<PyObject*>(Py_TYPE(gradient)) != type_.ptr() || !torch_.view(t, &v))
          return forget();
        const auto type = static_cast<int32_t>(Torch::dtype_of(v));
        address = Torch::elements(v) == 0 ? kEmpty : reinterpret_cast<std::uintptr_t>(v.data);
        if (!is_usual(t, v, i) || type == 0 || address == 0) return forget();
        if (types_[i] != type) changes |= kRetyped;
        types_[i] = type;
      }
      if (addresses_[i] != address) changes |= kMoved;
      addresses_[i] = address;
    }
    return changes;
  }

  // The next list is new, whatever it is.
  int forget() {
    addresses_.assign(shapes_.size(), UINTPTR_MAX);
    types_.assign(shapes_.size(), 0);
    return kUnusual;
  }

  // Of the last list that read() took: addresses, 0 where there was no gradient; and DTypes, 0
  // where there has never been one.
  void write_addresses(std::uintptr_t* out) const {
    std::copy(addresses_.begin(), addresses_.end(), out);
  }
  const std::vector<int32_t>& types() const { return types_; }

 private:
  bool is_usual(Torch::Tensor t, const Torch::View& v, size_t i) const {
    const std::vector<int64_t>& shape = shapes_[i];
    int32_t type = 0, index = 0;
    return torch_.get_device_type(t, &type) == 0 && type == device_type_ &&
           torch_.get_device_index(t, &index) == 0 && index == device_index_ &&
           std::equal(shape.begin(), shape.end(), v.sizes, v.sizes + v.dim) &&
           (Torch::is_contiguous(v) || Torch::elements(v) == 0);
  }

  pybind11::object type_;
  Torch torch_;
  std::vector<std::vector<int64_t>> shapes_;
  int32_t device_type_ = 0, device_index_ = 0;
  std::vector<std::uintptr_t> addresses_;
  std::vector<int32_t> types_;
};

}  // namespace hdet
