// The update phase of a step on a CPU: plain loops that the compiler vectorises. They move 28 bytes
// a parameter (AdamW, float32) and wait for memory, so intrinsics would gain nothing.
#include "fused.h"
#include "kernels.h"

namespace {

using hdet::EmaRow;

template <bool kCautious>
void take_steps(const ReplicaRow& shared_row, float* __restrict p, const float* __restrict u,
                int length) {
  const ReplicaRow row = shared_row;
  for (int i = 0; i < length; ++i) p[i] = hdet::take_step<kCautious>(row, p[i], u[i]);
}

// Each replica steps along u and keeps what it gets, or u if that is the new parameter.
template <class Rule>
void store(const Work& w, int64_t element, int length, float* u) {
  if (!Rule::kGivesParameter && w.plan.known == hdet::Known::floats)
    return follow_all(w, element, length, u);
  Staging buffer;
  uint16_t random[kBlock];
  const Formats& f = w.formats;
  const bool draws = hdet::draws_params(f.stochastic, f.param, f.master);
  for (int32_t k = 0; k < w.plan.num_replicas; ++k) {
    const Param param = w.param(k);
    float* p = u;
    if (!Rule::kGivesParameter) {
      p = open(param, element, length, buffer);
      if (hdet::is_cautious(w.replicas[k])) take_steps<true>(w.replicas[k], p, u, length);
      else take_steps<false>(w.replicas[k], p, u, length);
    }
    if (draws)
      w.random(static_cast<uint32_t>(w.plan.first_replica + k), element, length, 0, random);
    if (draws && param.kind == Master::split24) round_to_24(p, random, length);
    put(param, element, length, p, draws ? random : nullptr);
  }
}

template <class Rule>
void update_block(const Work& w, int64_t element, int length) {
  Staging directions;
  share<Rule>(w, element, length, directions.values);
  store<Rule>(w, element, length, directions.values);
}

void take_in(const EmaRow& shared_row, float* __restrict average, const float* __restrict p,
             int length) {
  const float weight = shared_row.weight, rest = shared_row.rest;
  if (weight == 1.0f) {
    __builtin_memcpy(average, p, static_cast<unsigned long>(length) * sizeof(float));
  } else if (weight < 0.5f) {
    for (int i = 0; i < length; ++i) average[i] = average[i] + weight * (p[i] - average[i]);
  } else {
    for (int i = 0; i < length; ++i) average[i] = p[i] - rest * (p[i] - average[i]);
  }
}

// Averages over time take in what replicas have become. The chunk is in the cache.
void follow_over_time(const Work& w) {
  for (int32_t k = 0; k < w.plan.num_replicas; ++k) {
    over_blocks(w.chunk, [&](int64_t element, int length) {
      Staging buffer;
      const float* const p = open(w.param(k), element, length, buffer);
      for (int32_t j = 0; j < w.plan.num_emas; ++j) {
        const EmaRow& row = hdet::ema_row_of(w.plan, w.chunk.tensor, j);
        float* const average = hdet::ema_of(w.plan, w.chunk.tensor, j, k) + element;
        if (row.weight != 0.0f) take_in(row, average, p, length);
      }
    });
  }
}

template <class Rule>
void update_chunk(const Work& w) {
  const Done done = w.plan.known == hdet::Known::floats ? fused_chunk<Rule>(w) : Done::nothing;
  if (done == Done::nothing) {
    over_blocks(w.chunk,
                [&](int64_t element, int length) { update_block<Rule>(w, element, length); });
  }
  if (w.plan.emas != nullptr && done != Done::averages) follow_over_time(w);
}

template <class Rule>
void update(const StepPlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const Work w(plan, plan.chunks[i]);
    if (w.without_gradient()) continue;
    if (!w.skipped()) update_chunk<Rule>(w);
    if (plan.zero_gradients != 0) zero_gradient(w);
  }
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(step_)(const StepPlan& plan, int64_t first, int64_t last) {
  with_rule(plan.rule, [&](auto rule) { update<decltype(rule)>(plan, first, last); });
}

}  // namespace hdet::cpu
