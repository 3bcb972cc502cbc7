// A thread block as phases. Kernels name no thread: what differs between threads is the argument of a phase, and what passes from
// one phase to the next lies in shared memory. Code outside of phases is the same for all threads of a block and writes nothing.
// So a host can run a kernel as well, a block after the other and a phase as a loop over its threads (tests/kernels/shim).
#pragma once

#include <cuda_runtime.h>

namespace hdet::cuda {

#if defined(__CUDACC__)

// work(thread) for each thread of the block.
template <class Work>
__device__ __forceinline__ void threads(const Work& work) {
  work(static_cast<int>(threadIdx.x));
}

// The same; afterwards everyone sees what all of them have written.
template <class Work>
__device__ __forceinline__ void phase(const Work& work) {
  work(static_cast<int>(threadIdx.x));
  __syncthreads();
}

// Shared memory of the size that the launch asked for.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
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

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(shim::dynamic_shared_memory);
}

#endif

// The sum of kThreads numbers in shared memory, in an order that does not depend on anything; it is in numbers[0] afterwards. Eight at
// a time: a barrier costs more than the additions it would spread over more threads.
template <int kThreads>
__device__ __forceinline__ void add_up(double* numbers) {
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
