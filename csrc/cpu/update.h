// What the updates of step.cpp and fused.h have in common: the rule on a block, its moments and its
// random numbers. For sources that are compiled once per instruction set, like blocks.h.
#pragma once

#include "blocks.h"

namespace {

using hdet::Chunk;
using hdet::Control;
using hdet::Formats;
using hdet::HyperRow;
using hdet::ReplicaRow;
using hdet::StepPlan;

// The moments of one element, of blocks of all moments.
struct Element {
  float* const* moments;
  int i;
  float& operator[](int j) const { return moments[j][i]; }
};

// The rule on a block: new moments, and the direction that all replicas share. `p` is read by
// coupled rules.
template <class Rule>
void directions(const HyperRow& shared_row, const float* g, const float* p, float* const* blocks,
                float* u, int length) {
  const HyperRow row = shared_row;  // a copy cannot alias the floats written below
  float* moments[Rule::kMoments];
  for (int j = 0; j < Rule::kMoments; ++j) moments[j] = blocks[j];
  HDET_INDEPENDENT
  for (int i = 0; i < length; ++i) {
    u[i] = Rule::direction(row, row.gradient_scale * g[i], Rule::kCoupled ? p[i] : 0.0f,
                           Element{moments, i});
  }
}

// Random numbers of a block: the 16 bits of each word that start at `shift`.
void random_bits(const StepPlan& plan, uint32_t step, uint32_t replica, int32_t id, int64_t element,
                 int length, int shift, uint16_t* out) {
  const int64_t first = element / 4;
  if (element % 4 == 0 && length % 4 == 0) {
    for (int q = 0; q < length / 4; ++q) {
      const hdet::Random4 random =
          hdet::rounding_bits(plan.seed, step, replica, static_cast<uint32_t>(id), first + q);
      for (int j = 0; j < 4; ++j) out[4 * q + j] = static_cast<uint16_t>(random.word[j] >> shift);
    }
    return;
  }
  for (int i = 0; i < length; ++i) {
    const int64_t place = element + i;
    const hdet::Random4 random =
        hdet::rounding_bits(plan.seed, step, replica, static_cast<uint32_t>(id), place / 4);
    out[i] = static_cast<uint16_t>(random.word[place % 4] >> shift);
  }
}

// A chunk of a plan, and all that is the same for its blocks.
struct Work {
  const StepPlan& plan;
  const Chunk& chunk;
  const Formats formats;
  const HyperRow& row;
  const ReplicaRow* replicas;
  const Control control;

  Work(const StepPlan& p, const Chunk& c)
      : plan(p),
        chunk(c),
        formats(hdet::unpack_formats(c.formats)),
        row(p.rows[c.tensor]),
        replicas(p.replica_rows + static_cast<int64_t>(c.tensor) * p.num_replicas),
        control(*p.control) {}

  bool without_gradient() const { return plan.gradients[chunk.tensor] == nullptr; }
  bool skipped() const { return control.skip != 0.0f; }
  Param param(int32_t k) const {
    return {formats.param, formats.master, hdet::param_of(plan, chunk.tensor, k),
            hdet::master_of(plan, chunk.tensor, k)};
  }
  void* moment(int j) const { return hdet::moment_of(plan, chunk.tensor, j); }
  Moment moment(int j, bool is_signed) const {
    const bool coded = formats.moments[j] == DType::codes;
    return {formats.moments[j], is_signed, moment(j), hdet::scales_of(plan, chunk.tensor, j),
            coded ? plan.codebooks + (is_signed ? 0 : 1) : nullptr};
  }
  void random(uint32_t replica, int64_t element, int length, int shift, uint16_t* out) const {
    random_bits(plan, row.step, replica, plan.ids[chunk.tensor], element, length, shift, out);
  }
};

// What a rule reads of a block, as float32: gradient, moments, and the parameter for a coupled
// rule, zeros if replicas share u.
template <class Rule>
struct Inputs {
  Staging g_buffer, p_buffer, buffers[Rule::kMoments];
  const float* g;
  const float* p = nullptr;
  float* moments[Rule::kMoments];

  Inputs(const Work& w, int64_t element, int length) {
    const unsigned long bytes = static_cast<unsigned long>(length) * sizeof(float);
    const Formats& f = w.formats;
    g = open(f.gradient, w.plan.gradients[w.chunk.tensor], element, length, g_buffer);
    if (Rule::kCoupled)
      p = w.plan.num_replicas == 1
              ? open(w.param(0), element, length, p_buffer)
              : static_cast<float*>(__builtin_memset(p_buffer.values, 0, bytes));
    for (int j = 0; j < Rule::kMoments; ++j) {
      moments[j] = buffers[j].values;
      if (f.moments[j] != DType::none)
        moments[j] = open(w.moment(j, Rule::is_signed(j)), element, length, buffers[j]);
      else  // SGD without momentum
        __builtin_memset(moments[j], 0, bytes);
    }
  }
};

// Gradient and moments of a block -> new moments in memory, and u.
template <class Rule>
void share(const Work& w, int64_t element, int length, float* u) {
  const Inputs<Rule> inputs(w, element, length);
  float* const* const moments = inputs.moments;
  uint16_t random[kBlock];
  const Formats& f = w.formats;
  directions<Rule>(w.row, inputs.g, inputs.p, moments, u, length);
  for (int j = 0; j < Rule::kMoments; ++j) {
    if (f.moments[j] == DType::none) continue;
    const bool stochastic = f.stochastic && !Rule::is_signed(j) && f.moments[j] == DType::bf16;
    if (stochastic) w.random(0, element, length, 16, random);
    put(w.moment(j, Rule::is_signed(j)), element, length, moments[j],
        stochastic ? random : nullptr);
  }
}

void zero_gradient(const Work& w) {
  const int bytes = w.formats.gradient == DType::f32 ? 4 : 2;
  void* const gradient = at<char>(w.plan.gradients[w.chunk.tensor], w.chunk.offset * bytes);
  __builtin_memset(gradient, 0, static_cast<unsigned long>(w.chunk.length * bytes));
}

}  // namespace
