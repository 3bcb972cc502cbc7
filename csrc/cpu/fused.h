// A step on float32 alone: the rule and up to 8 sets of parameters in one loop, so that all streams
// advance together. One set after the other, block by block, is half as fast: hardware prefetch
// starts anew at each jump to another stream.
#pragma once

#include "update.h"

namespace {

// N replicas at one element: where their parameters are, and how they step.
template <int N>
struct Batch {
  float* p[N];
  ReplicaRow rows[N];
  bool cautious = false;

  Batch(const Work& w, int32_t first, int64_t element) {
    for (int k = 0; k < N; ++k) {
      p[k] = at<float>(hdet::param_of(w.plan, w.chunk.tensor, first + k), element);
      rows[k] = w.replicas[first + k];
      cautious = cautious || hdet::is_cautious(rows[k]);
    }
  }

  template <bool kCautious>
  void take_steps(int i, float u) const {
    HDET_UNROLL
    for (int k = 0; k < N; ++k) p[k][i] = hdet::take_step<kCautious>(rows[k], p[k][i], u);
  }
};

// The averages over time that one loop moves with the step of one replica. None where there are
// more, or where one is left alone, begins, or moves by half of the way or more.
inline int emas_in_loop(const Work& w) {
  if (w.plan.num_replicas != 1 || w.plan.num_emas > 2 || hdet::is_cautious(w.replicas[0])) return 0;
  for (int32_t j = 0; j < w.plan.num_emas; ++j) {
    const float weight = hdet::ema_row_of(w.plan, w.chunk.tensor, j).weight;
    if (!(weight > 0.0f && weight < 0.5f)) return 0;
  }
  return w.plan.num_emas;
}

// The whole step of N replicas. One replica shows its parameter to a coupled rule.
template <class Rule, int N, bool kCautious, int kEmas = 0>
void fused_loop(const Work& w, const Batch<N>& batch) {
  const HyperRow row = w.row;  // a copy cannot alias the floats written below
  const Chunk& c = w.chunk;
  const float* const g = at<const float>(w.plan.gradients[c.tensor], c.offset);
  float* moments[Rule::kMoments];
  for (int j = 0; j < Rule::kMoments; ++j) moments[j] = at<float>(w.moment(j), c.offset);
  float* emas[kEmas + 1];
  float weights[kEmas + 1];
  for (int j = 0; j < kEmas; ++j) {
    emas[j] = hdet::ema_of(w.plan, c.tensor, j, 0) + c.offset;
    weights[j] = hdet::ema_row_of(w.plan, c.tensor, j).weight;
  }
  HDET_INDEPENDENT
  for (int i = 0; i < c.length; ++i) {
    const float u = Rule::direction(row, row.gradient_scale * g[i], N == 1 ? batch.p[0][i] : 0.0f,
                                    Element{moments, i});
    if (Rule::kGivesParameter) batch.p[0][i] = u;
    else batch.template take_steps<kCautious>(i, u);
    HDET_UNROLL
    for (int j = 0; j < kEmas; ++j) emas[j][i] += weights[j] * (batch.p[0][i] - emas[j][i]);
  }
}

// What has been done of a chunk; `averages`: all.
enum class Done { nothing, step, averages };

template <class Rule, int N>
Done fused(const Work& w) {
  const Batch<N> batch(w, 0, w.chunk.offset);
  if (N == 1 && emas_in_loop(w) > 0) {
    if (w.plan.num_emas == 1) fused_loop<Rule, 1, false, 1>(w, Batch<1>(w, 0, w.chunk.offset));
    else fused_loop<Rule, 1, false, 2>(w, Batch<1>(w, 0, w.chunk.offset));
    return Done::averages;
  }
  if (!Rule::kCoupled && batch.cautious) fused_loop<Rule, N, !Rule::kCoupled>(w, batch);
  else fused_loop<Rule, N, false>(w, batch);
  return Done::step;
}

// N replicas along directions that are known.
template <int N, bool kCautious>
void follow_loop(const Batch<N>& batch, int length, const float* u) {
  HDET_INDEPENDENT
  for (int i = 0; i < length; ++i) batch.template take_steps<kCautious>(i, u[i]);
}

// The same, from number `first` on.
template <int N>
void follow(const Work& w, int32_t first, int64_t element, int length, const float* u) {
  const Batch<N> batch(w, first, element);
  if (batch.cautious) follow_loop<N, true>(batch, length, u);
  else follow_loop<N, false>(batch, length, u);
}

inline void follow_all(const Work& w, int64_t element, int length, const float* u) {
  const int32_t count = w.plan.num_replicas;
  int32_t k = 0;
  for (; count - k >= 8; k += 8) follow<8>(w, k, element, length, u);
  switch (count - k) {
    case 1: return follow<1>(w, k, element, length, u);
    case 2: return follow<2>(w, k, element, length, u);
    case 3: return follow<3>(w, k, element, length, u);
    case 4: return follow<4>(w, k, element, length, u);
    case 5: return follow<5>(w, k, element, length, u);
    case 6: return follow<6>(w, k, element, length, u);
    case 7: return follow<7>(w, k, element, length, u);
  }
}

// The update of a chunk that holds float32 only, if there is one loop for it.
template <class Rule>
Done fused_chunk(const Work& w) {
  if constexpr (!Rule::kGeneric) {
    for (int j = 0; j < Rule::kMoments; ++j) {
      if (w.formats.moments[j] != DType::f32)
        return Done::nothing;  // SGD without momentum, and codes
    }
    switch (w.plan.num_replicas) {
      case 1: return fused<Rule, 1>(w);
      case 2: return fused<Rule, 2>(w);
      case 4: return fused<Rule, 4>(w);
      case 8: return fused<Rule, 8>(w);
    }
  }
  return Done::nothing;
}

}  // namespace
