// The loops of journal.hpp, for one instruction set. Included after kernels_impl.hpp, whose rules hold here, too; the table is
// named through UNWALL_JOURNAL.
//
// [Note: journal]
// From the new values of an element and its gradient the old ones can be computed, but for what rounding has lost: mostly a few
// units in the last place. The bits of two floats of one sign, read as integers, differ by that number of units. 8 bits of it
// are kept for exp_avg, 4 each for exp_avg_sq and the parameter, a word of 16 bits for an element. Where an old value is much
// smaller than the new one, more is lost than that (0.1% of elements; a tenth of them in the second step, when moments are
// young), and the old bits are kept as an `Escape`. So are those on whose way there is a NaN, which no arithmetic gives back
// with its payload. Both directions do the same operations in the same order, so the way back is exact for every element, on
// every instruction set.
#include "journal.hpp"

#define UNWALL_INLINE inline __attribute__((always_inline))

namespace unwall {
namespace {

struct Inverse {
  float beta1, beta2, keep;
};

inline Inverse inverse_of(const AdamWConstants& c) { return {1.0f / c.beta1, 1.0f / c.beta2, 1.0f / c.keep}; }

// The old values as far as the new ones tell.
inline Updated guess(const Updated& now, float g, const AdamWConstants& c, const Inverse& inverse) {
  g = g * c.grad_scale;
  float denominator = __builtin_sqrtf(now.exp_avg_sq) * c.unbias + c.eps;
  float change = c.rate * (now.exp_avg / denominator);
  return {(now.param + change) * inverse.keep, (now.exp_avg - c.grad_weight * g) * inverse.beta1,
          (now.exp_avg_sq - c.square_weight * g * g) * inverse.beta2};
}

struct Lost {
  uint32_t param, exp_avg, exp_avg_sq;
};

inline Lost lost_of(const Updated& old, const Updated& guessed) {
  return {bits_of(old.param) - bits_of(guessed.param), bits_of(old.exp_avg) - bits_of(guessed.exp_avg),
          bits_of(old.exp_avg_sq) - bits_of(guessed.exp_avg_sq)};
}

// The lower 16 bits count, and only where it fits: 128, 8 and 8 stand for nothing lost.
inline uint32_t word_of(const Lost& lost) {
  return (lost.exp_avg + 128u) | (lost.exp_avg_sq + 8u) << 8 | (lost.param + 8u) << 12;
}

// Not 0: it does not fit into its word.
inline uint32_t excess_of(const Lost& lost) {
  return ((lost.exp_avg + 128u) & ~255u) | (((lost.exp_avg_sq + 8u) | (lost.param + 8u)) & ~15u);
}

// True where one of an element's new values is NaN: then its parameter is, too. (The old values are finite or infinite, so that
// a guess that is NaN is far from them.)
inline bool has_nan(const Updated& now) { return now.param != now.param; }

inline Updated before(const Updated& now, float g, uint32_t word, const AdamWConstants& c, const Inverse& inverse) {
  Updated guessed = guess(now, g, c, inverse);
  return {float_of(bits_of(guessed.param) + (word >> 12 & 15u) - 8u), float_of(bits_of(guessed.exp_avg) + (word & 255u) - 128u),
          float_of(bits_of(guessed.exp_avg_sq) + (word >> 8 & 15u) - 8u)};
}

// Elements at a time. Their arithmetic is a loop on 32 bits alone, between two that widen and narrow: in one loop with 16 bits
// there are too few registers (measured).
constexpr int64_t JOURNAL_BLOCK = 4 * LINE_NUMEL;

struct Block {
  float param[JOURNAL_BLOCK];  // the old values, as far as an update goes
  float exp_avg[JOURNAL_BLOCK];
  float exp_avg_sq[JOURNAL_BLOCK];
  float grad[JOURNAL_BLOCK];
  float stored[JOURNAL_BLOCK];  // the parameter that is written
  uint32_t words[JOURNAL_BLOCK];
  uint16_t copy[JOURNAL_BLOCK];

  template <bool WithCopy>
  Escape escape(int64_t i, int64_t begin) const {
    uint16_t kept = 0;
    if constexpr (WithCopy) kept = copy[i];
    return {static_cast<uint16_t>(begin + i), kept, bits_of(param[i]), bits_of(exp_avg[i]), bits_of(exp_avg_sq[i])};
  }
};

// The arrays of a chunk, with their types.
template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
struct Arrays {
  Param* param;
  int16_t* remainder;
  uint16_t* copy;
  float* exp_avg;
  float* exp_avg_sq;
  const typename Grad::Storage* grad;

  explicit Arrays(const AdamWSpan& span)
      : param(static_cast<Param*>(span.param)),
        remainder(span.remainder),
        copy(static_cast<uint16_t*>(span.copy)),
        exp_avg(span.exp_avg),
        exp_avg_sq(span.exp_avg_sq),
        grad(static_cast<const typename Grad::Storage*>(span.grad)) {}

  Updated load(int64_t i) const { return {load_master<Split>(param, remainder, i), exp_avg[i], exp_avg_sq[i]}; }

  void store(const Updated& value, int64_t i) const {
    exp_avg[i] = value.exp_avg;
    exp_avg_sq[i] = value.exp_avg_sq;
    store_master<Copy, WithCopy, Split>(value.param, param, remainder, copy, i);
  }

  // All bits, those of a NaN among them: nothing is rounded here.
  void store(const Escape& old, int64_t i) const {
    exp_avg[i] = float_of(old.exp_avg);
    exp_avg_sq[i] = float_of(old.exp_avg_sq);
    if constexpr (Split) {
      param[i] = static_cast<uint16_t>((old.param + 0x8000u) >> 16);
      remainder[i] = static_cast<int16_t>(old.param);
    } else {
      param[i] = float_of(old.param);
      if constexpr (WithCopy) copy[i] = old.copy;
    }
  }
};

// Gradients that vector loops of their own can read.
template <class Grad>
constexpr bool IN_VECTORS = true;
template <>
constexpr bool IN_VECTORS<F16> = false;

// ---- a block: its values come in, are worked on, and go out -------------------------------------------------------------

template <class Grad, bool Split, class Param>
UNWALL_INLINE void widen(const Param* __restrict param, const int16_t* __restrict remainder,
                         const typename Grad::Storage* __restrict grad, Block& __restrict block, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    block.param[i] = load_master<Split>(param, remainder, i);
    block.grad[i] = Grad::load(grad[i]);
  }
}

template <class Copy, bool WithCopy, bool Split, class Param>
UNWALL_INLINE void narrow(const Block& __restrict block, Param* __restrict param, int16_t* __restrict remainder,
                          uint16_t* __restrict copy, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_master<Copy, WithCopy, Split>(block.stored[i], param, remainder, copy, i);
}

// True: a copy is not the rounded parameter. Keeps what the copies are.
template <class Copy>
UNWALL_INLINE bool keep_copies(Block& __restrict block, const uint16_t* __restrict copy, int64_t n) {
  uint16_t differ = 0;
  for (int64_t i = 0; i < n; ++i) {
    block.copy[i] = copy[i];
    differ |= static_cast<uint16_t>(Copy::store(block.param[i]) ^ copy[i]);
  }
  return differ != 0;
}

// True: an element does not fit into its word.
UNWALL_INLINE bool update_loop(Block& __restrict block, float* __restrict exp_avg, float* __restrict exp_avg_sq, int64_t n,
                               const AdamWConstants c, const Inverse inverse) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    Updated old = {block.param[i], exp_avg[i], exp_avg_sq[i]};
    Updated now = adamw_element(old.param, old.exp_avg, old.exp_avg_sq, block.grad[i], c);
    Updated guessed = guess(now, block.grad[i], c, inverse);
    Lost lost = lost_of(old, guessed);
    bad |= excess_of(lost) | static_cast<uint32_t>(has_nan(now));
    block.words[i] = word_of(lost);
    block.exp_avg[i] = old.exp_avg;
    block.exp_avg_sq[i] = old.exp_avg_sq;
    block.stored[i] = now.param;
    exp_avg[i] = now.exp_avg;
    exp_avg_sq[i] = now.exp_avg_sq;
  }
  return bad != 0;
}

// `Again`: and then an update with other numbers.
template <bool Again>
UNWALL_INLINE void take_back_loop(Block& __restrict block, float* __restrict exp_avg, float* __restrict exp_avg_sq, int64_t n,
                                  const AdamWConstants used, const Inverse inverse, const AdamWConstants again) {
  for (int64_t i = 0; i < n; ++i) {
    Updated value = before({block.param[i], exp_avg[i], exp_avg_sq[i]}, block.grad[i], block.words[i], used, inverse);
    if constexpr (Again) value = adamw_element(value.param, value.exp_avg, value.exp_avg_sq, block.grad[i], again);
    block.stored[i] = value.param;
    exp_avg[i] = value.exp_avg;
    exp_avg_sq[i] = value.exp_avg_sq;
  }
}

// Updates elements from `begin` on. True: one of them does not fit.
template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
UNWALL_INLINE bool update_block(const Arrays<Grad, Copy, WithCopy, Split, Param>& to, int64_t begin, int64_t n, Block& block,
                                uint16_t* __restrict words, const AdamWConstants& c, const Inverse& inverse) {
  int16_t* remainder = Split ? to.remainder + begin : nullptr;
  uint16_t* copy = WithCopy ? to.copy + begin : nullptr;
  bool bad = false;
  widen<Grad, Split>(to.param + begin, remainder, to.grad + begin, block, n);
  if constexpr (WithCopy) bad = keep_copies<Copy>(block, copy, n);
  bad |= update_loop(block, to.exp_avg + begin, to.exp_avg_sq + begin, n, c, inverse);
  narrow<Copy, WithCopy, Split>(block, to.param + begin, remainder, copy, n);
  for (int64_t i = 0; i < n; ++i) words[i] = static_cast<uint16_t>(block.words[i]);
  return bad;
}

template <bool Again, class Grad, class Copy, bool WithCopy, bool Split, class Param>
UNWALL_INLINE void take_back_block(const Arrays<Grad, Copy, WithCopy, Split, Param>& to, int64_t begin, int64_t n,
                                   const uint16_t* words, const AdamWConstants& used, const Inverse& inverse,
                                   const AdamWConstants& again) {
  alignas(LINE_BYTES) Block block;
  int16_t* remainder = Split ? to.remainder + begin : nullptr;
  uint16_t* copy = WithCopy ? to.copy + begin : nullptr;
  widen<Grad, Split>(to.param + begin, remainder, to.grad + begin, block, n);
  for (int64_t i = 0; i < n; ++i) block.words[i] = words[begin + i];
  take_back_loop<Again>(block, to.exp_avg + begin, to.exp_avg_sq + begin, n, used, inverse, again);
  narrow<Copy, WithCopy, Split>(block, to.param + begin, remainder, copy, n);
}

#if defined(__AVX512F__)
}  // namespace
}  // namespace unwall

#include "journal_avx512.hpp"

namespace unwall {
namespace {
#endif

// ---- a chunk ------------------------------------------------------------------------------------------------------------

// Which elements of a block do not fit: their words are not 0 then.
inline void find_escapes(Block& __restrict block, int64_t n, const AdamWConstants c, const Inverse inverse) {
  for (int64_t i = 0; i < n; ++i) {
    Updated old = {block.param[i], block.exp_avg[i], block.exp_avg_sq[i]};
    Updated now = adamw_element(old.param, old.exp_avg, old.exp_avg_sq, block.grad[i], c);
    Lost lost = lost_of(old, guess(now, block.grad[i], c, inverse));
    block.words[i] = excess_of(lost) | static_cast<uint32_t>(has_nan(now));
  }
}

// A block in which something does not fit: notes those elements down, or gives the block back. False: no room for them.
template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
__attribute__((noinline)) bool note_escapes(const Arrays<Grad, Copy, WithCopy, Split, Param>& to, Block& block, int64_t begin,
                                            int64_t n, const JournalSpan& journal, int64_t& count, const AdamWConstants& c,
                                            const Inverse& inverse) {
  int64_t count_before = count;
  find_escapes(block, n, c, inverse);
  for (int64_t i = 0; i < n; ++i) {
    bool same = block.words[i] == 0;
    if constexpr (WithCopy) same = same && Copy::store(block.param[i]) == block.copy[i];
    if (same) continue;
    if (count == journal.capacity) {
      for (int64_t j = 0; j < n; ++j) to.store(block.template escape<WithCopy>(j, begin), begin + j);
      count = count_before;
      return false;
    }
    journal.escapes[count++] = block.template escape<WithCopy>(i, begin);
  }
  return true;
}

// The first `n` elements of a chunk, of which `count` are escapes.
template <bool Again, class Grad, class Copy, bool WithCopy, bool Split, class Param>
void take_back_some(const AdamWSpan& span, int64_t n, const AdamWConstants used, const AdamWConstants again,
                    const JournalSpan journal, int64_t count) {
  const Arrays<Grad, Copy, WithCopy, Split, Param> to(span);
  const Inverse inverse = inverse_of(used);
  int64_t begin = 0;
  for (; begin + JOURNAL_BLOCK <= n; begin += JOURNAL_BLOCK) {
    take_back_block<Again>(to, begin, JOURNAL_BLOCK, journal.words, used, inverse, again);
  }
  if (begin < n) take_back_block<Again>(to, begin, n - begin, journal.words, used, inverse, again);
  for (int64_t entry = 0; entry < count; ++entry) {
    const Escape& old = journal.escapes[entry];
    if constexpr (Again) {
      float p = float_of(old.param), m = float_of(old.exp_avg), v = float_of(old.exp_avg_sq);
      to.store(adamw_element(p, m, v, Grad::load(to.grad[old.at]), again), old.at);
    } else {
      to.store(old, old.at);
    }
  }
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
void take_back(const AdamWSpan& span, const AdamWConstants& used, const AdamWConstants* again, const JournalSpan& journal) {
  int64_t count = *journal.state - JOURNAL_APPLIED;
  if (count >= 0 && again == nullptr) {
    take_back_some<false, Grad, Copy, WithCopy, Split, Param>(span, span.n, used, used, journal, count);
  } else if (count >= 0) {
    take_back_some<true, Grad, Copy, WithCopy, Split, Param>(span, span.n, used, *again, journal, count);
  } else if (again != nullptr && *journal.state == JOURNAL_OWING) {
    adamw<Grad, Copy, WithCopy, Split, Param>(span, *again);
  }
  *journal.state = JOURNAL_NOTHING;
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
void journal_update(const AdamWSpan& span, const AdamWConstants& constants, const JournalSpan& kept) {
  const Arrays<Grad, Copy, WithCopy, Split, Param> to(span);
  const AdamWConstants c = constants;  // locals, which no store can change, are not read again after each
  const JournalSpan journal = kept;
  const Inverse inverse = inverse_of(c);
  const int64_t all = span.n;
  int64_t count = 0, begin = 0;
  bool fits = true;
#if defined(__AVX512F__)
  if constexpr (!WithCopy && IN_VECTORS<Grad>) {
    begin = update_vectors(to, all, c, journal, count);
    fits = all - begin < VECTOR;
  }
#endif
  for (; fits && begin < all; begin += JOURNAL_BLOCK) {
    alignas(LINE_BYTES) uint16_t words[JOURNAL_BLOCK];
    alignas(LINE_BYTES) Block block;
    bool whole = all - begin >= JOURNAL_BLOCK;
    int64_t n = whole ? JOURNAL_BLOCK : all - begin;
    bool bad = whole ? update_block(to, begin, JOURNAL_BLOCK, block, words, c, inverse)
                     : update_block(to, begin, n, block, words, c, inverse);
    fits = !bad || note_escapes(to, block, begin, n, journal, count, c, inverse);
    if (!fits) break;
    stream(journal.words + begin, words, n * static_cast<int64_t>(sizeof(uint16_t)));
  }
  stream_fence();
  if (!fits) take_back_some<false, Grad, Copy, WithCopy, Split, Param>(span, begin, c, c, journal, count);
  *journal.state = fits ? static_cast<int32_t>(JOURNAL_APPLIED + count) : static_cast<int32_t>(JOURNAL_OWING);
}

#define UNWALL_JOURNAL_ROW(kernel, Grad)                                                                                   \
  {kernel<Grad, BF16, false, false, float>, kernel<Grad, BF16, true, false, float>, kernel<Grad, F16, true, false, float>, \
   kernel<Grad, BF16, false, true, uint16_t>}

constexpr JournalKernels JOURNAL_TABLE = {
    {UNWALL_JOURNAL_ROW(journal_update, F32), UNWALL_JOURNAL_ROW(journal_update, BF16),
     UNWALL_JOURNAL_ROW(journal_update, F16)},
    {UNWALL_JOURNAL_ROW(take_back, F32), UNWALL_JOURNAL_ROW(take_back, BF16), UNWALL_JOURNAL_ROW(take_back, F16)},
};

#undef UNWALL_JOURNAL_ROW
#undef UNWALL_INLINE

}  // namespace

const JournalKernels& UNWALL_JOURNAL() { return JOURNAL_TABLE; }

}  // namespace unwall
