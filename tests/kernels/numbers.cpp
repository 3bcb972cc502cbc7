// csrc/core/numbers.h and philox.h as functions of arrays, for test_numbers.py.
#include "../../csrc/core/numbers.h"
#include "../../csrc/core/philox.h"

using namespace hdet;

extern "C" {

void to_16_bits(int type, const float* in, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_16(static_cast<DType>(type), in[i]);
}

void from_16_bits(int type, const uint16_t* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = from_16(static_cast<DType>(type), in[i]);
}

void round_stochastically(const float* in, const uint16_t* random, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(in[i], random[i]);
}

void split(const float* in, uint16_t* upper, uint16_t* lower, float* joined, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    upper[i] = upper_half(in[i]);
    lower[i] = lower_half(in[i]);
    joined[i] = join(upper[i], lower[i]);
  }
}

void join_halves(const uint16_t* upper, const uint16_t* lower, float* joined, int64_t count) {
  for (int64_t i = 0; i < count; ++i) joined[i] = join(upper[i], lower[i]);
}

void philox_words(uint64_t seed, const uint32_t* counter, uint32_t* out) {
  const Random4 random = philox(seed, counter[0], counter[1], counter[2], counter[3]);
  for (int i = 0; i < 4; ++i) out[i] = random.word[i];
}

void element_bits(uint64_t seed, uint32_t step, uint32_t replica, uint32_t id, int64_t quad, uint32_t* out) {
  const Random4 random = rounding_bits(seed, step, replica, id, quad);
  for (int i = 0; i < 4; ++i) out[i] = random.word[i];
}

}  // extern "C"
