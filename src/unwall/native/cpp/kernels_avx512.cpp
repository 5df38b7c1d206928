// The kernels for AVX-512 F, BW, VL and DQ; the compile options are in CMakeLists.txt.
#define UNWALL_ISA "avx512"
#define UNWALL_KERNELS avx512_kernels
#define UNWALL_QUANTISE avx512_quantise
#include "kernels_impl.hpp"
#include "quantise_impl.hpp"
