// hdet._C: plain integers in (addresses, sizes, a stream), no tensor type of any library. Callers
// check dtype, layout and size.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "core/plan.h"
#include "cpu/kernels.h"
#include "tensors.h"
#ifdef HDET_CUDA
#include "cuda/kernels.h"
#endif

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// By its place, so that properties are compiled once for a plan, not for each type.
struct PlanField {
  const char* name;
  size_t place, size;
  bool is_float;

  template <class T>
  T& of(void* plan) const {
    return *reinterpret_cast<T*>(static_cast<char*>(plan) + place);
  }
};

// A plan as Python sees it: fields named as in plan.h; pointers and enumerations are integers.
template <class Plan>
void define_plan(py::module_& m, const char* name, std::initializer_list<PlanField> fields) {
  py::class_<Plan> plan(m, name);
  plan.def(py::init([] { return Plan{}; }));
  for (const PlanField& field : fields) {
    const auto get = [field](Plan& self) -> py::object {
      if (field.is_float) return py::float_(field.of<float>(&self));
      if (field.size == 8) return py::int_(field.of<Address>(&self));
      return py::int_(field.of<int32_t>(&self));
    };
    const auto set = [field](Plan& self, const py::object& value) {
      if (field.is_float) field.of<float>(&self) = value.cast<float>();
      else if (field.size == 8) field.of<Address>(&self) = value.cast<Address>();
      else field.of<int32_t>(&self) = value.cast<int32_t>();
    };
    plan.def_property(field.name, get, set);
  }
}

#define HDET_FIELD(name) \
  {#name, offsetof(Plan, name), sizeof(Plan::name), std::is_same_v<decltype(Plan::name), float>}

void define_plans(py::module_& m) {
  {
    using Plan = hdet::StepPlan;
    define_plan<Plan>(
        m, "StepPlan",
        {HDET_FIELD(chunks),      HDET_FIELD(num_chunks),     HDET_FIELD(longest),
         HDET_FIELD(num_tensors), HDET_FIELD(num_replicas),   HDET_FIELD(num_groups),
         HDET_FIELD(rule),        HDET_FIELD(zero_gradients), HDET_FIELD(known),
         HDET_FIELD(seed),        HDET_FIELD(first_replica),  HDET_FIELD(gradients),
         HDET_FIELD(addresses),   HDET_FIELD(columns),        HDET_FIELD(codebooks),
         HDET_FIELD(ids),         HDET_FIELD(groups),         HDET_FIELD(rates),
         HDET_FIELD(settings),    HDET_FIELD(rows),           HDET_FIELD(replica_rows),
         HDET_FIELD(control),     HDET_FIELD(partials),       HDET_FIELD(grad_scale),
         HDET_FIELD(found_inf),   HDET_FIELD(carried),        HDET_FIELD(num_carried),
         HDET_FIELD(emas),        HDET_FIELD(num_emas),       HDET_FIELD(ema_settings),
         HDET_FIELD(ema_rows),    HDET_FIELD(sums),           HDET_FIELD(num_sums),
         HDET_FIELD(spans)});
  }
  {
    using Plan = hdet::AveragePlan;
    define_plan<Plan>(m, "AveragePlan",
                      {HDET_FIELD(chunks), HDET_FIELD(num_chunks), HDET_FIELD(num_replicas),
                       HDET_FIELD(all_float), HDET_FIELD(addresses), HDET_FIELD(weights)});
  }
  {
    using Plan = hdet::CopyPlan;
    define_plan<Plan>(m, "CopyPlan",
                      {HDET_FIELD(chunks), HDET_FIELD(num_chunks), HDET_FIELD(all_float),
                       HDET_FIELD(addresses), HDET_FIELD(scale)});
  }
}

void define_tensors(py::module_& m) {
  using hdet::GradientReader;
  using hdet::HeldGradients;
  using hdet::NotedObjects;
  using hdet::Torch;
  py::class_<Torch>(m, "Torch").def(py::init<const std::vector<Address>&>(), py::arg("interface"));
  py::class_<NotedObjects>(m, "NotedObjects")
      .def(py::init<const Torch&, const py::list&, const std::vector<bool>&>(), py::arg("torch"),
           py::arg("objects"), py::arg("tensors"))
      .def("same", &NotedObjects::same, py::arg("nested"));
  py::class_<HeldGradients>(m, "HeldGradients")
      .def("__len__", &HeldGradients::size)
      .def("__getitem__", &HeldGradients::object, py::arg("place"))
      .def("absent", &HeldGradients::absent)
      .def("choose", &HeldGradients::choose, py::arg("places"));
  py::class_<GradientReader> reader(m, "GradientReader");
  reader.def(py::init<const Torch&, const py::list&>(), py::arg("torch"), py::arg("params"));
  reader.def("read", &GradientReader::read, py::arg("gradients"));
  reader.def("forget", [](GradientReader& self) { self.forget(); });
  reader.def(
      "write_addresses",
      [](const GradientReader& self, Address out) {
        self.write_addresses(reinterpret_cast<Address*>(out));
      },
      py::arg("out"));
  reader.def_property_readonly("types", &GradientReader::types);
  reader.attr("EMPTY") = Address{GradientReader::kEmpty};
  reader.attr("UNUSUAL") = int{GradientReader::kUnusual};
  reader.attr("MOVED") = int{GradientReader::kMoved};
  reader.attr("RETYPED") = int{GradientReader::kRetyped};

  m.def("hold_gradients", &hdet::hold_gradients, py::arg("torch"), py::arg("params"));
  m.def("bump_versions", &hdet::bump_versions, py::arg("torch"), py::arg("tensors"));
}

void define_cpu(py::module_& m) {
  m.def("cpu_step", &hdet::cpu::step, py::arg("plan"), py::arg("threads"), py::arg("isa") = "",
        ReleaseGil());
  m.def("cpu_average", &hdet::cpu::average, py::arg("plan"), py::arg("threads"),
        py::arg("isa") = "", ReleaseGil());
  m.def("cpu_copy", &hdet::cpu::copy, py::arg("plan"), py::arg("threads"), py::arg("isa") = "",
        ReleaseGil());
}

#ifdef HDET_CUDA
void define_cuda(py::module_& m) {
  m.def("cuda_step", &hdet::cuda::step, py::arg("plan"), py::arg("device"), py::arg("stream"),
        ReleaseGil());
  m.def("cuda_average", &hdet::cuda::average, py::arg("plan"), py::arg("device"), py::arg("stream"),
        ReleaseGil());
  m.def("cuda_copy", &hdet::cuda::copy, py::arg("plan"), py::arg("device"), py::arg("stream"),
        ReleaseGil());
}
#endif

// Of all tensors of a step.
int known_of(const std::vector<int64_t>& formats) {
  const auto known = [](int64_t one) { return hdet::known_of(hdet::unpack_formats(one)); };
  const auto first = formats.empty() ? hdet::Known::none : known(formats.front());
  const auto same = [&](int64_t one) { return known(one) == first; };
  return static_cast<int>(std::all_of(formats.begin(), formats.end(), same) ? first
                                                                            : hdet::Known::none);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "hdet's native kernels. Arguments are addresses and sizes; use hdet.kernels, which checks "
      "them.";

  m.attr("__version__") = HDET_VERSION;
  m.attr("compiler") = HDET_COMPILER;
  m.attr("isa") = hdet::cpu::variants();
  m.attr("openmp") = hdet::cpu::has_openmp();
  m.attr("cuda_compiler") = HDET_CUDA_COMPILER;
  m.attr("cuda_archs") = HDET_CUDA_ARCHS;
  m.attr("cuda_note") = HDET_CUDA_NOTE;
  m.attr("SOURCES") = HDET_SOURCES;  // hdet/kernels/native/sources.py
  m.attr("RULES") = hdet::kRulesDigest;
  m.attr("CARRIED") = hdet::kCarried;
  m.attr("CODE_BLOCK") = hdet::kCodeBlock;
  m.attr("CODEBOOK_BYTES") = sizeof(hdet::Codebook);

  define_plans(m);
  define_tensors(m);

  m.def("known_of", &known_of, py::arg("formats"));

  define_cpu(m);
#ifdef HDET_CUDA
  m.attr("cuda") = true;
  define_cuda(m);
#else
  m.attr("cuda") = false;
#endif
}
