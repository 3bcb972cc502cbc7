// Operations between two sets of tensors on a GPU: into a bucket and back, a running average, an exchange. One launch for all tensors.
#include "../core/rules.h"
#include "block.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "vec.cuh"

namespace hdet::cuda {
namespace {

constexpr int kPairThreads = 128;

template <bool kFloat>
struct Pair {
  const PairPlan& plan;
  const Chunk chunk;
  Param source, destination;

  __device__ __forceinline__ explicit Pair(const PairPlan& p) : plan(p), chunk(p.chunks[blockIdx.x]) {
    const Formats formats = unpack_formats(chunk.formats);
    void* const lower = kFloat ? nullptr : entry(plan.source_lowers, chunk.tensor);
    void* const master = kFloat ? nullptr : entry(plan.masters, chunk.tensor);
    source = param_at(kFloat ? DType::f32 : formats.gradient, lower == nullptr ? Master::none : Master::split, plan.sources[chunk.tensor],
                      lower, chunk.offset);
    destination = param_at(kFloat ? DType::f32 : formats.param, master == nullptr ? Master::none : formats.master,
                           plan.destinations[chunk.tensor], master, chunk.offset);
  }

  __device__ __forceinline__ Cut prepare() const {
    const bool wide = source.type != DType::f32 && destination.type != DType::f32 && destination.kind != Master::f32;
    const int head = head_of(source.param, source.type, wide);
    return cut(chunk.length, head, wide, in_step(source, head, wide) && in_step(destination, head, wide));
  }

  template <int kWidth>
  __device__ __forceinline__ void turn(const Place& at) const {
    if (plan.pairing == Pairing::swap) return exchange<kWidth>(at);
    Raw<kWidth> raw_source, raw_destination;
    const bool reads = plan.pairing != Pairing::copy || plan.scale != 0.0f;
    if (reads) load(source, at, raw_source);
    if (plan.pairing == Pairing::lerp) load(destination, at, raw_destination);
    float x[kWidth] = {};
    if (reads) unpack(source, raw_source, x);
    if (plan.pairing == Pairing::lerp) {
      float y[kWidth];
      unpack(destination, raw_destination, y);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = running_average(y[i], x[i], plan.scale);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = scaled(plan.scale, x[i]);
    }
    store(destination, at, x);
  }

  template <int kWidth>
  __device__ __forceinline__ void exchange(const Place& at) const {
    swap_bits<kWidth>(source.type, source.param, destination.param, at);
    if (source.kind != Master::none && destination.kind != Master::none) swap_bits<kWidth>(source.type, source.master, destination.master, at);
  }

  template <int kWidth>
  __device__ __forceinline__ void swap_bits(DType type, void* a, void* b, const Place& at) const {
    Raw<kWidth> raw_a, raw_b;
    load(type, a, at, raw_a);
    load(type, b, at, raw_b);
    store_raw(type, a, at, raw_b);
    store_raw(type, b, at, raw_a);
  }
};

template <bool kFloat>
__global__ void __launch_bounds__(kPairThreads, 6) pair_kernel(const __grid_constant__ PairPlan plan) {
  const Pair<kFloat> pair(plan);
  const Cut parts = pair.prepare();
  threads([&](int thread) {
    over_elements<kPairThreads>(
        parts, pair.chunk.length, thread, [&](const Place& at) { pair.template turn<kEight>(at); },
        [&](const Place& at) { pair.template turn<1>(at); });
  });
}

}  // namespace

void pair(const PairPlan& plan, int device, std::uintptr_t stream) {
  use_device(device);
  launch("cudaLaunchKernelEx(pair)", plan.all_float != 0 ? pair_kernel<true> : pair_kernel<false>, {plan.num_chunks, kPairThreads}, stream, plan);
}

}  // namespace hdet::cuda
