// A stand-in for CUDA's header that lets a C++ compiler build csrc/cuda/*.cu for the host. A grid
// is a loop over its blocks; the kernels' phases are loops over the threads of a block
// (csrc/cuda/block.cuh), so a kernel is called once for each block. It covers what those sources
// use and nothing else.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__  // a variable of the kernel's call, that is of one block
#define __grid_constant__
#define __launch_bounds__(...)
#define __builtin_assume(condition) static_cast<void>(condition)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x) : x(x) {}
};

// the sanitizer reports an access that is not aligned like these
struct alignas(8) uint2 {
  std::uint32_t x, y;
};
struct alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};
inline uint2 make_uint2(std::uint32_t x, std::uint32_t y) { return {x, y}; }
inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) {
  return {x, y, z, w};
}

inline dim3 blockIdx, blockDim;

namespace shim {
inline void* dynamic_shared_memory = nullptr;
inline long accesses[17] = {};  // to streams (csrc/cuda/vec.cuh), by their number of bytes
inline long launches = 0;
inline int device = 0;
inline long early = 0;       // launches whose blocks may come up while the kernel before them runs
inline bool waited = false;  // the block has waited for it
}  // namespace shim

inline bool __isGlobal(const void*) { return true; }
using std::min;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101
};
using cudaStream_t = struct Stream*;
enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore = 0,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
struct cudaFuncAttributes {
  int ptxVersion;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

inline const char* cudaGetErrorString(cudaError_t) { return "reported by the shim"; }
inline const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorInvalidDevice ? "cudaErrorInvalidDevice"
                                        : "cudaErrorInvalidConfiguration";
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = shim::device;
  return cudaSuccess;
}
// Devices 0 and 1, and -1, which is what torch calls a CPU.
inline cudaError_t cudaSetDevice(int device) {
  if (device < -1 || device > 1) return cudaErrorInvalidDevice;
  shim::device = device;
  return cudaSuccess;
}

template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Parameters... arguments) {
  if (config->gridDim.x == 0 || config->blockDim.x > 1024 || config->dynamicSmemBytes > 48 * 1024)
    return cudaErrorInvalidConfiguration;
  ++shim::launches;
  const bool early =
      config->numAttrs > 0 && config->attrs->val.programmaticStreamSerializationAllowed != 0;
  if (early) ++shim::early;
  blockDim = config->blockDim;
  for (blockIdx.x = 0; blockIdx.x < config->gridDim.x; ++blockIdx.x) {
    // new for each block and of its exact size, so that the sanitizer sees a block that reaches
    // beyond it
    const std::unique_ptr<char[]> shared(
        config->dynamicSmemBytes > 0 ? new char[config->dynamicSmemBytes] : nullptr);
    std::fill_n(shared.get(), config->dynamicSmemBytes, char(0x7f));
    shim::dynamic_shared_memory = shared.get();
    shim::waited = false;
    kernel(arguments...);
    if (early && !shim::waited)
      return cudaErrorInvalidConfiguration;  // it has read what may not be there yet
  }
  return cudaSuccess;
}
