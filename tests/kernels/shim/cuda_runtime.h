// A stand-in for CUDA's header that lets a C++ compiler build csrc/cuda/*.cu for the host: a grid and its blocks become loops.
// It covers what those sources use and nothing else. Kernels that synchronise threads would need more than this.
#pragma once

#include <algorithm>
#include <cstddef>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __builtin_assume(condition) static_cast<void>(condition)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x) : x(x) {}
};

struct alignas(16) float4 {  // the sanitizer reports an access that is not 16-byte aligned
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline dim3 blockIdx, blockDim, threadIdx;
inline long vector_accesses = 0;  // through __ldcs and __stcs

template <class T>
T __ldcs(const T* address) {
  vector_accesses += sizeof(T) == 16;
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  vector_accesses += sizeof(T) == 16;
  *address = value;
}
inline bool __isGlobal(const void*) { return true; }
using std::min;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9, cudaErrorInvalidDevice = 101 };
using cudaStream_t = struct Stream*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline int current_device = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "reported by the shim"; }
inline const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorInvalidDevice ? "cudaErrorInvalidDevice" : "cudaErrorInvalidConfiguration";
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 1) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

template <class Argument>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Argument), Argument argument) {
  if (config->gridDim.x == 0) return cudaErrorInvalidConfiguration;
  blockDim = config->blockDim;
  for (blockIdx.x = 0; blockIdx.x < config->gridDim.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < config->blockDim.x; ++threadIdx.x) kernel(argument);
  }
  return cudaSuccess;
}
