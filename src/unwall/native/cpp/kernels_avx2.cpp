// The kernels for AVX2; the compile options are in CMakeLists.txt.
#define UNWALL_ISA "avx2"
#define UNWALL_KERNELS avx2_kernels
#include "kernels_impl.hpp"
#define UNWALL_JOURNAL avx2_journal
#include "journal_impl.hpp"
#define UNWALL_QUANTISE avx2_quantise
#include "quantise_impl.hpp"
