// Eight 32-bit elements in a register of AVX2, for lean_wide.hpp. Included by lean_impl.hpp, inside its namespaces.
struct Vec {
  using Floats = __m256;
  using Ints = __m256i;
  using Flags = __m256i;
  static constexpr int LANES = 8;

  static Floats all(float value) { return _mm256_set1_ps(value); }
  static Ints ints(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static Ints words(uint16_t value) { return _mm256_set1_epi16(static_cast<int16_t>(value)); }
  static Ints bits(Floats values) { return _mm256_castps_si256(values); }
  static Floats floats(Ints values) { return _mm256_castsi256_ps(values); }
  static Ints load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
  static void store(void* to, Ints values) { _mm256_storeu_si256(static_cast<__m256i*>(to), values); }
  static Ints signed_bytes(const int8_t* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store_bytes(int8_t* to, Ints values) {  // of words below 256
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  }
  static Floats half_floats(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Floats in_order(Floats values) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(values), 0xd8)); }
  static Floats evens(Floats low, Floats high) { return in_order(_mm256_shuffle_ps(low, high, 0x88)); }
  static Floats odds(Floats low, Floats high) { return in_order(_mm256_shuffle_ps(low, high, 0xdd)); }

  template <int By>
  static Ints up(Ints values) {
    return _mm256_slli_epi32(values, By);
  }
  template <int By>
  static Ints down(Ints values) {
    return _mm256_srli_epi32(values, By);
  }
  template <int By>
  static Ints words_up(Ints values) {
    return _mm256_slli_epi16(values, By);
  }
  template <int By>
  static Ints words_down(Ints values) {
    return _mm256_srli_epi16(values, By);
  }
  static Ints word_signs(Ints values) { return _mm256_srai_epi16(values, 15); }
  static Ints up_each(Ints values, Ints by) { return _mm256_sllv_epi32(values, by); }

  static Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
  static Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
  static Ints differ(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
  static Ints masked_or(Ints a, Ints mask, Ints b) { return either(both(a, mask), b); }
  // The lower half of each 32 bits from one, the upper half from the other.
  static Ints halves(Ints low, Ints high, Ints) { return _mm256_blend_epi16(low, high, 0xaa); }
  static Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static Ints minus(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
  static Ints times(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
  static Ints larger(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
  static Ints larger_unsigned(Ints a, Ints b) { return _mm256_max_epu32(a, b); }
  static uint32_t largest(Ints values) {
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
  }
  static Ints words_plus(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
  static Ints words_minus(Ints a, Ints b) { return _mm256_sub_epi16(a, b); }
  static Ints smaller_words(Ints a, Ints b) { return _mm256_min_epu16(a, b); }

  static Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats minus(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Floats root(Floats a) { return _mm256_sqrt_ps(a); }
  static Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  static Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  // a * b + c, only where the product is exact.
  static Floats exact_times_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  // The smaller of |a| and b, which is not negative.
  static Floats bounded_size(Floats a, Floats b) { return smaller(floats(both(bits(a), ints(MAGNITUDE))), b); }

  static Flags no_number(Floats a, Floats b) { return bits(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)); }
  static Flags below(Floats a, Floats b) { return bits(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static Flags zero_words(Ints values, Ints mask) { return _mm256_cmpeq_epi16(both(values, mask), _mm256_setzero_si256()); }
  static Flags flags(Flags a, Flags b) { return either(a, b); }
  static bool any(Flags flags) { return _mm256_movemask_epi8(flags) != 0; }
  // Words where `tested` has a bit, zero elsewhere.
  static Ints where_words(Ints tested, Ints words) {
    return _mm256_andnot_si256(_mm256_cmpeq_epi16(tested, _mm256_setzero_si256()), words);
  }
  static Ints first_words(__m128i words) { return _mm256_inserti128_si256(_mm256_setzero_si256(), words, 0); }
};
