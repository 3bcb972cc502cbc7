// The rank-one step on a GPU: gradient, moments, base and displacement are read, and K sets of parameters only written. With AdamW
// and float32 gradients 32 bytes a parameter (gradient 4, moments 16, base 4, displacement 8; with 16-bit gradients 30), and 4 (or, in
// 16 bits, 2) for each set.
#include "kernels.h"
#include "launch.cuh"
#include "phases.cuh"
#include "update.cuh"

namespace hdet::cuda {
namespace {

// One set of parameters from a chunk's first element on, and where on the line it stands.
struct Output {
  void* stream;
  ReplicaRow row;
  bool in_step;
};

// Base, displacement and the outputs of a chunk.
struct Line {
  const RankOnePlan& plan;
  const Chunk& chunk;
  const DType type;  // of the outputs
  const ReplicaRow row;
  void* const base;
  void* const displacement;
  Output* const outputs;  // in shared memory

  __device__ __forceinline__ Line(const RankOnePlan& p, const Chunk& c, DType type)
      : plan(p),
        chunk(c),
        type(type),
        row(p.lines[c.tensor]),
        base(advance(p.bases[c.tensor], DType::f32, c.offset)),
        displacement(advance(p.displacements[c.tensor], DType::f32, c.offset)),
        outputs(dynamic_shared<Output>()) {}

  // Fills shared memory; whether these streams are in step after `head` elements. Base and displacement are float32: never wide.
  __device__ __forceinline__ bool prepare(int head) const {
    phase([&](int thread) {
      for (int k = thread; k < plan.num_replicas; k += kStepThreads) {
        void* const stream = advance(plan.params[k * plan.num_tensors + chunk.tensor], type, chunk.offset);
        outputs[k] = {stream, plan.replica_rows[static_cast<int64_t>(chunk.tensor) * plan.num_replicas + k], in_step(stream, type, head, false)};
      }
    });
    bool vectors = in_step(base, DType::f32, head, false) && in_step(displacement, DType::f32, head, false);
    for (int k = 0; k < plan.num_replicas; ++k) vectors = vectors && outputs[k].in_step;
    return vectors;
  }

  template <int kWidth>
  __device__ __forceinline__ void load_turn(const Place& at, Raw<kWidth>& raw_base, Raw<kWidth>& raw_displacement) const {
    load(DType::f32, base, at, raw_base);
    load(DType::f32, displacement, at, raw_displacement);
  }

};

template <class Rule, Known kKnown>
__global__ void __launch_bounds__(kStepThreads, 4) rank_one_kernel(const __grid_constant__ RankOnePlan plan) {
  const Chunk chunk = plan.chunks[blockIdx.x];
  after_the_kernel_before();
  if (without_gradient(plan, chunk)) return;
  const Shared<Rule, kKnown> shared(plan, chunk);
  const Line line(plan, chunk, shared.formats.param);
  const int head = head_of(line.base, DType::f32, false);
  const bool in_line = line.prepare(head);
  const bool vectors = in_line && in_step(shared.gradient, shared.formats.gradient, head, false) && shared.are_in_step(head, false);

  const auto turn = [&](const Place& at, auto width) {
    constexpr int kWidth = decltype(width)::value;
    typename Shared<Rule, kKnown>::template RawTurn<kWidth> raw;
    Raw<kWidth> raw_base, raw_displacement;
    shared.load_turn(at, raw);
    line.load_turn(at, raw_base, raw_displacement);
    float u[kWidth] = {}, b[kWidth], d[kWidth];
    uint32_t bits[kWidth];
    const float no_param[kWidth] = {};
    if (!shared.skipped()) shared.direction(at, raw, no_param, bits, u);
    if (plan.zero_gradients != 0) shared.template clear_gradient<kWidth>(at);
    unpack(DType::f32, raw_base, b);
    unpack(DType::f32, raw_displacement, d);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) d[i] = displaced(line.row, d[i], u[i]);
    store_floats(line.displacement, at, d);
#pragma unroll 1
    for (int k = 0; k < plan.num_replicas; ++k) {
      const Output output = line.outputs[k];
      float p[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) p[i] = take_step(output.row, b[i], d[i]);
      store(line.type, output.stream, at, p);
    }
  };
  const Cut parts = cut(chunk.length, head, false, vectors);
  threads([&](int thread) {
    over_elements<kStepThreads>(
        parts, chunk.length, thread, [&](const Place& at) { turn(at, Width<kEight>{}); }, [&](const Place& at) { turn(at, Width<1>{}); });
  });
}

// All replicas meet at their mean, which becomes the base.
__global__ void __launch_bounds__(kStepThreads, 8) converge_kernel(const __grid_constant__ RankOnePlan plan) {
  const Chunk chunk = plan.chunks[blockIdx.x];
  after_the_kernel_before();
  const Line line(plan, chunk, unpack_formats(chunk.formats).param);
  const int head = head_of(line.base, DType::f32, false);
  const bool vectors = line.prepare(head);

  const auto turn = [&](const Place& at, auto width) {
    constexpr int kWidth = decltype(width)::value;
    Raw<kWidth> raw_base, raw_displacement;
    line.load_turn(at, raw_base, raw_displacement);
    float b[kWidth], d[kWidth];
    unpack(DType::f32, raw_base, b);
    unpack(DType::f32, raw_displacement, d);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      b[i] = take_step(line.row, b[i], d[i]);
      d[i] = 0.0f;
    }
    store_floats(line.base, at, b);
    store_floats(line.displacement, at, d);
#pragma unroll 1
    for (int k = 0; k < plan.num_replicas; ++k) store(line.type, line.outputs[k].stream, at, b);
  };
  const Cut parts = cut(chunk.length, head, false, vectors);
  threads([&](int thread) {
    over_elements<kStepThreads>(
        parts, chunk.length, thread, [&](const Place& at) { turn(at, Width<kEight>{}); }, [&](const Place& at) { turn(at, Width<1>{}); });
  });
}

using Kernel = void (*)(RankOnePlan);

template <class Rule>
Kernel kernel_for(Known known) {
  return known == Known::floats ? rank_one_kernel<Rule, Known::floats> : rank_one_kernel<Rule, Known::none>;
}

Kernel kernel_for(const RankOnePlan& plan) {
  switch (plan.rule) {
    case Rule::adam: return kernel_for<AdamRule>(plan.known);
    case Rule::sgd: return kernel_for<SgdRule>(plan.known);
    case Rule::lion: return kernel_for<LionRule>(plan.known);
    case Rule::adamw: break;
  }
  return kernel_for<AdamWRule>(plan.known);
}

int64_t shared_bytes(const RankOnePlan& plan) { return static_cast<int64_t>(plan.num_replicas * sizeof(Output)); }

}  // namespace

void rank_one(const RankOnePlan& plan, int device, std::uintptr_t stream) {
  const char* const name = "cudaLaunchKernelEx(rank_one)";
  const Grid grid{plan.num_chunks, kStepThreads, shared_bytes(plan), true};
  check(grid, name);
  use_device(device);
  if (plan.partials != nullptr) launch_norm(plan.chunks, plan.num_chunks, plan.gradients, plan.partials, stream);
  launch_derive(plan, stream);
  launch(name, kernel_for(plan), grid, stream, plan);
}

void converge(const RankOnePlan& plan, int device, std::uintptr_t stream) {
  const char* const name = "cudaLaunchKernelEx(converge)";
  const Grid grid{plan.num_chunks, kStepThreads, shared_bytes(plan), true};
  check(grid, name);
  use_device(device);
  launch_derive_converge(plan, stream);
  launch(name, converge_kernel, grid, stream, plan);
}

}  // namespace hdet::cuda
