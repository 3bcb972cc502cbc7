// Moments in 8 bits: blocks of numbers with a scale each, and codes from a table (hdet/kernels/spec/eight_bit.py, which computes it,
// says what holds of them). Here is how a number becomes a code, the same on every device.
#pragma once

#include "portable.h"

namespace hdet {

constexpr int kCodeBlock = 256;  // elements of a tensor, from its first one on, that share a scale

// The table of signed numbers, which are first moments, or of unsigned ones, which are second moments.
struct Codebook {
  float values[256];      // by code
  float thresholds[256];  // ascending; those that are not needed are infinite
};

// Finite magnitudes have smaller bits than infinity, and that smaller ones than NaN: so a block's largest is found among whole numbers.
HDET_HD uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

// `largest`: magnitude_bits of the block's largest number. NaN if that is not finite.
HDET_HD float scale_of(uint32_t largest) {
  constexpr uint32_t kLeast = (127u - 104u) << 23;  // 2^-104
  return float_of(largest >= 0x7f800000u ? 0x7fc00000u : largest < kLeast ? kLeast : largest);
}

// The code of number / scale: how many thresholds are below it. NaN gets code 0; its scale tells what it is.
template <bool kSigned>
HDET_HD uint32_t encode(const float* thresholds, float share) {
  const float magnitude = kSigned ? float_of(magnitude_bits(share)) : share;
  uint32_t code = 0;
  HDET_UNROLLED
  for (uint32_t half = kSigned ? 64 : 128; half != 0; half /= 2) code += thresholds[code + half - 1] < magnitude ? half : 0;
  return kSigned && share < -thresholds[0] ? code | 128u : code;
}

}  // namespace hdet
