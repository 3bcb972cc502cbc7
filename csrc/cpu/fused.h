// A step on float32 alone: the rule and up to 8 sets of parameters in one loop, so that all streams advance together. One set after
// the other, block by block, is half as fast: hardware prefetch starts anew at each jump to another stream.
#pragma once

#include "update.h"

namespace {

// N replicas at one element: where their parameters are, and how they step.
template <int N>
struct Batch {
  float* p[N];
  ReplicaRow rows[N];
  float weights[N];

  Batch(const Work& w, int32_t first, int64_t element) {
    for (int k = 0; k < N; ++k) {
      p[k] = at<float>(w.plan.params[w.place(first + k)], element);
      rows[k] = w.replicas[first + k];
      weights[k] = w.plan.weights[first + k];
    }
  }

  void take_steps(int i, float u, float* next) const {
    HDET_UNROLL
    for (int k = 0; k < N; ++k) next[k] = hdet::take_step(rows[k], p[k][i], u);
  }

  void store(int i, const float* next) const {
    HDET_UNROLL
    for (int k = 0; k < N; ++k) p[k][i] = next[k];
  }

  void store_mean(int i, float mean) const {
    HDET_UNROLL
    for (int k = 0; k < N; ++k) p[k][i] = mean;
  }

  float add(float sum, const float* next) const {
    HDET_UNROLL
    for (int k = 0; k < N; ++k) sum = hdet::add_weighted(sum, weights[k], next[k]);
    return sum;
  }
};

// The whole step of N replicas: finish(i, new parameters) for each element. One replica shows its parameter to a coupled rule.
template <class Rule, int N, class Finish>
void fused(const Work& w, const Batch<N>& batch, const Finish& finish) {
  const HyperRow row = w.row;  // a copy cannot alias the floats written below
  const Chunk& c = w.chunk;
  const float* const g = at<const float>(w.plan.gradients[c.tensor], c.offset);
  float* const m = at<float>(w.plan.exp_avgs[c.tensor], c.offset);
  float* const v = Rule::kSecond ? at<float>(w.plan.exp_avg_sqs[c.tensor], c.offset) : nullptr;
  HDET_INDEPENDENT
  for (int i = 0; i < c.length; ++i) {
    float none = 0.0f, next[N];
    float& second = Rule::kSecond ? v[i] : none;
    const float u = Rule::direction(row, row.gradient_scale * g[i], N == 1 ? batch.p[0][i] : 0.0f, m[i], second);
    batch.take_steps(i, u, next);
    finish(i, next);
  }
}

template <class Rule, int N>
void fused_store(const Work& w) {
  const Batch<N> batch(w, 0, w.chunk.offset);
  fused<Rule>(w, batch, [=](int i, const float* next) { batch.store(i, next); });
}

template <class Rule, int N>
void fused_mean(const Work& w) {
  const Batch<N> batch(w, 0, w.chunk.offset);
  fused<Rule>(w, batch, [=](int i, const float* next) { batch.store_mean(i, batch.add(hdet::kEmptySum, next)); });
}

template <class Rule>
void fused_pack(const Work& w) {
  const Batch<1> batch(w, 0, w.chunk.offset);
  float* const bucket = w.plan.buckets[w.chunk.tensor] + w.chunk.offset;
  fused<Rule>(w, batch, [=](int i, const float* next) { bucket[i] = hdet::scaled(batch.weights[0], next[0]); });
}

// N replicas, from number `first` on, along directions that are known. With `sums` they are added up instead of stored.
template <int N>
void follow(const Work& w, int32_t first, int64_t element, int length, const float* u, float* sums) {
  const Batch<N> batch(w, first, element);
  if (sums == nullptr) {
    HDET_INDEPENDENT
    for (int i = 0; i < length; ++i) {
      float next[N];
      batch.take_steps(i, u[i], next);
      batch.store(i, next);
    }
  } else {
    HDET_INDEPENDENT
    for (int i = 0; i < length; ++i) {
      float next[N];
      batch.take_steps(i, u[i], next);
      sums[i] = batch.add(sums[i], next);
    }
  }
}

inline void follow_all(const Work& w, int64_t element, int length, const float* u, float* sums) {
  const int32_t count = w.plan.num_replicas;
  int32_t k = 0;
  for (; count - k >= 8; k += 8) follow<8>(w, k, element, length, u, sums);
  for (; count - k >= 2; k += 2) follow<2>(w, k, element, length, u, sums);
  if (k < count) follow<1>(w, k, element, length, u, sums);
}

template <class Rule, int N>
bool fused_replicas(const Work& w) {
  if (w.plan.finish == Finish::mean) fused_mean<Rule, N>(w);
  else fused_store<Rule, N>(w);
  return true;
}

// The update of a chunk that holds float32 only and is not skipped, if there is one loop for it.
template <class Rule>
bool fused_chunk(const Work& w) {
  if (w.formats.exp_avg == DType::none) return false;  // SGD without momentum
  switch (w.plan.num_replicas) {
    case 1:
      if (w.plan.finish == Finish::mean) return false;
      if (w.plan.finish == Finish::pack) fused_pack<Rule>(w);
      else fused_store<Rule, 1>(w);
      return true;
    case 2: return fused_replicas<Rule, 2>(w);
    case 4: return fused_replicas<Rule, 4>(w);
    case 8: return fused_replicas<Rule, 8>(w);
    default: return false;
  }
}

}  // namespace
