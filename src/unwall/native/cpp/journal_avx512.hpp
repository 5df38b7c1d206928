// The update with a journal in AVX-512 registers, for what is trained most: parameters without a copy, gradients of fp32 or
// bf16. Included by journal_impl.hpp, whose arithmetic and journal this is.
//
// [Note: journal in registers]
// A compiler that is given the loop over 16-bit and 32-bit arrays takes twice the registers there are, or a block of memory in
// between; both took twice as long as the plain update (measured). So this loop says what a vector is. Nothing is stored before
// it is known whether every element of the vector fits into its word. Where one does not, its old values are still where they
// were, and are noted down; that is also where a NaN loses its payload, so that the usual vector pays for neither.
namespace unwall {
namespace {

constexpr int64_t VECTOR = 16;

inline __m512 broadcast(float value) { return _mm512_set1_ps(value); }
inline __m512i broadcast(uint32_t value) { return _mm512_set1_epi32(static_cast<int32_t>(value)); }
inline __m512i bits_of(__m512 values) { return _mm512_castps_si512(values); }

template <class Narrow>
inline __m256i load_halves(const Narrow* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

template <class Narrow>
inline void store_halves(Narrow* to, __m512i words) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(words));
}

inline __m512 upper_halves(const uint16_t* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(from)), 16));
}

inline __m512 load_grads(const uint16_t* from) { return upper_halves(from); }
inline __m512 load_grads(const float* from) { return _mm512_loadu_ps(from); }

inline __m512 load_masters(const uint16_t* param, const int16_t* remainder) {
  __m512i low = _mm512_cvtepi16_epi32(load_halves(remainder));
  return _mm512_castsi512_ps(_mm512_add_epi32(bits_of(upper_halves(param)), low));
}
inline __m512 load_masters(const float* param, const int16_t*) { return _mm512_loadu_ps(param); }

inline void store_masters(__m512 value, uint16_t* param, int16_t* remainder) {
  __m512i bits = bits_of(value);
  store_halves(param, _mm512_srli_epi32(_mm512_add_epi32(bits, broadcast(0x8000u)), 16));
  store_halves(remainder, bits);
}
inline void store_masters(__m512 value, float* param, int16_t*) { _mm512_storeu_ps(param, value); }

// Notes those elements down, before they are updated, and says how many there are now. -1: there is no room for them.
template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
__attribute__((noinline)) int64_t note_lanes(const Arrays<Grad, Copy, WithCopy, Split, Param> to, uint32_t lanes, int64_t begin,
                                             const JournalSpan journal, int64_t count) {
  for (; lanes != 0; lanes &= lanes - 1) {
    if (count == journal.capacity) return -1;
    int64_t i = begin + __builtin_ctz(lanes);
    Updated old = to.load(i);
    journal.escapes[count++] = {static_cast<uint16_t>(i), 0, bits_of(old.param), bits_of(old.exp_avg), bits_of(old.exp_avg_sq)};
  }
  return count;
}

// Updates whole vectors and counts their escapes, as far as there is room for these. Says where it has ended: the elements
// before are updated. A stream_fence() has to follow.
template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
int64_t update_vectors(const Arrays<Grad, Copy, WithCopy, Split, Param>& to, int64_t n, const AdamWConstants c,
                       const JournalSpan journal, int64_t& escapes) {
  const Inverse inverse = inverse_of(c);
  Param* const param = to.param;
  int16_t* const remainder = to.remainder;
  float *const exp_avg = to.exp_avg, *const exp_avg_sq = to.exp_avg_sq;
  const typename Grad::Storage* const grad = to.grad;
  uint16_t* const words = journal.words;
  int64_t count = escapes, i = 0;
  for (; i + VECTOR <= n; i += VECTOR) {
    if (i % LINE_NUMEL == 0) {  // see [Note: fetched ahead]
      fetch_ahead<LINE_NUMEL>(param, i);
      if constexpr (Split) fetch_ahead<LINE_NUMEL>(remainder, i);
      fetch_ahead<LINE_NUMEL>(exp_avg, i);
      fetch_ahead<LINE_NUMEL>(exp_avg_sq, i);
      fetch_ahead<LINE_NUMEL>(grad, i);
    }
    const __m512 p0 = load_masters(param + i, Split ? remainder + i : nullptr),
                 g = load_grads(grad + i) * broadcast(c.grad_scale);
    const __m512 m0 = _mm512_loadu_ps(exp_avg + i), v0 = _mm512_loadu_ps(exp_avg_sq + i);
    // adamw_element
    const __m512 dm = broadcast(c.grad_weight) * g, dv = broadcast(c.square_weight) * g * g;
    const __m512 m = broadcast(c.beta1) * m0 + dm, v = broadcast(c.beta2) * v0 + dv;
    const __m512 change = broadcast(c.rate) * (m / (_mm512_sqrt_ps(v) * broadcast(c.unbias) + broadcast(c.eps)));
    __m512 p = p0 * broadcast(c.keep) - change;
    // guess, lost_of. Where any of the new values is NaN the parameter is.
    const __m512i lost_p = _mm512_sub_epi32(bits_of(p0), bits_of((p + change) * broadcast(inverse.keep)));
    const __m512i lost_m = _mm512_sub_epi32(bits_of(m0), bits_of((m - dm) * broadcast(inverse.beta1)));
    const __m512i lost_v = _mm512_sub_epi32(bits_of(v0), bits_of((v - dv) * broadcast(inverse.beta2)));
    const __m512i kept_p = _mm512_add_epi32(lost_p, broadcast(8u)), kept_v = _mm512_add_epi32(lost_v, broadcast(8u));
    const __m512i kept_m = _mm512_add_epi32(lost_m, broadcast(128u));
    const __mmask16 nan = _mm512_cmp_ps_mask(p, p, _CMP_UNORD_Q), wide_m = _mm512_test_epi32_mask(kept_m, broadcast(~255u)),
                    wide_vp = _mm512_test_epi32_mask(_mm512_or_si512(kept_v, kept_p), broadcast(~15u));
    if (const uint32_t bad = nan | wide_m | wide_vp; __builtin_expect(bad != 0, 0)) {
      int64_t noted = note_lanes(to, bad, i, journal, count);
      if (noted < 0) break;
      count = noted;
      if constexpr (Split) {
        __m512i quiet = _mm512_or_si512(_mm512_and_si512(bits_of(p), broadcast(~MAGNITUDE)), broadcast(0x7fc00000u));
        p = _mm512_mask_mov_ps(p, nan, _mm512_castsi512_ps(quiet));
      }
    }
    _mm512_storeu_ps(exp_avg + i, m);
    _mm512_storeu_ps(exp_avg_sq + i, v);
    store_masters(p, param + i, Split ? remainder + i : nullptr);
    const __m512i word = _mm512_or_si512(kept_m, _mm512_or_si512(_mm512_slli_epi32(kept_v, 8), _mm512_slli_epi32(kept_p, 12)));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(words + i), _mm512_cvtepi32_epi16(word));
  }
  escapes = count;
  return i;
}

}  // namespace
}  // namespace unwall
