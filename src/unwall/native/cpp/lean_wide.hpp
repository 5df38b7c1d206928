// One whole block of lean states in AVX-512, sixteen elements at a time, all of it in registers: what the loops of
// lean_impl.hpp do, in their order, so with their bits. The compiler keeps each array of those loops in memory, and takes 1.6
// times as long. Included by lean_impl.hpp, inside its namespaces.
struct WideGradF32 {
  static __m512 load(const float* from) { return _mm512_loadu_ps(from); }
};

inline __m256i load_shorts(const uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

struct WideGradBF16 {
  static __m512 load(const uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_shorts(from)), 16));
  }
};

struct WideGradF16 {
  static __m512 load(const uint16_t* from) { return _mm512_cvtph_ps(load_shorts(from)); }
};

template <class Grad>
struct WideOf;
template <>
struct WideOf<GradF32> {
  using Type = WideGradF32;
};
template <>
struct WideOf<GradBF16> {
  using Type = WideGradBF16;
};
template <>
struct WideOf<GradF16> {
  using Type = WideGradF16;
};

inline __m512i ints(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
inline __m512i bits_of(__m512 values) { return _mm512_castps_si512(values); }

inline __m512i mixed(__m512i value) {
  value = _mm512_xor_si512(value, _mm512_srli_epi32(value, 16));
  value = _mm512_mullo_epi32(value, ints(0x85ebca6bu));
  value = _mm512_xor_si512(value, _mm512_srli_epi32(value, 13));
  value = _mm512_mullo_epi32(value, ints(0xc2b2ae35u));
  return _mm512_xor_si512(value, _mm512_srli_epi32(value, 16));
}

template <uint32_t Rebias>
inline __m512i narrow(__m512 value) {
  const __m512 smallest = _mm512_castsi512_ps(ints(Rebias + (1u << 23)));
  __mmask16 denormal = _mm512_cmp_ps_mask(value, smallest, _CMP_LT_OQ);
  __m512i bits = _mm512_sub_epi32(bits_of(_mm512_mask_add_ps(value, denormal, value, smallest)), ints(Rebias));
  return _mm512_mask_sub_epi32(bits, denormal, bits, ints(1u << 23));
}

// What a block has in registers between its two halves: the largest root decides about the scale of all.
struct Wide {
  __m512 root, ratio;
  __m512i noise;
};

inline __m512 wide_params(const uint16_t* half, const int8_t* remainder) {
  __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_shorts(half)), 16);
  __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(remainder)));
  return _mm512_castsi512_ps(_mm512_add_epi32(high, _mm512_slli_epi32(low, 8)));
}

inline void store_wide_params(__m512 param, __m512i noise, uint16_t* half, int8_t* remainder) {
  __m512i bits = bits_of(param);
  __mmask16 nan = _mm512_cmp_ps_mask(param, param, _CMP_UNORD_Q);
  if (nan != 0) bits = _mm512_mask_or_epi32(bits, nan, _mm512_and_si512(bits, ints(~MAGNITUDE)), ints(0x7fc00000u));
  bits = _mm512_add_epi32(bits, _mm512_and_si512(_mm512_srli_epi32(noise, 12), ints(0xffu)));
  __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, ints(0x8000u)), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(half), _mm512_cvtepi32_epi16(high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(remainder), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 8)));
}

// scale_of and carry_scale: the lowest bits of the first eight elements, as a mask.
inline int wide_scale_of(const uint16_t* moments) {
  __m128i carriers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(moments));
  return static_cast<int>(_mm_movepi16_mask(_mm_slli_epi16(carriers, 15))) - SCALE_BIAS;
}

inline __m256i carried(__m256i codes, int scale) {
  return _mm256_or_si256(codes, _mm256_maskz_set1_epi16(static_cast<__mmask16>(scale + SCALE_BIAS), 1));
}

// First: the elements that carry the scale's bits are among these.
template <bool First>
inline void load_wide_moments(const uint16_t* moments, __m512 scale, Wide& wide) {
  __m256i both = load_shorts(moments);
  if (First) both = _mm256_andnot_si256(_mm256_set_epi64x(0, 0, 0x0001000100010001, 0x0001000100010001), both);
  __m256i roots = _mm256_and_si256(_mm256_srli_epi16(both, 2), _mm256_set1_epi16(0x3fc0));
  __m256i sign = _mm256_and_si256(_mm256_slli_epi16(both, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  __m256i ratios = _mm256_or_si256(sign, _mm256_and_si256(_mm256_slli_epi16(both, 6), _mm256_set1_epi16(0x1fc0)));
  wide.root = _mm512_mul_ps(_mm512_cvtph_ps(roots), scale);
  wide.ratio = _mm512_mul_ps(_mm512_cvtph_ps(ratios), _mm512_set1_ps(RATIO_OF_HALF));
}

inline __m512 update_wide(__m512 p, __m512 raw, Wide& wide, const AdamWConstants& c, uint32_t key) {
  auto all = [](float value) { return _mm512_set1_ps(value); };
  auto times = [](__m512 a, __m512 b) { return _mm512_mul_ps(a, b); };
  __m512i seed = _mm512_mullo_epi32(bits_of(p), ints(0x9e3779b1u));
  wide.noise = mixed(_mm512_add_epi32(seed, _mm512_xor_si512(bits_of(raw), ints(key))));
  __m512 g = times(raw, all(c.grad_scale)), r = wide.root;
  __m512 m = _mm512_add_ps(times(all(c.beta1), times(wide.ratio, r)), times(all(c.grad_weight), g));
  __m512 v = _mm512_add_ps(times(all(c.beta2), times(r, r)), times(times(all(c.square_weight), g), g));
  __m512 root = _mm512_sqrt_ps(v);
  __m512 bounded = _mm512_min_ps(root, all(MOST_ROOT));  // no number: MOST_ROOT
  __m512 below = _mm512_add_ps(times(bounded, all(c.unbias)), all(c.eps));
  __m512 shared = _mm512_div_ps(m, _mm512_max_ps(times(bounded, below), all(LEAST_PRODUCT)));
  wide.ratio = times(below, shared);
  wide.root = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(root, all(MOST_ROOT), _CMP_LT_OQ), root);
  return _mm512_sub_ps(times(p, all(c.keep)), times(all(c.rate), times(bounded, shared)));
}

template <bool First>
inline void store_wide_moments(const Wide& wide, __m512 up, int scale, uint16_t* moments) {
  __m512i low = _mm512_and_si512(wide.noise, ints((1u << SHIFT) - 1)), high = _mm512_srli_epi32(wide.noise, 32 - SHIFT);
  __m512i root = _mm512_add_epi32(narrow<ROOT_REBIAS>(_mm512_mul_ps(wide.root, up)), low);
  root = _mm512_srli_epi32(root, SHIFT);
  if (First) high = _mm512_mask_add_epi32(high, 0xff, high, high);
  __m512 size = _mm512_min_ps(_mm512_abs_ps(wide.ratio), _mm512_set1_ps(MOST_RATIO));
  __m512i ratio = _mm512_srli_epi32(_mm512_add_epi32(narrow<RATIO_REBIAS>(size), high), SHIFT);
  if (First) {
    ratio = _mm512_min_epu32(ratio, ints(127));
    ratio = _mm512_mask_and_epi32(ratio, 0xff, ratio, ints(0x7e));
  }
  ratio = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(root, root), ratio);
  __m512i signs = _mm512_srli_epi32(bits_of(wide.ratio), 24);
  __m512i sign = _mm512_maskz_and_epi32(_mm512_test_epi32_mask(ratio, ratio), signs, ints(0x80));
  __m512i codes = _mm512_or_si512(_mm512_or_si512(_mm512_slli_epi32(root, 8), sign), ratio);
  __m256i halves = _mm512_cvtepi32_epi16(codes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(moments), First ? carried(halves, scale) : halves);
}

template <class Grad>
__attribute__((always_inline)) inline void update_wide_block(const LeanSpan& span, int64_t begin, const AdamWConstants& c,
                                                             uint32_t key) {
  const auto* grad = static_cast<const typename Grad::Storage*>(span.grad) + begin;
  const uint16_t* moments = span.moments + begin;
  const __m512 scale = _mm512_set1_ps(power_of_two(wide_scale_of(moments)));
  Wide wide[BLOCK / 16];
  __m512i largest = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int part = 0; part < BLOCK / 16; ++part) {
    int64_t at = 16 * part;
    if (part == 0) {
      load_wide_moments<true>(moments, scale, wide[part]);
    } else {
      load_wide_moments<false>(moments + at, scale, wide[part]);
    }
    __m512 param = wide_params(span.half + begin + at, span.remainder + begin + at);
    param = update_wide(param, WideOf<Grad>::Type::load(grad + at), wide[part], c, key);
    store_wide_params(param, wide[part].noise, span.out_half + begin + at, span.out_remainder + begin + at);
    __m512i low = _mm512_and_si512(wide[part].noise, ints((1u << SHIFT) - 1));
    largest = _mm512_max_epu32(largest, _mm512_add_epi32(bits_of(wide[part].root), low));
  }
  int stored = stored_scale(_mm512_reduce_max_epu32(largest));
  const __m512 up = _mm512_set1_ps(power_of_two(-stored));
  uint16_t* out = span.out_moments + begin;
  store_wide_moments<true>(wide[0], up, stored, out);
#pragma GCC unroll 4
  for (int part = 1; part < BLOCK / 16; ++part) store_wide_moments<false>(wide[part], up, stored, out + 16 * part);
}
