// The weighted mean of K co-resident replicas on a GPU, in place: each element is read once and
// written once, 8K bytes an element in float32.
#include "../core/arithmetic.h"
#include "block.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "vec.cuh"

namespace hdet::cuda {
namespace {

constexpr int kAverageThreads = 128;
constexpr int kBatch = 4;  // sets whose loads are issued together

struct Member {
  Param<> param;
  float weight;
  bool in_step;
};

template <bool kFloat>
struct Average {
  const AveragePlan& plan;
  const Chunk chunk;
  const Formats formats;
  Member* const members;

  HDET_DEVICE explicit Average(const AveragePlan& p)
      : plan(p),
        chunk(p.chunks[blockIdx.x]),
        formats(unpack_formats(chunk.formats)),
        members(dynamic_shared<Member>()) {}

  HDET_DEVICE void* const* row() const {
    return plan.addresses + int64_t{chunk.tensor} * 2 * plan.num_replicas;
  }
  HDET_DEVICE DType type() const { return kFloat ? DType::f32 : formats.param; }
  HDET_DEVICE Master kind() const { return kFloat ? Master::none : formats.master; }
  HDET_DEVICE bool wide() const { return type() != DType::f32 && kind() != Master::f32; }

  HDET_DEVICE Param<> param(int k) const {
    Param<> p = members[k].param;
    p.type = type();
    p.kind = kind();
    return p;
  }

  // Fills shared memory; then how the chunk is cut.
  HDET_DEVICE Cut prepare() const {
    const int head = head_of(advance(row()[0], type(), chunk.offset), type(), wide());
    phase([&](int thread) {
      for (int k = thread; k < plan.num_replicas; k += kAverageThreads) {
        void* const master = row()[plan.num_replicas + k];
        const Param<> p = param_at(type(), kind(), row()[k], master, chunk.offset);
        members[k] = {p, plan.weights[k], hdet::cuda::in_step(p, head, wide())};
      }
    });
    bool vectors = true;
    for (int k = 0; k < plan.num_replicas; ++k) vectors = vectors && members[k].in_step;
    return cut(chunk.length, head, wide(), vectors);
  }

  template <int kWidth>
  HDET_DEVICE void turn(const Place& at) const {
    float sums[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] = kEmptySum;
#pragma unroll 1
    for (int first = 0; first < plan.num_replicas; first += kBatch) {
      Raw<kWidth> raw[kBatch];
      float weights[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {  // a set of weight 0 is not read
        weights[b] = first + b < plan.num_replicas ? members[first + b].weight : 0.0f;
        if (weights[b] != 0.0f) param(first + b).load(at, raw[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (weights[b] == 0.0f) continue;
        float x[kWidth];
        param(first + b).unpack(raw[b], x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[i] = add_weighted(sums[i], weights[b], x[i]);
      }
    }
    param(0).round(sums);
#pragma unroll 1
    for (int k = 0; k < plan.num_replicas; ++k) param(k).store(at, sums);
  }
};

template <bool kFloat>
__global__ void __launch_bounds__(kAverageThreads, kFloat ? 8 : 5)
    average_kernel(const __grid_constant__ AveragePlan plan) {
  const Average<kFloat> average(plan);
  const Cut parts = average.prepare();
  threads([&](int thread) {
    over_elements<kAverageThreads>(parts, average.chunk.length, thread, average);
  });
}

}  // namespace

void average(const AveragePlan& plan, int device, std::uintptr_t stream) {
  use_device(device);
  const auto kernel = plan.all_float != 0 ? average_kernel<true> : average_kernel<false>;
  const auto shared = static_cast<int64_t>(plan.num_replicas * sizeof(Member));
  launch("cudaLaunchKernelEx(average)", kernel, {plan.num_chunks, kAverageThreads, shared}, stream,
         plan);
}

}  // namespace hdet::cuda
