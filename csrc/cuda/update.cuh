// What all updates of a step have in common: a chunk's gradient and moments, and the direction that replicas share.
#pragma once

#include "../core/philox.h"
#include "../core/plan.h"
#include "../core/rules.h"
#include "block.cuh"
#include "vec.cuh"

namespace hdet::cuda {

// Small blocks: in a model of 1000-element tensors a block has 125 turns to share. What keeps the memory busy is the registers of
// all blocks on a multiprocessor together: 768 threads x 4 streams x 32 bytes in flight are 96 KiB, and 30 KiB would do.
constexpr int kStepThreads = 128;

// How the blocks of a grid share chunks: `count` to each, which have `length` elements of it one after the other. The memory is the faster the
// nearer to each other the blocks are that run at a time: with 2048 elements each an H100 reaches 0.97 of a copy's bandwidth, with 16384 0.94
// (docs/evidence/gpu.md). Chunks stay long, as each has a partial sum of the norm, which the derive phase adds up.
struct Slices {
  int32_t count, length;
};
constexpr int32_t kSliceElements = 2048;

// `longest`: elements of the longest chunk.
inline Slices slices_of(int32_t longest) { return {longest <= kSliceElements ? 1 : (longest - 1) / kSliceElements + 1, kSliceElements}; }

// A block for each chunk.
inline Slices whole_chunks() { return {1, static_cast<int32_t>(kChunkElements)}; }

// That of this block. Without elements where a chunk is shorter than the longest.
__device__ __forceinline__ Chunk slice_of(const Chunk* chunks, const Slices& slices) {
  const uint32_t count = static_cast<uint32_t>(slices.count);
  Chunk chunk = chunks[blockIdx.x / count];
  const int first = static_cast<int>(blockIdx.x % count) * slices.length;
  chunk.offset += first;
  chunk.length = chunk.length - first < slices.length ? chunk.length - first : slices.length;
  return chunk;
}

// kKnown: StepPlan::known. Unless it is none, formats are constants to the compiler.
template <class Rule, Known kKnown>
struct Shared {
  static constexpr bool kIsKnown = kKnown != Known::none;
  static constexpr bool kMayLackMomentum = Rule::kCoupled && !Rule::kSecond;  // SGD without momentum keeps nothing

  template <int kWidth>
  struct RawTurn {
    Raw<kWidth> gradient, first, second;
  };

  const StepPlan& plan;
  const Chunk chunk;
  const Control control;
  const HyperRow row;
  Formats formats;
  void *gradient, *exp_avg, *exp_avg_sq;

  __device__ __forceinline__ Shared(const StepPlan& p, const Chunk& c)
      : plan(p), chunk(c), control(*p.control), row(p.rows[c.tensor]), formats(kIsKnown ? formats_of(kKnown) : unpack_formats(c.formats)) {
    if (kIsKnown && kMayLackMomentum && unpack_formats(c.formats).exp_avg == DType::none) formats.exp_avg = DType::none;
    gradient = advance(plan.gradients[chunk.tensor], formats.gradient, chunk.offset);
    exp_avg = keeps_first() ? advance(plan.exp_avgs[chunk.tensor], formats.exp_avg, chunk.offset) : nullptr;
    exp_avg_sq = Rule::kSecond ? advance(plan.exp_avg_sqs[chunk.tensor], formats.exp_avg_sq, chunk.offset) : nullptr;
  }

  __device__ __forceinline__ bool keeps_first() const { return !kMayLackMomentum || formats.exp_avg != DType::none; }
  __device__ __forceinline__ bool skipped() const { return control.skip != 0.0f; }
  __device__ __forceinline__ bool draws_second() const { return Rule::kSecond && formats.stochastic && formats.exp_avg_sq == DType::bf16; }

  // Whether 16-byte accesses hold eight elements in all of these streams.
  __device__ __forceinline__ bool narrow() const {
    return (!kIsKnown || kKnown == Known::halves) && formats.gradient != DType::f32 && formats.exp_avg != DType::f32 && formats.exp_avg_sq != DType::f32;
  }

  // Random numbers belong to the elements 4q .. 4q + 3, so a group of four must not lie across two of them.
  __device__ __forceinline__ bool are_in_step(int head, bool wide) const {
    return in_step(exp_avg, formats.exp_avg, head, wide) && in_step(exp_avg_sq, formats.exp_avg_sq, head, wide) &&
           !(formats.stochastic && head % 4 != 0);
  }

  template <int kWidth>
  __device__ __forceinline__ void load_turn(const Place& at, RawTurn<kWidth>& raw) const {
    load(formats.gradient, gradient, at, raw.gradient);
    if (keeps_first()) load(formats.exp_avg, exp_avg, at, raw.first);
    if (Rule::kSecond) load(formats.exp_avg_sq, exp_avg_sq, at, raw.second);
  }

  // Gradient and moments -> new moments, in memory, and u. `p`: the parameter, for coupled rules. `bits`: those of replica number 0
  // afterwards, if draws_second().
  template <int kWidth>
  __device__ __forceinline__ void direction(const Place& at, const RawTurn<kWidth>& raw, const float (&p)[kWidth], uint32_t (&bits)[kWidth],
                                            float (&u)[kWidth]) const {
    float g[kWidth], m[kWidth] = {}, v[kWidth] = {};
    unpack(formats.gradient, raw.gradient, g);
    if (keeps_first()) unpack(formats.exp_avg, raw.first, m);
    if (Rule::kSecond) unpack(formats.exp_avg_sq, raw.second, v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) u[i] = Rule::direction(row, row.gradient_scale * g[i], p[i], m[i], v[i]);
    if (keeps_first()) store(formats.exp_avg, exp_avg, at, m);
    if (draws_second()) {
      random(0, at, bits);
      store_halves<kWidth>(exp_avg_sq, at, [&](int i) { return to_bf16(v[i], bits[i] >> 16); });
    } else if (Rule::kSecond) {
      store(formats.exp_avg_sq, exp_avg_sq, at, v);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void clear_gradient(const Place& at) const {
    const float zeros[kWidth] = {};
    store(formats.gradient, gradient, at, zeros);
  }

  // Random numbers for the elements of this thread.
  template <int kWidth>
  __device__ __forceinline__ void random(uint32_t number, const Place& at, uint32_t (&bits)[kWidth]) const {
    const auto id = static_cast<uint32_t>(plan.ids[chunk.tensor]);
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const int64_t element = chunk.offset + (i == 0 ? at.first : at.second);
      const Random4 random = rounding_bits(plan.seed, row.step, number, id, element / 4);
      if constexpr (kWidth == 1) {
        const int lane = static_cast<int>(element % 4);
        bits[0] = lane == 0 ? random.word[0] : lane == 1 ? random.word[1] : lane == 2 ? random.word[2] : random.word[3];
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[i + j] = random.word[j];
      }
    }
  }
};

// A chunk of a tensor without a gradient: there is nothing to do.
__device__ __forceinline__ bool without_gradient(const StepPlan& plan, const Chunk& chunk) { return plan.gradients[chunk.tensor] == nullptr; }

}  // namespace hdet::cuda
