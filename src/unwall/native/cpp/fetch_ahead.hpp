// Lines that a loop will read a little later. Included by the loops of each instruction set; [Note: no std here] in
// kernels_impl.hpp holds here, too.
//
// [Note: fetched ahead]
// An update walks along five arrays or more at once, and the processor's own prefetchers end at each page of 4 KiB, on huge
// pages, too. So the loops ask for the lines of `AHEAD` elements further on. It saves a tenth of the time where many cores
// share the memory (measured with 8 to 16 of an H200's host: plain update 0.174 to 0.157 ns per element, with a journal 0.185
// to 0.167), and costs nothing where they do not. A prefetch of memory that is not there does nothing.
#pragma once
#include <cstdint>

namespace unwall {
namespace {

constexpr int64_t LINE_BYTES = 64;
constexpr int64_t LINE_NUMEL = LINE_BYTES / 2;  // whole lines of every array
constexpr int64_t AHEAD = 16 * LINE_NUMEL;

// The lines of `NUMEL` elements of `array` from `at` on, `AHEAD` further on. See [Note: fetched ahead].
template <int64_t NUMEL, class Type>
inline void fetch_ahead(const Type* array, int64_t at) {
  constexpr int64_t size = static_cast<int64_t>(sizeof(Type));
  intptr_t first = reinterpret_cast<intptr_t>(array) + (at + AHEAD) * size;
  for (int64_t byte = 0; byte < NUMEL * size; byte += LINE_BYTES) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + byte));
  }
}

}  // namespace
}  // namespace unwall
