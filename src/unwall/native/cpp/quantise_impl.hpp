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
// the seed and the element's number: 16 bits of it, and half a unit, so that whole numbers stay what they are.
#include "quantise.hpp"

namespace unwall {
namespace {

constexpr int HALF_BLOCK = QUANTISE_BLOCK / 2;
constexpr float SMALLEST = 0x1p-100f;

inline float noise(uint32_t element, uint32_t seed) {
  constexpr uint32_t MIX = 0x045d9f3bu;
  uint32_t x = element;
  x = (x ^ (x >> 16)) * MIX;
  x ^= seed;
  x = (x ^ (x >> 16)) * MIX;
  x = (x ^ (x >> 16)) * MIX;
  x = x ^ (x >> 16);
  return static_cast<float>(static_cast<int32_t>(x >> 16)) * 0x1p-16f + 0x1p-17f;
}

// The largest finite magnitude, as bits, which are ordered as the numbers are. *special: whether there are others.
inline float largest(const float* __restrict values, bool* special) {
  int32_t most = 0, others = 0;
  for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) {
    int32_t magnitude = static_cast<int32_t>(bits_of(values[i]) & MAGNITUDE);
    bool finite = magnitude < static_cast<int32_t>(INF);
    int32_t counted = finite ? magnitude : 0;
    most = counted > most ? counted : most;
    others |= finite ? 0 : 1;
  }
  *special = others != 0;
  return float_of(static_cast<uint32_t>(most));
}

template <int Most>
void round_block(int32_t* __restrict codes, const float* __restrict values, float inverse, uint32_t first, bool stochastic,
                 uint32_t seed) {
  for (int32_t i = 0; i < QUANTISE_BLOCK; ++i) {
    float chance = stochastic ? noise(first + static_cast<uint32_t>(i), seed) : 0.5f;
    bool finite = (bits_of(values[i]) & MAGNITUDE) < INF;
    float wanted = (finite ? values[i] : 0.0f) * inverse + chance;
    int32_t below = static_cast<int32_t>(wanted);
    below -= static_cast<float>(below) > wanted ? 1 : 0;
    below = below > Most ? Most : below;
    codes[i] = below < -Most ? -Most : below;
  }
}

// What is not finite gets its code.
inline void mark_special(int32_t* codes, const float* values) {
  for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) {
    uint32_t bits = bits_of(values[i]), magnitude = bits & MAGNITUDE;
    if (magnitude > INF) codes[i] = -128;
    if (magnitude == INF) codes[i] = bits == INF ? 127 : -127;
  }
}

inline void store_codes(uint8_t* __restrict out, const int32_t* __restrict codes, int bits) {
  if (bits == 8) {
    for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) out[i] = static_cast<uint8_t>(codes[i]);
  } else {
    for (int i = 0; i < HALF_BLOCK; ++i) {
      out[i] = static_cast<uint8_t>((codes[i] & 15) | ((codes[i + HALF_BLOCK] & 15) << 4));
    }
  }
}

template <class Type, int Bits>
void pack(float* scale, void* codes, const void* src, void* residual, uint32_t first, const Rounding& rounding) {
  constexpr int MOST = Bits == 8 ? 126 : 7;
  const auto* __restrict elements = static_cast<const typename Type::Storage*>(src);
  auto* __restrict rest = static_cast<typename Type::Storage*>(residual);
  float values[QUANTISE_BLOCK];
  int32_t found[QUANTISE_BLOCK];
  for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) values[i] = Type::load(elements[i]);
  if (rest != nullptr) {
    for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) values[i] += Type::load(rest[i]);
  }
  bool special = false;
  float most = largest(values, &special);
  bool counts = most >= SMALLEST;
  *scale = counts ? most / static_cast<float>(MOST) : 0.0f;
  float inverse = counts ? static_cast<float>(MOST) / most : 0.0f;
  round_block<MOST>(found, values, inverse, first, rounding.stochastic, rounding.seed);
  if (rest != nullptr) {
    for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) {
      float left = values[i] - static_cast<float>(found[i]) * *scale;
      bool kept = (bits_of(values[i]) & MAGNITUDE) < INF && !(Bits == 4 && special);
      rest[i] = Type::store(kept ? left : 0.0f);
    }
  }
  if (special && Bits == 8) mark_special(found, values);
  if (special && Bits == 4) *scale = float_of(0x7fc00000u);
  store_codes(static_cast<uint8_t*>(codes), found, Bits);
}

// ---- and back -----------------------------------------------------------------------------------------------------

// See [Note: codes].
inline float value_of_8(int32_t code, float scale) {
  uint32_t bits = bits_of(static_cast<float>(code) * scale);
  bits = code == 127 ? INF : bits;
  bits = code == -127 ? (INF | ~MAGNITUDE) : bits;
  bits = code == -128 ? 0x7fc00000u : bits;
  return float_of(bits);
}

template <int Bits>
void load_values(float* __restrict values, const uint8_t* __restrict codes, float scale) {
  if constexpr (Bits == 8) {
    for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) values[i] = value_of_8(static_cast<int8_t>(codes[i]), scale);
  } else {
    for (int i = 0; i < HALF_BLOCK; ++i) {
      int32_t low = ((codes[i] & 15) ^ 8) - 8, high = ((codes[i] >> 4) ^ 8) - 8;
      values[i] = static_cast<float>(low) * scale;
      values[i + HALF_BLOCK] = static_cast<float>(high) * scale;
    }
  }
}

template <class Type, int Bits>
void unpack(void* dst, const char* scale, const char* codes, int64_t stride, int32_t pieces, float divisor) {
  auto* __restrict out = static_cast<typename Type::Storage*>(dst);
  float sum[QUANTISE_BLOCK], values[QUANTISE_BLOCK];
  for (int32_t piece = 0; piece < pieces; ++piece) {
    float factor;
    __builtin_memcpy(&factor, scale + piece * stride, sizeof factor);
    const auto* from = reinterpret_cast<const uint8_t*>(codes + piece * stride);
    load_values<Bits>(piece == 0 ? sum : values, from, factor);
    if (piece == 0) continue;
    for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) sum[i] += values[i];
  }
  if (divisor != 1.0f) {
    for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) sum[i] /= divisor;
  }
  for (int64_t i = 0; i < QUANTISE_BLOCK; ++i) out[i] = Type::store(sum[i]);
}

constexpr QuantiseKernels QUANTISE_TABLE = {
    {{pack<F32, 8>, pack<F32, 4>}, {pack<BF16, 8>, pack<BF16, 4>}, {pack<F16, 8>, pack<F16, 4>}},
    {{unpack<F32, 8>, unpack<F32, 4>}, {unpack<BF16, 8>, unpack<BF16, 4>}, {unpack<F16, 8>, unpack<F16, 4>}},
};

}  // namespace

const QuantiseKernels& UNWALL_QUANTISE() { return QUANTISE_TABLE; }

}  // namespace unwall
