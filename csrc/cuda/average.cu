// The weighted mean of K co-resident replicas on a GPU, in place: each element is read once and written once, 8K bytes an element.
#include "../core/rules.h"
#include "kernels.h"
#include "launch.cuh"
#include "vec.cuh"

namespace hdet::cuda {
namespace {

constexpr int kAverageThreads = 256;

__device__ __forceinline__ void add(float4& sum, float weight, const float4& x) {
  sum.x = add_weighted(sum.x, weight, x.x);
  sum.y = add_weighted(sum.y, weight, x.y);
  sum.z = add_weighted(sum.z, weight, x.z);
  sum.w = add_weighted(sum.w, weight, x.w);
}

// Adds kBatch rows to the sum: all loads are issued before the first result is needed. A weight of 0 leaves a row out.
template <int kBatch>
__device__ __forceinline__ void add_rows(float4& sum, float* const (&rows)[kBatch], const float (&weights)[kBatch], int i) {
  float4 loaded[kBatch];
#pragma unroll
  for (int k = 0; k < kBatch; ++k) loaded[k] = *reinterpret_cast<const float4*>(rows[k] + i);
#pragma unroll
  for (int k = 0; k < kBatch; ++k) add(sum, weights[k], loaded[k]);
}

__device__ __forceinline__ float4 empty_sum() { return make_float4(kEmptySum, kEmptySum, kEmptySum, kEmptySum); }

// A number of replicas known to the compiler: their addresses and weights stay in registers.
template <int kReplicas>
__global__ void __launch_bounds__(kAverageThreads) average_kernel(const AveragePlan plan) {
  const Chunk c = plan.chunks[blockIdx.x];
  float* const* const table = plan.addresses + c.tensor;
  float* rows[kReplicas];
  float weights[kReplicas];
#pragma unroll
  for (int k = 0; k < kReplicas; ++k) {
    rows[k] = global(table[k * plan.num_tensors]) + c.offset;
    weights[k] = plan.weights[k];
  }
  const auto scalar = [&](int i) {
    float sum = kEmptySum;
#pragma unroll
    for (int k = 0; k < kReplicas; ++k) sum = add_weighted(sum, weights[k], rows[k][i]);
#pragma unroll
    for (int k = 0; k < kReplicas; ++k) rows[k][i] = sum;
  };
  const auto vector = [&](int i) {
    float4 sum = empty_sum();
    add_rows(sum, rows, weights, i);
#pragma unroll
    for (int k = 0; k < kReplicas; ++k) *reinterpret_cast<float4*>(rows[k] + i) = sum;
  };
  over_elements(c.length, floats_before_boundary(table, plan.num_tensors, kReplicas, c.offset, c.length), scalar, vector);
}

// Any number of replicas: addresses and weights are read again for each vector, from the cache.
__global__ void __launch_bounds__(kAverageThreads) average_any_kernel(const AveragePlan plan) {
  constexpr int kBatch = 4;
  const Chunk c = plan.chunks[blockIdx.x];
  const int count = plan.num_replicas;
  float* const* const table = plan.addresses + c.tensor;
  const auto row = [&](int k) { return global(table[k * plan.num_tensors]) + c.offset; };

  const auto scalar = [&](int i) {
    float sum = kEmptySum;
    for (int k = 0; k < count; ++k) sum = add_weighted(sum, plan.weights[k], row(k)[i]);
    for (int k = 0; k < count; ++k) row(k)[i] = sum;
  };
  const auto vector = [&](int i) {
    float4 sum = empty_sum();
    for (int first = 0; first < count; first += kBatch) {
      float* rows[kBatch];
      float weights[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {  // the last batch is filled up with its last row, at weight 0
        rows[k] = row(min(first + k, count - 1));
        weights[k] = first + k < count ? plan.weights[first + k] : 0.0f;
      }
      add_rows(sum, rows, weights, i);
    }
#pragma unroll 1
    for (int k = 0; k < count; ++k) *reinterpret_cast<float4*>(row(k) + i) = sum;
  };
  over_elements(c.length, floats_before_boundary(table, plan.num_tensors, count, c.offset, c.length), scalar, vector);
}

using Kernel = void (*)(AveragePlan);

Kernel kernel_for(int num_replicas) {
  switch (num_replicas) {
    case 1: return average_kernel<1>;
    case 2: return average_kernel<2>;
    case 4: return average_kernel<4>;
    case 8: return average_kernel<8>;
    default: return average_any_kernel;
  }
}

}  // namespace

void average(const AveragePlan& plan, int device, std::uintptr_t stream) {
  launch_over_chunks("cudaLaunchKernelEx(average)", kernel_for(plan.num_replicas), plan, kAverageThreads, device, stream);
}

}  // namespace hdet::cuda
