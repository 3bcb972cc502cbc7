// The scaled copy on a GPU: parameters into a bucket and back, one launch for all tensors, 8 bytes an element.
#include "../core/plan.h"
#include "kernels.h"
#include "launch.cuh"
#include "vec.cuh"

namespace hdet::cuda {
namespace {

constexpr int kCopyThreads = 256;

__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const CopyPlan plan) {
  const Chunk c = plan.chunks[blockIdx.x];
  const float* const source = global(plan.sources[c.tensor]) + c.offset;
  float* const destination = global(plan.destinations[c.tensor]) + c.offset;
  const float scale = plan.scale;

  const auto scalar = [&](int i) { destination[i] = scale == 0.0f ? 0.0f : scale * source[i]; };
  const auto vector = [&](int i) {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (scale != 0.0f) {
      x = *reinterpret_cast<const float4*>(source + i);
      x = make_float4(scale * x.x, scale * x.y, scale * x.z, scale * x.w);
    }
    *reinterpret_cast<float4*>(destination + i) = x;
  };
  over_elements(c.length, floats_before_boundary(source, c.length, destination), scalar, vector);
}

}  // namespace

void copy(const CopyPlan& plan, int device, std::uintptr_t stream) {
  launch_over_chunks("cudaLaunchKernelEx(copy)", copy_kernel, plan, kCopyThreads, device, stream);
}

}  // namespace hdet::cuda
