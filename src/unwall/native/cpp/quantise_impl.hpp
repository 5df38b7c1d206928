// The loops of quantise.hpp, for one instruction set. Included after kernels_impl.hpp, whose rules hold here, too; the table is
// named through UNWALL_QUANTISE.
//
// [Note: codes]
// The largest finite magnitude of a block becomes the largest code: 126 of 8 bits, 7 of 4 bits. Codes of 8 bits keep what is
// not finite, element by element: 127 and -127 are the infinities, -128 is NaN. Four bits have no codes to spare: a block with
// such an element has the scale NaN, and all of it is NaN. All bytes zero are all elements zero. Below 2^-100 a block counts as
// zero, so that neither a scale nor its inverse leaves the range of normal floats. Codes of 4 bits lie in two's complement,
// element i of a block in the lower half of byte i, element i + 128 in the upper one.
//
// [Note: noise]
// Stochastic rounding adds a number from 0 to 1 and rounds down, so what is lost is zero on average. The number is a hash of
// the seed and the element's number: the upper 16 bits of it, and half a unit, so that whole numbers stay what they are. A
// block starts at a multiple of 256, so what the hash begins with, x ^ (x >> 16) of the element's number x, is one number per
// block ^ the element's place in it. The 16 bits become the first of the mantissa of a number from 1 to 2, and the half unit
// the bit after them: exact, and cheaper than a conversion.
//
// [Note: fast blocks]
// Nearly all blocks are finite. One pass over a block finds its largest magnitude, and so whether it is; then one loop makes
// the codes, all of it in the vectors that compilers make of such loops: no branch, no call, nothing kept in between. What is
// not finite takes a slower way, with copies.
#include "quantise.hpp"

// The loops are fast only where their callers' constants reach them.
#define UNWALL_INLINE inline __attribute__((always_inline))

namespace unwall {
namespace {

constexpr int HALF_BLOCK = QUANTISE_BLOCK / 2;
constexpr float SMALLEST = 0x1p-100f;
constexpr uint32_t QUIET = 0x7fc00000u;

constexpr int most_of(int bits) { return bits == 8 ? 126 : 7; }

// ---- a block as floats ----------------------------------------------------------------------------------------------

// Whether an element is better read twice than kept.
template <class Type>
constexpr bool READS_FAST = true;
template <>
constexpr bool READS_FAST<F16> = false;

template <class Type>
UNWALL_INLINE void load_block(float* __restrict values, const typename Type::Storage* __restrict from) {
  for (int i = 0; i < QUANTISE_BLOCK; ++i) values[i] = Type::load(from[i]);
}

template <class Type>
UNWALL_INLINE void store_block(typename Type::Storage* __restrict to, const float* __restrict values) {
  for (int i = 0; i < QUANTISE_BLOCK; ++i) to[i] = Type::store(values[i]);
}

#if defined(__F16C__)
// The processor has instructions for it, which compilers do not find in the loops above.
template <>
UNWALL_INLINE void load_block<F16>(float* __restrict values, const uint16_t* __restrict from) {
  for (int i = 0; i < QUANTISE_BLOCK; i += 8) {
    __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(values + i, _mm256_cvtph_ps(eight));
  }
}

template <>
UNWALL_INLINE void store_block<F16>(uint16_t* __restrict to, const float* __restrict values) {
  for (int i = 0; i < QUANTISE_BLOCK; i += 8) {
    __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), eight);
  }
}
#endif

// ---- packing --------------------------------------------------------------------------------------------------------

// See [Note: noise].
struct Noise {
  uint32_t base, seed;

  Noise(uint32_t first, uint32_t seed) : base(first ^ (first >> 16)), seed(seed) {}

  float operator()(uint32_t index) const {
    constexpr uint32_t MIX = 0x045d9f3bu;
    uint32_t x = ((base ^ index) * MIX) ^ seed;
    x = (x ^ (x >> 16)) * MIX;
    x = (x ^ (x >> 16)) * MIX;
    return float_of((x >> 16 << 7) | 0x3f800040u) - 1.0f;
  }
};

// Rounds to nearest.
struct Halfway {
  float operator()(uint32_t) const { return 0.5f; }
};

inline bool is_finite(float value) { return (bits_of(value) & MAGNITUDE) < INF; }

// The largest magnitude, as bits, which are ordered as the numbers are. INF or more: not all are finite.
template <class Load>
UNWALL_INLINE uint32_t largest(Load load) {
  int32_t most = 0;
  for (int i = 0; i < QUANTISE_BLOCK; ++i) {
    int32_t magnitude = static_cast<int32_t>(bits_of(load(i)) & MAGNITUDE);
    most = magnitude > most ? magnitude : most;
  }
  return static_cast<uint32_t>(most);
}

template <int Most>
UNWALL_INLINE int32_t round_down(float wanted) {
#if defined(__SSE4_1__)
  int32_t below = static_cast<int32_t>(__builtin_floorf(wanted));
#else
  int32_t below = static_cast<int32_t>(wanted);
  below -= static_cast<float>(below) > wanted ? 1 : 0;
#endif
  below = below > Most ? Most : below;
  return below < -Most ? -Most : below;
}

template <int Bits, class Load, class Chance>
UNWALL_INLINE void round_block(uint8_t* __restrict out, Load load, float inverse, Chance chance) {
  auto code = [=](int i) { return round_down<most_of(Bits)>(load(i) * inverse + chance(static_cast<uint32_t>(i))); };
  if constexpr (Bits == 8) {
    for (int i = 0; i < QUANTISE_BLOCK; ++i) out[i] = static_cast<uint8_t>(code(i));
  } else {
    for (int i = 0; i < HALF_BLOCK; ++i) out[i] = static_cast<uint8_t>((code(i) & 15) | (code(i + HALF_BLOCK) << 4));
  }
}

// All that `load` gives is finite, and `most` the largest magnitude of it.
template <int Bits, class Load>
UNWALL_INLINE void pack_finite(float* scale, uint8_t* out, Load load, float most, uint32_t first, const Rounding& rounding) {
  constexpr float MOST = most_of(Bits);
  bool counts = most >= SMALLEST;
  *scale = counts ? most / MOST : 0.0f;
  float inverse = counts ? MOST / most : 0.0f;
  if (rounding.stochastic) {
    round_block<Bits>(out, load, inverse, Noise(first, rounding.seed));
  } else {
    round_block<Bits>(out, load, inverse, Halfway());
  }
}

// What is not finite gets its code.
inline void mark_special(uint8_t* codes, const float* values) {
  for (int i = 0; i < QUANTISE_BLOCK; ++i) {
    uint32_t bits = bits_of(values[i]);
    if (is_finite(values[i])) continue;
    codes[i] = static_cast<uint8_t>((bits & MAGNITUDE) > INF ? -128 : bits == INF ? 127 : -127);
  }
}

template <int Bits>
void load_codes(float* __restrict values, const uint8_t* __restrict codes, float scale);

// Any block, as floats. Feeds: they become what the rounding has left of them.
template <int Bits>
void pack_values(float* scale, uint8_t* out, float* __restrict values, uint32_t first, const Rounding& rounding, bool feeds) {
  float clean[QUANTISE_BLOCK], rounded[QUANTISE_BLOCK];
  uint32_t most = largest([=](int i) { return values[i]; });
  bool special = most >= INF;
  const float* from = values;
  if (special) {
    for (int i = 0; i < QUANTISE_BLOCK; ++i) clean[i] = is_finite(values[i]) ? values[i] : 0.0f;
    most = largest([&](int i) { return clean[i]; });
    from = clean;
  }
  pack_finite<Bits>(scale, out, [=](int i) { return from[i]; }, float_of(most), first, rounding);
  if (special && Bits == 8) mark_special(out, values);
  if (special && Bits == 4) *scale = float_of(QUIET);
  if (!feeds) return;
  load_codes<Bits>(rounded, out, *scale);
  for (int i = 0; i < QUANTISE_BLOCK; ++i) values[i] = is_finite(rounded[i]) ? values[i] - rounded[i] : 0.0f;
}

template <class Type, int Bits>
void pack(float* scale, void* codes, const void* src, void* residual, uint32_t first, const Rounding& rounding) {
  const auto* elements = static_cast<const typename Type::Storage*>(src);
  auto* rest = static_cast<typename Type::Storage*>(residual);
  auto* out = static_cast<uint8_t*>(codes);
  if (rest == nullptr && READS_FAST<Type>) {
    auto load = [=](int i) { return Type::load(elements[i]); };
    uint32_t most = largest(load);
    if (most < INF) {
      pack_finite<Bits>(scale, out, load, float_of(most), first, rounding);
      return;
    }
  }
  float values[QUANTISE_BLOCK], left[QUANTISE_BLOCK];
  load_block<Type>(values, elements);
  if (rest != nullptr) {
    load_block<Type>(left, rest);
    for (int i = 0; i < QUANTISE_BLOCK; ++i) values[i] += left[i];
  }
  pack_values<Bits>(scale, out, values, first, rounding, rest != nullptr);
  if (rest != nullptr) store_block<Type>(rest, values);
}

// ---- and back -----------------------------------------------------------------------------------------------------

// See [Note: codes].
inline float special_value(int32_t code) { return float_of(code == -128 ? QUIET : code == 127 ? INF : (INF | ~MAGNITUDE)); }

inline bool has_special(const uint8_t* __restrict codes) {
  uint8_t found = 0;
  for (int i = 0; i < QUANTISE_BLOCK; ++i) found |= static_cast<uint8_t>(codes[i] + 126) > 252 ? 1 : 0;
  return found != 0;
}

template <int Bits>
UNWALL_INLINE float finite_value(const uint8_t* codes, int i, float scale) {
  if constexpr (Bits == 8) return static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
  int32_t half = i < HALF_BLOCK ? codes[i] & 15 : codes[i - HALF_BLOCK] >> 4;
  return static_cast<float>((half ^ 8) - 8) * scale;
}

template <int Bits>
void load_codes(float* __restrict values, const uint8_t* __restrict codes, float scale) {
  for (int i = 0; i < HALF_BLOCK; ++i) values[i] = finite_value<Bits>(codes, i, scale);
  for (int i = HALF_BLOCK; i < QUANTISE_BLOCK; ++i) values[i] = finite_value<Bits>(codes, i, scale);
  if (Bits == 4 || !has_special(codes)) return;
  for (int i = 0; i < QUANTISE_BLOCK; ++i) {
    int32_t code = static_cast<int8_t>(codes[i]);
    if (code > 126 || code < -126) values[i] = special_value(code);
  }
}

template <class Type, int Bits>
void unpack(void* dst, const char* scale, const char* codes, int64_t stride, int32_t pieces, float divisor) {
  float sum[QUANTISE_BLOCK], values[QUANTISE_BLOCK];
  for (int32_t piece = 0; piece < pieces; ++piece) {
    float factor;
    __builtin_memcpy(&factor, scale + piece * stride, sizeof factor);
    const auto* from = reinterpret_cast<const uint8_t*>(codes + piece * stride);
    load_codes<Bits>(piece == 0 ? sum : values, from, factor);
    if (piece == 0) continue;
    for (int i = 0; i < QUANTISE_BLOCK; ++i) sum[i] += values[i];
  }
  if (divisor != 1.0f) {
    for (int i = 0; i < QUANTISE_BLOCK; ++i) sum[i] /= divisor;
  }
  store_block<Type>(static_cast<typename Type::Storage*>(dst), sum);
}

constexpr QuantiseKernels QUANTISE_TABLE = {
    {{pack<F32, 8>, pack<F32, 4>}, {pack<BF16, 8>, pack<BF16, 4>}, {pack<F16, 8>, pack<F16, 4>}},
    {{unpack<F32, 8>, unpack<F32, 4>}, {unpack<BF16, 8>, unpack<BF16, 4>}, {unpack<F16, 8>, unpack<F16, 4>}},
};

}  // namespace

const QuantiseKernels& UNWALL_QUANTISE() { return QUANTISE_TABLE; }

}  // namespace unwall

#undef UNWALL_INLINE
