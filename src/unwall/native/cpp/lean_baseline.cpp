// The lean kernels for any processor of the architecture; the compile options are in CMakeLists.txt.
#define UNWALL_ISA "baseline"
#define UNWALL_LEAN_KERNELS lean_baseline_kernels
#include "lean_impl.hpp"
