// The update phase of a step on a CPU: plain loops that the compiler vectorises. They move 28 bytes a parameter (AdamW, float32) and
// wait for memory, so intrinsics would gain nothing.
#include "kernels.h"

#include "fused.h"

namespace {

void take_steps(const ReplicaRow& shared_row, float* __restrict p, const float* __restrict u, int length) {
  const ReplicaRow row = shared_row;
  for (int i = 0; i < length; ++i) p[i] = hdet::take_step(row, p[i], u[i]);
}

void take_steps_to(float* __restrict out, const ReplicaRow& shared_row, const float* __restrict p, const float* __restrict u,
                   int length) {
  const ReplicaRow row = shared_row;
  for (int i = 0; i < length; ++i) out[i] = hdet::take_step(row, p[i], u[i]);
}

void average_block(const Work& w, int32_t k, int64_t element, int length, const float* values) {
  Staging buffer;
  void* const average = w.plan.averages[w.place(k)];
  float* const averages = open(w.formats.average, average, element, length, buffer);
  move_towards(averages, w.control.average_weight, values, length);
  put(w.formats.average, average, element, length, averages);
}

// Each replica steps along u and keeps what it gets.
void store(const Work& w, int64_t element, int length, const float* u) {
  if (w.plan.all_float != 0) return follow_all(w, element, length, u, nullptr);
  Staging buffer;
  uint16_t random[kBlock];
  for (int32_t k = 0; k < w.plan.num_replicas; ++k) {
    const Param param = w.param(k);
    float* const p = open(param, element, length, buffer);
    take_steps(w.replicas[k], p, u, length);
    if (w.averages()) average_block(w, k, element, length, p);
    if (w.random_params()) w.random(static_cast<uint32_t>(w.plan.first_replica + k), element, length, 0, random);
    put(param, element, length, p, w.random_params() ? random : nullptr);
  }
}

// The new parameters of one replica, without writing them to its set. `u` is null where the step is skipped.
const float* stepped(const Work& w, int32_t k, int64_t element, int length, const float* u, Staging& in, Staging& out) {
  const float* const p = open(w.param(k), element, length, in);
  if (u == nullptr) return p;
  take_steps_to(out.values, w.replicas[k], p, u, length);
  if (w.averages()) average_block(w, k, element, length, out.values);
  return out.values;
}

void mean(const Work& w, int64_t element, int length, const float* u) {
  Staging sums, in, out;
  start_sums(sums.values, length);
  if (w.plan.all_float != 0 && u != nullptr) follow_all(w, element, length, u, sums.values);
  else for (int32_t k = 0; k < w.plan.num_replicas; ++k) {
    const float weight = w.plan.weights[k];
    if (weight == 0.0f && !w.averages()) continue;
    add_weighted_block(sums.values, weight, stepped(w, k, element, length, u, in, out), length);
  }
  for (int32_t k = 0; k < w.plan.num_replicas; ++k) put(w.param(k), element, length, sums.values);
}

void pack(const Work& w, int64_t element, int length, const float* u) {
  Staging in, out;
  const float weight = w.plan.weights[0];
  const float* const p = stepped(w, 0, element, length, u, in, out);
  float* const bucket = w.plan.buckets[w.chunk.tensor] + element;
  for (int i = 0; i < length; ++i) bucket[i] = hdet::scaled(weight, p[i]);
}

template <class Rule>
void update_block(const Work& w, int64_t element, int length) {
  Staging directions, buffer;
  float* const u = w.skipped() ? nullptr : directions.values;
  const float* const p = Rule::kCoupled && w.plan.num_replicas == 1 ? open(w.param(0), element, length, buffer) : nullptr;
  if (u != nullptr) share<Rule>(w, element, length, p, u);
  if (w.plan.finish == Finish::mean) mean(w, element, length, u);
  else if (w.plan.finish == Finish::pack) pack(w, element, length, u);
  else if (u != nullptr) store(w, element, length, u);
}

template <class Rule>
void update(const StepPlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const Work w(plan, plan.chunks[i]);
    const bool done = plan.all_float != 0 && !w.skipped() && fused_chunk<Rule>(w);
    if (!done) over_blocks(w.chunk, [&](int64_t element, int length) { update_block<Rule>(w, element, length); });
    if (plan.zero_gradients != 0) zero_gradient(w);
  }
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(step_)(const StepPlan& plan, int64_t first, int64_t last) {
  switch (plan.rule) {
    case Rule::adamw: return update<AdamWRule>(plan, first, last);
    case Rule::adam: return update<AdamRule>(plan, first, last);
    case Rule::sgd: return update<SgdRule>(plan, first, last);
    case Rule::lion: return update<LionRule>(plan, first, last);
  }
}

}  // namespace hdet::cpu
