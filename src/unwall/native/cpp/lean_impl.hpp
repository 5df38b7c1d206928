// The loops over lean states. Each lean_<isa>.cpp includes this file once. [Note: same bits] and [Note: no std here] in
// kernels_impl.hpp hold here, too. optim/lean_format.py is the same in torch operations, and a test compares the bits.
//
// [Note: lean format]
// Of an element a bf16 half and an 8-bit remainder are kept, together a master of 24 bits, and 16 bits of moments: the upper
// byte is the root of exp_avg_sq, the lower one the ratio of exp_avg to that root. Both are small floats, an exponent and four
// bits of mantissa, with denormals:
//   root   4 bits of exponent, relative to the scale of its block of 64 elements, a power of two: a range of 2^18
//   ratio  a sign and 3 bits of exponent, absolute: from 1/128 to 15.5. It needs no scale, because it is bounded: with the
//          usual betas no sequence of gradients makes it larger than 7.3. And it is what the update is made of, so a small
//          element beside large ones, the row of a rare token beside that of a frequent one, is as precise as they are.
// The block's scale (its exponent plus 40) lies in the lowest bits of the first eight ratios, which have three bits of mantissa
// instead. So all zeros means zero, a state is two bytes per element wherever it is cut, and a block depends on nothing but its
// own elements.
//
// [Note: lean rounding]
// To nearest, exp_avg_sq would stand still: with beta2 = 0.999 a step changes its root by 1/2000, and neighbours are 1/16 to
// 1/32 apart. So what is stored is rounded at random, up as often as it is nearer to the upper neighbour, and right on average.
// The random bits are a hash of the step, the gradient and the master: the same wherever the element lies (tier, group, rank),
// whatever the instruction set, and when an update is done again.
//
// [Note: lean roundtrip]
// exp_avg_sq = root^2 and exp_avg = ratio * root are exact in fp32 (five bits each, and the scales are powers of two), and so
// are root = sqrt(exp_avg_sq) and ratio = exp_avg / root. The largest root of a block keeps its power of two when it is
// rounded. So whatever leaves as fp32 comes back as the same bytes.
#include "fetch_ahead.hpp"
#include "lean.hpp"
#if defined(__F16C__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // some compilers' headers begin with undefined registers
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace unwall {
namespace {

constexpr int BLOCK = LEAN_BLOCK;
constexpr int CARRIERS = 8;           // elements that carry a bit of the scale
constexpr int SCALE_BIAS = 40;        // the smallest root is 2^-58, and its square no denormal
constexpr float MOST_ROOT = 0x1p58f;  // the largest whose square is finite, with room
constexpr float LEAST_PRODUCT = 0x1p-126f;
constexpr float MOST_RATIO = 15.5f;
constexpr uint32_t INF = 0x7f800000u;
constexpr uint32_t MAGNITUDE = 0x7fffffffu;
constexpr uint32_t HALF_STEP = 1u << 18;
constexpr int SHIFT = 19;                            // from the mantissa of a float to four bits
constexpr uint32_t ROOT_REBIAS = 112u << 23;         // the largest exponent of a root, 15, stands for [1, 2)
constexpr uint32_t RATIO_REBIAS = (127u - 4) << 23;  // that of a ratio, 7, for [8, 16)
constexpr float RATIO_OF_HALF = 0x1p11f;             // and in fp16 for [2^-8, 2^-7)

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

struct GradF32 {
  using Storage = float;
  static float load(float value) { return value; }
};

struct GradBF16 {
  using Storage = uint16_t;
  static float load(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }
};

struct GradF16 {
  using Storage = uint16_t;
  static float load(uint16_t half) {
    uint32_t wide = (half & 0x7fffu) << 13;
    constexpr uint32_t smallest_normal = 113u << 23;
    uint32_t denormal = bits_of(float_of(wide + smallest_normal) - float_of(smallest_normal));
    uint32_t bits = wide < (0x400u << 13) ? denormal : wide + (112u << 23);
    bits = wide >= (0x7c00u << 13) ? (wide | INF) : bits;
    return float_of(bits | (static_cast<uint32_t>(half & 0x8000u) << 16));
  }
};

// A block of fp16 as floats.
inline void load_halves(const uint16_t* __restrict halves, float* __restrict values) {
#if defined(__AVX512F__)
  for (int i = 0; i < BLOCK; i += 16) {
    _mm512_storeu_ps(values + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + i))));
  }
#elif defined(__F16C__)
  for (int i = 0; i < BLOCK; i += 8) {
    _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i))));
  }
#else
  for (int i = 0; i < BLOCK; ++i) values[i] = GradF16::load(halves[i]);
#endif
}

// The bits of a value (not negative) as they are before those below the small float's are cut off. The low ones are added to.
// See [Note: small floats by comparison] in lean_wide.hpp.
template <uint32_t Rebias>
inline uint32_t narrow(float value) {
  float denormal = value * 0.5f + float_of(Rebias);
  return bits_of(value > denormal ? value : denormal) - Rebias;
}

// A finaliser of a multiplicative hash: every bit of the input reaches every bit of the result.
inline uint32_t mixed(uint32_t value) {
  value ^= value >> 16;
  value *= 0x85ebca6bu;
  value ^= value >> 13;
  value *= 0xc2b2ae35u;
  return value ^ (value >> 16);
}

// What is added to a float's bits before the lowest 19 are cut off: for the root, and for the ratio.
inline uint32_t low_noise(uint32_t noise) { return noise & ((1u << SHIFT) - 1); }
inline uint32_t high_noise(uint32_t noise) { return noise >> (32 - SHIFT); }

struct Block {
  float param[BLOCK], grad[BLOCK], root[BLOCK], ratio[BLOCK];
  uint32_t noise[BLOCK];
};

inline float power_of_two(int exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }

inline int scale_of(const uint16_t* moments) {
  int biased = 0;
  for (int i = 0; i < CARRIERS; ++i) biased |= (moments[i] & 1) << i;
  return biased - SCALE_BIAS;
}

// Of a block whose largest root has these bits when it is rounded.
inline int stored_scale(uint32_t largest) {
  int scale = static_cast<int>(largest >> 23) - 127;
  return scale < -SCALE_BIAS ? -SCALE_BIAS : scale;
}

inline void carry_scale(int scale, uint16_t* moments) {
  int biased = scale + SCALE_BIAS;
  for (int i = 0; i < CARRIERS; ++i) moments[i] = static_cast<uint16_t>(moments[i] | ((biased >> i) & 1));
}

// The mask that takes the scale's bit out of a ratio.
inline uint32_t ratio_mask(int lane) { return lane < CARRIERS ? 0x7eu : 0x7fu; }

// As fp16 both are what they stand for, but for a power of two: their exponents and mantissas lie in the same order there.
void load_moments(const uint16_t* __restrict moments, float* __restrict root, float* __restrict ratio) {
  float scale = power_of_two(scale_of(moments));
  uint16_t roots[BLOCK], ratios[BLOCK];
  for (int i = 0; i < BLOCK; ++i) {
    roots[i] = static_cast<uint16_t>((moments[i] >> 2) & 0x3fc0);
    ratios[i] = static_cast<uint16_t>(((moments[i] & 0x80) << 8) | ((moments[i] & 0x7f) << 6));
  }
  for (int i = 0; i < CARRIERS; ++i) ratios[i] = static_cast<uint16_t>(ratios[i] & ~0x40);
  load_halves(roots, root);
  load_halves(ratios, ratio);
  for (int i = 0; i < BLOCK; ++i) {
    root[i] *= scale;
    ratio[i] *= RATIO_OF_HALF;
  }
}

// New roots and ratios in place of the old ones, new parameters, and the random bits of each element. One division serves both
// the step, exp_avg / (root * unbias + eps), and the ratio, exp_avg / root: the divider is what an update waits for.
void update(Block& block, const AdamWConstants& c, uint32_t key) {
  for (int i = 0; i < BLOCK; ++i) {
    float p = block.param[i], r = block.root[i], raw = block.grad[i];
    block.noise[i] = mixed(bits_of(p) * 0x9e3779b1u + (bits_of(raw) ^ key));
    float g = raw * c.grad_scale;
    float m = c.beta1 * (block.ratio[i] * r) + c.grad_weight * g;
    float v = c.beta2 * (r * r) + c.square_weight * g * g;
    float root = __builtin_sqrtf(v);
    float bounded = root < MOST_ROOT ? root : MOST_ROOT;
    float below = bounded * c.unbias + c.eps;
    float product = bounded * below;
    float shared = m / (product > LEAST_PRODUCT ? product : LEAST_PRODUCT);
    block.param[i] = p * c.keep - c.rate * (bounded * shared);
    block.ratio[i] = below * shared;
    block.root[i] = root < MOST_ROOT ? root : 0.0f;  // what is not finite begins anew: it is in the parameter already
  }
}

// Nearest: without random bits, for what comes from outside. What was stored before is exact, and so stays as it is.
template <bool Nearest>
void store_moments(const Block& block, uint16_t* __restrict moments) {
  uint32_t largest = 0;  // as it is rounded, which may be to the next power of two; such bits are ordered as the floats are
  for (int i = 0; i < BLOCK; ++i) {
    uint32_t rounded = bits_of(block.root[i]) + (Nearest ? HALF_STEP : low_noise(block.noise[i]));
    largest = rounded > largest ? rounded : largest;
  }
  int scale = stored_scale(largest);
  float up = power_of_two(-scale);
  for (int i = 0; i < BLOCK; ++i) {
    uint32_t noise = block.noise[i];
    uint32_t root = (narrow<ROOT_REBIAS>(block.root[i] * up) + (Nearest ? HALF_STEP : low_noise(noise))) >> SHIFT;
    float size = float_of(bits_of(block.ratio[i]) & MAGNITUDE);
    size = size < MOST_RATIO ? size : MOST_RATIO;  // no number: its root is zero, and so will it be
    uint32_t random = Nearest ? HALF_STEP : high_noise(noise);
    uint32_t ratio = (narrow<RATIO_REBIAS>(size) + (i < CARRIERS ? 2u * random : random)) >> SHIFT;
    ratio = (ratio > 127u ? 127u : ratio) & ratio_mask(i);
    ratio = root == 0 ? 0u : ratio;
    uint32_t sign = ratio == 0 ? 0u : (bits_of(block.ratio[i]) >> 24) & 0x80u;
    moments[i] = static_cast<uint16_t>((root << 8) | sign | ratio);
  }
  carry_scale(scale, moments);
}

void load_params(const uint16_t* __restrict half, const int8_t* __restrict remainder, float* __restrict param, int count) {
  for (int i = 0; i < count; ++i) {
    param[i] =
        float_of((static_cast<uint32_t>(half[i]) << 16) + (static_cast<uint32_t>(static_cast<int32_t>(remainder[i])) << 8));
  }
}

void store_params(const Block& block, uint16_t* __restrict half, int8_t* __restrict remainder) {
  for (int i = 0; i < BLOCK; ++i) {
    uint32_t bits = bits_of(block.param[i]);
    bits = (bits & MAGNITUDE) > INF ? ((bits & ~MAGNITUDE) | 0x7fc00000u) : bits;
    bits = (bits + ((block.noise[i] >> 12) & 0xffu)) & ~0xffu;
    half[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    remainder[i] = static_cast<int8_t>(bits >> 8);
  }
}

// One block. Whole: all of its elements are there, otherwise the first `count`; the others are zero and stay so.
template <class Grad, bool Whole>
inline void update_block(const LeanSpan& span, int64_t begin, int count, const AdamWConstants& constants, uint32_t key) {
  Block block;
  const auto* grad = static_cast<const typename Grad::Storage*>(span.grad) + begin;
  if constexpr (Whole) {
    load_params(span.half + begin, span.remainder + begin, block.param, BLOCK);
    for (int i = 0; i < BLOCK; ++i) block.grad[i] = Grad::load(grad[i]);
  } else {
    __builtin_memset(&block, 0, sizeof block);
    load_params(span.half + begin, span.remainder + begin, block.param, count);
    for (int i = 0; i < count; ++i) block.grad[i] = Grad::load(grad[i]);
  }
  load_moments(span.moments + begin, block.root, block.ratio);
  update(block, constants, key);
  store_moments<false>(block, span.out_moments + begin);
  if constexpr (Whole) {
    store_params(block, span.out_half + begin, span.out_remainder + begin);
  } else {
    uint16_t half[BLOCK];
    int8_t remainder[BLOCK];
    store_params(block, half, remainder);
    __builtin_memcpy(span.out_half + begin, half, sizeof half[0] * static_cast<uint64_t>(count));
    __builtin_memcpy(span.out_remainder + begin, remainder, static_cast<uint64_t>(count));
  }
}

#if defined(__AVX512F__)
#include "lean_vec512.hpp"
#elif defined(__AVX2__)
#include "lean_vec256.hpp"
#endif
#if defined(__AVX2__)
#include "lean_wide.hpp"
#endif

template <class Grad>
void update_span(const LeanSpan& span, const AdamWConstants& constants, uint32_t key) {
  const AdamWConstants c = constants;
#if defined(__AVX2__)
  int64_t begin = update_wide<Grad>(span, c, key);
#else
  int64_t begin = 0;
  for (; begin + BLOCK <= span.n; begin += BLOCK) update_block<Grad, true>(span, begin, BLOCK, c, key);
#endif
  if (begin < span.n) update_block<Grad, false>(span, begin, static_cast<int>(span.n - begin), c, key);
}

// The two moments in float, and back. The last block may be cut: its other elements are left alone.
void read_span(float* dst, const uint16_t* moments, bool squares, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    float root[BLOCK], ratio[BLOCK], values[BLOCK];
    load_moments(moments + begin, root, ratio);
    for (int i = 0; i < BLOCK; ++i) values[i] = (squares ? root[i] : ratio[i]) * root[i];
    int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
    __builtin_memcpy(dst + begin, values, sizeof values[0] * static_cast<uint64_t>(count));
  }
}

void write_span(uint16_t* moments, const float* src, bool squares, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    Block block;
    load_moments(moments + begin, block.root, block.ratio);
    float mean[BLOCK], square[BLOCK];
    for (int i = 0; i < BLOCK; ++i) {
      mean[i] = block.ratio[i] * block.root[i];
      square[i] = block.root[i] * block.root[i];
    }
    int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
    __builtin_memcpy(squares ? square : mean, src + begin, sizeof mean[0] * static_cast<uint64_t>(count));
    for (int i = 0; i < BLOCK; ++i) {
      float root = __builtin_sqrtf(square[i]);
      block.ratio[i] = root > 0.0f ? mean[i] / root : 0.0f;
      block.root[i] = root < MOST_ROOT ? root : 0.0f;
      block.noise[i] = 0;
    }
    store_moments<true>(block, moments + begin);
  }
}

constexpr LeanKernels TABLE = {
    UNWALL_ISA, {update_span<GradF32>, update_span<GradBF16>, update_span<GradF16>}, read_span, write_span};

}  // namespace

const LeanKernels& UNWALL_LEAN_KERNELS() { return TABLE; }

}  // namespace unwall
