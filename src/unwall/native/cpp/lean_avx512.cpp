// The lean kernels for AVX-512; the compile options are in CMakeLists.txt.
#define UNWALL_ISA "avx512"
#define UNWALL_LEAN_KERNELS lean_avx512_kernels
#include "lean_impl.hpp"
