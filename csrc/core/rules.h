// Printed by csrc/generate.py from hdet/rules: change that, and print again.
//
// Of each rule: how many moments it keeps, which have a sign, which are float32 in any case, and
// whether some, averages of squares, have no sign; whether decay is part of its gradient, whether
// moments may be missing, whether it gives the new parameter in the place of u, and whether it has
// no CUDA kernels of its own; what of the host's settings its elements meet (derive) and what the
// rate is divided by, in double; new moments and the direction u of one element; and of a rule that
// asks for sums over a tensor what is summed (terms). `g` is scaled (HyperRow::gradient_scale); `p`
// is 0 where several replicas share u.
#pragma once

#include "arithmetic.h"

namespace hdet {

constexpr const char* kRulesDigest = "b61803ebbd4ff05f";

enum class Rule : int32_t { adamw = 0, adam = 1, adan = 2, ademamix = 3, adopt = 4,
    cautious_adamw = 5, lion = 6, cautious_lion = 7, mars = 8, muon = 9, nadamw = 10,
    schedule_free_adamw = 11, sgd = 12 };

// What the host says of a parameter group: StepSettings, which explains it.
struct GroupSettings {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, nesterov, maximize,
      decay_at_base, cautious_decay, beta3, alpha, t_alpha, t_beta3, gamma, average;
};

// What all replicas of a tensor share, in loads of 16 bytes.
struct alignas(16) HyperRow {
  float gradient_scale;  // sign, unscaling and clipping in one factor
  uint32_t step;         // from 1; part of the key of random numbers
  float s[14];  // what the rule's elements meet, as its derive() says
};

// What a pass over a tensor has found before a step.
constexpr int kMostMoments = 4, kMostSums = 1;
struct Whole {
  double elements, sums[kMostSums];
};

struct AdamwRule {
  static constexpr int kMoments = 2, kSums = 0;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, const
      Whole& /*whole*/, float* s) {
    s[0] = static_cast<float>(1.0 - h.beta1);
    s[1] = static_cast<float>(h.beta1);
    s[2] = static_cast<float>(h.beta2);
    s[3] = static_cast<float>(1.0 - h.beta2);
    s[4] = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
    s[5] = static_cast<float>(h.eps);
  }
  HDET_HD double divisor(const GroupSettings& h, uint32_t step) {
    return 1.0 - power(h.beta1, step);
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5];
    const float m = moments[0], v = moments[1];
    const float t0 = lerp(m, g, s0, s1);
    const float t1 = (v * s2) + ((g * s3) * g);
    const float u = t0 / ((square_root(t1) * s4) + s5);
    moments[0] = t0;
    moments[1] = t1;
    return u;
  }
};

struct AdamRule {
  static constexpr int kMoments = 2, kSums = 0;
  static constexpr bool kSquares = true, kCoupled = true, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, const
      Whole& /*whole*/, float* s) {
    s[0] = static_cast<float>(h.weight_decay);
    s[1] = static_cast<float>(1.0 - h.beta1);
    s[2] = static_cast<float>(h.beta1);
    s[3] = static_cast<float>(h.beta2);
    s[4] = static_cast<float>(1.0 - h.beta2);
    s[5] = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
    s[6] = static_cast<float>(h.eps);
  }
  HDET_HD double divisor(const GroupSettings& h, uint32_t step) {
    return 1.0 - power(h.beta1, step);
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float p, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5], s6 = row.s[6];
    const float m = moments[0], v = moments[1];
    const float t0 = add_weighted(g, s0, p);
    const float t1 = lerp(m, t0, s1, s2);
    const float t2 = (v * s3) + ((t0 * s4) * t0);
    const float u = t1 / ((square_root(t2) * s5) + s6);
    moments[0] = t1;
    moments[1] = t2;
    return u;
  }
};

struct AdanRule {  // no kernels of its own
  static constexpr int kMoments = 4, kSums = 0;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = true;
  HDET_HD constexpr bool is_signed(int moment) { return (11 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, const
      Whole& /*whole*/, float* s) {
    s[0] = static_cast<float>(1.0 - h.beta1);
    s[1] = static_cast<float>(h.beta1);
    s[2] = static_cast<float>(1.0 / (1.0 - power(h.beta1, step)));
    s[3] = static_cast<float>(step <= 1.0 ? 0.0 : 1.0);
    s[4] = static_cast<float>(1.0 - h.beta2);
    s[5] = static_cast<float>(h.beta2);
    s[6] = static_cast<float>(h.beta2 / (1.0 - power(h.beta2, step)));
    s[7] = static_cast<float>(h.beta3);
    s[8] = static_cast<float>(1.0 - h.beta3);
    s[9] = static_cast<float>(1.0 / square_root(1.0 - power(h.beta3, step)));
    s[10] = static_cast<float>(h.eps);
    s[11] = static_cast<float>(-1.0);
  }
  HDET_HD double divisor(const GroupSettings& /*h*/, uint32_t /*step*/) {
    return 1.0;
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5], s6 = row.s[6], s7 = row.s[7], s8 = row.s[8], s9 = row.s[9], s10 = row.s[10],
        s11 = row.s[11];
    const float m = moments[0], d = moments[1], n = moments[2], before = moments[3];
    const float t0 = lerp(m, g, s0, s1);
    const float t1 = (g + before) * s3;
    const float t2 = lerp(d, t1, s4, s5);
    const float t3 = g + (t1 * s5);
    const float t4 = (n * s7) + ((t3 * s8) * t3);
    const float new_before = g * s11;
    const float u = ((t0 * s2) + (t2 * s6)) / ((square_root(t4) * s9) + s10);
    moments[0] = t0;
    moments[1] = t2;
    moments[2] = t4;
    moments[3] = new_before;
    return u;
  }
};

struct AdemamixRule {
  static constexpr int kMoments = 3, kSums = 0;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = false;
  HDET_HD constexpr bool is_signed(int moment) { return (3 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (2 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, const
      Whole& /*whole*/, float* s) {
    const double e0 = logarithm(h.beta1);
    const double e1 = logarithm(h.beta3);
    const double e2 = exponential((e0 * e1) / (e1 + ((e0 - e1) * (step / h.t_beta3))));
    s[0] = static_cast<float>(1.0 - h.beta1);
    s[1] = static_cast<float>(h.beta1);
    s[2] = static_cast<float>(1.0 / (1.0 - power(h.beta1, step)));
    s[3] = static_cast<float>(1.0 - (step <= h.t_beta3 ? e2 : h.beta3));
    s[4] = static_cast<float>(step <= h.t_beta3 ? e2 : h.beta3);
    s[5] = static_cast<float>(h.alpha * (step <= h.t_alpha ? (step / h.t_alpha) : 1.0));
    s[6] = static_cast<float>(h.beta2);
    s[7] = static_cast<float>(1.0 - h.beta2);
    s[8] = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
    s[9] = static_cast<float>(h.eps);
  }
  HDET_HD double divisor(const GroupSettings& /*h*/, uint32_t /*step*/) {
    return 1.0;
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5], s6 = row.s[6], s7 = row.s[7], s8 = row.s[8], s9 = row.s[9];
    const float m = moments[0], slow = moments[1], v = moments[2];
    const float t0 = lerp(m, g, s0, s1);
    const float t1 = lerp(slow, g, s3, s4);
    const float t2 = (v * s6) + ((g * s7) * g);
    const float u = ((t0 * s2) + (t1 * s5)) / ((square_root(t2) * s8) + s9);
    moments[0] = t0;
    moments[1] = t1;
    moments[2] = t2;
    return u;
  }
};

struct AdoptRule {  // no kernels of its own
  static constexpr int kMoments = 2, kSums = 0;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = true;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, const
      Whole& /*whole*/, float* s) {
    s[0] = static_cast<float>(step <= 1.0);
    s[1] = static_cast<float>(h.eps);
    s[2] = static_cast<float>(__builtin_huge_val());
    s[3] = static_cast<float>(0.0 - square_root(square_root(step - 1.0)));
    s[4] = static_cast<float>(square_root(square_root(step - 1.0)));
    s[5] = static_cast<float>(1.0 - (step <= 1.0 ? 1.0 : h.beta1));
    s[6] = static_cast<float>(step <= 1.0 ? 1.0 : h.beta1);
    s[7] = static_cast<float>(step <= 1.0 ? 0.0 : h.beta2);
    s[8] = static_cast<float>(1.0 - (step <= 1.0 ? 0.0 : h.beta2));
  }
  HDET_HD double divisor(const GroupSettings& /*h*/, uint32_t /*step*/) {
    return 1.0;
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5], s6 = row.s[6], s7 = row.s[7], s8 = row.s[8];
    const float m = moments[0], v = moments[1];
    const float t0 = lerp(m, clip((s0 != 0 ? m : g) / clip(square_root(v), s1, s2), s3, s4), s5,
        s6);
    const float new_v = (v * s7) + ((g * s8) * g);
    const float u = t0;
    moments[0] = t0;
    moments[1] = new_v;
    return u;
  }
};

struct Cautious_adamwRule {  // no kernels of its own
  static constexpr int kMoments = 2, kSums = 1;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = true;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, const Whole& whole,
      float* s) {
    const double e0 = whole.sums[0] / whole.elements;
    s[0] = static_cast<float>(1.0 - h.beta1);
    s[1] = static_cast<float>(h.beta1);
    s[2] = static_cast<float>(0.0);
    s[3] = static_cast<float>(1.0);
    s[4] = static_cast<float>(1.0 / (e0 <= 0.001 ? 0.001 : e0));
    s[5] = static_cast<float>(h.beta2);
    s[6] = static_cast<float>(1.0 - h.beta2);
    s[7] = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
    s[8] = static_cast<float>(h.eps);
  }
  HDET_HD double divisor(const GroupSettings& h, uint32_t step) {
    return 1.0 - power(h.beta1, step);
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5], s6 = row.s[6], s7 = row.s[7], s8 = row.s[8];
    const float m = moments[0], v = moments[1];
    const float t0 = lerp(m, g, s0, s1);
    const float t1 = (v * s5) + ((g * s6) * g);
    const float u = ((t0 * clip(sign(t0) * sign(g), s2, s3)) * s4) / ((square_root(t1) * s7) + s8);
    moments[0] = t0;
    moments[1] = t1;
    return u;
  }

  template <class Moments>
  HDET_HD void terms(const HyperRow& row, float g, float /*p*/, const Moments& moments,
      float* terms) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3];
    const float m = moments[0];
    terms[0] = clip(sign(lerp(m, g, s0, s1)) * sign(g), s2, s3);
  }
};

struct LionRule {
  static constexpr int kMoments = 1, kSums = 0;
  static constexpr bool kSquares = false, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t /*step*/, double /*rate*/, const
      Whole& /*whole*/, float* s) {
    s[0] = static_cast<float>(1.0 - h.beta1);
    s[1] = static_cast<float>(h.beta1);
    s[2] = static_cast<float>(1.0 - h.beta2);
    s[3] = static_cast<float>(h.beta2);
  }
  HDET_HD double divisor(const GroupSettings& /*h*/, uint32_t /*step*/) {
    return 1.0;
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3];
    const float m = moments[0];
    const float new_m = lerp(m, g, s2, s3);
    const float u = sign(lerp(m, g, s0, s1));
    moments[0] = new_m;
    return u;
  }
};

struct Cautious_lionRule {  // no kernels of its own
  static constexpr int kMoments = 1, kSums = 1;
  static constexpr bool kSquares = false, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = true;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t /*step*/, double /*rate*/, const
      Whole& whole, float* s) {
    const double e0 = whole.sums[0] / whole.elements;
    s[0] = static_cast<float>(1.0 - h.beta1);
    s[1] = static_cast<float>(h.beta1);
    s[2] = static_cast<float>(0.0);
    s[3] = static_cast<float>(1.0);
    s[4] = static_cast<float>(1.0 / (e0 <= 0.001 ? 0.001 : e0));
    s[5] = static_cast<float>(1.0 - h.beta2);
    s[6] = static_cast<float>(h.beta2);
  }
  HDET_HD double divisor(const GroupSettings& /*h*/, uint32_t /*step*/) {
    return 1.0;
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5], s6 = row.s[6];
    const float m = moments[0];
    const float t0 = sign(lerp(m, g, s0, s1));
    const float new_m = lerp(m, g, s5, s6);
    const float u = (t0 * clip(sign(t0) * sign(g), s2, s3)) * s4;
    moments[0] = new_m;
    return u;
  }

  template <class Moments>
  HDET_HD void terms(const HyperRow& row, float g, float /*p*/, const Moments& moments,
      float* terms) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3];
    const float m = moments[0];
    terms[0] = clip(sign(sign(lerp(m, g, s0, s1))) * sign(g), s2, s3);
  }
};

struct MarsRule {  // no kernels of its own
  static constexpr int kMoments = 3, kSums = 1;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = true;
  HDET_HD constexpr bool is_signed(int moment) { return (5 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, const Whole& whole,
      float* s) {
    s[0] = static_cast<float>(h.gamma * (h.beta1 / (1.0 - h.beta1)));
    s[1] = static_cast<float>(whole.sums[0] <= 1.0 ? 1.0 : (1.0 / square_root(whole.sums[0])));
    s[2] = static_cast<float>(1.0 - h.beta1);
    s[3] = static_cast<float>(h.beta1);
    s[4] = static_cast<float>(h.beta2);
    s[5] = static_cast<float>(1.0 - h.beta2);
    s[6] = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
    s[7] = static_cast<float>(h.eps);
  }
  HDET_HD double divisor(const GroupSettings& h, uint32_t step) {
    return 1.0 - power(h.beta1, step);
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5], s6 = row.s[6], s7 = row.s[7];
    const float m = moments[0], v = moments[1], last = moments[2];
    const float t0 = (g + ((g - last) * s0)) * s1;
    const float t1 = lerp(m, t0, s2, s3);
    const float t2 = (v * s4) + ((t0 * s5) * t0);
    const float new_last = g;
    const float u = t1 / ((square_root(t2) * s6) + s7);
    moments[0] = t1;
    moments[1] = t2;
    moments[2] = new_last;
    return u;
  }

  template <class Moments>
  HDET_HD void terms(const HyperRow& row, float g, float /*p*/, const Moments& moments,
      float* terms) {
    const float s0 = row.s[0];
    const float last = moments[2];
    const float t0 = g + ((g - last) * s0);
    terms[0] = t0 * t0;
  }
};

struct MuonRule {
  static constexpr int kMoments = 1, kSums = 0;
  static constexpr bool kSquares = false, kCoupled = false, kMayLackMoments = true,
      kGivesParameter = false, kGeneric = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t /*step*/, double /*rate*/, const
      Whole& /*whole*/, float* s) {
    s[0] = static_cast<float>(1.0 - h.momentum);
    s[1] = static_cast<float>(h.momentum);
    s[2] = static_cast<float>(1.0 - (h.nesterov != 0 ? h.momentum : 1.0));
    s[3] = static_cast<float>(h.nesterov != 0 ? h.momentum : 1.0);
  }
  HDET_HD double divisor(const GroupSettings& /*h*/, uint32_t /*step*/) {
    return 1.0;
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3];
    const float m = moments[0];
    const float t0 = lerp(m, g, s0, s1);
    const float u = lerp(t0, g, s2, s3);
    moments[0] = t0;
    return u;
  }
};

struct NadamwRule {
  static constexpr int kMoments = 2, kSums = 0;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false, kGeneric = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, const
      Whole& /*whole*/, float* s) {
    s[0] = static_cast<float>(1.0 - h.beta1);
    s[1] = static_cast<float>(h.beta1);
    s[2] = static_cast<float>(h.beta2);
    s[3] = static_cast<float>(1.0 - h.beta2);
    s[4] = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
    s[5] = static_cast<float>(h.eps);
  }
  HDET_HD double divisor(const GroupSettings& h, uint32_t step) {
    return 1.0 - power(h.beta1, step);
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float /*p*/, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5];
    const float m = moments[0], v = moments[1];
    const float t0 = lerp(m, g, s0, s1);
    const float t1 = (v * s2) + ((g * s3) * g);
    const float u = lerp(t0, g, s0, s1) / ((square_root(t1) * s4) + s5);
    moments[0] = t0;
    moments[1] = t1;
    return u;
  }
};

struct Schedule_free_adamwRule {
  static constexpr int kMoments = 2, kSums = 0;
  static constexpr bool kSquares = true, kCoupled = true, kMayLackMoments = false,
      kGivesParameter = true, kGeneric = false;
  HDET_HD constexpr bool is_signed(int moment) { return (2 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (2 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double rate, const Whole& /*whole*/,
      float* s) {
    s[0] = static_cast<float>(1.0 - (1.0 - h.average));
    s[1] = static_cast<float>(1.0 - h.average);
    s[2] = static_cast<float>(h.beta2);
    s[3] = static_cast<float>(1.0 - h.beta2);
    s[4] = static_cast<float>(1.0 / square_root(1.0 - power(h.beta2, step)));
    s[5] = static_cast<float>(h.eps);
    s[6] = static_cast<float>(h.weight_decay);
    s[7] = static_cast<float>(rate * ((h.beta1 * (1.0 - h.average)) - 1.0));
    s[8] = static_cast<float>(rate);
  }
  HDET_HD double divisor(const GroupSettings& /*h*/, uint32_t /*step*/) {
    return 1.0;
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float p, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3], s4 = row.s[4],
        s5 = row.s[5], s6 = row.s[6], s7 = row.s[7], s8 = row.s[8];
    const float v = moments[0], z = moments[1];
    const float t0 = (v * s2) + ((g * s3) * g);
    const float t1 = add_weighted(g / ((square_root(t0) * s4) + s5), s6, p);
    const float new_z = z - (t1 * s8);
    const float u = lerp(p, z, s0, s1) + (t1 * s7);
    moments[0] = t0;
    moments[1] = new_z;
    return u;
  }
};

struct SgdRule {
  static constexpr int kMoments = 1, kSums = 0;
  static constexpr bool kSquares = false, kCoupled = true, kMayLackMoments = true,
      kGivesParameter = false, kGeneric = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, const
      Whole& /*whole*/, float* s) {
    s[0] = static_cast<float>(h.nesterov);
    s[1] = static_cast<float>(h.weight_decay);
    s[2] = static_cast<float>(step <= 1.0 ? 1.0 : (h.momentum != 0 ? (1.0 - h.dampening) : 1.0));
    s[3] = static_cast<float>(h.momentum);
  }
  HDET_HD double divisor(const GroupSettings& /*h*/, uint32_t /*step*/) {
    return 1.0;
  }

  template <class Moments>
  HDET_HD float direction(const HyperRow& row, float g, float p, const Moments& moments) {
    const float s0 = row.s[0], s1 = row.s[1], s2 = row.s[2], s3 = row.s[3];
    const float m = moments[0];
    const float t0 = add_weighted(g, s1, p);
    const float t1 = add_weighted(t0 * s2, s3, m);
    const float u = s0 != 0 ? (t0 + (t1 * s3)) : t1;
    moments[0] = t1;
    return u;
  }
};

HDET_HD constexpr bool is_coupled(Rule rule) {
  return rule == Rule::adam || rule == Rule::schedule_free_adamw || rule == Rule::sgd;
}

// The first step that changes parameters.
HDET_HD constexpr uint32_t first_step(Rule rule) {
  return rule == Rule::adopt ? 2 : 1;
}

// `rate`: of replica 0.
HDET_HD void derive_scalars(
    Rule rule, const GroupSettings& h, uint32_t step, double rate, const Whole& whole, float* s) {
  switch (rule) {
    case Rule::adamw: return AdamwRule::derive(h, step, rate, whole, s);
    case Rule::adam: return AdamRule::derive(h, step, rate, whole, s);
    case Rule::adan: return AdanRule::derive(h, step, rate, whole, s);
    case Rule::ademamix: return AdemamixRule::derive(h, step, rate, whole, s);
    case Rule::adopt: return AdoptRule::derive(h, step, rate, whole, s);
    case Rule::cautious_adamw: return Cautious_adamwRule::derive(h, step, rate, whole, s);
    case Rule::lion: return LionRule::derive(h, step, rate, whole, s);
    case Rule::cautious_lion: return Cautious_lionRule::derive(h, step, rate, whole, s);
    case Rule::mars: return MarsRule::derive(h, step, rate, whole, s);
    case Rule::muon: return MuonRule::derive(h, step, rate, whole, s);
    case Rule::nadamw: return NadamwRule::derive(h, step, rate, whole, s);
    case Rule::schedule_free_adamw: return Schedule_free_adamwRule::derive(h, step, rate, whole, s);
    case Rule::sgd: return SgdRule::derive(h, step, rate, whole, s);
  }
  HDET_UNREACHABLE
}

HDET_HD double derive_divisor(Rule rule, const GroupSettings& h, uint32_t step) {
  switch (rule) {
    case Rule::adamw: return AdamwRule::divisor(h, step);
    case Rule::adam: return AdamRule::divisor(h, step);
    case Rule::adan: return AdanRule::divisor(h, step);
    case Rule::ademamix: return AdemamixRule::divisor(h, step);
    case Rule::adopt: return AdoptRule::divisor(h, step);
    case Rule::cautious_adamw: return Cautious_adamwRule::divisor(h, step);
    case Rule::lion: return LionRule::divisor(h, step);
    case Rule::cautious_lion: return Cautious_lionRule::divisor(h, step);
    case Rule::mars: return MarsRule::divisor(h, step);
    case Rule::muon: return MuonRule::divisor(h, step);
    case Rule::nadamw: return NadamwRule::divisor(h, step);
    case Rule::schedule_free_adamw: return Schedule_free_adamwRule::divisor(h, step);
    case Rule::sgd: return SgdRule::divisor(h, step);
  }
  HDET_UNREACHABLE
}

// call(a rule's struct)
HDET_HD_OF_CALL
template <class Call>
HDET_HD auto with_rule(Rule rule, const Call& call) {
  switch (rule) {
    case Rule::adamw: return call(AdamwRule{});
    case Rule::adam: return call(AdamRule{});
    case Rule::adan: return call(AdanRule{});
    case Rule::ademamix: return call(AdemamixRule{});
    case Rule::adopt: return call(AdoptRule{});
    case Rule::cautious_adamw: return call(Cautious_adamwRule{});
    case Rule::lion: return call(LionRule{});
    case Rule::cautious_lion: return call(Cautious_lionRule{});
    case Rule::mars: return call(MarsRule{});
    case Rule::muon: return call(MuonRule{});
    case Rule::nadamw: return call(NadamwRule{});
    case Rule::schedule_free_adamw: return call(Schedule_free_adamwRule{});
    case Rule::sgd: return call(SgdRule{});
  }
  HDET_UNREACHABLE
}

}  // namespace hdet
