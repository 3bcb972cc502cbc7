// The derive phase on a GPU: what the update reads, from the host's settings, the norm, the scaler
// and the step counters, which advance here.
#include <algorithm>

#include "../core/prepare.h"
#include "block.cuh"
#include "launch.cuh"

namespace hdet::cuda {
namespace {

constexpr int kDeriveThreads = 512;

// The sum of the partials, in an order of its own. `sums` is shared memory.
HDET_DEVICE double sum_of_squares(const StepPlan& plan, double* sums) {
  if (plan.partials == nullptr) return 0.0;
  phase([&](int thread) {
    // Four sums of a thread: a 7B model has 400 000 partials, and one load at a time would wait 800
    // times for the cache.
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

// StepPlan::carried, on its way. The host reads its memory when it launches.
struct Carried {
  uint64_t words[kCarried];
};

// A thread for each tensor. Every block adds up all partials, in the same order, so that none waits
// for another; and writes all that has been carried, of which another may not have written anything
// yet.
__global__ void __launch_bounds__(kDeriveThreads)
    derive_kernel(const __grid_constant__ StepPlan plan, const __grid_constant__ Carried carried) {
  __shared__ double sums[kDeriveThreads];
  let_the_next_kernel_come();
  after_the_kernel_before();
  if (plan.num_carried > 0) {
    phase([&](int thread) {
      if (thread < plan.num_carried)
        reinterpret_cast<uint64_t*>(plan.settings)[thread] = carried.words[thread];
    });
  }
  const double sum = sum_of_squares(plan, sums);
  threads([&](int thread) {
    const Control control = prepare_control(plan, sum);
    const int64_t tensor = static_cast<int64_t>(blockIdx.x) * kDeriveThreads + thread;
    if (tensor == 0) *plan.control = control;
    if (tensor < plan.num_tensors) prepare_tensor(plan, control, tensor, -1);
  });
}

}  // namespace

void launch_derive(const StepPlan& plan, std::uintptr_t stream) {
  Carried carried;
  if (plan.num_carried > kCarried)
    throw std::runtime_error("hdet: too many settings for a kernel's arguments");
  std::copy_n(plan.carried, plan.num_carried, carried.words);
  // early where the norm is the kernel before it; what torch has launched is waited for
  const Grid grid{(plan.num_tensors + kDeriveThreads - 1) / kDeriveThreads, kDeriveThreads, 0,
                  plan.partials != nullptr};
  launch("cudaLaunchKernelEx(derive)", derive_kernel, grid, stream, plan, carried);
}

}  // namespace hdet::cuda
