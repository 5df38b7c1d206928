// AdamW over lean states: one table of kernels per instruction set, all with the same bits. The format is in lean_impl.hpp.
#pragma once
#include <cstdint>

#include "kernels.hpp"

namespace unwall {

constexpr int64_t LEAN_BLOCK = 64;  // elements that share a scale

// The pointers of one chunk, already moved to its first element, which begins a block. In place: the outputs are the inputs.
struct LeanSpan {
  const uint16_t* half;
  const int8_t* remainder;
  const uint16_t* moments;  // whole blocks, also where n ends inside of one
  const void* grad;
  uint16_t* out_half;
  int8_t* out_remainder;
  uint16_t* out_moments;
  int64_t n;
};

struct LeanKernels {
  const char* name;
  void (*update[DTYPES])(const LeanSpan& span, const AdamWConstants& constants, uint32_t key);  // [gradient]
  void (*read)(float* dst, const uint16_t* moments, bool squares, int64_t n);
  void (*write)(uint16_t* moments, const float* src, bool squares, int64_t n);
};

const LeanKernels& lean_baseline_kernels();
#if defined(__x86_64__)
const LeanKernels& lean_avx2_kernels();
const LeanKernels& lean_avx512_kernels();
#endif

}  // namespace unwall
