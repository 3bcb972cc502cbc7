// hdet._C: plain integers in (addresses, sizes, a stream), no tensor type of any library. Callers check dtype, layout and size.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/plan.h"
#include "cpu/kernels.h"
#ifdef HDET_CUDA
#include "cuda/kernels.h"
#endif

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

hdet::AdamWPlan adamw_plan(Address chunks, int64_t num_chunks, Address rows, Address gradients, Address params, Address exp_avgs,
                           Address exp_avg_sqs) {
  return {at<const hdet::Chunk>(chunks), num_chunks,           at<const hdet::HyperRow>(rows), at<const float* const>(gradients),
          at<float* const>(params),      at<float* const>(exp_avgs), at<float* const>(exp_avg_sqs)};
}

hdet::AveragePlan average_plan(Address chunks, int64_t num_chunks, Address addresses, int64_t num_tensors, int32_t num_replicas,
                               Address weights) {
  return {at<const hdet::Chunk>(chunks), num_chunks, at<float* const>(addresses), num_tensors, num_replicas, at<const float>(weights)};
}

hdet::CopyPlan copy_plan(Address chunks, int64_t num_chunks, Address sources, Address destinations, float scale) {
  return {at<const hdet::Chunk>(chunks), num_chunks, at<const float* const>(sources), at<float* const>(destinations), scale};
}

void write_chunks(Address out, const std::vector<int64_t>& elements, const std::vector<int32_t>& rows) {
  if (elements.size() != rows.size()) throw std::invalid_argument("elements and rows differ in length");
  hdet::write_chunks(at<hdet::Chunk>(out), elements, rows);
}

// One tuple for each row, in the order of AdamWSettings.
void write_adamw_rows(Address out, const std::vector<std::array<double, 8>>& settings) {
  static_assert(sizeof(hdet::AdamWSettings) == 8 * sizeof(double));
  for (size_t i = 0; i < settings.size(); ++i) {
    hdet::AdamWSettings row;
    std::memcpy(&row, settings[i].data(), sizeof row);
    at<hdet::HyperRow>(out)[i] = hdet::adamw_row(row);
  }
}

void write_addresses(Address out, const std::vector<Address>& addresses) {
  if (!addresses.empty()) std::memcpy(at<Address>(out), addresses.data(), addresses.size() * sizeof(Address));
}

py::dict build_info() {
  py::dict info;
  info["version"] = HDET_VERSION;
  info["compiler"] = HDET_COMPILER;
  info["isa"] = hdet::cpu::variants();
  info["openmp"] = hdet::cpu::has_openmp();
#ifdef HDET_CUDA
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  info["cuda_compiler"] = HDET_CUDA_COMPILER;
  info["cuda_archs"] = HDET_CUDA_ARCHS;
  info["cuda_note"] = HDET_CUDA_NOTE;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "hdet's native kernels. Arguments are addresses and sizes; use hdet.kernels, which checks them.";

  const py::dict info = build_info();
  m.def("build_info", &build_info);
  m.attr("__version__") = info["version"];
  for (const char* name : {"compiler", "isa", "openmp", "cuda", "cuda_compiler", "cuda_archs", "cuda_note"}) m.attr(name) = info[name];
  m.attr("INTERFACE") = 2;  // see hdet/kernels/native.py
  m.attr("CHUNK_ELEMENTS") = hdet::kChunkElements;
  m.attr("CHUNK_BYTES") = sizeof(hdet::Chunk);
  m.attr("ROW_BYTES") = sizeof(hdet::HyperRow);

  m.def("count_chunks", &hdet::count_chunks, py::arg("elements"));
  m.def("write_chunks", &write_chunks, py::arg("out"), py::arg("elements"), py::arg("rows"));
  m.def("write_adamw_rows", &write_adamw_rows, py::arg("out"), py::arg("settings"));
  m.def("write_addresses", &write_addresses, py::arg("out"), py::arg("addresses"));
  m.def("add_to_steps", &hdet::add_to_steps, py::arg("steps"), py::arg("count"), py::arg("amount"));

  m.def(
      "cpu_adamw",
      [](Address chunks, int64_t num_chunks, Address rows, Address gradients, Address params, Address exp_avgs, Address exp_avg_sqs,
         int threads, const std::string& isa) {
        hdet::cpu::adamw(adamw_plan(chunks, num_chunks, rows, gradients, params, exp_avgs, exp_avg_sqs), threads, isa);
      },
      py::arg("chunks"), py::arg("num_chunks"), py::arg("rows"), py::arg("gradients"), py::arg("params"), py::arg("exp_avgs"),
      py::arg("exp_avg_sqs"), py::arg("threads"), py::arg("isa") = "", py::call_guard<py::gil_scoped_release>());
  m.def(
      "cpu_average",
      [](Address chunks, int64_t num_chunks, Address addresses, int64_t num_tensors, int32_t num_replicas, Address weights, int threads,
         const std::string& isa) {
        hdet::cpu::average(average_plan(chunks, num_chunks, addresses, num_tensors, num_replicas, weights), threads, isa);
      },
      py::arg("chunks"), py::arg("num_chunks"), py::arg("addresses"), py::arg("num_tensors"), py::arg("num_replicas"), py::arg("weights"),
      py::arg("threads"), py::arg("isa") = "", py::call_guard<py::gil_scoped_release>());
  m.def(
      "cpu_copy",
      [](Address chunks, int64_t num_chunks, Address sources, Address destinations, float scale, int threads, const std::string& isa) {
        hdet::cpu::copy(copy_plan(chunks, num_chunks, sources, destinations, scale), threads, isa);
      },
      py::arg("chunks"), py::arg("num_chunks"), py::arg("sources"), py::arg("destinations"), py::arg("scale"), py::arg("threads"),
      py::arg("isa") = "", py::call_guard<py::gil_scoped_release>());

#ifdef HDET_CUDA
  m.def(
      "cuda_copy",
      [](Address chunks, int64_t num_chunks, Address sources, Address destinations, float scale, int device, Address stream) {
        hdet::cuda::copy(copy_plan(chunks, num_chunks, sources, destinations, scale), device, stream);
      },
      py::arg("chunks"), py::arg("num_chunks"), py::arg("sources"), py::arg("destinations"), py::arg("scale"), py::arg("device"),
      py::arg("stream"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "cuda_adamw",
      [](Address chunks, int64_t num_chunks, Address rows, Address gradients, Address params, Address exp_avgs, Address exp_avg_sqs,
         int device, Address stream) {
        hdet::cuda::adamw(adamw_plan(chunks, num_chunks, rows, gradients, params, exp_avgs, exp_avg_sqs), device, stream);
      },
      py::arg("chunks"), py::arg("num_chunks"), py::arg("rows"), py::arg("gradients"), py::arg("params"), py::arg("exp_avgs"),
      py::arg("exp_avg_sqs"), py::arg("device"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "cuda_average",
      [](Address chunks, int64_t num_chunks, Address addresses, int64_t num_tensors, int32_t num_replicas, Address weights, int device,
         Address stream) {
        hdet::cuda::average(average_plan(chunks, num_chunks, addresses, num_tensors, num_replicas, weights), device, stream);
      },
      py::arg("chunks"), py::arg("num_chunks"), py::arg("addresses"), py::arg("num_tensors"), py::arg("num_replicas"), py::arg("weights"),
      py::arg("device"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
#endif
}
