// Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"). A number is a function of its place alone, so it is the same on every backend
// and for every shape of a launch.
#pragma once

#include "portable.h"

namespace hdet {

struct Random4 {
  uint32_t word[4];
};

HDET_HD Random4 philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The random numbers of four neighbouring elements, `quad` = element / 4, of tensor `id` in one
// replica and one step: word[element % 4]. Its low 16 bits round the parameter, its high 16 bits
// the second moment (taken from replica 0, like all that replicas share).
HDET_HD Random4 rounding_bits(uint64_t seed, uint32_t step, uint32_t replica, uint32_t id,
                              int64_t quad) {
  // 2^50 elements are enough for anybody
  const auto high = static_cast<uint32_t>(quad >> 32) & 0xffffu;
  return philox(seed, static_cast<uint32_t>(quad), high | replica << 16, id, step);
}

}  // namespace hdet
