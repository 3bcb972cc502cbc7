// Sums of squares of a step's gradients on a GPU: a block for each chunk, in float64, where the square of a float32 is exact. Reads every element once.
#include "block.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "phases.cuh"
#include "vec.cuh"

namespace hdet::cuda {
namespace {

constexpr int kNormThreads = 256;

__device__ __forceinline__ void add_square(double& sum, float x) { sum += static_cast<double>(x) * static_cast<double>(x); }

// A turn of the only stream.
struct Turn {
  Place at;
  Raw<kEight> raw;

  __device__ __forceinline__ Turn(DType type, const void* stream, const Cut& parts, int turn) : at(place_of(parts, turn)) {
    load(type, stream, at, raw);
  }

  __device__ __forceinline__ void add_squares(DType type, double& sum) const {
    float x[kEight];
    unpack(type, raw, x);
    // a group that is there twice counts once
    const int count = at.first == at.second ? 4 : kEight;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (i < count) add_square(sum, x[i]);
    }
  }
};

// With one stream only it takes many threads to keep the memory busy: 30 KiB are what the bandwidth of an H200 needs at a latency of
// 0.8 us. 1280 threads of a multiprocessor have 80 KiB in flight, two turns each before they wait for the first.
__global__ void __launch_bounds__(kNormThreads, 5)
    norm_kernel(const Chunk* __restrict__ chunks, void* const* __restrict__ tensors, double* __restrict__ partials) {
  __shared__ double sums[kNormThreads];
  const Chunk chunk = chunks[blockIdx.x];
  const DType type = unpack_formats(chunk.formats).gradient;
  void* const tensor = tensors[chunk.tensor];
  if (tensor == nullptr) {  // a step's gradient that is not there
    threads([&](int thread) {
      if (thread == 0) partials[blockIdx.x] = 0.0;
    });
    return;
  }
  const void* const stream = advance(tensor, type, chunk.offset);
  const bool wide = type != DType::f32;
  const Cut parts = cut(chunk.length, head_of(stream, type, wide), wide, true);
  phase([&](int thread) {
    double sum = 0.0;
    int turn = thread;
#pragma unroll 1
    for (; turn + kNormThreads < parts.turns; turn += 2 * kNormThreads) {
      const Turn one(type, stream, parts, turn), other(type, stream, parts, turn + kNormThreads);
      one.add_squares(type, sum);
      other.add_squares(type, sum);
    }
    if (turn < parts.turns) Turn(type, stream, parts, turn).add_squares(type, sum);
    over_ends<kNormThreads>(parts, chunk.length, thread, [&](const Place& at) {
      Raw<1> raw;
      float x[1];
      load(type, stream, at, raw);
      unpack(type, raw, x);
      add_square(sum, x[0]);
    });
    sums[thread] = sum;
  });
  add_up<kNormThreads>(sums);
  threads([&](int thread) {
    if (thread == 0) partials[blockIdx.x] = sums[0];
  });
}

}  // namespace

void launch_norm(const Chunk* chunks, int64_t num_chunks, void* const* tensors, double* partials, std::uintptr_t stream) {
  launch("cudaLaunchKernelEx(norm)", norm_kernel, {num_chunks, kNormThreads}, stream, chunks, tensors, partials);
}

}  // namespace hdet::cuda
