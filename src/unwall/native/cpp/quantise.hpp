// Blocks of small integers with one scale each: what travels between ranks in the place of 16-bit numbers.
#pragma once
#include <cstdint>

#include "kernels.hpp"

namespace unwall {

constexpr int64_t QUANTISE_BLOCK = 256;

struct Rounding {
  bool stochastic;
  uint32_t seed;
};

// [element type][0: 8 bits, 1: 4 bits]. Both work on one block.
struct QuantiseKernels {
  // `residual` (null: none) is added to the elements first, and gets what the rounding has left of the sum. `first`: the
  // number of the first element, of which the noise is made.
  void (*pack[DTYPES][2])(float* scale, void* codes, const void* src, void* residual, uint32_t first, const Rounding& rounding);
  // The sum of `pieces` blocks in their order, in float, over `divisor`. Scales and codes of each are `stride` bytes further.
  void (*unpack[DTYPES][2])(void* dst, const char* scale, const char* codes, int64_t stride, int32_t pieces, float divisor);
};

const QuantiseKernels& baseline_quantise();
#if defined(__x86_64__)
const QuantiseKernels& avx2_quantise();
const QuantiseKernels& avx512_quantise();
#endif

}  // namespace unwall
