// Philox4x32-10, a generator without state: random words as a function of a counter and a key.
// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", doi:10.1145/2063384.2063405.
#pragma once

#include "numbers.h"

namespace megatron::OPS_TARGET {

struct FourWords {
  uint32_t first, second, third, fourth;
};

LANE_FN uint32_t high_word(uint64_t product) { return uint32_t(product >> 32); }

LANE_FN FourWords philox(FourWords counter, uint32_t key, uint32_t other_key) {
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const uint64_t product = uint64_t(0xD2511F53u) * counter.first;
    const uint64_t other_product = uint64_t(0xCD9E8D57u) * counter.third;
    counter = {
        high_word(other_product) ^ counter.second ^ key, uint32_t(other_product),
        high_word(product) ^ counter.fourth ^ other_key, uint32_t(product)};
    key += 0x9E3779B9u;  // of the golden ratio
    other_key += 0xBB67AE85u;  // of the square root of 3
  }
  return counter;
}

}  // namespace megatron::OPS_TARGET
