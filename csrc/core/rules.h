// Printed by csrc/generate.py from hdet/rules: change that, and print again.
//
// Of each rule: how many moments it keeps, which have a sign, which are float32 in any case, and
// whether some, averages of squares, have no sign; whether decay is part of its gradient, whether
// moments may be missing, and whether it gives the new parameter in the place of u; what of the
// host's settings its elements meet (derive) and what the rate is divided by, in double; and new
// moments and the direction u of one element. `g` is scaled (HyperRow::gradient_scale); `p` is 0
// where several replicas share u.
#pragma once

#include "arithmetic.h"

namespace hdet {

constexpr const char* kRulesDigest = "fb418c2f7d37ab34";

enum class Rule : int32_t { adamw = 0, adam = 1, ademamix = 2, lion = 3, muon = 4, nadamw = 5,
    schedule_free_adamw = 6, sgd = 7 };

// What the host says of a parameter group: StepSettings, which explains it.
struct GroupSettings {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, nesterov, maximize,
      decay_at_base, cautious_decay, beta3, alpha, t_alpha, t_beta3, average;
};

struct AdamwRule {
  static constexpr int kMoments = 2;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, float* s) {
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
  static constexpr int kMoments = 2;
  static constexpr bool kSquares = true, kCoupled = true, kMayLackMoments = false,
      kGivesParameter = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, float* s) {
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

struct AdemamixRule {
  static constexpr int kMoments = 3;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false;
  HDET_HD constexpr bool is_signed(int moment) { return (3 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (2 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, float* s) {
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

struct LionRule {
  static constexpr int kMoments = 1;
  static constexpr bool kSquares = false, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t /*step*/, double /*rate*/, float* s) {
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

struct MuonRule {
  static constexpr int kMoments = 1;
  static constexpr bool kSquares = false, kCoupled = false, kMayLackMoments = true,
      kGivesParameter = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t /*step*/, double /*rate*/, float* s) {
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
  static constexpr int kMoments = 2;
  static constexpr bool kSquares = true, kCoupled = false, kMayLackMoments = false,
      kGivesParameter = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, float* s) {
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
  static constexpr int kMoments = 2;
  static constexpr bool kSquares = true, kCoupled = true, kMayLackMoments = false,
      kGivesParameter = true;
  HDET_HD constexpr bool is_signed(int moment) { return (2 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (2 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double rate, float* s) {
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
  static constexpr int kMoments = 1;
  static constexpr bool kSquares = false, kCoupled = true, kMayLackMoments = true,
      kGivesParameter = false;
  HDET_HD constexpr bool is_signed(int moment) { return (1 >> moment & 1) != 0; }
  HDET_HD constexpr bool is_exact(int moment) { return (0 >> moment & 1) != 0; }

  HDET_HD void derive(const GroupSettings& h, uint32_t step, double /*rate*/, float* s) {
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

// `rate`: of replica 0.
HDET_HD void derive_scalars(
    Rule rule, const GroupSettings& h, uint32_t step, double rate, float* s) {
  switch (rule) {
    case Rule::adamw: return AdamwRule::derive(h, step, rate, s);
    case Rule::adam: return AdamRule::derive(h, step, rate, s);
    case Rule::ademamix: return AdemamixRule::derive(h, step, rate, s);
    case Rule::lion: return LionRule::derive(h, step, rate, s);
    case Rule::muon: return MuonRule::derive(h, step, rate, s);
    case Rule::nadamw: return NadamwRule::derive(h, step, rate, s);
    case Rule::schedule_free_adamw: return Schedule_free_adamwRule::derive(h, step, rate, s);
    case Rule::sgd: return SgdRule::derive(h, step, rate, s);
  }
  HDET_UNREACHABLE
}

HDET_HD double derive_divisor(Rule rule, const GroupSettings& h, uint32_t step) {
  switch (rule) {
    case Rule::adamw: return AdamwRule::divisor(h, step);
    case Rule::adam: return AdamRule::divisor(h, step);
    case Rule::ademamix: return AdemamixRule::divisor(h, step);
    case Rule::lion: return LionRule::divisor(h, step);
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
    case Rule::ademamix: return call(AdemamixRule{});
    case Rule::lion: return call(LionRule{});
    case Rule::muon: return call(MuonRule{});
    case Rule::nadamw: return call(NadamwRule{});
    case Rule::schedule_free_adamw: return call(Schedule_free_adamwRule{});
    case Rule::sgd: return call(SgdRule{});
  }
  HDET_UNREACHABLE
}

}  // namespace hdet
