// The kernels for AVX2; the compile options are in CMakeLists.txt.
#define UNWALL_ISA "avx2"
#define UNWALL_KERNELS avx2_kernels
#define UNWALL_QUANTISE avx2_quantise
#include "kernels_impl.hpp"
#include "quantise_impl.hpp"
