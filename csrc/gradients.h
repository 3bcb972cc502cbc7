// Where this step's gradients lie, found in about 10 ns for each: asked of torch through DLPack's C exchange interface (the
// structures below are its stable binary interface, version 1), because a Python call for each attribute of 300 gradients would
// take longer than the step's launch.
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
  if (t.type_code == kFloat) return t.bits == 32 ? DType::f32 : t.bits == 16 ? DType::f16 : DType::none;
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

}  // namespace dlpack

// The gradients of one list of parameters. read() takes what a step can use as it is: plain tensors of the parameters' shapes, on
// their device, contiguous, of a type that Formats knows. For anything else it says so, and Python finds out what it is.
class Gradients {
 public:
  // `type` is torch.Tensor, `capsule` its __dlpack_c_exchange_api__. Where a torch has none, or another one, Python sees all lists.
  Gradients(const pybind11::object& type, const pybind11::object& capsule, const pybind11::list& params) : type_(type) {
    if (PyCapsule_IsValid(capsule.ptr(), kCapsule) != 0) {
      const auto* const exchange = static_cast<const dlpack::Exchange*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
      if (exchange->major == 1) describe_ = exchange->tensor_from_object;
    }
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

  // kUnusual, or a sum of what has changed since the last call.
  int read(const pybind11::list& gradients) {
    if (describe_ == nullptr || gradients.size() != shapes_.size()) return kUnusual;
    int changes = 0;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      PyObject* const gradient = PyList_GET_ITEM(gradients.ptr(), i);
      dlpack::Tensor t{};
      if (reinterpret_cast<PyObject*>(Py_TYPE(gradient)) != type_.ptr()) return forget();
      if (describe_(gradient, &t) != 0) {
        PyErr_Clear();
        return forget();
      }
      const auto type = static_cast<int32_t>(dlpack::dtype_of(t));
      const auto address = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
      if (!is_usual(t, i) || type == 0 || (address == 0 && dlpack::elements(t) != 0)) return forget();
      if (addresses_[i] != address) changes |= kMoved;
      if (types_[i] != type) changes |= kRetyped;
      addresses_[i] = address;
      types_[i] = type;
    }
    return changes;
  }

  // The next list is new, whatever it is.
  int forget() {
    addresses_.assign(shapes_.size(), UINTPTR_MAX);
    types_.assign(shapes_.size(), 0);
    return kUnusual;
  }

  // Addresses and DTypes of the last list that read() took.
  void write_addresses(std::uintptr_t* out) const { std::copy(addresses_.begin(), addresses_.end(), out); }
  const std::vector<int32_t>& types() const { return types_; }

 private:
  bool is_usual(const dlpack::Tensor& t, size_t i) const {
    const std::vector<int64_t>& shape = shapes_[i];
    return t.device_type == device_type_ && t.device_id == device_id_ && static_cast<size_t>(t.ndim) == shape.size() &&
           (shape.empty() || std::memcmp(t.shape, shape.data(), shape.size() * sizeof(int64_t)) == 0) && dlpack::is_contiguous(t);
  }

  static constexpr const char* kCapsule = "dlpack_exchange_api";

  pybind11::object type_;
  int (*describe_)(void*, dlpack::Tensor*) = nullptr;
  std::vector<std::vector<int64_t>> shapes_;
  int32_t device_type_ = 0, device_id_ = 0;
  std::vector<std::uintptr_t> addresses_;
  std::vector<int32_t> types_;
};

}  // namespace hdet
