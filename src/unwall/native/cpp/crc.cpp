// CRC-32 (that of zlib and PNG), alone or on the way of a copy, by the calling thread.
//
// [Note: folding]
// A message is a polynomial over GF(2), and its CRC the remainder of a division by P. Sixteen bytes that lie D bits before
// others may be replaced by their product with x^D mod P, added to those others: the remainder stays the same. With a
// multiplication without carries that is two instructions for 16 bytes, four of them at a time. What is left at the end is
// 16 bytes, which the table divides. Bits are reflected in this CRC, so the factors are, too.
#include <algorithm>
#include <array>
#include <cstring>

#include "kernels.hpp"
#include "unwall.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unwall {
namespace {

constexpr uint32_t POLYNOMIAL = 0x04C11DB7;  // without its x^32
constexpr int64_t CHUNK_BYTES = 64 << 10;    // stays in the cache between the checksum and the copy

constexpr uint32_t reflected(uint32_t value) {
  uint32_t found = 0;
  for (int bit = 0; bit < 32; ++bit) found |= (value >> bit & 1u) << (31 - bit);
  return found;
}

// Of eight bytes at once: row k is for a byte that k others follow.
using Table = std::array<std::array<uint32_t, 256>, 8>;

Table make_table() {
  Table table{};
  const uint32_t low_first = reflected(POLYNOMIAL);
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value & 1u ? value >> 1 ^ low_first : value >> 1;
    table[0][byte] = value;
  }
  for (size_t row = 1; row < table.size(); ++row)
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = table[row - 1][byte];
      table[row][byte] = before >> 8 ^ table[0][before & 0xFF];
    }
  return table;
}

// `state` is the register: the CRC with all bits turned over.
uint32_t by_table(const unsigned char* src, int64_t n, uint32_t state) {
  static const Table table = make_table();
  for (; n >= 8; n -= 8, src += 8) {
    uint64_t word = 0;
    for (int byte = 7; byte >= 0; --byte) word = word << 8 | src[byte];
    word ^= state;
    state = 0;
    for (int byte = 0; byte < 8; ++byte) state ^= table[7 - byte][word >> 8 * byte & 0xFF];
  }
  for (; n > 0; --n, ++src) state = state >> 8 ^ table[0][(state ^ *src) & 0xFF];
  return state;
}

#if defined(__x86_64__)
// x^bits mod P, as a factor of a reflected multiplication.
uint64_t factor(int bits) {
  uint32_t value = 1;
  for (int step = 0; step < bits; ++step) value = value >> 31 ? value << 1 ^ POLYNOMIAL : value << 1;
  return static_cast<uint64_t>(reflected(value)) << 1;
}

#define UNWALL_FOLDS __attribute__((target("pclmul,sse4.1")))

UNWALL_FOLDS inline __m128i folded(__m128i value, __m128i factors, __m128i other) {
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00), high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), other);
}

// See [Note: folding]. At least 64 bytes.
UNWALL_FOLDS uint32_t by_folding(const unsigned char* src, int64_t n, uint32_t state) {
  static const uint64_t far[2] = {factor(4 * 128 + 32), factor(4 * 128 - 32)};
  static const uint64_t near[2] = {factor(128 + 32), factor(128 - 32)};
  const auto load = [](const void* at) UNWALL_FOLDS { return _mm_loadu_si128(static_cast<const __m128i*>(at)); };
  __m128i factors = load(far);
  __m128i lanes[4] = {load(src), load(src + 16), load(src + 32), load(src + 48)};
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (src += 64, n -= 64; n >= 64; src += 64, n -= 64)
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = folded(lanes[lane], factors, load(src + 16 * lane));
  factors = load(near);
  __m128i one = lanes[0];
  for (int lane = 1; lane < 4; ++lane) one = folded(one, factors, lanes[lane]);
  for (; n >= 16; src += 16, n -= 16) one = folded(one, factors, load(src));
  unsigned char rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), one);
  return by_table(src, n, by_table(rest, sizeof rest, 0));
}
#endif

uint32_t updated(const void* src, int64_t n, uint32_t state) {
  const auto* bytes = static_cast<const unsigned char*>(src);
#if defined(__x86_64__)
  static const bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (folds && n >= 64) return by_folding(bytes, n, state);
#endif
  return by_table(bytes, n, state);
}

}  // namespace
}  // namespace unwall

using namespace unwall;

uint32_t uw_crc32(const void* src, int64_t n, uint32_t value) { return ~updated(src, n, ~value); }

uint32_t uw_crc32_copy(void* dst, const void* src, int64_t n, uint32_t value) {
  uint32_t state = ~value;
  for (int64_t at = 0; at < n; at += CHUNK_BYTES) {
    const int64_t count = std::min(CHUNK_BYTES, n - at);
    const char* from = static_cast<const char*>(src) + at;
    state = updated(from, count, state);
    kernels().stream_copy(static_cast<char*>(dst) + at, from, count);
  }
  return ~state;
}

uint32_t uw_crc32_join(float* dst, const void* half, const int16_t* remainder, int64_t n, uint32_t value) {
  constexpr int64_t chunk = CHUNK_BYTES / 4;
  uint32_t state = ~value;
  for (int64_t at = 0; at < n; at += chunk) {
    const int64_t count = std::min(chunk, n - at);
    kernels().join(dst + at, static_cast<const uint16_t*>(half) + at, remainder + at, count);
    state = updated(dst + at, count * 4, state);
  }
  return ~state;
}

uint32_t uw_crc32_split(void* half, int16_t* remainder, const float* src, int64_t n, uint32_t value) {
  constexpr int64_t chunk = CHUNK_BYTES / 4;
  uint32_t state = ~value;
  for (int64_t at = 0; at < n; at += chunk) {
    const int64_t count = std::min(chunk, n - at);
    state = updated(src + at, count * 4, state);
    kernels().split(static_cast<uint16_t*>(half) + at, remainder + at, src + at, count);
  }
  return ~state;
}
