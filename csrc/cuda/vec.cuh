// Accesses of 16 bytes: four floats at a time where the addresses allow it.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace hdet::cuda {

constexpr int kWidth = 4;  // floats in 16 bytes
constexpr int kVectorBytes = kWidth * static_cast<int>(sizeof(float));

// A pointer read from a table is generic to the compiler: it may be shared memory. Saying that it is global makes the accesses
// ld.global/st.global, which are also the ones that can be vectorised without a check.
template <class T>
__device__ __forceinline__ T* global(T* address) {
  __builtin_assume(__isGlobal(address));
  return address;
}

// Gradients and moments are used once per step: they pass the caches first-in first-out and leave them to the parameters, which
// the next forward pass reads.
template <class T>
__device__ __forceinline__ T load_once(const T* address) {
  return __ldcs(address);
}

template <class T>
__device__ __forceinline__ void store_once(T* address, T value) {
  __stcs(address, value);
}

// How many floats precede the first 16-byte boundary, when all the given arrays reach one at the same index. Otherwise `length`:
// no part of the chunk can be accessed in vectors.
__device__ __forceinline__ int floats_before_boundary(const float* array, int length) {
  const auto past = static_cast<int>(reinterpret_cast<std::uintptr_t>(array) % kVectorBytes / sizeof(float));
  return min((kWidth - past) % kWidth, length);
}

template <class... Arrays>
__device__ __forceinline__ int floats_before_boundary(const float* array, int length, const Arrays*... others) {
  const int head = floats_before_boundary(array, length);
  const bool alike = ((floats_before_boundary(others, length) == head) && ...);
  return alike ? head : length;
}

// The same for num_rows arrays whose addresses are in a table, at distance `stride`, each advanced by `offset` elements.
__device__ __forceinline__ int floats_before_boundary(float* const* table, int64_t stride, int num_rows, int64_t offset, int length) {
  const int head = floats_before_boundary(table[0] + offset, length);
  for (int k = 1; k < num_rows; ++k) {
    if (floats_before_boundary(table[k * stride] + offset, length) != head) return length;
  }
  return head;
}

// Shares a chunk among the threads of its block: scalar(i) for each element of the head and the tail, vector(i) for each group of
// four elements starting at i.
template <class Scalar, class Vector>
__device__ __forceinline__ void over_elements(int length, int head, const Scalar& scalar, const Vector& vector) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int tail = head + (length - head) / kWidth * kWidth;
#pragma unroll 1  // short loops: copies of them would only fill the instruction cache
  for (int i = thread; i < head; i += threads) scalar(i);
  for (int i = head + thread * kWidth; i < tail; i += threads * kWidth) vector(i);
#pragma unroll 1
  for (int i = tail + thread; i < length; i += threads) scalar(i);
}

}  // namespace hdet::cuda
