// What an optimizer's step looks at for every tensor, read where torch keeps it: a Python call for
// each attribute of 300 tensors would take longer than the step. hdet/optim/lists.py has the same
// in Python.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/numbers.h"

namespace hdet {

// Where this torch keeps what a step asks for, so that the module is built without torch and runs
// beside any. hdet/kernels/native/interface.py finds it, and tries it on tensors of which Python
// knows everything.
struct Torch {
  using Tensor = const std::uintptr_t*;  // an at::Tensor: a pointer to its c10::TensorImpl

  std::uintptr_t word;                         // of a Python object, its at::Tensor
  std::uintptr_t sizes;                        // of a TensorImpl, the first that view() reads
  std::uintptr_t undefined;                    // an at::Tensor that is none
  std::uintptr_t tensor, parameter;            // the types in Python
  Tensor (*grad)(std::uintptr_t);              // c10::TensorImpl::grad
  void (*bump_version)(Tensor);                // torch::autograd::impl::bump_version
  int32_t (*get_data)(Tensor, void**);         // aoti_torch_get_data_ptr
  int32_t (*assign)(Tensor, std::uintptr_t*);  // aoti_torch_assign_tensors: from, to

  explicit Torch(const std::vector<std::uintptr_t>& interface) {
    static_assert(sizeof(Torch) == 9 * sizeof(std::uintptr_t));
    if (interface.size() != 9) throw pybind11::value_error("not torch's interface");
    std::memcpy(static_cast<void*>(this), interface.data(), sizeof(Torch));
  }

  // `kind`: dtype, device and flags. `keys`: the dispatcher's; of another backend or layout, of a
  // negated view, a subclass that dispatches or a wrapper they are others.
  struct View {
    int64_t dim;
    const int64_t *sizes, *strides;
    int64_t numel, kind, keys;
  };

  View view(Tensor t) const {
    constexpr int64_t kInside = 5;  // so many dimensions are kept in the TensorImpl
    const int64_t* const at = reinterpret_cast<const int64_t*>(*t) + sizes;
    const bool is_inside = at[0] <= kInside;
    const int64_t* const all = is_inside ? at + 1 : reinterpret_cast<const int64_t*>(at[1]);
    return {at[0], all, all + (is_inside ? kInside : at[0]), at[12], at[13], at[14]};
  }

  Tensor of(PyObject* object) const { return reinterpret_cast<Tensor>(object) + word; }

  // Of one of torch's own types, whose attributes nobody has changed.
  bool is_plain(PyObject* object) const {
    const auto type = reinterpret_cast<std::uintptr_t>(Py_TYPE(object));
    return type == tensor || type == parameter;
  }

  bool is_tensor(PyObject* object) const {
    return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(tensor)) != 0;
  }

  static DType dtype_of(const View& v) {
    const auto number = static_cast<uint16_t>(v.kind);
    return number == 6    ? DType::f32
           : number == 15 ? DType::bf16
           : number == 5  ? DType::f16
                          : DType::none;
  }

  static int64_t device_of(const View& v) { return (v.kind >> 16) & 0xffffff; }

  static bool is_contiguous(const View& v) {
    int64_t expected = 1;
    for (int64_t i = v.dim; i-- > 0;) {
      if (v.sizes[i] != 1 && v.strides[i] != expected) return false;
      expected *= v.sizes[i];
    }
    return true;
  }
};

// What objects there were in nested lists and dictionaries when this was made, and where those that
// are tensors lay, with their types, shapes and strides. Whoever has it keeps the objects: the
// garbage collector sees then who holds whom.
class NotedObjects {
 public:
  // In the order of hdet/optim/lists.py, objects_in. `tensors`: whose memory counts.
  NotedObjects(const Torch& torch, const pybind11::list& objects, const std::vector<bool>& tensors)
      : torch_(torch) {
    for (size_t i = 0; i < objects.size(); ++i) {
      PyObject* const object = PyList_GET_ITEM(objects.ptr(), i);
      const Kind kind = tensors[i] ? Kind::tensor : PyDict_Check(object) ? Kind::dict : Kind::other;
      objects_.push_back({object, kind});
      if (kind == Kind::tensor) {
        describe(object, [this](int64_t number) {
          memory_.push_back(number);
          return true;
        });
      }
    }
  }

  bool same(const pybind11::list& nested) const {
    Place place{objects_.data(), objects_.data() + objects_.size(), memory_.data()};
    return is_next(nested.ptr(), &place) && place.next == place.end;
  }

 private:
  enum class Kind { other, dict, tensor };
  struct Object {
    PyObject* object;
    Kind kind;
  };
  struct Place {
    const Object *next, *end;
    const int64_t* memory;
  };

  bool is_next(PyObject* found, Place* place) const {
    if (place->next == place->end || place->next->object != found) {
      if (!PyList_Check(found)) return false;
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found); ++i) {
        if (!is_next(PyList_GET_ITEM(found, i), place)) return false;
      }
      return true;
    }
    const Kind kind = (place->next++)->kind;
    if (kind == Kind::other) return true;
    if (kind == Kind::tensor)
      return describe(found, [place](int64_t number) { return *place->memory++ == number; });
    PyObject *key, *value;
    Py_ssize_t entry = 0;
    while (PyDict_Next(found, &entry, &key, &value) != 0) {
      if (!is_next(key, place) || !is_next(value, place)) return false;
    }
    return true;
  }

  // Shows numbers until `look` says no, or torch that it has no address.
  template <class Look>
  bool describe(PyObject* object, const Look& look) const {
    const Torch::Tensor t = torch_.of(object);
    const Torch::View v = torch_.view(t);
    if (!look(v.keys) || !look(v.kind) || !look(v.dim)) return false;
    for (int64_t d = 0; d < v.dim; ++d) {
      if (!look(v.sizes[d]) || !look(v.strides[d])) return false;
    }
    void* data = nullptr;
    return torch_.get_data(t, &data) == 0 && look(reinterpret_cast<int64_t>(data));
  }

  Torch torch_;
  std::vector<Object> objects_;
  std::vector<int64_t> memory_;
};

// Gradients, as a sequence. They are held until it goes, whatever their parameters have meanwhile,
// and have no Python objects before somebody asks for these.
class HeldGradients {
 public:
  HeldGradients(const Torch& torch, const std::vector<Torch::Tensor>& gradients)
      : torch_(torch), held_(gradients.size(), torch.undefined) {
    for (size_t i = 0; i < held_.size(); ++i) torch.assign(gradients[i], &held_[i]);
  }
  ~HeldGradients() {
    for (std::uintptr_t& one : held_) {
      if (one != torch_.undefined) torch_.assign(&torch_.undefined, &one);
    }
  }
  HeldGradients(const HeldGradients&) = delete;
  HeldGradients& operator=(const HeldGradients&) = delete;

  size_t size() const { return held_.size(); }
  // nullptr: there is none.
  Torch::Tensor at(size_t i) const { return held_[i] == torch_.undefined ? nullptr : &held_[i]; }

  // The places of None.
  std::vector<size_t> absent() const {
    std::vector<size_t> places;
    for (size_t i = 0; i < held_.size(); ++i) {
      if (at(i) == nullptr) places.push_back(i);
    }
    return places;
  }

  std::unique_ptr<HeldGradients> choose(const std::vector<size_t>& places) const {
    std::vector<Torch::Tensor> chosen;
    for (const size_t place : places) chosen.push_back(&held_[place]);
    return std::make_unique<HeldGradients>(torch_, chosen);
  }

  pybind11::object object(size_t place) const {
    static const pybind11::handle wrap =
        pybind11::getattr(pybind11::module_::import("torch._C"), "_wrap_tensor_impl").release();
    if (place >= held_.size()) throw pybind11::index_error();
    if (at(place) == nullptr) return pybind11::none();
    return wrap(pybind11::capsule(reinterpret_cast<const void*>(held_[place])));
  }

 private:
  Torch torch_;
  std::vector<std::uintptr_t> held_;
};

// As they are held; None where a parameter is not of torch's own types, or a gradient is of another
// kind than its parameter (sparse, a negated view).
inline std::unique_ptr<HeldGradients> hold_gradients(const Torch& torch,
                                                     const pybind11::list& params) {
  std::vector<Torch::Tensor> found(params.size());
  for (size_t i = 0; i < found.size(); ++i) {
    PyObject* const param = PyList_GET_ITEM(params.ptr(), i);
    if (!torch.is_plain(param)) return nullptr;
    const Torch::Tensor own = torch.of(param), gradient = torch.grad(*own);
    const bool is_there = *gradient != torch.undefined;
    if (is_there && torch.view(gradient).keys != torch.view(own).keys) return nullptr;
    found[i] = gradient;
  }
  return std::make_unique<HeldGradients>(torch, found);
}

// What a backward pass has saved of these is no longer valid.
inline void bump_versions(const Torch& torch, const pybind11::list& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i)
    torch.bump_version(torch.of(PyList_GET_ITEM(tensors.ptr(), i)));
}

// The gradients of one list of parameters; None: there is none. read() takes what a step can use as
// it is: tensors of the parameters' shapes, on their device, contiguous, of a type that Formats
// knows, as plain as their parameters. For anything else it says so, and Python finds out what it
// is.
class GradientReader {
 public:
  GradientReader(const Torch& torch, const pybind11::list& params) : torch_(torch) {
    for (size_t i = 0; i < params.size(); ++i) {
      const Torch::View v = torch.view(torch.of(PyList_GET_ITEM(params.ptr(), i)));
      params_.push_back({{v.sizes, v.sizes + v.dim}, Torch::device_of(v), v.keys});
    }
    forget();
  }

  static constexpr int kUnusual = -1, kMoved = 1, kRetyped = 2;
  // Where an empty gradient lies, which is there and which nobody reads.
  static constexpr std::uintptr_t kEmpty = 64;

  // kUnusual, or a sum of what has changed since the last call. A gradient that goes or comes has
  // moved.
  int read(const pybind11::object& gradients) {
    if (pybind11::isinstance<HeldGradients>(gradients)) {
      const auto& held = gradients.cast<const HeldGradients&>();
      return take(held.size(), [&held](size_t i, Torch::Tensor* out) {
        *out = held.at(i);
        return true;
      });
    }
    const pybind11::list list(gradients);
    return take(list.size(), [&](size_t i, Torch::Tensor* out) {
      PyObject* const gradient = PyList_GET_ITEM(list.ptr(), i);
      *out = gradient == Py_None ? nullptr : torch_.of(gradient);
      return gradient == Py_None || torch_.is_tensor(gradient);
    });
  }

  // The next list is new, whatever it is.
  int forget() {
    addresses_.assign(params_.size(), UINTPTR_MAX);
    types_.assign(params_.size(), 0);
    return kUnusual;
  }

  // Of the last list that read() took: addresses, 0 where there was no gradient; and DTypes, 0
  // where there has never been one.
  void write_addresses(std::uintptr_t* out) const {
    std::copy(addresses_.begin(), addresses_.end(), out);
  }
  const std::vector<int32_t>& types() const { return types_; }

 private:
  struct Param {
    std::vector<int64_t> shape;
    int64_t device, keys;
  };

  template <class Find>
  int take(size_t count, const Find& find) {
    if (count != params_.size()) return forget();
    int changes = 0;
    for (size_t i = 0; i < count; ++i) {
      Torch::Tensor t = nullptr;
      if (!find(i, &t)) return forget();
      std::uintptr_t address = 0;
      if (t != nullptr) {
        const Torch::View v = torch_.view(t);
        const auto type = static_cast<int32_t>(Torch::dtype_of(v));
        address = is_usual(v, params_[i]) && type != 0 ? address_of(t, v) : 0;
        if (address == 0) return forget();
        if (types_[i] != type) changes |= kRetyped;
        types_[i] = type;
      }
      if (addresses_[i] != address) changes |= kMoved;
      addresses_[i] = address;
    }
    return changes;
  }

  static bool is_usual(const Torch::View& v, const Param& param) {
    return v.keys == param.keys && Torch::device_of(v) == param.device &&
           std::equal(param.shape.begin(), param.shape.end(), v.sizes, v.sizes + v.dim) &&
           (Torch::is_contiguous(v) || v.numel == 0);
  }

  std::uintptr_t address_of(Torch::Tensor t, const Torch::View& v) const {
    void* data = nullptr;
    if (v.numel == 0) return kEmpty;
    return torch_.get_data(t, &data) == 0 ? reinterpret_cast<std::uintptr_t>(data) : 0;
  }

  Torch torch_;
  std::vector<Param> params_;
  std::vector<std::uintptr_t> addresses_;
  std::vector<int32_t> types_;
};

}  // namespace hdet
