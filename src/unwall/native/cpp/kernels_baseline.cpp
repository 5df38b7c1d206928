// The kernels for whatever every processor of the architecture has (SSE2 or NEON).
#define UNWALL_ISA "baseline"
#define UNWALL_KERNELS baseline_kernels
#include "kernels_impl.hpp"
#define UNWALL_JOURNAL baseline_journal
#include "journal_impl.hpp"
#define UNWALL_QUANTISE baseline_quantise
#include "quantise_impl.hpp"
