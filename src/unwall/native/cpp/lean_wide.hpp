// One whole block of lean states in registers, with the vectors of lean_vec512.hpp or lean_vec256.hpp: what the loops of
// lean_impl.hpp do, with their bits. Included by lean_impl.hpp, inside its namespaces.
//
// [Note: evens and odds]
// A register of 16-bit elements is taken apart into its elements of even and of odd place, each in 32 bits of its own: a shift
// or a mask, where taking it apart in order is a shuffle and a shift; and putting it together again is a shift and a choice of
// halves. No element knows its neighbours, so their order in between does not matter.
//
// [Note: small floats by comparison]
// Of a float x >= 0 and the smallest normal s of a small format, bits((x + s) / 2) is at most bits(x) where x >= s, and at
// least bits(x) where x < s, where it is what the format's denormals are cut from. So the larger of the two is right for both.
// The other way round, of the float n that a code becomes under the format's smallest exponent, the smaller of n and 2n - s is.
// All of these are exact, or are rounded as adding s is.
//
// [Note: the usual block]
// All roots of a block of a dense layer are normal in its format, no root is beyond MOST_ROOT and no parameter is NaN. So the
// usual block is spared what only others need, and these are noticed by two comparisons per block. Nothing is stored before
// that, so a block that turns out to be another is done again: with denormal roots here, any other by the loops. Blocks of a
// kind lie together (rows that had no gradient yet), so the next one is taken for what the last one was.
//
// [Note: constants in memory]
// A compiler that knows a constant makes it anew in a register wherever it is used, by an instruction for which there is one
// port only, and thirty of them do not fit into registers. So they are vectors in memory, behind a pointer it cannot see
// through: as operands of the arithmetic they cost nothing.
#define UNWALL_INLINE inline __attribute__((always_inline))

using Ints = Vec::Ints;
using Floats = Vec::Floats;

// Elements of even and of odd place.
struct Pair {
  Floats even, odd;
};
struct IntPair {
  Ints even, odd;
};

constexpr int PAIR = 2 * Vec::LANES;
constexpr int PAIRS = BLOCK / PAIR;
constexpr uint32_t ROOT_FIELD = 0x07f80000u, RATIO_FIELD = 0x03f80000u, SIGN = 0x80000000u;
constexpr uint32_t EIGHTH_REBIAS = RATIO_REBIAS - (3u << 23);  // its lowest bits are zero where a ratio's exponent goes
constexpr uint32_t LOW_NOISE = (1u << SHIFT) - 1;

// What is known of a pair before the scale of its block is.
struct Updated {
  Pair root;
  IntPair rounded;  // the bits of the roots with their noise
  Ints ratios;      // codes, in words
  Ints halves, remainders;
};

// The elements that carry bits of the scale: twice the noise for their ratios, and no lowest bit.
alignas(64) constexpr uint32_t CARRIER_SHIFT[16] = {1, 1, 1, 1};
alignas(64) constexpr uint32_t CARRIER_CODES[16] = {0xfffefffeu, 0xfffefffeu, 0xfffefffeu, 0xfffefffeu, ~0u, ~0u, ~0u, ~0u,
                                                    ~0u,         ~0u,         ~0u,         ~0u,         ~0u, ~0u, ~0u, ~0u};

// See [Note: constants in memory].
struct Numbers {
  Numbers(const AdamWConstants& c, uint32_t step_key)
      : grad_scale(Vec::all(c.grad_scale)),
        eight_beta1(Vec::all(8.0f * c.beta1)),
        grad_weight(Vec::all(c.grad_weight)),
        beta2(Vec::all(c.beta2)),
        square_weight(Vec::all(c.square_weight)),
        keep(Vec::all(c.keep)),
        unbias(Vec::all(c.unbias)),
        eps(Vec::all(c.eps)),
        rate(Vec::all(c.rate)),
        key(Vec::ints(step_key)) {}

  Floats grad_scale, eight_beta1, grad_weight, beta2, square_weight, keep, unbias, eps, rate;
  Ints key;
  Floats least_product = Vec::all(LEAST_PRODUCT), most_ratio = Vec::all(MOST_RATIO), two = Vec::all(2.0f),
         half = Vec::all(0.5f), minus_smallest_eighth = Vec::all(-float_of(EIGHTH_REBIAS + (1u << 23))),
         half_smallest_ratio = Vec::all(float_of(RATIO_REBIAS)), half_smallest_root = Vec::all(float_of(ROOT_REBIAS));
  Ints root_field = Vec::ints(ROOT_FIELD), ratio_field = Vec::ints(RATIO_FIELD), eighth_rebias = Vec::ints(EIGHTH_REBIAS),
       sign = Vec::ints(SIGN), seed = Vec::ints(0x9e3779b1u), first_factor = Vec::ints(0x85ebca6bu),
       second_factor = Vec::ints(0xc2b2ae35u), low_noise = Vec::ints(LOW_NOISE), byte = Vec::ints(0xffu),
       half_unit = Vec::ints(0x8000u), upper = Vec::ints(0xffff0000u), ratio_rebias = Vec::words(RATIO_REBIAS >> SHIFT),
       most_code = Vec::words(127), sign_bits = Vec::words(0x80), root_bits = Vec::words(0xff00u),
       root_exponents = Vec::words(0xf000u), carrier_shift = Vec::load(CARRIER_SHIFT), carrier_codes = Vec::load(CARRIER_CODES);
};

template <class Grad>
struct PairOf;
template <>
struct PairOf<GradF32> {
  static UNWALL_INLINE Pair load(const float* from, const Numbers&) {
    Floats low = Vec::load_floats(from), high = Vec::load_floats(from + Vec::LANES);
    return {Vec::evens(low, high), Vec::odds(low, high)};
  }
};
template <>
struct PairOf<GradBF16> {
  static UNWALL_INLINE Pair load(const uint16_t* from, const Numbers& k) {
    Ints both = Vec::load(from);
    return {Vec::floats(Vec::up<16>(both)), Vec::floats(Vec::both(both, k.upper))};
  }
};
template <>
struct PairOf<GradF16> {
  static UNWALL_INLINE Pair load(const uint16_t* from, const Numbers&) {
    Floats low = Vec::half_floats(from), high = Vec::half_floats(from + Vec::LANES);
    return {Vec::evens(low, high), Vec::odds(low, high)};
  }
};

UNWALL_INLINE int wide_scale_of(const uint16_t* moments) {
  __m128i carriers = _mm_slli_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(moments)), 15);
  return _mm_movemask_epi8(_mm_packs_epi16(carriers, _mm_setzero_si128())) - SCALE_BIAS;
}

UNWALL_INLINE Ints carried(int scale) {
  const __m128i places = _mm_set_epi16(128, 64, 32, 16, 8, 4, 2, 1);
  __m128i chosen = _mm_and_si128(_mm_set1_epi16(static_cast<int16_t>(scale + SCALE_BIAS)), places);
  return Vec::first_words(_mm_srli_epi16(_mm_cmpeq_epi16(chosen, places), 15));
}

UNWALL_INLINE Ints wide_mixed(Ints value, const Numbers& k) {
  value = Vec::times(Vec::differ(value, Vec::down<16>(value)), k.first_factor);
  value = Vec::times(Vec::differ(value, Vec::down<13>(value)), k.second_factor);
  return Vec::differ(value, Vec::down<16>(value));
}

UNWALL_INLINE Pair wide_params(const uint16_t* half, const int8_t* remainder, const Numbers& k) {
  Ints low = Vec::signed_bytes(remainder);
  Ints high = Vec::words_plus(Vec::load(half), Vec::word_signs(low));
  low = Vec::words_up<8>(low);
  return {Vec::floats(Vec::halves(low, Vec::up<16>(high), k.upper)),
          Vec::floats(Vec::halves(Vec::down<16>(low), high, k.upper))};
}

// `rebias`: that of the roots, with the scale of their block. Usual: none of them is denormal.
template <bool Usual>
UNWALL_INLINE Pair wide_roots(Ints codes, uint32_t rebias, const Numbers& k) {
  const Ints least = Vec::ints(rebias);
  Pair root = {Vec::floats(Vec::plus(Vec::both(Vec::up<11>(codes), k.root_field), least)),
               Vec::floats(Vec::plus(Vec::both(Vec::down<5>(codes), k.root_field), least))};
  if (Usual) return root;
  const Floats smallest = Vec::all(float_of(rebias + (1u << 23)));
  return {Vec::smaller(root.even, Vec::minus(Vec::plus(root.even, root.even), smallest)),
          Vec::smaller(root.odd, Vec::minus(Vec::plus(root.odd, root.odd), smallest))};
}

// An eighth of it.
UNWALL_INLINE Floats wide_ratio(Ints size, Ints sign, const Numbers& k) {
  Floats normal = Vec::floats(Vec::masked_or(size, k.ratio_field, k.eighth_rebias));
  Floats denormal = Vec::exact_times_plus(normal, k.two, k.minus_smallest_eighth);
  return Vec::floats(Vec::masked_or(sign, k.sign, Vec::bits(Vec::smaller(normal, denormal))));
}

UNWALL_INLINE Ints wide_noise(Floats param, Floats raw, const Numbers& k) {
  Ints seed = Vec::times(Vec::bits(param), k.seed);
  return wide_mixed(Vec::plus(seed, Vec::differ(Vec::bits(raw), k.key)), k);
}

// `root` and `ratio` (an eighth of it) become the new ones (the whole of it). Gives back the new parameter.
UNWALL_INLINE Floats wide_update(Floats p, Floats raw, Floats& root, Floats& ratio, const Numbers& k) {
  auto times = [](Floats a, Floats b) { return Vec::times(a, b); };
  Floats g = times(raw, k.grad_scale);
  Floats m = Vec::plus(times(k.eight_beta1, times(ratio, root)), times(k.grad_weight, g));
  Floats v = Vec::plus(times(k.beta2, times(root, root)), times(times(k.square_weight, g), g));
  root = Vec::root(v);
  Floats below = Vec::plus(times(root, k.unbias), k.eps);
  Floats shared = Vec::over(m, Vec::larger(times(root, below), k.least_product));
  ratio = times(below, shared);
  return Vec::minus(times(p, k.keep), times(k.rate, times(root, shared)));
}

// What the ratio's code is cut from, with `noise`.
UNWALL_INLINE Ints wide_size(Floats ratio, Ints noise, const Numbers& k) {
  Floats size = Vec::bounded_size(ratio, k.most_ratio);
  Floats denormal = Vec::exact_times_plus(size, k.half, k.half_smallest_ratio);
  return Vec::plus(Vec::bits(Vec::larger(size, denormal)), noise);
}

template <bool First>
UNWALL_INLINE Ints wide_ratios(const Pair& ratio, const IntPair& noise, const Numbers& k) {
  IntPair random = {Vec::down<32 - SHIFT>(noise.even), Vec::down<32 - SHIFT>(noise.odd)};
  if (First) random = {Vec::up_each(random.even, k.carrier_shift), Vec::up_each(random.odd, k.carrier_shift)};
  Ints even = wide_size(ratio.even, random.even, k), odd = wide_size(ratio.odd, random.odd, k);
  Ints codes = Vec::halves(Vec::down<SHIFT>(even), Vec::down<SHIFT - 16>(odd), k.upper);
  codes = Vec::words_minus(codes, k.ratio_rebias);
  if (First) codes = Vec::both(Vec::smaller_words(codes, k.most_code), k.carrier_codes);
  Ints signs = Vec::words_down<8>(Vec::halves(Vec::down<16>(Vec::bits(ratio.even)), Vec::bits(ratio.odd), k.upper));
  return Vec::masked_or(Vec::where_words(codes, signs), k.sign_bits, codes);
}

// Half and remainder, rounded at random: half a unit of the former is added with the noise, and taken from the latter.
UNWALL_INLINE void wide_split(const Pair& param, const IntPair& noise, Updated& now, const Numbers& k) {
  auto rounded = [&k](Floats value, Ints random) {
    return Vec::plus(Vec::bits(value), Vec::masked_or(Vec::down<12>(random), k.byte, k.half_unit));
  };
  Ints even = rounded(param.even, noise.even), odd = rounded(param.odd, noise.odd);
  now.halves = Vec::halves(Vec::down<16>(even), odd, k.upper);
  now.remainders = Vec::differ(Vec::words_down<8>(Vec::halves(even, Vec::up<16>(odd), k.upper)), k.sign_bits);
}

// Flags: elements for which this is wrong.
template <class Grad, bool First, bool Usual>
UNWALL_INLINE Vec::Flags update_pair(const LeanSpan& span, int64_t at, uint32_t rebias, const Numbers& k, Updated& now) {
  Ints codes = Vec::load(span.moments + at);
  if (First) codes = Vec::both(codes, k.carrier_codes);
  now.root = wide_roots<Usual>(codes, rebias, k);
  Pair ratio = {wide_ratio(Vec::up<19>(codes), Vec::up<24>(codes), k), wide_ratio(Vec::up<3>(codes), Vec::up<8>(codes), k)};
  Pair param = wide_params(span.half + at, span.remainder + at, k);
  Pair raw = PairOf<Grad>::load(static_cast<const typename Grad::Storage*>(span.grad) + at, k);
  IntPair noise = {wide_noise(param.even, raw.even, k), wide_noise(param.odd, raw.odd, k)};
  param.even = wide_update(param.even, raw.even, now.root.even, ratio.even, k);
  param.odd = wide_update(param.odd, raw.odd, now.root.odd, ratio.odd, k);
  now.rounded = {Vec::plus(Vec::bits(now.root.even), Vec::both(noise.even, k.low_noise)),
                 Vec::plus(Vec::bits(now.root.odd), Vec::both(noise.odd, k.low_noise))};
  now.ratios = wide_ratios<First>(ratio, noise, k);
  wide_split(param, noise, now, k);
  Vec::Flags wrong = Vec::no_number(param.even, param.odd);
  return Usual ? Vec::flags(wrong, Vec::zero_words(codes, k.root_exponents)) : wrong;
}

// The codes of a pair in words. Usual: no root of the block is denormal in the format.
template <bool Usual>
UNWALL_INLINE Ints wide_codes(const Updated& now, int scale, const Numbers& k) {
  IntPair cut = now.rounded;
  if (!Usual) {
    const Ints shift = Vec::ints(static_cast<uint32_t>(scale) << 23);
    const Floats half = Vec::all(power_of_two(-scale - 1));
    auto larger = [&](Floats root, Ints rounded) {
      Ints denormal = Vec::bits(Vec::plus(Vec::times(root, half), k.half_smallest_root));
      return Vec::larger(Vec::minus(rounded, shift), Vec::plus(denormal, Vec::minus(rounded, Vec::bits(root))));
    };
    cut = {larger(now.root.even, cut.even), larger(now.root.odd, cut.odd)};
  }
  Ints roots = Vec::halves(Vec::down<SHIFT - 8>(cut.even), Vec::up<24 - SHIFT>(cut.odd), k.upper);
  if (Usual) {
    roots = Vec::words_minus(roots, Vec::words(static_cast<uint16_t>(scale << 12)));
    return Vec::masked_or(roots, k.root_bits, now.ratios);
  }
  roots = Vec::both(roots, k.root_bits);
  return Vec::where_words(roots, Vec::either(roots, now.ratios));
}

enum class Kind { USUAL, WITH_DENORMALS, OTHER };

// Says of which kind the block is; see [Note: the usual block]. Usual: nothing is stored if it is of another, otherwise nothing
// is stored if it is OTHER.
template <class Grad, bool Usual>
__attribute__((noinline)) Kind update_wide_block(const LeanSpan& span, int64_t begin, const Numbers& k) {
  const uint32_t rebias = ROOT_REBIAS + (static_cast<uint32_t>(wide_scale_of(span.moments + begin)) << 23);
  Updated now[PAIRS];
  Vec::Flags wrong = update_pair<Grad, true, Usual>(span, begin, rebias, k, now[0]);
  Ints most = Vec::larger_unsigned(now[0].rounded.even, now[0].rounded.odd);
  Floats least = Vec::smaller(now[0].root.even, now[0].root.odd);
#pragma GCC unroll 4
  for (int pair = 1; pair < PAIRS; ++pair) {
    wrong = Vec::flags(wrong, update_pair<Grad, false, Usual>(span, begin + PAIR * pair, rebias, k, now[pair]));
    most = Vec::larger_unsigned(most, Vec::larger_unsigned(now[pair].rounded.even, now[pair].rounded.odd));
    least = Vec::smaller(least, Vec::smaller(now[pair].root.even, now[pair].root.odd));
  }
  const uint32_t largest = Vec::largest(most);
  const int scale = stored_scale(largest);
  const bool low = Vec::any(Vec::below(least, Vec::all(power_of_two(scale - 14))));
  if (largest >= bits_of(MOST_ROOT) || Vec::any(wrong)) return Usual ? Kind::WITH_DENORMALS : Kind::OTHER;
  if (Usual && low) return Kind::WITH_DENORMALS;
#pragma GCC unroll 4
  for (int pair = 0; pair < PAIRS; ++pair) {
    const int64_t at = begin + PAIR * pair;
    Ints codes = wide_codes<Usual>(now[pair], scale, k);
    Vec::store(span.out_moments + at, pair == 0 ? Vec::either(codes, carried(scale)) : codes);
    Vec::store(span.out_half + at, now[pair].halves);
    Vec::store_bytes(span.out_remainder + at, now[pair].remainders);
  }
  return low ? Kind::WITH_DENORMALS : Kind::USUAL;
}

// All whole blocks. Says where it has ended.
template <class Grad>
int64_t update_wide(const LeanSpan& span, const AdamWConstants& constants, uint32_t key) {
  const Numbers numbers(constants, key);
  const Numbers* k = &numbers;
  __asm__("" : "+r"(k) : "m"(numbers));
  Kind kind = Kind::USUAL;
  int64_t begin = 0;
  for (; begin + BLOCK <= span.n; begin += BLOCK) {
    fetch_ahead<BLOCK>(span.half, begin);  // see [Note: fetched ahead]
    fetch_ahead<BLOCK>(span.remainder, begin);
    fetch_ahead<BLOCK>(span.moments, begin);
    fetch_ahead<BLOCK>(static_cast<const typename Grad::Storage*>(span.grad), begin);
    if (kind == Kind::USUAL) kind = update_wide_block<Grad, true>(span, begin, *k);
    if (kind == Kind::USUAL) continue;
    kind = update_wide_block<Grad, false>(span, begin, *k);
    if (kind == Kind::OTHER) update_block<Grad, true>(span, begin, BLOCK, constants, key);
  }
  return begin;
}

#undef UNWALL_INLINE
