// The kernels for AVX-512 F, BW, VL and DQ; the compile options are in CMakeLists.txt.
#define UNWALL_ISA "avx512"
#define UNWALL_KERNELS avx512_kernels
#include "kernels_impl.hpp"
#define UNWALL_JOURNAL avx512_journal
#include "journal_impl.hpp"
#define UNWALL_QUANTISE avx512_quantise
#include "quantise_impl.hpp"
