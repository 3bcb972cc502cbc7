// Sums of squares of a step's gradients on a GPU, one float64 for each chunk. Reads every element
// once. A thread adds up its squares in two float32, which have more bits than the result needs: an
// operation in float64 takes 64 times as long as one in float32 on RTX cards and on a B300, and one
// for each element would take longer than to read it.
#include "block.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "vec.cuh"

namespace hdet::cuda {
namespace {

constexpr int kNormThreads = 256;

// A sum of squares without what rounding takes away: all of that is in `rest`.
struct Squares {
  float sum = 0.0f, rest = 0.0f;
  uint32_t any = 0;  // bits of the numbers

  HDET_DEVICE void add(float x) {
    const float square = x * x, next = sum + square, added = next - sum;
    rest += __builtin_fmaf(x, x, -square) + ((sum - (next - added)) + (square - added));
    sum = next;
    any |= bits_of(x);
  }

  HDET_DEVICE double total() const { return static_cast<double>(sum) + static_cast<double>(rest); }

  // Not where squares were so small that bits were lost which count here, nor where one was too
  // large for a float32: then `rest` is NaN.
  HDET_DEVICE bool is_exact() const { return (any & 0x7fffffffu) == 0 || total() >= 0x1p-90; }
};

// The same where it is not exact. A square of a float32 is exact in float64.
struct WideSquares {
  double sum = 0.0;

  HDET_DEVICE void add(float x) { sum += static_cast<double>(x) * static_cast<double>(x); }
};

// A turn of the only stream.
struct Turn {
  Place at;
  Raw<kEight> raw;

  HDET_DEVICE Turn(DType type, const void* stream, const Cut& parts, int turn)
      : at(place_of(parts, turn)) {
    load(type, stream, at, raw);
  }

  template <class Sum>
  HDET_DEVICE void add_to(Sum& sum, DType type) const {
    float x[kEight];
    unpack(type, raw, x);
    // a group that is there twice counts once
    const int count = at.first == at.second ? 4 : kEight;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (i < count) sum.add(x[i]);
    }
  }
};

// Adds the squares of a thread's elements.
template <class Sum>
HDET_DEVICE Sum squares_of(DType type, const void* stream, const Cut& parts, int length,
                           int thread) {
  Sum sum;
  int turn = thread;
#pragma unroll 1
  for (; turn + kNormThreads < parts.turns; turn += 2 * kNormThreads) {
    const Turn one(type, stream, parts, turn), other(type, stream, parts, turn + kNormThreads);
    one.add_to(sum, type);
    other.add_to(sum, type);
  }
  if (turn < parts.turns) Turn(type, stream, parts, turn).add_to(sum, type);
  over_ends<kNormThreads>(parts, length, thread, [&](const Place& at) {
    Raw<1> raw;
    float x[1];
    load(type, stream, at, raw);
    unpack(type, raw, x);
    sum.add(x[0]);
  });
  return sum;
}

// With one stream only it takes many threads to keep the memory busy: 30 KiB are what the bandwidth
// of an H200 needs at a latency of 0.8 us. 1280 threads of a multiprocessor have 80 KiB in flight,
// two turns each before they wait for the first.
__global__ void __launch_bounds__(kNormThreads, 5)
    norm_kernel(const Chunk* __restrict__ chunks, void* const* __restrict__ tensors,
                double* __restrict__ partials) {
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
    const auto squares = squares_of<Squares>(type, stream, parts, chunk.length, thread);
    sums[thread] = squares.is_exact()
                       ? squares.total()
                       : squares_of<WideSquares>(type, stream, parts, chunk.length, thread).sum;
  });
  add_up<kNormThreads>(sums);
  threads([&](int thread) {
    if (thread == 0) partials[blockIdx.x] = sums[0];
  });
}

}  // namespace

void launch_norm(const StepPlan& plan, std::uintptr_t stream) {
  launch("cudaLaunchKernelEx(norm)", norm_kernel, {plan.num_chunks, kNormThreads}, stream,
         plan.chunks, plan.gradients, plan.partials);
}

}  // namespace hdet::cuda
