// The lean kernels for AVX2; the compile options are in CMakeLists.txt.
#define UNWALL_ISA "avx2"
#define UNWALL_LEAN_KERNELS lean_avx2_kernels
#include "lean_impl.hpp"
