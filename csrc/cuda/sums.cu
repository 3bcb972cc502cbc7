// What rules sum over a tensor before a step, on a GPU: float64 numbers for each chunk, then for
// each tensor, in an order of their own. One kernel for all such rules and all formats, element by
// element: it reads one or two streams more than half of what the step reads.
#include "../core/prepare.h"
#include "block.cuh"
#include "launch.cuh"
#include "vec.cuh"

namespace hdet::cuda {
namespace {

constexpr int kSumThreads = 256;

struct Sums {
  double of[kMostSums];
};

// A stream of one chunk.
struct Stream {
  DType type;
  const void* numbers;
  const float* scales;  // of codes, with their table
  const float* values;

  HDET_DEVICE float at(const Chunk& chunk, int i) const {
    if (type == DType::none) return 0.0f;
    if (type == DType::codes)
      return values[read<uint8_t>(numbers, i)] * scales[(chunk.offset + i) / kCodeBlock];
    Raw<1> raw;
    float x[1];
    load(type, numbers, Place{i, 0, false}, raw);
    unpack(type, raw, x);
    return x[0];
  }
};

template <class Rule>
HDET_DEVICE Stream moment_stream(const StepPlan& plan, const Chunk& chunk, const Formats& formats,
                                 int j) {
  const DType type = formats.moments[j];
  void* const numbers = moment_of(plan, chunk.tensor, j);
  if (type != DType::codes) return {type, advance(numbers, type, chunk.offset), nullptr, nullptr};
  return {type, static_cast<const uint8_t*>(numbers) + chunk.offset,
          scales_of(plan, chunk.tensor, j), plan.codebooks[Rule::is_signed(j) ? 0 : 1].values};
}

// Of one thread's elements.
template <class Rule>
HDET_DEVICE Sums sums_of_thread(const StepPlan& plan, const Chunk& chunk, int thread) {
  const Formats formats = unpack_formats(chunk.formats);
  const HyperRow row = plan.rows[chunk.tensor];
  const Stream gradient{formats.gradient,
                        advance(plan.gradients[chunk.tensor], formats.gradient, chunk.offset),
                        nullptr, nullptr};
  Stream moments[Rule::kMoments];
#pragma unroll
  for (int j = 0; j < Rule::kMoments; ++j)
    moments[j] = moment_stream<Rule>(plan, chunk, formats, j);
  const bool reads_param = Rule::kCoupled && plan.num_replicas == 1;
  const auto param = param_at(formats.param, formats.master, param_of(plan, chunk.tensor, 0),
                              master_of(plan, chunk.tensor, 0), chunk.offset);
  Sums sums{};
#pragma unroll 4
  for (int i = thread; i < chunk.length; i += kSumThreads) {
    float p[1] = {}, x[Rule::kMoments], terms[Rule::kSums];
    if (reads_param) {
      Raw<1> raw;
      param.load(Place{i, 0, false}, raw);
      param.unpack(raw, p);
    }
#pragma unroll
    for (int j = 0; j < Rule::kMoments; ++j) x[j] = moments[j].at(chunk, i);
    Rule::terms(row, row.gradient_scale * gradient.at(chunk, i), p[0], x, terms);
#pragma unroll
    for (int j = 0; j < Rule::kSums; ++j) sums.of[j] += static_cast<double>(terms[j]);
  }
  return sums;
}

// The sums of all threads; for all of them.
HDET_DEVICE Sums add_up_threads(PerThread<Sums, kSumThreads>& own, int count, double* shared) {
  Sums sums{};
#pragma unroll
  for (int j = 0; j < kMostSums; ++j) {
    if (j >= count) break;
    phase([&](int thread) { shared[thread] = own[thread].of[j]; });
    add_up<kSumThreads>(shared);
    sums.of[j] = shared[0];
    phase([](int) {});
  }
  return sums;
}

__global__ void __launch_bounds__(kSumThreads) sums_kernel(const __grid_constant__ StepPlan plan) {
  __shared__ double shared[kSumThreads];
  const Chunk chunk = plan.chunks[blockIdx.x];
  if (plan.control->skip != 0.0f || plan.gradients[chunk.tensor] == nullptr) return;
  PerThread<Sums, kSumThreads> own;
  threads([&](int thread) {
    own[thread] = with_rule(plan.rule, [&](auto rule) {
      if constexpr (decltype(rule)::kSums > 0)
        return sums_of_thread<decltype(rule)>(plan, chunk, thread);
      else return Sums{};
    });
  });
  const Sums sums = add_up_threads(own, plan.num_sums, shared);
  threads([&](int thread) {
    if (thread != 0) return;
#pragma unroll
    for (int j = 0; j < kMostSums; ++j) {
      if (j < plan.num_sums)
        plan.sums[static_cast<int64_t>(blockIdx.x) * plan.num_sums + j] = sums.of[j];
    }
  });
}

// A block for each tensor.
__global__ void __launch_bounds__(kSumThreads, 2)
    prepare_again_kernel(const __grid_constant__ StepPlan plan) {
  __shared__ double shared[kSumThreads];
  const int64_t tensor = blockIdx.x;
  if (plan.control->skip != 0.0f || plan.gradients[tensor] == nullptr) return;
  const auto count = static_cast<int>(num_chunks_of(plan, tensor));
  PerThread<Sums, kSumThreads> own;
  threads([&](int thread) {
    own[thread] = {};
    for (int i = thread; i < count; i += kSumThreads) {
#pragma unroll
      for (int j = 0; j < kMostSums; ++j)
        if (j < plan.num_sums)
          own[thread].of[j] += sums_of(plan, tensor)[static_cast<int64_t>(i) * plan.num_sums + j];
    }
  });
  const Sums sums = add_up_threads(own, plan.num_sums, shared);
  threads([&](int thread) {
    if (thread != 0) return;
    Whole whole{};
#pragma unroll
    for (int j = 0; j < kMostSums; ++j) whole.sums[j] = sums.of[j];
    prepare_again(plan, tensor, whole);
  });
}

}  // namespace

void launch_sums(const StepPlan& plan, std::uintptr_t stream) {
  launch("cudaLaunchKernelEx(sums)", sums_kernel, {plan.num_chunks, kSumThreads}, stream, plan);
  launch("cudaLaunchKernelEx(sums of tensors)", prepare_again_kernel,
         {plan.num_chunks == 0 ? 0 : plan.num_tensors, kSumThreads}, stream, plan);
}

}  // namespace hdet::cuda
