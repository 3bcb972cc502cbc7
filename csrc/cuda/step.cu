// The AdamW step on a GPU: one launch over the chunks of all tensors, 28 bytes a parameter.
#include "../core/rules.h"
#include "kernels.h"
#include "launch.cuh"
#include "vec.cuh"

namespace hdet::cuda {
namespace {

constexpr int kStepThreads = 512;

__global__ void __launch_bounds__(kStepThreads) adamw_kernel(const AdamWPlan plan) {
  const Chunk c = plan.chunks[blockIdx.x];
  const HyperRow row = plan.rows[c.row];
  const float* const g = global(plan.gradients[c.tensor]) + c.offset;
  float* const p = global(plan.params[c.tensor]) + c.offset;
  float* const m = global(plan.exp_avgs[c.tensor]) + c.offset;
  float* const v = global(plan.exp_avg_sqs[c.tensor]) + c.offset;

  const auto scalar = [&](int i) {
    float param = p[i], exp_avg = load_once(m + i), exp_avg_sq = load_once(v + i);
    hdet::adamw(row, load_once(g + i), param, exp_avg, exp_avg_sq);
    p[i] = param;
    store_once(m + i, exp_avg);
    store_once(v + i, exp_avg_sq);
  };
  const auto vector = [&](int i) {
    // All four loads are issued before the first result is needed.
    const float4 gradient = load_once(reinterpret_cast<const float4*>(g + i));
    float4 param = *reinterpret_cast<const float4*>(p + i);
    float4 exp_avg = load_once(reinterpret_cast<const float4*>(m + i));
    float4 exp_avg_sq = load_once(reinterpret_cast<const float4*>(v + i));
    hdet::adamw(row, gradient.x, param.x, exp_avg.x, exp_avg_sq.x);
    hdet::adamw(row, gradient.y, param.y, exp_avg.y, exp_avg_sq.y);
    hdet::adamw(row, gradient.z, param.z, exp_avg.z, exp_avg_sq.z);
    hdet::adamw(row, gradient.w, param.w, exp_avg.w, exp_avg_sq.w);
    *reinterpret_cast<float4*>(p + i) = param;
    store_once(reinterpret_cast<float4*>(m + i), exp_avg);
    store_once(reinterpret_cast<float4*>(v + i), exp_avg_sq);
  };
  over_elements(c.length, floats_before_boundary(g, c.length, p, m, v), scalar, vector);
}

}  // namespace

void adamw(const AdamWPlan& plan, int device, std::uintptr_t stream) {
  launch_over_chunks("cudaLaunchKernelEx(adamw)", adamw_kernel, plan, kStepThreads, device, stream);
}

}  // namespace hdet::cuda
