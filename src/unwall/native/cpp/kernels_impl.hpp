// The loops themselves. Each kernels_<isa>.cpp includes this file once, is compiled for its instruction set, and names its
// table through UNWALL_KERNELS (the function) and UNWALL_ISA (the string).
//
// [Note: same bits]
// Every loop is element-wise IEEE arithmetic without contraction, and sqrt and division are correctly rounded, so the
// width of the vectors cannot change a result. The one reduction has a lane structure of its own, fixed in the source.
//
// [Note: no std here]
// An inline function of the standard library compiled with -mavx512f may be the copy that the linker keeps for everybody,
// and then the baseline dies of an illegal instruction. So this file uses builtins and functions without linkage only.
// (Intrinsics are always inlined.)
//
// [Note: out of place]
// A plain store to memory that is not in the cache reads the line first: 12 bytes more for an element of the split master,
// on top of 26. So the new values go to a block on the stack, and are streamed from there in whole lines, which nobody reads
// first. Where every output starts a line the block is as small as it can be, one line of 16-bit elements, so that the
// processor works on the next ones while these leave (measured: 1024 elements at a time take 1.7 times as long). Where they
// do not, lines are cut at the ends of a block, so there it is longer. Both forms of the update share the arithmetic of an
// element, and so its bits.
//
// [Note: split master]
// bits(master) = (hi << 16) + sign_extend(lo), hi = (bits + 0x8000) >> 16. `hi` read as bf16 is the master rounded to
// nearest (ties away from zero), `lo` what the rounding left. It is pure integer arithmetic, so lossless for every finite
// value, denormals, -0.0 and infinities. A master above the largest bf16 (within 2^-9 of the largest float) has a half of
// inf, as rounding says, and the pair still gives the master back. NaN is made the plain quiet one with remainder 0:
// otherwise the addition could carry through it and the half would read as inf or 0, hiding it from the device.
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "fetch_ahead.hpp"
#include "kernels.hpp"

// A loop over a block is fast only where its caller's constants reach it (measured: 1.2 times).
#define UNWALL_INLINE inline __attribute__((always_inline))

namespace unwall {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr uint32_t INF = 0x7f800000u;
constexpr uint32_t MAGNITUDE = 0x7fffffffu;

// ---- element types: how one is read as float, and rounded to nearest even from float ------------------------------

struct F32 {
  using Storage = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};

struct BF16 {
  using Storage = uint16_t;
  static float load(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }
  static uint16_t store(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;  // rounding could carry a NaN into inf or -0
    return static_cast<uint16_t>((bits & MAGNITUDE) > INF ? quiet : rounded);
  }
};

struct F16 {
  using Storage = uint16_t;
  static constexpr uint32_t REBIAS = 112u << 23;  // the exponent of float counts from 127, that of half from 15

  static float load(uint16_t half) {
    uint32_t wide = (half & 0x7fffu) << 13;
    uint32_t normal = wide + REBIAS;
    uint32_t special = wide | INF;
    // A denormal half is k * 2^-24: put k under the exponent of 2^-14 and take 2^-14 away again, which is exact.
    constexpr uint32_t smallest_normal = 113u << 23;
    uint32_t denormal = bits_of(float_of(wide + smallest_normal) - float_of(smallest_normal));
    uint32_t bits = wide < (0x400u << 13) ? denormal : normal;
    bits = wide >= (0x7c00u << 13) ? special : bits;
    return float_of(bits | (static_cast<uint32_t>(half & 0x8000u) << 16));
  }

  static uint16_t store(float value) {
    uint32_t bits = bits_of(value);
    uint32_t magnitude = bits & MAGNITUDE;
    uint32_t normal = (magnitude - REBIAS + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // The last place of 0.5f is 2^-24, that of a denormal half: the addition itself rounds to nearest even.
    uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t half = magnitude < 0x38800000u ? denormal : normal;          // 2^-14
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;                     // 65520, halfway past the largest half
    half = magnitude > INF ? (0x7e00u | ((bits >> 13) & 0x3ffu)) : half;  // NaN keeps its upper payload
    return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
  }
};

inline float join_bits(uint16_t half, int16_t remainder) {
  return float_of((static_cast<uint32_t>(half) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}

// See [Note: split master].
inline uint32_t without_payload(float value) {
  uint32_t bits = bits_of(value);
  return (bits & MAGNITUDE) > INF ? ((bits & ~MAGNITUDE) | 0x7fc00000u) : bits;
}

// ---- streaming ----------------------------------------------------------------------------------------------------

// `dst` is the start of a line.
inline void stream_line(char* dst, const char* src) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
#elif defined(__AVX2__)
  for (int part = 0; part < LINE_BYTES; part += 32) {
    __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + part));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + part), value);
  }
#elif defined(__SSE2__)
  for (int part = 0; part < LINE_BYTES; part += 16) {
    __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + part));
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst + part), value);
  }
#else
  __builtin_memcpy(dst, src, LINE_BYTES);
#endif
}

// Streamed stores are not ordered with what tells others that the chunk has ended.
inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

inline int64_t bytes_to_line(const void* address) { return -reinterpret_cast<intptr_t>(address) & (LINE_BYTES - 1); }

// Streams the lines that lie in the range as a whole and copies the two ends. A stream_fence() has to follow.
void stream(void* dst, const void* src, int64_t bytes) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  int64_t i = bytes_to_line(to);
  if (i > bytes) i = bytes;
  __builtin_memcpy(to, from, static_cast<uint64_t>(i));
  for (; i + LINE_BYTES <= bytes; i += LINE_BYTES) stream_line(to + i, from + i);
  __builtin_memcpy(to + i, from + i, static_cast<uint64_t>(bytes - i));
}

void stream_copy(void* dst, const void* src, int64_t bytes) {
  stream(dst, src, bytes);
  stream_fence();
}

// ---- AdamW --------------------------------------------------------------------------------------------------------

struct Updated {
  float param, exp_avg, exp_avg_sq;
};

inline Updated adamw_element(float p, float m, float v, float g, const AdamWConstants& c) {
  g = g * c.grad_scale;
  m = c.beta1 * m + c.grad_weight * g;
  v = c.beta2 * v + c.square_weight * g * g;
  float denominator = __builtin_sqrtf(v) * c.unbias + c.eps;
  p = p * c.keep - c.rate * (m / denominator);
  return {p, m, v};
}

template <bool Split, class Param>
inline float load_master(const Param* param, const int16_t* remainder, int64_t i) {
  if constexpr (Split) {
    return join_bits(param[i], remainder[i]);
  } else {
    return param[i];
  }
}

// `copy` is written where WithCopy, `remainder` where Split.
template <class Copy, bool WithCopy, bool Split, class Param>
inline void store_master(float value, Param* param, int16_t* remainder, typename Copy::Storage* copy, int64_t i) {
  if constexpr (Split) {
    uint32_t bits = without_payload(value);
    param[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    remainder[i] = static_cast<int16_t>(bits);
  } else {
    param[i] = value;
    if constexpr (WithCopy) copy[i] = Copy::store(value);
  }
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
UNWALL_INLINE void adamw_loop(Param* __restrict param, int16_t* __restrict remainder, typename Copy::Storage* __restrict copy,
                              float* __restrict exp_avg, float* __restrict exp_avg_sq,
                              const typename Grad::Storage* __restrict grad, int64_t n, const AdamWConstants c) {
  for (int64_t i = 0; i < n; ++i) {
    float p = load_master<Split>(param, remainder, i);
    Updated now = adamw_element(p, exp_avg[i], exp_avg_sq[i], Grad::load(grad[i]), c);
    exp_avg[i] = now.exp_avg;
    exp_avg_sq[i] = now.exp_avg_sq;
    store_master<Copy, WithCopy, Split>(now.param, param, remainder, copy, i);
  }
}

// What an update of `LINE_NUMEL` elements will read, a little later.
template <bool Split, class Param, class Storage>
UNWALL_INLINE void fetch_states_ahead(const AdamWSpan& span, const Param* param, const Storage* grad, int64_t at) {
  fetch_ahead<LINE_NUMEL>(param, at);
  if constexpr (Split) fetch_ahead<LINE_NUMEL>(span.remainder, at);
  fetch_ahead<LINE_NUMEL>(span.exp_avg, at);
  fetch_ahead<LINE_NUMEL>(span.exp_avg_sq, at);
  fetch_ahead<LINE_NUMEL>(grad, at);
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
void adamw(const AdamWSpan& whole, const AdamWConstants& constants) {
  const AdamWSpan span = whole;  // locals, which no store can change, are not read again after each
  const AdamWConstants c = constants;
  Param* param = static_cast<Param*>(span.param);
  auto* copy = static_cast<typename Copy::Storage*>(span.copy);
  const auto* grad = static_cast<const typename Grad::Storage*>(span.grad);
  auto update = [&](int64_t begin, int64_t count) {
    adamw_loop<Grad, Copy, WithCopy, Split>(param + begin, Split ? span.remainder + begin : nullptr,
                                            WithCopy ? copy + begin : nullptr, span.exp_avg + begin, span.exp_avg_sq + begin,
                                            grad + begin, count, c);
  };
  int64_t begin = 0;
  for (; begin + LINE_NUMEL <= span.n; begin += LINE_NUMEL) {
    fetch_states_ahead<Split>(span, param, grad, begin);
    update(begin, LINE_NUMEL);
  }
  update(begin, span.n - begin);
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
UNWALL_INLINE void adamw_out_loop(const Param* __restrict param, const int16_t* __restrict remainder,
                                  const float* __restrict exp_avg, const float* __restrict exp_avg_sq,
                                  const typename Grad::Storage* __restrict grad, Param* __restrict out_param,
                                  int16_t* __restrict out_remainder, typename Copy::Storage* __restrict copy,
                                  float* __restrict out_exp_avg, float* __restrict out_exp_avg_sq, int64_t n,
                                  const AdamWConstants c) {
  for (int64_t i = 0; i < n; ++i) {
    float p = load_master<Split>(param, remainder, i);
    Updated now = adamw_element(p, exp_avg[i], exp_avg_sq[i], Grad::load(grad[i]), c);
    out_exp_avg[i] = now.exp_avg;
    out_exp_avg_sq[i] = now.exp_avg_sq;
    store_master<Copy, WithCopy, Split>(now.param, out_param, out_remainder, copy, i);
  }
}

constexpr int64_t RAGGED_NUMEL = 512;

template <bool Lines, class Type>
inline void stream_block(Type* dst, const Type* src, int64_t count) {
  if constexpr (Lines) {
    constexpr int64_t step = LINE_BYTES / static_cast<int64_t>(sizeof(Type));
    for (int64_t i = 0; i < LINE_NUMEL; i += step) {
      stream_line(reinterpret_cast<char*>(dst + i), reinterpret_cast<const char*>(src + i));
    }
  } else {
    stream(dst, src, count * static_cast<int64_t>(sizeof(Type)));
  }
}

// Elements [begin, begin + count). Lines: `count` is LINE_NUMEL and every output starts a line. Otherwise it is at most
// RAGGED_NUMEL, and the outputs are anywhere.
template <class Grad, class Copy, bool WithCopy, bool Split, class Param, bool Lines>
UNWALL_INLINE void adamw_block(const AdamWSpan& span, int64_t begin, int64_t count, const AdamWConstants& constants) {
  using CopyStorage = typename Copy::Storage;
  constexpr int64_t NUMEL = Lines ? LINE_NUMEL : RAGGED_NUMEL;
  alignas(LINE_BYTES) Param param[NUMEL];
  alignas(LINE_BYTES) int16_t remainder[Split ? NUMEL : 1];
  alignas(LINE_BYTES) CopyStorage copy[WithCopy ? NUMEL : 1];
  alignas(LINE_BYTES) float exp_avg[NUMEL];
  alignas(LINE_BYTES) float exp_avg_sq[NUMEL];
  adamw_out_loop<Grad, Copy, WithCopy, Split>(
      static_cast<const Param*>(span.param) + begin, Split ? span.remainder + begin : nullptr, span.exp_avg + begin,
      span.exp_avg_sq + begin, static_cast<const typename Grad::Storage*>(span.grad) + begin, param, remainder, copy, exp_avg,
      exp_avg_sq, Lines ? NUMEL : count, constants);
  stream_block<Lines>(span.out_exp_avg + begin, exp_avg, count);
  stream_block<Lines>(span.out_exp_avg_sq + begin, exp_avg_sq, count);
  stream_block<Lines>(static_cast<Param*>(span.out_param) + begin, param, count);
  if constexpr (Split) stream_block<Lines>(span.out_remainder + begin, remainder, count);
  if constexpr (WithCopy) stream_block<Lines>(static_cast<CopyStorage*>(span.copy) + begin, copy, count);
}

// The first element at which every output starts a line, or -1 where there is none. A span of arrays that start with a line
// has one, wherever it starts itself.
template <bool WithCopy, bool Split, class Param>
int64_t first_line(const AdamWSpan& span) {
  int64_t first = WithCopy ? bytes_to_line(span.copy) / 2 : bytes_to_line(span.out_param) / static_cast<int64_t>(sizeof(Param));
  auto starts_line = [first](auto* output) { return bytes_to_line(output + first) == 0; };
  bool all =
      starts_line(static_cast<Param*>(span.out_param)) && starts_line(span.out_exp_avg) && starts_line(span.out_exp_avg_sq);
  if constexpr (Split) all = all && starts_line(span.out_remainder);
  if constexpr (WithCopy) all = all && starts_line(static_cast<uint16_t*>(span.copy));
  return all ? first : -1;
}

// See [Note: out of place].
template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
void adamw_out(const AdamWSpan& whole, const AdamWConstants& constants) {
  const AdamWSpan span = whole;  // locals, which no store can change, are not read again after each
  const AdamWConstants c = constants;
  int64_t first = first_line<WithCopy, Split, Param>(span), begin = 0;
  if (first >= 0 && first <= span.n) {
    adamw_block<Grad, Copy, WithCopy, Split, Param, false>(span, 0, first, c);
    for (begin = first; begin + LINE_NUMEL <= span.n; begin += LINE_NUMEL) {
      fetch_states_ahead<Split>(span, static_cast<const Param*>(span.param),
                                static_cast<const typename Grad::Storage*>(span.grad), begin);
      adamw_block<Grad, Copy, WithCopy, Split, Param, true>(span, begin, LINE_NUMEL, c);
    }
  }
  for (; begin < span.n; begin += RAGGED_NUMEL) {
    int64_t count = span.n - begin < RAGGED_NUMEL ? span.n - begin : RAGGED_NUMEL;
    adamw_block<Grad, Copy, WithCopy, Split, Param, false>(span, begin, count, c);
  }
  stream_fence();
}

// ---- the rest -----------------------------------------------------------------------------------------------------

// Element i of a chunk adds to lane i % LANES, and the lanes are added up in order: the lanes are what a few vector
// registers hold, but their number belongs to the definition of the result and not to the instruction set.
constexpr int LANES = 16;

// Only the last call for a chunk may come with an n that is not a multiple of LANES.
void add_squares(double* lanes, const float* __restrict values, int64_t n) {
  double sums[LANES];  // a local whose address nobody has stays in registers
  for (int lane = 0; lane < LANES; ++lane) sums[lane] = lanes[lane];
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int lane = 0; lane < LANES; ++lane) {
      sums[lane] += static_cast<double>(values[i + lane]) * static_cast<double>(values[i + lane]);  // an exact product
    }
  }
  for (int lane = 0; lane < LANES; ++lane) lanes[lane] = sums[lane];
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
}

int32_t count_nonfinite(const float* __restrict values, int64_t n) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += (bits_of(values[i]) & MAGNITUDE) >= INF;
  return count;
}

// A block at a time through the first-level cache, in three loops (widen, square, count) that each vectorise well: in one
// loop together they do not.
template <class Src>
SquareSum sum_squares(const void* src, int64_t n) {
  const auto* values = static_cast<const typename Src::Storage*>(src);
  constexpr int64_t BLOCK = 1024;
  static_assert(BLOCK % LANES == 0, "an element's lane must not depend on the block");
  double lanes[LANES] = {};
  SquareSum result = {0.0, 0};
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
    float widened[BLOCK];
    const float* block = widened;
    if constexpr (sizeof(typename Src::Storage) == sizeof(float)) {
      block = values + begin;
    } else {
      for (int64_t i = 0; i < count; ++i) widened[i] = Src::load(values[begin + i]);
    }
    add_squares(lanes, block, count);
    result.nonfinite += count_nonfinite(block, count);
  }
  for (int lane = 0; lane < LANES; ++lane) result.sum += lanes[lane];
  return result;
}

template <class Src>
void accumulate(float* __restrict dst, const void* src, int64_t n) {
  const auto* __restrict values = static_cast<const typename Src::Storage*>(src);
  for (int64_t i = 0; i < n; ++i) dst[i] += Src::load(values[i]);
}

template <class Dst, class Src>
void cast_loop(typename Dst::Storage* __restrict dst, const typename Src::Storage* __restrict src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = Dst::store(Src::load(src[i]));
}

template <class Dst, class Src>
void cast(void* dst, const void* src, int64_t n) {
  cast_loop<Dst, Src>(static_cast<typename Dst::Storage*>(dst), static_cast<const typename Src::Storage*>(src), n);
}

// To the same type: the bits, NaN payloads and all.
template <class Type>
void cast_same(void* dst, const void* src, int64_t n) {
  __builtin_memmove(dst, src, static_cast<uint64_t>(n) * sizeof(typename Type::Storage));
}

void split_loop(uint16_t* __restrict half, int16_t* __restrict remainder, const float* __restrict src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = without_payload(src[i]);
    half[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    remainder[i] = static_cast<int16_t>(bits);
  }
}

void split(void* half, int16_t* remainder, const float* src, int64_t n) {
  split_loop(static_cast<uint16_t*>(half), remainder, src, n);
}

void join_loop(float* __restrict dst, const uint16_t* __restrict half, const int16_t* __restrict remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = join_bits(half[i], remainder[i]);
}

void join(float* dst, const void* half, const int16_t* remainder, int64_t n) {
  join_loop(dst, static_cast<const uint16_t*>(half), remainder, n);
}

#define UNWALL_ADAMW_ROW(kernel, Grad)                                                                                     \
  {kernel<Grad, BF16, false, false, float>, kernel<Grad, BF16, true, false, float>, kernel<Grad, F16, true, false, float>, \
   kernel<Grad, BF16, false, true, uint16_t>}

constexpr Kernels TABLE = {
    UNWALL_ISA,
    {UNWALL_ADAMW_ROW(adamw, F32), UNWALL_ADAMW_ROW(adamw, BF16), UNWALL_ADAMW_ROW(adamw, F16)},
    {UNWALL_ADAMW_ROW(adamw_out, F32), UNWALL_ADAMW_ROW(adamw_out, BF16), UNWALL_ADAMW_ROW(adamw_out, F16)},
    {sum_squares<F32>, sum_squares<BF16>, sum_squares<F16>},
    {accumulate<F32>, accumulate<BF16>, accumulate<F16>},
    {{cast_same<F32>, cast<F32, BF16>, cast<F32, F16>},
     {cast<BF16, F32>, cast_same<BF16>, cast<BF16, F16>},
     {cast<F16, F32>, cast<F16, BF16>, cast_same<F16>}},
    split,
    join,
    stream_copy,
};

#undef UNWALL_ADAMW_ROW
#undef UNWALL_INLINE

}  // namespace

const Kernels& UNWALL_KERNELS() { return TABLE; }

}  // namespace unwall
