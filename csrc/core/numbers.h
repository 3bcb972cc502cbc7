// Numbers in memory: float32, bfloat16, float16, and the split form. All arithmetic is float32;
// these functions are the way in and out.
#pragma once

#include <initializer_list>

#include "portable.h"

namespace hdet {

// codes: of moments alone, eight_bit.h
enum class DType : int32_t { none = 0, f32 = 1, bf16 = 2, f16 = 3, codes = 4 };

// What stands beside a parameter of 16 bits: nothing; its float32 value; the 16 bits that its
// bfloat16 lacks (split); or the first 8 of these (split24). Numbered as a DType of as many bytes.
enum class Master : int32_t { none = 0, f32 = 1, split = 2, split24 = 4 };
HDET_HD constexpr DType type_of(Master kind) { return static_cast<DType>(kind); }
HDET_HD constexpr bool is_split(Master kind) {
  return kind == Master::split || kind == Master::split24;
}

HDET_HD bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

HDET_HD float from_bf16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

// To nearest, ties to even. NaN stays NaN: of the many there are, 0x7fc0 or the hardware's. A pair
// has the first number in its lower half.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
HDET_HD uint32_t to_bf16_pair(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
HDET_HD uint16_t to_bf16(float x) { return static_cast<uint16_t>(to_bf16_pair(x, 0.0f)); }
#else
HDET_HD uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan(bits) ? 0x7fc0u : rounded);
}
HDET_HD uint32_t to_bf16_pair(float low, float high) {
  return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
}
#endif

// Stochastic: up with the probability of what would be cut off. `random` is uniform in 0 .. 65535.
// Infinities and NaN are exact.
HDET_HD uint16_t to_bf16(float x, uint32_t random) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + random) >> 16;
  return (bits & 0x7f800000u) == 0x7f800000u ? to_bf16(x) : static_cast<uint16_t>(rounded);
}

HDET_HD float from_f16(uint16_t x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
  return result;
#else
  // exponent and mantissa where float32 has them
  const uint32_t shifted = static_cast<uint32_t>(x & 0x7fffu) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  const uint32_t rebased = shifted + (112u << 23);  // 127 - 15
  const uint32_t special = rebased + (112u << 23);  // infinity and NaN
  // zero and subnormal numbers
  const uint32_t small = bits_of(float_of(rebased + (1u << 23)) - float_of(113u << 23));
  const uint32_t magnitude = exponent == 0x0f800000u ? special : exponent == 0 ? small : rebased;
  return float_of(magnitude | static_cast<uint32_t>(x & 0x8000u) << 16);
#endif
}

// To nearest, ties to even.
HDET_HD uint16_t to_f16(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
#else
  const uint32_t sign = bits_of(x) & 0x80000000u;
  const uint32_t bits = bits_of(x) ^ sign;
  const uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // one unit in its last place is the spacing of float16's subnormal numbers
  constexpr uint32_t kMagic = 126u << 23;
  const uint32_t small = bits_of(float_of(bits) + float_of(kMagic)) - kMagic;
  const uint32_t normal = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
  const uint32_t magnitude = bits >= 143u << 23 ? special : bits < 113u << 23 ? small : normal;
  return static_cast<uint16_t>(magnitude | sign >> 16);
#endif
}

// A number of 16 bits, by its type.
HDET_HD float from_16(DType type, uint16_t x) {
  return type == DType::bf16 ? from_bf16(x) : from_f16(x);
}
HDET_HD uint16_t to_16(DType type, float x) { return type == DType::bf16 ? to_bf16(x) : to_f16(x); }

// The split form: a float32 as its bfloat16, rounded to nearest with ties away from zero, and its
// low 16 bits. Where they are 0x8000 or more the upper half was rounded up, so the pair is exact
// for every number; a NaN stays one in the upper half, where everybody looks for it. A zero that
// was rounded up is no number's upper half: somebody has set the parameter to zero.
HDET_HD float join(uint16_t upper, uint16_t lower) {
  const uint32_t bits =
      ((static_cast<uint32_t>(upper) - static_cast<uint32_t>(lower >> 15)) << 16) + lower;
  return float_of((upper & 0x7fffu) == 0 && lower >= 0x8000u ? static_cast<uint32_t>(upper) << 16
                                                             : bits);
}
HDET_HD uint16_t upper_half(float x) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>(is_nan(bits) ? 0x7fc0u : (bits + 0x8000u) >> 16);
}
HDET_HD uint16_t lower_half(float x) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>(is_nan(bits) ? 0u : bits);
}

// The split form of 24 bits is that of a float32 whose last 8 bits are 0, which are not stored. To
// it: up with the probability of what is cut off, for a `random` uniform in 0 .. 255. Infinities
// and NaN are exact.
HDET_HD float to_24(float x, uint32_t random) {
  const uint32_t bits = bits_of(x);
  return (bits & 0x7f800000u) == 0x7f800000u ? x : float_of((bits + random) & 0xffffff00u);
}
// To nearest, ties to even.
HDET_HD float to_24(float x) { return to_24(x, 0x7fu + (bits_of(x) >> 8 & 1u)); }

// How the streams of one tensor are stored, four bits each, in Chunk::formats, where there is room
// for so many moments.
constexpr int kMaxMoments = 12;
struct Formats {
  DType gradient, param;
  Master master;
  bool stochastic;  // of parameters, see draws_params, and of bfloat16 averages of squares
  DType moments[kMaxMoments];
};

// Are parameters rounded stochastically? bfloat16 without a master, or in the split form of 24
// bits.
HDET_HD constexpr bool draws_params(bool stochastic, DType param, Master master) {
  return stochastic && param == DType::bf16 &&
         (master == Master::none || master == Master::split24);
}

// How all tensors of a step are stored, where kernels have been compiled for just that: float32; or
// bfloat16 parameters and gradients, with float32 masters or in the split form, with moments in
// float32 or codes; or bfloat16 throughout, rounded stochastically (halves). Moments may be
// missing.
enum class Known : int32_t { none = 0, floats = 1, masters = 2, split = 3, halves = 4 };

// Of moments those that are not codes.
HDET_HD constexpr Formats formats_of(Known known) {
  const bool all_halves = known == Known::halves;
  const DType halves =
      known == Known::floats ? DType::f32 : DType::bf16;  // parameters and gradients
  const Master master = known == Known::masters ? Master::f32
                        : known == Known::split ? Master::split
                                                : Master::none;
  Formats formats{halves, halves, master, all_halves, {}};
  for (DType& moment : formats.moments) moment = all_halves ? DType::bf16 : DType::f32;
  return formats;
}

HDET_HD Formats unpack_formats(int64_t packed) {
  const auto type = [packed](int place) { return static_cast<DType>(packed >> 4 * place & 15); };
  Formats formats{
      type(0), type(1), static_cast<Master>(packed >> 8 & 15), (packed >> 12 & 1) != 0, {}};
  for (int j = 0; j < kMaxMoments; ++j) formats.moments[j] = type(4 + j);
  return formats;
}

// Whether a tensor asks for stochastic rounding matters in halves alone: the other formats are
// never rounded so.
HDET_HD Known known_of(const Formats& f) {
  for (const Known one : {Known::floats, Known::masters, Known::split, Known::halves}) {
    const Formats like = formats_of(one);
    const bool coded = one != Known::halves;  // may be
    bool alike = f.gradient == like.gradient && f.param == like.param && f.master == like.master;
    for (const DType moment : f.moments) {
      alike = alike && (moment == like.moments[0] || moment == DType::none ||
                        (coded && moment == DType::codes));
    }
    if (alike && (f.stochastic || !like.stochastic)) return one;
  }
  return Known::none;
}

}  // namespace hdet
