// The derive phase on a GPU, in one block: what the update reads, from the host's settings, the norm, the scaler and the step
// counters. The counters themselves advance in the update (step.cu), which reads none: there all multiprocessors share the work.
#include "../core/prepare.h"
#include "../core/rank_one.h"
#include "block.cuh"
#include "launch.cuh"
#include "phases.cuh"

namespace hdet::cuda {
namespace {

constexpr int kDeriveThreads = 512;

// The sum of the partials, in an order of its own. `sums` is shared memory.
__device__ __forceinline__ double sum_of_squares(const StepPlan& plan, double* sums) {
  if (plan.partials == nullptr) return 0.0;
  phase([&](int thread) {
    // Four sums of a thread: a 7B model has 400 000 partials, and one load at a time would wait 800 times for the cache.
    double sum[4] = {};
    int64_t i = thread;
    for (; i + 3 * kDeriveThreads < plan.num_chunks; i += 4 * kDeriveThreads) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] += plan.partials[i + j * kDeriveThreads];
    }
    for (; i < plan.num_chunks; i += kDeriveThreads) sum[0] += plan.partials[i];
    sums[thread] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  });
  add_up<kDeriveThreads>(sums);
  return sums[0];
}

__device__ __forceinline__ void derive_replicas(const StepPlan& plan, const Control&, int thread) {
  // from the other end of the block, so that rows and replicas are derived side by side
  const int64_t pairs = static_cast<int64_t>(plan.num_rows) * plan.num_replicas;
  for (int64_t i = kDeriveThreads - 1 - thread; i < pairs; i += kDeriveThreads) {
    prepare_replica(plan, static_cast<int32_t>(i / plan.num_replicas), static_cast<int32_t>(i % plan.num_replicas));
  }
}

__device__ __forceinline__ void derive_replicas(const RankOnePlan& plan, const Control& control, int thread) {
  for (int row = kDeriveThreads - 1 - thread; row < plan.num_rows; row += kDeriveThreads) prepare_rank_one(plan, control, row);
}

template <class Plan>
__global__ void __launch_bounds__(kDeriveThreads) derive_kernel(const __grid_constant__ Plan plan) {
  __shared__ double sums[kDeriveThreads];
  const double sum = sum_of_squares(plan, sums);
  threads([&](int thread) {
    const Control control = prepare_control(plan, sum);
    if (thread == 0) *plan.control = control;
    for (int row = thread; row < plan.num_rows; row += kDeriveThreads) prepare_row(plan, control, row);
    derive_replicas(plan, control, thread);
  });
}

__global__ void __launch_bounds__(kDeriveThreads) derive_converge_kernel(const __grid_constant__ RankOnePlan plan) {
  threads([&](int thread) {
    for (int row = thread; row < plan.num_rows; row += kDeriveThreads) prepare_converge(plan, row);
  });
}

}  // namespace

void launch_derive(const StepPlan& plan, std::uintptr_t stream) {
  launch("cudaLaunchKernelEx(derive)", derive_kernel<StepPlan>, {1, kDeriveThreads}, stream, plan);
}

void launch_derive(const RankOnePlan& plan, std::uintptr_t stream) {
  launch("cudaLaunchKernelEx(derive)", derive_kernel<RankOnePlan>, {1, kDeriveThreads}, stream, plan);
}

void launch_derive_converge(const RankOnePlan& plan, std::uintptr_t stream) {
  launch("cudaLaunchKernelEx(derive_converge)", derive_converge_kernel, {1, kDeriveThreads}, stream, plan);
}

}  // namespace hdet::cuda
