// The kernels for whatever every processor of the architecture has (SSE2 or NEON).
#define UNWALL_ISA "baseline"
#define UNWALL_KERNELS baseline_kernels
#define UNWALL_QUANTISE baseline_quantise
#include "kernels_impl.hpp"
#include "quantise_impl.hpp"
