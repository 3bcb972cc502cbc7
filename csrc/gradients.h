// Where gradients lie, asked of torch in 50 to 100 ns for each through DLPack's C exchange
// interface (the structures below are its stable binary interface, version 1), because a Python
// call for each attribute of 300 gradients would take longer than the step's launch.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/numbers.h"

namespace hdet {

namespace dlpack {

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct Exchange {
  uint32_t major, minor;
  Exchange* older;
  void* unused[3];
  int (*tensor_from_object)(void* object, Tensor* out);  // may be null; -1 with a Python error set
};

inline DType dtype_of(const Tensor& t) {
  constexpr uint8_t kFloat = 2, kBfloat = 4;
  if (t.lanes != 1) return DType::none;
  if (t.type_code == kFloat)
    return t.bits == 32 ? DType::f32 : t.bits == 16 ? DType::f16 : DType::none;
  return t.type_code == kBfloat && t.bits == 16 ? DType::bf16 : DType::none;
}

inline int64_t elements(const Tensor& t) {
  int64_t count = 1;
  for (int32_t i = 0; i < t.ndim; ++i) count *= t.shape[i];
  return count;
}

inline bool is_contiguous(const Tensor& t) {
  if (t.strides == nullptr || elements(t) == 0) return true;
  int64_t expected = 1;
  for (int32_t i = t.ndim; i-- > 0;) {
    if (t.shape[i] != 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

inline std::uintptr_t address_of(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
}

// What describes a torch tensor, from torch.Tensor.__dlpack_c_exchange_api__; null where a torch
// has none, or another one.
inline auto describer(const pybind11::object& capsule) -> int (*)(void*, Tensor*) {
  constexpr const char* kCapsule = "dlpack_exchange_api";
  if (PyCapsule_IsValid(capsule.ptr(), kCapsule) == 0) return nullptr;
  const auto* const exchange =
      static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  return exchange->major == 1 ? exchange->tensor_from_object : nullptr;
}

}  // namespace dlpack

// The gradients of one list of parameters; None: there is none. read() takes what a step can use as
// it is: plain tensors of the parameters' shapes, on their device, contiguous, of a type that
// Formats knows. For anything else it says so, and Python finds out what it is.
class Gradients {
 public:
  // `type` is torch.Tensor, `capsule` its __dlpack_c_exchange_api__. Without one, Python sees all
  // lists.
  Gradients(const pybind11::object& type, const pybind11::object& capsule,
            const pybind11::list& params)
      : type_(type), describe_(dlpack::describer(capsule)) {
    for (const pybind11::handle param : params) {
      dlpack::Tensor t{};
      if (describe_ != nullptr && describe_(param.ptr(), &t) != 0) {
        PyErr_Clear();
        describe_ = nullptr;
      }
      if (describe_ == nullptr) return;
      shapes_.emplace_back(t.shape, t.shape + t.ndim);
      device_type_ = t.device_type;
      device_id_ = t.device_id;
    }
    forget();
  }

  static constexpr int kUnusual = -1, kMoved = 1, kRetyped = 2;
  static constexpr std::uintptr_t kEmpty =
      64;  // where an empty gradient lies, which is there and which nobody reads

  // kUnusual, or a sum of what has changed since the last call. A gradient that goes or comes has
  // moved.
  int read(const pybind11::list& gradients) {
    if (describe_ == nullptr || gradients.size() != shapes_.size()) return kUnusual;
    int changes = 0;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      PyObject* const gradient = PyList_GET_ITEM(gradients.ptr(), i);
      std::uintptr_t address = 0;
      if (gradient != Py_None) {
        dlpack::Tensor t{};
        if (reinterpret_cast<PyObject*>(Py_TYPE(gradient)) != type_.ptr()) return forget();
        if (describe_(gradient, &t) != 0) {
          PyErr_Clear();
          return forget();
        }
        const auto type = static_cast<int32_t>(dlpack::dtype_of(t));
        address = dlpack::elements(t) == 0 ? kEmpty : dlpack::address_of(t);
        if (!is_usual(t, i) || type == 0 || address == 0) return forget();
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
  bool is_usual(const dlpack::Tensor& t, size_t i) const {
    const std::vector<int64_t>& shape = shapes_[i];
    return t.device_type == device_type_ && t.device_id == device_id_ &&
           static_cast<size_t>(t.ndim) == shape.size() &&
           (shape.empty() ||
            std::memcmp(t.shape, shape.data(), shape.size() * sizeof(int64_t)) == 0) &&
           dlpack::is_contiguous(t);
  }

  pybind11::object type_;
  int (*describe_)(void*, dlpack::Tensor*);
  std::vector<std::vector<int64_t>> shapes_;
  int32_t device_type_ = 0, device_id_ = 0;
  std::vector<std::uintptr_t> addresses_;
  std::vector<int32_t> types_;
};

}  // namespace hdet
