// Moments in 8 bits: blocks of numbers with a scale each, and codes from a table
// (hdet/kernels/numbers.py, which computes it, says what holds of them). Here is how a number
// becomes a code, the same on every device.
#pragma once

#include "portable.h"

namespace hdet {

constexpr int kCodeBlock = 256;  // elements of a tensor, from its first one on, that share a scale

// A search among 255 thresholds would take 8 reads one after the other. The exponent and 7 bits of
// the mantissa, which are a part of the numbers from 2^-21 on, leave one threshold, so that one
// read is enough. (By decades codes have a closed form, with tables of eight entries. It reads as
// much of shared memory, as entries are of two and of four numbers, and takes more instructions.)
constexpr float kLeastShare = 0x1p-21f;  // no threshold but 0 is below it
constexpr int kParts = 2704;  // 21 exponents of 128 parts, 1, and some more to a multiple of 16

// The table of signed numbers, which are first moments, or of unsigned ones, which are second
// moments.
struct alignas(16) Codebook {
  float values[256];  // by code
  // upper half: how many thresholds are below the part; lower half: 0xffff less that of a threshold
  // in it, or 0
  uint32_t parts[kParts];
};

// Finite magnitudes have smaller bits than infinity, and that smaller ones than NaN: so a block's
// largest is found among whole numbers.
HDET_HD uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

// `largest`: magnitude_bits of the block's largest number. NaN if that is not finite.
HDET_HD float scale_of(uint32_t largest) {
  constexpr uint32_t kLeast = (127u - 104u) << 23;  // 2^-104
  return float_of(largest >= 0x7f800000u ? 0x7fc00000u : largest < kLeast ? kLeast : largest);
}

// What part of the scale a number is, from -1 to 1: number * (1 / scale), with one division for all
// numbers of a block. Both are quartered where the inverse of a large scale would not be a normal
// number, which some flush to 0.
struct Shares {
  float unit, inverse;
};
HDET_HD Shares shares_of(float scale) {
  const float unit = scale > 1.0f ? 0.25f : 1.0f;
  return {unit, 1.0f / (unit * scale)};
}
HDET_HD float share_of(const Shares& shares, float x) { return shares.unit * x * shares.inverse; }

// Where in the parts a magnitude from 0 to 1 lies: the number of a part, and 16 bits of the place
// in it. NaN, and what has another sign than it may have, counts as too small.
HDET_HD uint32_t place_of(float magnitude) {
  return bits_of(magnitude > kLeastShare ? magnitude : kLeastShare) - bits_of(kLeastShare);
}

// The code of a share, how many thresholds are below it, from its place and that part's entry. NaN
// gets code 0; its scale tells what it is.
template <bool kSigned>
HDET_HD uint32_t code_of(float share, uint32_t place, uint32_t part) {
  const uint32_t code = (part + (place & 0xffffu)) >> 16;
  if (kSigned) return code != 0 && share < 0.0f ? code | 128u : code;
  return share > 0.0f ? code : 0u;
}

template <bool kSigned>
HDET_HD uint32_t encode(const Codebook& book, float share) {
  const uint32_t place = place_of(kSigned ? float_of(magnitude_bits(share)) : share);
  return code_of<kSigned>(share, place, book.parts[place >> 16]);
}

}  // namespace hdet
