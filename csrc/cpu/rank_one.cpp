// The rank-one update on a CPU: base and displacement in, K sets of parameters out. Compiled once per instruction set.
#include "../core/rank_one.h"
#include "kernels.h"

#include "update.h"

namespace {

using hdet::RankOnePlan;

void displace(const ReplicaRow& shared_line, const float* __restrict u, float* __restrict displacement, int length) {
  const ReplicaRow line = shared_line;
  for (int i = 0; i < length; ++i) displacement[i] = hdet::displaced(line, displacement[i], u[i]);
}

void meet(const ReplicaRow& shared_line, float* __restrict base, float* __restrict displacement, int length) {
  const ReplicaRow line = shared_line;
  for (int i = 0; i < length; ++i) {
    base[i] = hdet::take_step(line, base[i], displacement[i]);
    displacement[i] = 0.0f;
  }
}

struct Float {
  using Number = float;
  HDET_HD float from(float x) { return x; }
};
struct Bfloat16 {
  using Number = uint16_t;
  HDET_HD uint16_t from(float x) { return hdet::to_bf16(x); }
};
struct Float16 {
  using Number = uint16_t;
  HDET_HD uint16_t from(float x) { return hdet::to_f16(x); }
};

// N outputs in one loop: see fused.h.
template <class Type, int N>
void write_outputs(const Work& w, int32_t first, int64_t element, int length, const float* base, const float* displacement) {
  typename Type::Number* outputs[N];
  ReplicaRow rows[N];
  for (int k = 0; k < N; ++k) {
    outputs[k] = at<typename Type::Number>(w.plan.params[w.place(first + k)], element);
    rows[k] = w.replicas[first + k];
  }
  HDET_INDEPENDENT
  for (int i = 0; i < length; ++i) {
    HDET_UNROLL
    for (int k = 0; k < N; ++k) outputs[k][i] = Type::from(hdet::take_step(rows[k], base[i], displacement[i]));
  }
}

template <class Type>
void write_all_outputs(const Work& w, int64_t element, int length, const float* base, const float* displacement) {
  const int32_t count = w.plan.num_replicas;
  int32_t k = 0;
  for (; count - k >= 4; k += 4) write_outputs<Type, 4>(w, k, element, length, base, displacement);
  for (; k < count; ++k) write_outputs<Type, 1>(w, k, element, length, base, displacement);
}

template <class Rule>
void update_block(const RankOnePlan& plan, const Work& w, int64_t element, int length) {
  Staging directions;
  float* const u = directions.values;
  if (w.skipped()) __builtin_memset(u, 0, sizeof directions.values);
  else share<Rule>(w, element, length, nullptr, u);
  const float* const base = plan.bases[w.chunk.tensor] + element;
  float* const displacement = plan.displacements[w.chunk.tensor] + element;
  displace(plan.lines[w.chunk.tensor], u, displacement, length);
  switch (w.formats.param) {
    case DType::f32: return write_all_outputs<Float>(w, element, length, base, displacement);
    case DType::bf16: return write_all_outputs<Bfloat16>(w, element, length, base, displacement);
    default: return write_all_outputs<Float16>(w, element, length, base, displacement);
  }
}

template <class Rule>
void update(const RankOnePlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const Work w(plan, plan.chunks[i]);
    if (w.without_gradient()) continue;
    over_blocks(w.chunk, [&](int64_t element, int length) { update_block<Rule>(plan, w, element, length); });
    if (plan.zero_gradients != 0) zero_gradient(w);
  }
}

void converge_block(const RankOnePlan& plan, const Chunk& c, int64_t element, int length) {
  float* const base = plan.bases[c.tensor] + element;
  meet(plan.lines[c.tensor], base, plan.displacements[c.tensor] + element, length);
  const DType type = hdet::unpack_formats(c.formats).param;
  for (int32_t k = 0; k < plan.num_replicas; ++k) put(type, plan.params[k * plan.num_tensors + c.tensor], element, length, base);
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(rank_one_)(const RankOnePlan& plan, int64_t first, int64_t last) {
  switch (plan.rule) {
    case Rule::adamw: return update<AdamWRule>(plan, first, last);
    case Rule::adam: return update<AdamRule>(plan, first, last);
    case Rule::sgd: return update<SgdRule>(plan, first, last);
    case Rule::lion: return update<LionRule>(plan, first, last);
  }
}

void HDET_VARIANT(converge_)(const RankOnePlan& plan, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    over_blocks(plan.chunks[i], [&](int64_t element, int length) { converge_block(plan, plan.chunks[i], element, length); });
  }
}

}  // namespace hdet::cpu
