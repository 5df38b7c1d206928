// The arithmetic of the host: one table of plain loops per instruction set, all with the same bits.
#pragma once
#include <cstdint>

#include "unwall.h"

namespace unwall {

// What one AdamW update needs, worked out in double once per job and rounded to float once.
struct AdamWConstants {
  float grad_scale;
  float beta1, grad_weight;    // exp_avg = beta1 * exp_avg + grad_weight * g
  float beta2, square_weight;  // exp_avg_sq = beta2 * exp_avg_sq + square_weight * g * g
  float keep;                  // 1 - lr * weight_decay
  float unbias;                // 1 / sqrt(1 - beta2^step)
  float eps;
  float rate;  // lr / (1 - beta1^step)
};

// The pointers of one chunk, already moved to its first element.
struct AdamWSpan {
  void* param;
  int16_t* remainder;
  void* copy;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  void* out_param;  // the outputs are for the kernels out of place alone
  int16_t* out_remainder;
  float* out_exp_avg;
  float* out_exp_avg_sq;
  int64_t n;
};

struct SquareSum {
  double sum;
  int64_t nonfinite;
};

enum AdamWVariant { ADAMW_F32, ADAMW_F32_COPY_BF16, ADAMW_F32_COPY_F16, ADAMW_SPLIT, ADAMW_VARIANTS };
constexpr int DTYPES = 3;  // uw_dtype counts from 0

struct Kernels {
  const char* name;
  void (*adamw[DTYPES][ADAMW_VARIANTS])(const AdamWSpan& span, const AdamWConstants& constants);  // [gradient][variant]
  void (*adamw_out[DTYPES][ADAMW_VARIANTS])(const AdamWSpan& span, const AdamWConstants& constants);
  SquareSum (*sum_squares[DTYPES])(const void* src, int64_t n);
  void (*accumulate[DTYPES])(float* dst, const void* src, int64_t n);
  void (*cast[DTYPES][DTYPES])(void* dst, const void* src, int64_t n);  // [to][from]
  void (*split)(void* half, int16_t* remainder, const float* src, int64_t n);
  void (*join)(float* dst, const void* half, const int16_t* remainder, int64_t n);
  void (*stream_copy)(void* dst, const void* src, int64_t bytes);  // past the cache
};

const Kernels& baseline_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

// What a request for an update says; `check_adamw` writes `*err` and answers false where it makes no sense.
bool check_adamw(const uw_adamw_args& args, uw_error* err);
AdamWConstants constants_of(const uw_adamw_args& args);
AdamWVariant variant_of(const uw_adamw_args& args);
AdamWSpan span_of(const uw_adamw_args& args, int64_t begin, int64_t count);

// The best table this processor can run, or the one that uw_isa_select chose.
const Kernels& kernels();

}  // namespace unwall
