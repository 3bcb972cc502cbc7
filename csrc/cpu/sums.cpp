// What rules sum over a tensor before a step, on a CPU: float64 numbers for each chunk, added up in
// a fixed order, so every instruction set gives the same bits. Compiled once per instruction set.
#include "kernels.h"
#include "update.h"

namespace {

constexpr int kLanes = 8;

// Element i of a block is added in lane i % kLanes.
void add_block(const float* __restrict values, int length, double* lanes) {
  double sums[kLanes];
  __builtin_memcpy(sums, lanes, sizeof sums);
  int start = 0;
  for (; start + kLanes <= length; start += kLanes) {
    HDET_UNROLL
    for (int j = 0; j < kLanes; ++j) sums[j] += static_cast<double>(values[start + j]);
  }
  for (int j = 0; start + j < length; ++j) sums[j] += static_cast<double>(values[start + j]);
  __builtin_memcpy(lanes, sums, sizeof sums);
}

template <class Rule>
void terms_of_block(const Work& w, const Inputs<Rule>& inputs, Staging* terms, int length) {
  const HyperRow row = w.row;
  HDET_INDEPENDENT
  for (int i = 0; i < length; ++i) {
    float of_element[Rule::kSums];
    Rule::terms(row, row.gradient_scale * inputs.g[i], Rule::kCoupled ? inputs.p[i] : 0.0f,
                Element{inputs.moments, i}, of_element);
    HDET_UNROLL
    for (int j = 0; j < Rule::kSums; ++j) terms[j].values[i] = of_element[j];
  }
}

template <class Rule>
void sum_chunk(const Work& w, double* sums) {
  double lanes[Rule::kSums][kLanes] = {};
  over_blocks(w.chunk, [&](int64_t element, int length) {
    const Inputs<Rule> inputs(w, element, length);
    Staging terms[Rule::kSums];
    terms_of_block<Rule>(w, inputs, terms, length);
    for (int j = 0; j < Rule::kSums; ++j) add_block(terms[j].values, length, lanes[j]);
  });
  for (int j = 0; j < Rule::kSums; ++j) {
    sums[j] = 0.0;
    for (const double lane : lanes[j]) sums[j] += lane;
  }
}

}  // namespace

namespace hdet::cpu {

void HDET_VARIANT(sums_)(const StepPlan& plan, int64_t first, int64_t last) {
  with_rule(plan.rule, [&](auto rule) {
    if constexpr (decltype(rule)::kSums > 0) {
      for (int64_t i = first; i < last; ++i) {
        const Work w(plan, plan.chunks[i]);
        if (!w.without_gradient()) sum_chunk<decltype(rule)>(w, plan.sums + i * plan.num_sums);
      }
    }
  });
}

}  // namespace hdet::cpu
