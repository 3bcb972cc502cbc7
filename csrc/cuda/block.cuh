// A thread block as phases. Kernels name no thread: what differs between threads is the argument of
// a phase, and what passes from one phase to the next lies in shared memory. Code outside of phases
// is the same for all threads of a block and writes nothing. So a host can run a kernel as well, a
// block after the other and a phase as a loop over its threads (tests/kernels/shim).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#define HDET_DEVICE __device__ __forceinline__

namespace hdet::cuda {

#if defined(__CUDACC__)

// work(thread) for each thread of the block.
template <class Work>
HDET_DEVICE void threads(const Work& work) {
  work(static_cast<int>(threadIdx.x));
}

// The same; afterwards everyone sees what all of them have written.
template <class Work>
HDET_DEVICE void phase(const Work& work) {
  work(static_cast<int>(threadIdx.x));
  __syncthreads();
}

// Waits until the kernel before this one is done and what it wrote can be seen. All blocks of a
// kernel that is launched early begin with it; in any other it does nothing.
HDET_DEVICE void after_the_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the blocks of a kernel that is launched early may come up, as far as there is room
// for them.
HDET_DEVICE void let_the_next_kernel_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// What each thread keeps from one phase to the next, in its registers.
template <class T, int kThreads>
struct PerThread {
  T own;
  HDET_DEVICE T& operator[](int) { return own; }
};

// The largest number of each 32 neighbours, for all of them.
template <int kThreads>
HDET_DEVICE void largest_of_warps(PerThread<uint32_t, kThreads>& numbers) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, numbers.own, distance);
    numbers.own = numbers.own < other ? other : numbers.own;
  }
}

// Afterwards the threads of a warp see what all of them have written, and have read what they read
// before.
HDET_DEVICE void warps_meet() { __syncwarp(); }

// Shared memory of the size that the launch asked for.
template <class T>
HDET_DEVICE T* dynamic_shared() {
  extern __shared__ uint4 dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory);
}

#else

template <class Work>
void threads(const Work& work) {
  for (unsigned thread = 0; thread < blockDim.x; ++thread) work(static_cast<int>(thread));
}

template <class Work>
void phase(const Work& work) {
  threads(work);
}

template <class T, int kThreads>
struct PerThread {
  T all[kThreads];
  T& operator[](int thread) { return all[thread]; }
};

template <int kThreads>
void largest_of_warps(PerThread<uint32_t, kThreads>& numbers) {
  for (int first = 0; first < kThreads; first += 32) {
    uint32_t largest = 0;
    for (int i = first; i < first + 32; ++i) largest = largest < numbers[i] ? numbers[i] : largest;
    for (int i = first; i < first + 32; ++i) numbers[i] = largest;
  }
}

inline void warps_meet() {}
inline void after_the_kernel_before() { shim::waited = true; }
inline void let_the_next_kernel_come() {}

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(shim::dynamic_shared_memory);
}

#endif

// The sum of kThreads numbers in shared memory, in an order that does not depend on anything; it is
// in numbers[0] afterwards. Eight at a time: a barrier costs more than the additions it would
// spread over more threads.
template <int kThreads>
HDET_DEVICE void add_up(double* numbers) {
  static_assert((kThreads & (kThreads - 1)) == 0);
#pragma unroll
  for (int count = kThreads; count > 1; count /= count < 8 ? count : 8) {
    const int parts = count < 8 ? count : 8, sums = count / parts;
    phase([&](int thread) {
      if (thread >= sums) return;
      double sum = numbers[thread];
#pragma unroll
      for (int part = 1; part < parts; ++part) sum += numbers[thread + part * sums];
      numbers[thread] = sum;
    });
  }
}

}  // namespace hdet::cuda
