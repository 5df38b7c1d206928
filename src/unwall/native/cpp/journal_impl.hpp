// The loops of journal.hpp, for one instruction set. Included after kernels_impl.hpp, whose rules hold here, too; the table is
// named through UNWALL_JOURNAL.
//
// [Note: journal]
// From the new values of an element and its gradient the old ones can be computed, but for what rounding has lost: mostly a few
// units in the last place. Floats in order of size are counted by an integer (`rank_of`, one to one on all bit patterns), so
// what is lost is a difference of two such integers: 8 bits of it are kept for exp_avg, 4 each for exp_avg_sq and the
// parameter, a word of 16 bits for an element. Where an old value is much smaller than the new one, more is lost than that
// (0.1% of elements; a tenth of them in the second step, when moments are young), and the old bits are kept as an `Escape`. So
// are those on whose way there is a NaN, which no arithmetic gives back with its payload. Both directions do the same
// operations in the same order, so the way back is exact for every element, on every instruction set.
#include "journal.hpp"

#define UNWALL_INLINE inline __attribute__((always_inline))

namespace unwall {
namespace {

// The place of a float among all of them, from the most negative to the largest: neighbours differ by 1.
inline uint32_t rank_of(float value) {
  uint32_t bits = bits_of(value);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) >> 1);
}

inline float of_rank(uint32_t rank) { return float_of(rank ^ (static_cast<uint32_t>(static_cast<int32_t>(rank) >> 31) >> 1)); }

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
  return {rank_of(old.param) - rank_of(guessed.param), rank_of(old.exp_avg) - rank_of(guessed.exp_avg),
          rank_of(old.exp_avg_sq) - rank_of(guessed.exp_avg_sq)};
}

inline uint16_t word_of(const Lost& lost) {
  return static_cast<uint16_t>((lost.exp_avg & 0xffu) | (lost.exp_avg_sq & 0xfu) << 8 | (lost.param & 0xfu) << 12);
}

inline bool fits(const Lost& lost) {
  return (lost.exp_avg + 128u < 256u) & (lost.exp_avg_sq + 8u < 16u) & (lost.param + 8u < 16u);
}

inline bool has_nan(const Updated& value) {
  return (value.param != value.param) | (value.exp_avg != value.exp_avg) | (value.exp_avg_sq != value.exp_avg_sq);
}

// `bits` of `value`, a number with a sign, as 32 of them.
inline uint32_t widened(uint32_t value, int bits) {
  return static_cast<uint32_t>(static_cast<int32_t>(value << (32 - bits)) >> (32 - bits));
}

inline Updated before(const Updated& now, float g, uint16_t word, const AdamWConstants& c, const Inverse& inverse) {
  Updated guessed = guess(now, g, c, inverse);
  uint32_t kept = word;
  return {of_rank(rank_of(guessed.param) + widened(kept >> 12, 4)), of_rank(rank_of(guessed.exp_avg) + widened(kept, 8)),
          of_rank(rank_of(guessed.exp_avg_sq) + widened(kept >> 8, 4))};
}

// All bits, those of a NaN among them: nothing is rounded here.
template <bool WithCopy, bool Split, class Param>
inline void store_bits(const Escape& old, Param* param, int16_t* remainder, uint16_t* copy, int64_t i) {
  if constexpr (Split) {
    param[i] = static_cast<uint16_t>((old.param + 0x8000u) >> 16);
    remainder[i] = static_cast<int16_t>(old.param);
  } else {
    param[i] = float_of(old.param);
    if constexpr (WithCopy) copy[i] = old.copy;
  }
}

constexpr int64_t JOURNAL_BLOCK = LINE_NUMEL;  // a line of words

// The old values of a block.
struct Olds {
  float param[JOURNAL_BLOCK], exp_avg[JOURNAL_BLOCK], exp_avg_sq[JOURNAL_BLOCK];
  uint16_t copy[JOURNAL_BLOCK];

  template <bool WithCopy>
  Escape at(int64_t i, int64_t where) const {
    uint16_t kept = 0;
    if constexpr (WithCopy) kept = copy[i];
    return {static_cast<uint16_t>(where), kept, bits_of(param[i]), bits_of(exp_avg[i]), bits_of(exp_avg_sq[i])};
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

  void store_old(const Escape& old, int64_t i) const {
    exp_avg[i] = float_of(old.exp_avg);
    exp_avg_sq[i] = float_of(old.exp_avg_sq);
    store_bits<WithCopy, Split>(old, param, remainder, copy, i);
  }
};

// Updates `n` (at most JOURNAL_BLOCK) elements. True: one of them does not fit into its word.
template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
UNWALL_INLINE bool journal_loop(Param* __restrict param, int16_t* __restrict remainder, uint16_t* __restrict copy,
                                float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                const typename Grad::Storage* __restrict grad, uint16_t* __restrict words,
                                Olds& __restrict olds, int64_t n, const AdamWConstants c, const Inverse inverse) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    Updated old = {load_master<Split>(param, remainder, i), exp_avg[i], exp_avg_sq[i]};
    float g = Grad::load(grad[i]);
    Updated now = adamw_element(old.param, old.exp_avg, old.exp_avg_sq, g, c);
    Updated guessed = guess(now, g, c, inverse);
    Lost lost = lost_of(old, guessed);
    uint32_t wrong = !fits(lost) | has_nan(guessed);
    olds.param[i] = old.param;
    olds.exp_avg[i] = old.exp_avg;
    olds.exp_avg_sq[i] = old.exp_avg_sq;
    if constexpr (WithCopy) {
      uint16_t rounded = Copy::store(old.param);
      wrong |= rounded != copy[i];
      olds.copy[i] = copy[i];
    }
    bad |= wrong;
    words[i] = word_of(lost);
    exp_avg[i] = now.exp_avg;
    exp_avg_sq[i] = now.exp_avg_sq;
    store_master<Copy, WithCopy, Split>(now.param, param, remainder, copy, i);
  }
  return bad != 0;
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
UNWALL_INLINE bool journal_block(const Arrays<Grad, Copy, WithCopy, Split, Param>& to, int64_t begin, int64_t n,
                                 uint16_t* words, Olds& olds, const AdamWConstants& c, const Inverse& inverse) {
  return journal_loop<Grad, Copy, WithCopy, Split>(to.param + begin, Split ? to.remainder + begin : nullptr,
                                                   WithCopy ? to.copy + begin : nullptr, to.exp_avg + begin,
                                                   to.exp_avg_sq + begin, to.grad + begin, words, olds, n, c, inverse);
}

// A block in which something does not fit: notes those elements down, or gives the block back. False: no room for them.
template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
__attribute__((noinline)) bool note_escapes(const Arrays<Grad, Copy, WithCopy, Split, Param>& arrays, const Olds& olds,
                                            const uint16_t* words, int64_t begin, int64_t n, const JournalSpan& journal,
                                            int64_t& count, const AdamWConstants& c, const Inverse& inverse) {
  int64_t before_block = count;
  for (int64_t i = 0; i < n; ++i) {
    Updated now = arrays.load(begin + i);
    float g = Grad::load(arrays.grad[begin + i]);
    Updated found = before(now, g, words[i], c, inverse);
    Escape old = olds.template at<WithCopy>(i, begin + i);
    bool same = bits_of(found.param) == old.param && bits_of(found.exp_avg) == old.exp_avg &&
                bits_of(found.exp_avg_sq) == old.exp_avg_sq && !has_nan(guess(now, g, c, inverse));
    if constexpr (WithCopy) same = same && Copy::store(found.param) == old.copy;
    if (same) continue;
    if (count == journal.capacity) {
      for (int64_t j = 0; j < n; ++j) arrays.store_old(olds.template at<WithCopy>(j, begin + j), begin + j);
      count = before_block;
      return false;
    }
    journal.escapes[count++] = old;
  }
  return true;
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
void take_back_loop(Param* __restrict param, int16_t* __restrict remainder, uint16_t* __restrict copy,
                    float* __restrict exp_avg, float* __restrict exp_avg_sq, const typename Grad::Storage* __restrict grad,
                    const uint16_t* __restrict words, int64_t n, const AdamWConstants used, const Inverse inverse) {
  for (int64_t i = 0; i < n; ++i) {
    Updated now = {load_master<Split>(param, remainder, i), exp_avg[i], exp_avg_sq[i]};
    Updated old = before(now, Grad::load(grad[i]), words[i], used, inverse);
    exp_avg[i] = old.exp_avg;
    exp_avg_sq[i] = old.exp_avg_sq;
    store_master<Copy, WithCopy, Split>(old.param, param, remainder, copy, i);
  }
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
void redo_loop(Param* __restrict param, int16_t* __restrict remainder, uint16_t* __restrict copy, float* __restrict exp_avg,
               float* __restrict exp_avg_sq, const typename Grad::Storage* __restrict grad, const uint16_t* __restrict words,
               int64_t n, const AdamWConstants used, const Inverse inverse, const AdamWConstants again) {
  for (int64_t i = 0; i < n; ++i) {
    float g = Grad::load(grad[i]);
    Updated now = {load_master<Split>(param, remainder, i), exp_avg[i], exp_avg_sq[i]};
    Updated old = before(now, g, words[i], used, inverse);
    now = adamw_element(old.param, old.exp_avg, old.exp_avg_sq, g, again);
    exp_avg[i] = now.exp_avg;
    exp_avg_sq[i] = now.exp_avg_sq;
    store_master<Copy, WithCopy, Split>(now.param, param, remainder, copy, i);
  }
}

// The first `n` elements of a chunk, of which `count` are escapes.
template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
void take_back_some(const AdamWSpan& span, int64_t n, const AdamWConstants& used, const AdamWConstants* again,
                    const JournalSpan& journal, int64_t count) {
  Arrays<Grad, Copy, WithCopy, Split, Param> to(span);
  const Inverse inverse = inverse_of(used);
  if (again == nullptr) {
    take_back_loop<Grad, Copy, WithCopy, Split>(to.param, to.remainder, to.copy, to.exp_avg, to.exp_avg_sq, to.grad,
                                                journal.words, n, used, inverse);
  } else {
    redo_loop<Grad, Copy, WithCopy, Split>(to.param, to.remainder, to.copy, to.exp_avg, to.exp_avg_sq, to.grad, journal.words,
                                           n, used, inverse, *again);
  }
  for (int64_t entry = 0; entry < count; ++entry) {
    const Escape& old = journal.escapes[entry];
    if (again == nullptr) {
      to.store_old(old, old.at);
    } else {
      float p = float_of(old.param), m = float_of(old.exp_avg), v = float_of(old.exp_avg_sq);
      to.store(adamw_element(p, m, v, Grad::load(to.grad[old.at]), *again), old.at);
    }
  }
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
void take_back(const AdamWSpan& span, const AdamWConstants& used, const AdamWConstants* again, const JournalSpan& journal) {
  int64_t count = *journal.state - JOURNAL_APPLIED;
  if (count >= 0) {
    take_back_some<Grad, Copy, WithCopy, Split, Param>(span, span.n, used, again, journal, count);
  } else if (again != nullptr && *journal.state == JOURNAL_OWING) {
    adamw<Grad, Copy, WithCopy, Split, Param>(span, *again);
  }
  *journal.state = JOURNAL_NOTHING;
}

template <class Grad, class Copy, bool WithCopy, bool Split, class Param>
void journal_update(const AdamWSpan& whole, const AdamWConstants& constants, const JournalSpan& kept) {
  const AdamWSpan span = whole;  // locals, which no store can change, are not read again after each
  const AdamWConstants c = constants;
  const JournalSpan journal = kept;
  const Inverse inverse = inverse_of(c);
  const Arrays<Grad, Copy, WithCopy, Split, Param> to(span);
  int64_t count = 0;
  for (int64_t begin = 0; begin < span.n; begin += JOURNAL_BLOCK) {
    alignas(LINE_BYTES) uint16_t words[JOURNAL_BLOCK];
    alignas(LINE_BYTES) Olds olds;
    bool lines = span.n - begin >= JOURNAL_BLOCK;
    int64_t n = lines ? JOURNAL_BLOCK : span.n - begin;
    bool bad = lines ? journal_block(to, begin, JOURNAL_BLOCK, words, olds, c, inverse)
                     : journal_block(to, begin, n, words, olds, c, inverse);
    if (bad && !note_escapes(to, olds, words, begin, n, journal, count, c, inverse)) {
      stream_fence();
      take_back_some<Grad, Copy, WithCopy, Split, Param>(span, begin, c, nullptr, journal, count);
      *journal.state = JOURNAL_OWING;
      return;
    }
    if (lines) {
      stream_line(reinterpret_cast<char*>(journal.words + begin), reinterpret_cast<const char*>(words));
    } else {
      __builtin_memcpy(journal.words + begin, words, static_cast<uint64_t>(n) * sizeof(uint16_t));
    }
  }
  stream_fence();
  *journal.state = static_cast<int32_t>(JOURNAL_APPLIED + count);
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
