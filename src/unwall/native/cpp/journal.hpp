// An AdamW update in place that can be taken back: what one chunk of its journal is. See [Note: journal] in journal_impl.hpp.
#pragma once
#include <cstdint>

#include "kernels.hpp"

namespace unwall {

// The old values of an element whose way back does not fit into a word, bit by bit.
struct Escape {
  uint16_t at;  // in its chunk
  uint16_t copy;
  uint32_t param;  // split master: both halves together
  uint32_t exp_avg;
  uint32_t exp_avg_sq;
};

enum JournalState : int32_t {
  JOURNAL_NOTHING = 0,  // what fresh memory says
  JOURNAL_OWING = 1,    // too many escapes: the chunk has its old values, and its update is still to come
  JOURNAL_APPLIED = 2   // it is updated; what is above this number counts the escapes
};

// The pointers of one chunk.
struct JournalSpan {
  int32_t* state;
  uint16_t* words;  // starts a line
  Escape* escapes;
  int64_t capacity;
};

// [gradient][variant], as the update itself.
struct JournalKernels {
  void (*update[DTYPES][ADAMW_VARIANTS])(const AdamWSpan& span, const AdamWConstants& constants, const JournalSpan& journal);
  // Gives the old values back or, with `again`, those of an update with other numbers.
  void (*take_back[DTYPES][ADAMW_VARIANTS])(const AdamWSpan& span, const AdamWConstants& used, const AdamWConstants* again,
                                            const JournalSpan& journal);
};

const JournalKernels& baseline_journal();
#if defined(__x86_64__)
const JournalKernels& avx2_journal();
const JournalKernels& avx512_journal();
#endif

}  // namespace unwall
