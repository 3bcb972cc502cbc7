// Moments in 8 bits: blocks of numbers with a scale each, and codes from a table (hdet/kernels/numbers.py, which computes it,
// says what holds of them). Here is how a number becomes a code, the same on every device.
#pragma once

#include "portable.h"

namespace hdet {

constexpr int kCodeBlock = 256;  // elements of a tensor, from its first one on, that share a scale

// A search among 255 thresholds would take 8 reads one after the other. The exponent and 7 bits of the mantissa leave one threshold.
constexpr uint32_t kLeastShare = 106u << 23;  // 2^-21: below it there is one threshold at most
constexpr int kStarts = 2704;                 // 21 exponents of 128 parts, 1, and some more to a multiple of 16

// The table of signed numbers, which are first moments, or of unsigned ones, which are second moments.
struct Codebook {
  float values[256];        // by code
  float thresholds[256];    // ascending; those that are not needed are infinite
  uint8_t starts[kStarts];  // how many thresholds are below the numbers of a part, but for one that may lie in it
};

// Finite magnitudes have smaller bits than infinity, and that smaller ones than NaN: so a block's largest is found among whole numbers.
HDET_HD uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

// `largest`: magnitude_bits of the block's largest number. NaN if that is not finite.
HDET_HD float scale_of(uint32_t largest) {
  constexpr uint32_t kLeast = (127u - 104u) << 23;  // 2^-104
  return float_of(largest >= 0x7f800000u ? 0x7fc00000u : largest < kLeast ? kLeast : largest);
}

// What part of the scale a number is, from -1 to 1: number * (1 / scale), with one division for all numbers of a block. Both are quartered where
// the inverse of a large scale would not be a normal number, which some flush to 0.
struct Shares {
  float unit, inverse;
};
HDET_HD Shares shares_of(float scale) {
  const float unit = scale > 1.0f ? 0.25f : 1.0f;
  return {unit, 1.0f / (unit * scale)};
}
HDET_HD float share_of(const Shares& shares, float x) { return shares.unit * x * shares.inverse; }

// The part in which a magnitude from 0 to 1 lies. Of NaN, and of what has another sign than it may have, the first one.
HDET_HD uint32_t part_of(float magnitude) {
  const uint32_t bits = bits_of(magnitude);
  return magnitude > float_of(kLeastShare) ? (bits - kLeastShare) >> 16 : 0u;
}

// The code of a share: how many thresholds are below it. NaN gets code 0; its scale tells what it is.
template <bool kSigned>
HDET_HD uint32_t encode(const Codebook& book, float share) {
  const float magnitude = kSigned ? float_of(magnitude_bits(share)) : share;
  const uint32_t start = book.starts[part_of(magnitude)];
  const uint32_t code = start + (book.thresholds[start] < magnitude ? 1u : 0u);
  return kSigned && share < -book.thresholds[0] ? code | 128u : code;
}

}  // namespace hdet
