// The update phase of a step on a GPU. A block has a slice of a chunk; with several replicas, or codes, a whole one. What a step costs is its
// traffic: each stream is read once and written once, 28 bytes a parameter for AdamW in float32 and 20 + 8K for K replicas. AdamW's 43
// instructions an element take 13 % of an H100's issue slots. In bfloat16 throughout, rounded stochastically, it takes 90 in the time of 14
// bytes, and reaches 0.81 of a copy's bandwidth: neither the memory nor the issue of instructions is full then, but the 16 warps of a
// multiprocessor wait for their own results (docs/evidence/gpu.md).
#pragma once

#include "update.cuh"

namespace hdet::cuda {

// A replica's streams from a chunk's first element on, and what its step needs. Of one replica in registers, of many in shared memory.
struct Replica {
  Param param;
  ReplicaRow row;
  bool in_step;
};

// kMany: any number of replicas, in batches whose loads are issued together; else one.
template <class Rule, bool kMany, Known kKnown>
struct Update : Shared<Rule, kKnown> {
  using Base = Shared<Rule, kKnown>;
  using Base::chunk, Base::formats, Base::gradient, Base::kIsKnown, Base::plan, Base::skipped;
  static constexpr int kBatch = !kMany ? 1 : kKnown == Known::floats ? 4 : 2;

  Replica* replicas;  // in shared memory, where there are many
  Replica own;

  __device__ __forceinline__ Update(const StepPlan& p, const Chunk& c) : Base(p, c) {
    if constexpr (kMany) replicas = dynamic_shared<Replica>();
    else own = replica_at(0);
  }

  __device__ __forceinline__ int count() const { return kMany ? plan.num_replicas : 1; }
  __device__ __forceinline__ bool wide() const {
    return Base::narrow() && formats.param != DType::f32 && formats.master != Master::f32;
  }

  __device__ __forceinline__ Replica replica_at(int k) const {
    const int64_t place = k * plan.num_tensors + chunk.tensor;
    const Master kind = kIsKnown || plan.masters != nullptr ? formats.master : Master::none;
    void* const master = kind == Master::none ? nullptr : plan.masters[place];
    return {param_at(formats.param, kind, plan.params[place], master, chunk.offset),
            plan.replica_rows[static_cast<int64_t>(chunk.tensor) * plan.num_replicas + k], true};
  }

  __device__ __forceinline__ Replica replica(int k) const {
    if constexpr (!kMany) {
      return own;
    } else {
      Replica found = replicas[k];
      found.param.type = formats.param;  // known already
      found.param.kind = kIsKnown ? formats.master : found.param.kind;
      return found;
    }
  }

  // How the chunk is cut.
  __device__ __forceinline__ Cut prepare() {
    const int head = head_of(gradient, formats.gradient, wide());
    const bool vectors = prepare_replicas(head, wide());
    return cut(chunk.length, head, wide(), vectors && Base::are_in_step(head, wide()));
  }

  // Fills shared memory. Whether all parameters are in step.
  __device__ __forceinline__ bool prepare_replicas(int head, bool wide) {
    if constexpr (kMany) {
      phase([&](int thread) {
        for (int k = thread; k < count(); k += kStepThreads) {
          Replica r = replica_at(k);
          r.in_step = in_step(r.param, head, wide);
          replicas[k] = r;
        }
      });
      bool vectors = true;
      for (int k = 0; k < count(); ++k) vectors = vectors && replicas[k].in_step;
      return vectors;
    } else {
      return in_step(own.param, head, wide);
    }
  }

  // One turn: everything that becomes of these elements.
  template <int kWidth>
  __device__ __forceinline__ void turn(const Place& at) const {
    typename Base::template RawTurn<kWidth> raw;
    Raw<kWidth> raw_params[kBatch];
    Base::load_turn(at, raw);
    load_batch(0, at, raw_params);

    float u[kWidth] = {};
    uint32_t bits[kWidth];
    if (!skipped()) {
      float p[kWidth] = {};
      if (Rule::kCoupled && count() == 1) unpack(replica(0).param, raw_params[0], p);
      Base::direction(at, raw, p, bits, u);
    }
    if (plan.zero_gradients != 0) Base::template clear_gradient<kWidth>(at);
    if (!skipped()) follow_all(at, raw_params, u, bits);
  }

  // Every replica takes its step along u; the first batch has been loaded.
  template <int kWidth>
  __device__ __forceinline__ void follow_all(const Place& at, Raw<kWidth> (&raw_params)[kBatch], const float (&u)[kWidth],
                                             uint32_t (&bits)[kWidth]) const {
    for (int first = 0;;) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (!kMany || first + b < count()) follow(first + b, at, raw_params[b], u, bits);
      }
      first += kBatch;
      if (!kMany || first >= count()) break;
      load_batch(first, at, raw_params);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void load_batch(int first, const Place& at, Raw<kWidth> (&raw)[kBatch]) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!kMany || first + b < count()) load(replica(first + b).param, at, raw[b]);
    }
  }

  // Replica k takes its step along u.
  template <int kWidth>
  __device__ __forceinline__ void follow(int k, const Place& at, const Raw<kWidth>& raw, const float (&u)[kWidth],
                                         uint32_t (&bits)[kWidth]) const {
    const Replica r = replica(k);
    float p[kWidth];
    unpack(r.param, raw, p);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) p[i] = take_step(r.row, p[i], u[i]);
    keep(r, k, at, p, bits);
  }

  template <int kWidth>
  __device__ __forceinline__ void keep(const Replica& r, int k, const Place& at, const float (&p)[kWidth], uint32_t (&bits)[kWidth]) const {
    if (formats.stochastic && r.param.kind == Master::none && r.param.type == DType::bf16) {
      const int number = plan.first_replica + k;
      const bool drawn = !kMany && number == 0 && Base::draws_second();  // one draw serves the second moment and the parameter
      if (!drawn) Base::random(static_cast<uint32_t>(number), at, bits);
      store_halves<kWidth>(r.param.param, at, [&](int i) { return to_bf16(p[i], bits[i] & 0xffffu); });
    } else {
      store(r.param, at, p);
    }
  }
};

template <class Rule, bool kMany, Known kKnown>
constexpr int blocks_per_multiprocessor() {
  if (kKnown == Known::none || kMany) return 4;
  if (kKnown != Known::floats) return 5;
  // 768 threads have 96 KiB in flight. With more blocks than these ptxas spills, on sm_100 with 6 already. For it SGD takes more than it needs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 5;
#else
  return Update<Rule, kMany, kKnown>::kMayLackMomentum ? 5 : 6;
#endif
}

template <class Rule, bool kMany, Known kKnown>
__device__ __forceinline__ void update_chunk(Update<Rule, kMany, kKnown>& update) {
  const Cut parts = update.prepare();
  threads([&](int thread) {
    over_elements<kStepThreads>(
        parts, update.chunk.length, thread, [&](const Place& at) { update.template turn<kEight>(at); },
        [&](const Place& at) { update.template turn<1>(at); });
  });
}

template <class Rule, bool kMany, Known kKnown>
__global__ void __launch_bounds__(kStepThreads, blocks_per_multiprocessor<Rule, kMany, kKnown>())
    step_kernel(const __grid_constant__ StepPlan plan, const Slices slices) {
  const Chunk chunk = slice_of(plan.chunks, slices);
  after_the_kernel_before();
  if (chunk.length <= 0 || without_gradient(plan, chunk)) return;
  Update<Rule, kMany, kKnown> update(plan, chunk);
  const bool nothing_to_do = update.skipped() && plan.zero_gradients == 0;
  if (nothing_to_do) return;
  update_chunk(update);
}

}  // namespace hdet::cuda
