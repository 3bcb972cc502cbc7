// Launches and error codes: the only place where hdet calls the CUDA runtime.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include <cuda_runtime.h>

namespace hdet::cuda {

inline void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string("hdet: ") + call + " failed: " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")");
}

// The calling thread's current device for the length of a scope. torch and this module each carry a CUDA runtime, and what they
// share is the driver's current context: it must be torch's again afterwards.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device == before_) return;
    check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
  // A destructor must not throw. cudaSetDevice to the device that was current a moment ago fails only after a sticky error, which
  // the launch has reported.
  ~DeviceScope() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// One block for each chunk of the plan. A plan without chunks launches nothing: a grid of 0 blocks is an error to CUDA.
template <class Plan>
void launch_over_chunks(const char* name, void (*kernel)(Plan), const Plan& plan, int threads, int device, std::uintptr_t stream) {
  if (plan.num_chunks == 0) return;
  if (plan.num_chunks > std::numeric_limits<std::int32_t>::max()) throw std::runtime_error(std::string("hdet: too many chunks for ") + name);
  const DeviceScope scope(device);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.num_chunks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, plan), name);
}

}  // namespace hdet::cuda
