// The update phase of a step on a GPU. A block has a slice of a chunk; with several replicas, or
// codes, a whole one. What a step costs is its traffic: each stream is read once and written once,
// 28 bytes a parameter for AdamW in float32 and 20 + 8K for K replicas. AdamW's 43 instructions an
// element take 13 % of an H100's issue slots. In bfloat16 throughout, rounded stochastically, it
// takes 90 in the time of 14 bytes, and reaches 0.81 of a copy's bandwidth: neither the memory nor
// the issue of instructions is full then, but the 16 warps of a multiprocessor wait for their own
// results (docs/evidence/gpu.md).
#pragma once

#include <type_traits>

#include "../core/philox.h"
#include "../core/plan.h"
#include "block.cuh"
#include "vec.cuh"

namespace hdet::cuda {

// Small blocks: in a model of 1000-element tensors a block has 125 turns to share. What keeps the
// memory busy is the registers of all blocks on a multiprocessor together: 768 threads x 4 streams
// x 32 bytes in flight are 96 KiB, and 30 KiB would do.
constexpr int kStepThreads = 128;

// How the blocks of a grid share chunks: `count` to each, which have `length` elements of it one
// after the other. The memory is the faster the nearer to each other the blocks are that run at a
// time: with 2048 elements each an H100 reaches 0.97 of a copy's bandwidth, with 16384 0.94
// (docs/evidence/gpu.md). Chunks stay long, as each has a partial sum of the norm, which the derive
// phase adds up.
struct Slices {
  int32_t count, length;
};
constexpr int32_t kSliceElements = 2048;

// `longest`: elements of the longest chunk.
inline Slices slices_of(int32_t longest) {
  return {longest <= kSliceElements ? 1 : (longest - 1) / kSliceElements + 1, kSliceElements};
}

// A block for each chunk.
inline Slices whole_chunks(int32_t longest) { return {1, longest}; }

// That of this block. Without elements where a chunk is shorter than the longest.
HDET_DEVICE Chunk slice_of(const Chunk* chunks, const Slices& slices) {
  const uint32_t count = static_cast<uint32_t>(slices.count);
  Chunk chunk = chunks[blockIdx.x / count];
  const int first = static_cast<int>(blockIdx.x % count) * slices.length;
  chunk.offset += first;
  chunk.length = chunk.length - first < slices.length ? chunk.length - first : slices.length;
  return chunk;
}

// A replica's streams from a chunk's first element on, and what its step needs. Of one replica in
// registers, of many in shared memory.
struct Replica {
  void *param, *master;
  ReplicaRow row;
  bool in_step;
};

// Formats that are known.
template <Known kKnown>
struct Stored {
  static constexpr Formats kFormats = formats_of(kKnown);
  Constant<kFormats.gradient> gradient;
  Constant<kFormats.param> param;
  Constant<kFormats.master> master;
  Constant<kFormats.stochastic> stochastic;

  HDET_DEVICE explicit Stored(int64_t /*packed*/) {}
  HDET_DEVICE Constant<kFormats.moments[0]> moment(int) const { return {}; }
};

template <>
struct Stored<Known::none> : Formats {
  HDET_DEVICE explicit Stored(int64_t packed) : Formats(unpack_formats(packed)) {}
  HDET_DEVICE DType moment(int j) const { return moments[j]; }
};

// work(j) for the number of each moment, as a constant. The compiler unrolls a loop so late that
// arrays have gone to memory by then.
template <int kCount, class Work>
HDET_DEVICE void each(const Work& work) {
  if constexpr (kCount > 1) each<kCount - 1>(work);
  work(Width<kCount - 1>{});
}

// The moments of one element.
template <int kWidth>
struct Element {
  float (*x)[kWidth];
  int i;
  HDET_DEVICE float& operator[](int j) const { return x[j][i]; }
};

// Stands for all rules, of which StepPlan::rule says the one: of kernels that are seldom asked for
// there is one for all of them.
struct AnyRule {
  static constexpr int kMoments = kMostMoments;
  static constexpr bool kSquares = true, kCoupled = true, kMayLackMoments = true,
                        kGivesParameter = false;
};

template <class Rule>
constexpr bool kIsAny = std::is_same_v<Rule, AnyRule>;

// kMany: any number of replicas, in batches whose loads are issued together; else one. kKnown:
// StepPlan::known. Unless it is none, formats are constants to the compiler. kEmas: there may be
// averages over time, whose old values are loaded late, where registers are free again.
template <class Rule, bool kMany, Known kKnown, bool kEmas = kKnown == Known::none>
struct Update {
  static constexpr bool kIsKnown = kKnown != Known::none;
  static constexpr bool kMayDraw = !kIsKnown || formats_of(kKnown).stochastic;
  static constexpr int kBatch = !kMany || kIsAny<Rule> ? 1 : kKnown == Known::floats ? 4 : 2;

  template <int kWidth>
  struct RawTurn {
    Raw<kWidth> gradient, moments[Rule::kMoments];
  };

  const StepPlan& plan;
  const Chunk chunk;
  const Control control;
  const HyperRow row;
  const Stored<kKnown> formats;
  void *gradient, *moments[Rule::kMoments];
  Replica* replicas;  // in shared memory, where there are many
  Replica own;

  HDET_DEVICE Update(const StepPlan& p, const Chunk& c)
      : plan(p), chunk(c), control(*p.control), row(p.rows[c.tensor]), formats(c.formats) {
    gradient = advance(plan.gradients[chunk.tensor], formats.gradient, chunk.offset);
    each<Rule::kMoments>([&](auto j) {
      moments[j] = keeps(j)
                       ? advance(moment_of(plan, chunk.tensor, j), formats.moment(j), chunk.offset)
                       : nullptr;
    });
    if constexpr (kMany) replicas = dynamic_shared<Replica>();
    else own = replica_at(0);
  }

  // call(the rule's struct)
  template <class Call>
  HDET_DEVICE auto with(const Call& call) const {
    if constexpr (kIsAny<Rule>) {
      return with_rule(plan.rule, call);
    } else {
      return call(Rule{});
    }
  }
  HDET_DEVICE bool is_signed(int j) const {
    return with([j](auto rule) { return rule.is_signed(j); });
  }
  HDET_DEVICE bool gives_parameter() const {
    return with([](auto rule) { return rule.kGivesParameter; });
  }
  HDET_DEVICE bool keeps(int j) const {
    return !Rule::kMayLackMoments || unpack_formats(chunk.formats).moments[j] != DType::none;
  }
  HDET_DEVICE bool skipped() const { return control.skip != 0.0f; }
  // Whether moment j is rounded stochastically, with the bits of replica number 0.
  HDET_DEVICE bool draws(int j) const {
    return formats.stochastic && formats.moment(j) == DType::bf16 && !is_signed(j);
  }
  HDET_DEVICE bool draws_any() const {
    bool any = false;
    each<Rule::kMoments>([&](auto j) { any = any || draws(j); });
    return any;
  }

  // Random numbers belong to the elements 4q .. 4q + 3, so a group of four must not lie across two
  // of them.
  HDET_DEVICE bool are_in_step(int head, bool wide) const {
    bool all = !(formats.stochastic && head % 4 != 0);
    each<Rule::kMoments>(
        [&](auto j) { all = all && in_step(moments[j], formats.moment(j), head, wide); });
    return all;
  }

  template <int kWidth>
  HDET_DEVICE void load_turn(const Place& at, RawTurn<kWidth>& raw) const {
    load(formats.gradient, gradient, at, raw.gradient);
    each<Rule::kMoments>([&](auto j) {
      if (keeps(j)) load(formats.moment(j), moments[j], at, raw.moments[j]);
    });
  }

  // Gradient and moments -> new moments and u.
  template <int kWidth>
  HDET_DEVICE void take_direction(const float (&g)[kWidth], const float (&p)[kWidth],
                                  float (&x)[Rule::kMoments][kWidth], float (&u)[kWidth]) const {
    with([&](auto rule) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        u[i] = rule.direction(row, row.gradient_scale * g[i], p[i], Element<kWidth>{x, i});
    });
  }

  // Gradient and moments -> new moments, in memory, and u. `p`: the parameter, for coupled rules.
  // `bits`: those of replica number 0 afterwards, if draws_any().
  template <int kWidth>
  HDET_DEVICE void direction(const Place& at, const RawTurn<kWidth>& raw, const float (&p)[kWidth],
                             uint32_t (&bits)[kWidth], float (&u)[kWidth]) const {
    float g[kWidth], x[Rule::kMoments][kWidth] = {};
    unpack(formats.gradient, raw.gradient, g);
    each<Rule::kMoments>([&](auto j) {
      if (keeps(j)) unpack(formats.moment(j), raw.moments[j], x[j]);
    });
    take_direction(g, p, x, u);
    each<Rule::kMoments>([&](auto j) {
      if (kMayDraw && draws(j)) {
        random(0, at, bits);
        store_halves<kWidth>(moments[j], at,
                             [&](int i) { return to_bf16(x[j][i], bits[i] >> 16); });
      } else if (keeps(j)) {
        store(formats.moment(j), moments[j], at, x[j]);
      }
    });
  }

  template <int kWidth>
  HDET_DEVICE void clear_gradient(const Place& at) const {
    const float zeros[kWidth] = {};
    store(formats.gradient, gradient, at, zeros);
  }

  // Random numbers for the elements of this thread.
  template <int kWidth>
  HDET_DEVICE void random(uint32_t number, const Place& at, uint32_t (&bits)[kWidth]) const {
    const auto id = static_cast<uint32_t>(plan.ids[chunk.tensor]);
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const int64_t element = chunk.offset + (i == 0 ? at.first : at.second);
      const Random4 random = rounding_bits(plan.seed, row.step, number, id, element / 4);
      if constexpr (kWidth == 1) {
        const int lane = static_cast<int>(element % 4);
        const uint32_t even = lane < 2 ? random.word[0] : random.word[2];
        const uint32_t odd = lane < 2 ? random.word[1] : random.word[3];
        bits[0] = lane % 2 == 0 ? even : odd;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[i + j] = random.word[j];
      }
    }
  }

  HDET_DEVICE int count() const { return kMany ? plan.num_replicas : 1; }
  // Whether 16-byte accesses hold eight elements in all streams.
  HDET_DEVICE bool wide() const {
    const auto has_16_bits = [](DType type) { return type != DType::f32; };
    if constexpr (kIsKnown) return kKnown == Known::halves;
    bool all = has_16_bits(formats.gradient) && has_16_bits(formats.param) &&
               formats.master != Master::f32;
    each<Rule::kMoments>([&](auto j) { all = all && has_16_bits(formats.moment(j)); });
    return all;
  }

  HDET_DEVICE Replica replica_at(int k) const {
    const auto master = formats.master;
    void* stream = nullptr;
    if (master != Master::none)  // read for nothing, ptxas would spill
      stream = master_of(plan, chunk.tensor, k);
    const auto param =
        param_at(formats.param, master, param_of(plan, chunk.tensor, k), stream, chunk.offset);
    return {param.param, param.master,
            plan.replica_rows[static_cast<int64_t>(chunk.tensor) * plan.num_replicas + k], true};
  }
  HDET_DEVICE Replica replica(int k) const {
    if constexpr (kMany) return replicas[k];
    else return own;
  }
  HDET_DEVICE auto param(const Replica& r) const {
    return Param<decltype(formats.param), decltype(formats.master)>{formats.param, formats.master,
                                                                    r.param, r.master};
  }

  // How the chunk is cut.
  HDET_DEVICE Cut prepare() {
    const int head = head_of(gradient, formats.gradient, wide());
    const bool vectors = prepare_replicas(head, wide()) && emas_are_in_step(head);
    return cut(chunk.length, head, wide(), vectors && are_in_step(head, wide()));
  }

  HDET_DEVICE void* ema_at(int j, int k) const {
    return advance(ema_of(plan, chunk.tensor, j, k), DType::f32, chunk.offset);
  }
  HDET_DEVICE bool emas_are_in_step(int head) const {
    bool all = true;
    if constexpr (kEmas) {  // of none num_emas is 0
#pragma unroll 1
      for (int i = 0; i < plan.num_emas * count(); ++i)
        all = all && in_step(ema_at(i / count(), i % count()), DType::f32, head, false);
    }
    return all;
  }

  // Fills shared memory. Whether all parameters are in step.
  HDET_DEVICE bool prepare_replicas(int head, bool wide) {
    if constexpr (kMany) {
      phase([&](int thread) {
        for (int k = thread; k < count(); k += kStepThreads) {
          Replica r = replica_at(k);
          r.in_step = in_step(param(r), head, wide);
          replicas[k] = r;
        }
      });
      bool vectors = true;
      for (int k = 0; k < count(); ++k) vectors = vectors && replicas[k].in_step;
      return vectors;
    } else {
      return in_step(param(own), head, wide);
    }
  }

  // One turn: everything that becomes of these elements.
  template <int kWidth>
  HDET_DEVICE void turn(const Place& at) const {
    RawTurn<kWidth> raw;
    Raw<kWidth> raw_params[kBatch];
    load_turn(at, raw);
    load_batch(0, at, raw_params);

    float u[kWidth] = {};
    uint32_t bits[kWidth];
    if (!skipped()) {
      float p[kWidth] = {};
      if (Rule::kCoupled && count() == 1) param(replica(0)).unpack(raw_params[0], p);
      direction(at, raw, p, bits, u);
    }
    if (plan.zero_gradients != 0) clear_gradient<kWidth>(at);
    if (!skipped()) follow_all(at, raw_params, u, bits);
  }

  // Every replica takes its step along u; the first batch has been loaded.
  template <int kWidth>
  HDET_DEVICE void follow_all(const Place& at, Raw<kWidth> (&raw_params)[kBatch],
                              const float (&u)[kWidth], uint32_t (&bits)[kWidth]) const {
    for (int first = 0;;) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (!kMany || first + b < count()) follow(first + b, at, raw_params[b], u, bits);
      }
      first += kBatch;
      if (!kMany || first >= count()) break;
      load_batch(first, at, raw_params);
    }
    if constexpr (kEmas && kMany) {  // read again: beside u there are no registers for averages
#pragma unroll 1
      for (int k = 0; k < count() && plan.emas != nullptr; ++k) {
        float p[kWidth];
        param(replica(k)).load(at, raw_params[0]);
        param(replica(k)).unpack(raw_params[0], p);
        follow_over_time(k, at, p);
      }
    }
  }

  template <int kWidth>
  HDET_DEVICE void load_batch(int first, const Place& at, Raw<kWidth> (&raw)[kBatch]) const {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!kMany || first + b < count()) param(replica(first + b)).load(at, raw[b]);
    }
  }

  // Replica k takes its step along u, or becomes it.
  template <int kWidth>
  HDET_DEVICE void follow(int k, const Place& at, const Raw<kWidth>& raw, const float (&u)[kWidth],
                          uint32_t (&bits)[kWidth]) const {
    const Replica r = replica(k);
    float p[kWidth];
    param(r).unpack(raw, p);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) p[i] = gives_parameter() ? u[i] : take_step(r.row, p[i], u[i]);
    keep(r, k, at, p, bits);
    if constexpr (kEmas && !kMany) {
      if (plan.emas == nullptr) return;
      const auto type = formats.param;
      const auto master = formats.master;
      if constexpr (kIsAny<Rule>) {  // read again, as there are no registers for more
        Raw<kWidth> now;
        param(r).load(at, now);
        param(r).unpack(now, p);
      } else if (master == Master::none && type != DType::f32) {  // as it is stored
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          p[i] = rounds_stochastically() ? from_bf16(to_bf16(p[i], bits[i] & 0xffffu))
                                         : from_16(type, to_16(type, p[i]));
      }
      follow_over_time(k, at, p);
    }
  }

  HDET_DEVICE bool rounds_stochastically() const {
    return draws_params(formats.stochastic, formats.param, formats.master);
  }

  // Averages over time take in what replica k has become.
  template <int kWidth>
  HDET_DEVICE void follow_over_time(int k, const Place& at, const float (&p)[kWidth]) const {
#pragma unroll 1
    for (int j = 0; j < plan.num_emas; ++j) {
      const EmaRow ema_row = ema_row_of(plan, chunk.tensor, j);
      if (ema_row.weight == 0.0f) continue;
      void* const ema = ema_at(j, k);
      Raw<kWidth> raw;
      float average[kWidth];
      load(Float(), ema, at, raw);
      unpack(Float(), raw, average);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) average[i] = averaged(ema_row, average[i], p[i]);
      store_floats(ema, at, average);
    }
  }

  // Leaves in `p` what split24 stores.
  template <int kWidth>
  HDET_DEVICE void keep(const Replica& r, int k, const Place& at, float (&p)[kWidth],
                        uint32_t (&bits)[kWidth]) const {
    const auto master = formats.master;
    if (kMayDraw && rounds_stochastically()) {
      const int number = plan.first_replica + k;
      const bool drawn = !kMany && number == 0 &&
                         draws_any();  // one draw serves the second moment and the parameter
      if (!drawn) random(static_cast<uint32_t>(number), at, bits);
      if (master == Master::split24) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) p[i] = to_24(p[i], bits[i] & 0xffu);
        param(r).store(at, p);
      } else {
        store_halves<kWidth>(r.param, at, [&](int i) { return to_bf16(p[i], bits[i] & 0xffffu); });
      }
    } else {
      param(r).round(p);
      param(r).store(at, p);
    }
  }
};

// A chunk of a tensor without a gradient: there is nothing to do.
HDET_DEVICE bool without_gradient(const StepPlan& plan, const Chunk& chunk) {
  return plan.gradients[chunk.tensor] == nullptr;
}

template <class Rule, bool kMany, Known kKnown, bool kEmas>
constexpr int blocks_per_multiprocessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  constexpr bool kBlackwell = true;
#else
  constexpr bool kBlackwell = false;
#endif
  // 768 threads have 96 KiB in flight. With more blocks than these ptxas spills.
  if (kIsAny<Rule>) return 3;
  if (kMany || kKnown == Known::none) return 4;
  if (kEmas) return Rule::kMoments > 2 || (kBlackwell && kKnown == Known::split) ? 4 : 5;
  if (Rule::kMoments > 2) return kKnown == Known::halves ? 5 : 4;
  if (kKnown != Known::floats || kBlackwell) return 5;
  return Rule::kMayLackMoments ? 5 : 6;  // for 6 SGD takes more registers than it needs
}

template <class Rule, bool kMany, Known kKnown, bool kEmas>
HDET_DEVICE void update_chunk(Update<Rule, kMany, kKnown, kEmas>& update) {
  const Cut parts = update.prepare();
  threads(
      [&](int thread) { over_elements<kStepThreads>(parts, update.chunk.length, thread, update); });
}

template <class Rule, bool kMany, Known kKnown, bool kEmas = kKnown == Known::none>
__global__ void __launch_bounds__(kStepThreads,
                                  blocks_per_multiprocessor<Rule, kMany, kKnown, kEmas>())
    step_kernel(const __grid_constant__ StepPlan plan, const Slices slices) {
  const Chunk chunk = slice_of(plan.chunks, slices);
  after_the_kernel_before();
  if (chunk.length <= 0 || without_gradient(plan, chunk)) return;
  Update<Rule, kMany, kKnown, kEmas> update(plan, chunk);
  const bool nothing_to_do = update.skipped() && plan.zero_gradients == 0;
  if (nothing_to_do) return;
  update_chunk(update);
}

using StepKernel = void (*)(StepPlan, Slices);

// Gradients in float32 beside bfloat16 parameters, as Megatron keeps them, moments in bfloat16, and
// 24 bits beside codes are most used with it: it has kernels of its own for mixtures of formats.
template <class Rule>
constexpr bool kMixes = std::is_same_v<Rule, AdamwRule>;

// What has a kernel for each rule. Other formats, and two at once of bfloat16 throughout, several
// replicas, averages over time and codes, have that of AnyRule, the only one of generic rules.
template <class Rule>
bool is_usual(const StepPlan& plan) {
  const bool has_many = plan.num_replicas > 1, has_codes = plan.codebooks != nullptr;
  if (plan.known == Known::none) return kMixes<Rule> && !has_many;
  return (plan.known == Known::halves) + has_many + (plan.emas != nullptr) + has_codes < 2;
}

template <class Rule>
StepKernel kernel_for(const StepPlan& plan);  // rule.cu

}  // namespace hdet::cuda
