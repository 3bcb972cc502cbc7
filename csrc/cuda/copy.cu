// A scaled copy of one set of tensors to another on a GPU: into a bucket and back. One launch for
// all tensors.
#include "../core/arithmetic.h"
#include "block.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "vec.cuh"

namespace hdet::cuda {
namespace {

constexpr int kCopyThreads = 128;

template <bool kFloat>
struct Copy {
  const CopyPlan& plan;
  const Chunk chunk;
  Param<> source, destination;

  HDET_DEVICE explicit Copy(const CopyPlan& p) : plan(p), chunk(p.chunks[blockIdx.x]) {
    const Formats formats = unpack_formats(chunk.formats);
    void* const* const row = plan.addresses + int64_t{4} * chunk.tensor;
    source = param_at(kFloat ? DType::f32 : formats.gradient,
                      kFloat ? Master::none : source_master(formats), row[0], row[1], chunk.offset);
    destination = param_at(kFloat ? DType::f32 : formats.param,
                           kFloat ? Master::none : formats.master, row[2], row[3], chunk.offset);
  }

  HDET_DEVICE Cut prepare() const {
    const bool wide = source.type != DType::f32 && destination.type != DType::f32 &&
                      destination.kind != Master::f32;
    const int head = head_of(source.param, source.type, wide);
    return cut(chunk.length, head, wide,
               in_step(source, head, wide) && in_step(destination, head, wide));
  }

  template <int kWidth>
  HDET_DEVICE void turn(const Place& at) const {
    float x[kWidth] = {};
    if (plan.scale != 0.0f) {
      Raw<kWidth> raw;
      source.load(at, raw);
      source.unpack(raw, x);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = scaled(plan.scale, x[i]);
    destination.round(x);
    destination.store(at, x);
  }
};

template <bool kFloat>
__global__ void __launch_bounds__(kCopyThreads, 6)
    copy_kernel(const __grid_constant__ CopyPlan plan) {
  const Copy<kFloat> copy(plan);
  const Cut parts = copy.prepare();
  threads([&](int thread) { over_elements<kCopyThreads>(parts, copy.chunk.length, thread, copy); });
}

}  // namespace

void copy(const CopyPlan& plan, int device, std::uintptr_t stream) {
  use_device(device);
  launch("cudaLaunchKernelEx(copy)", plan.all_float != 0 ? copy_kernel<true> : copy_kernel<false>,
         {plan.num_chunks, kCopyThreads}, stream, plan);
}

}  // namespace hdet::cuda
