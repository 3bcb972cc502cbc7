// Launches and error codes: the only place where hdet calls the CUDA runtime.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "../core/plan.h"

namespace hdet::cuda {

inline void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string("hdet: ") + call + " failed: " + cudaGetErrorString(code) +
                           " (" + cudaGetErrorName(code) + ")");
}

// Whoever calls has made this torch's current device and puts back what was
// (hdet/kernels/native/cuda.py). This module carries a CUDA runtime of its own, which has to be
// told as well. It puts nothing back: to a thread that never chose a device that would be GPU 0,
// and choosing it would make a context there.
inline thread_local unsigned device_in_use = 0;
inline void use_device(int device) {
  check(cudaSetDevice(device), "cudaSetDevice");
  device_in_use = static_cast<unsigned>(device);
}

struct Grid {
  int64_t blocks;
  int threads;
  int64_t shared_bytes = 0;
  // its blocks may come up while the kernel before it ends: they begin with
  // after_the_kernel_before() (block.cuh)
  bool early = false;
};

constexpr int64_t kSharedBytes = 48 * 1024;  // what a block gets without asking for more

// Before the first of several launches, so that none is made if a later one is impossible.
inline void check(const Grid& grid, const char* call) {
  if (grid.blocks > std::numeric_limits<int32_t>::max())
    throw std::runtime_error(std::string("hdet: too many chunks for ") + call);
  if (grid.shared_bytes > kSharedBytes)
    throw std::runtime_error(std::string("hdet: too many replicas for ") + call);
}

// Whether the code that runs here waits for the kernel before it, which compute capability 9.0 is
// the first to have an instruction for. On a newer device that may be code that was compiled for an
// older one.
template <class... Parameters>
bool waits(void (*kernel)(Parameters...)) {
  // of each device's code, which is the same for all kernels of a module
  static std::array<std::atomic<int>, 64> versions{};
  std::atomic<int>& version = versions[device_in_use % versions.size()];
  if (version == 0) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
          "cudaFuncGetAttributes");
    version = attributes.ptxVersion;
  }
  return version >= 90;
}

// A grid without blocks launches nothing: it would be an error to CUDA.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Grid& grid,
            std::uintptr_t stream, const Arguments&... arguments) {
  if (grid.blocks == 0) return;
  check(grid, name);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(grid.shared_bytes);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = grid.early && waits(kernel) ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

// The phases of a step that have files of their own: one float64 sum of squares for each chunk; and
// settings, norm, scaler and step counters -> control, rows and replica rows; and what a rule sums
// over a tensor -> what of the rows depends on it.
void launch_norm(const StepPlan& plan, std::uintptr_t stream);
void launch_derive(const StepPlan& plan, std::uintptr_t stream);
void launch_sums(const StepPlan& plan, std::uintptr_t stream);

}  // namespace hdet::cuda
