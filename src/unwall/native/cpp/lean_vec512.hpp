// Sixteen 32-bit elements in a register of AVX-512, for lean_wide.hpp. Included by lean_impl.hpp, inside its namespaces.
struct Vec {
  using Floats = __m512;
  using Ints = __m512i;
  using Flags = uint32_t;
  static constexpr int LANES = 16;

  static Floats all(float value) { return _mm512_set1_ps(value); }
  static Ints ints(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static Ints words(uint16_t value) { return _mm512_set1_epi16(static_cast<int16_t>(value)); }
  static Ints bits(Floats values) { return _mm512_castps_si512(values); }
  static Floats floats(Ints values) { return _mm512_castsi512_ps(values); }
  static Ints load(const void* from) { return _mm512_loadu_si512(from); }
  static Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
  static void store(void* to, Ints values) { _mm512_storeu_si512(to, values); }
  static Ints signed_bytes(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store_bytes(int8_t* to, Ints values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(values));
  }
  static Floats half_floats(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Floats evens(Floats low, Floats high) {
    const Ints index = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_ps(low, index, high);
  }
  static Floats odds(Floats low, Floats high) {
    const Ints index = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_ps(low, index, high);
  }

  template <int By>
  static Ints up(Ints values) {
    return _mm512_slli_epi32(values, By);
  }
  template <int By>
  static Ints down(Ints values) {
    return _mm512_srli_epi32(values, By);
  }
  template <int By>
  static Ints words_up(Ints values) {
    return _mm512_slli_epi16(values, By);
  }
  template <int By>
  static Ints words_down(Ints values) {
    return _mm512_srli_epi16(values, By);
  }
  static Ints word_signs(Ints values) { return _mm512_srai_epi16(values, 15); }
  static Ints up_each(Ints values, Ints by) { return _mm512_sllv_epi32(values, by); }

  static Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
  static Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
  static Ints differ(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
  static Ints masked_or(Ints a, Ints mask, Ints b) { return _mm512_ternarylogic_epi32(a, mask, b, 0xea); }  // (a & mask) | b
  // The lower half of each 32 bits from one, the upper half from the other. `upper`: the mask of the latter.
  static Ints halves(Ints low, Ints high, Ints upper) { return _mm512_ternarylogic_epi32(high, low, upper, 0xe4); }
  static Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints minus(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
  static Ints times(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
  static Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
  static Ints larger_unsigned(Ints a, Ints b) { return _mm512_max_epu32(a, b); }
  static uint32_t largest(Ints values) { return _mm512_reduce_max_epu32(values); }
  static Ints words_plus(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
  static Ints words_minus(Ints a, Ints b) { return _mm512_sub_epi16(a, b); }
  static Ints smaller_words(Ints a, Ints b) { return _mm512_min_epu16(a, b); }

  static Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats root(Floats a) { return _mm512_sqrt_ps(a); }
  static Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  // a * b + c, only where the product is exact.
  static Floats exact_times_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  // The smaller of |a| and b, which is not negative.
  static Floats bounded_size(Floats a, Floats b) { return _mm512_range_ps(a, b, 0x0a); }

  static Flags no_number(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  static Flags below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static Flags zero_words(Ints values, Ints mask) { return _mm512_testn_epi16_mask(values, mask); }
  static Flags flags(Flags a, Flags b) { return a | b; }
  static bool any(Flags flags) { return flags != 0; }
  // Words where `tested` has a bit, zero elsewhere.
  static Ints where_words(Ints tested, Ints words) {
    return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(tested, tested), words);
  }
  static Ints first_words(__m128i words) { return _mm512_inserti32x4(_mm512_setzero_si512(), words, 0); }
};
