// CRC-32 (that of zlib and PNG), alone or on the way of a copy, by the calling thread.
//
// [Note: folding]
// A message is a polynomial over GF(2), and its CRC the remainder of a division by P. Sixteen bytes that lie D bits before
// others may be replaced by their product with x^D mod P, added to those others: the remainder stays the same. With a
// multiplication without carries that is two instructions for 16 bytes, four of them at a time; with AVX-512 for 64 bytes,
// which are copied from the register they are in. What is left at the end is 16 bytes, which the table divides. Bits are
// reflected in this CRC, so the factors are, too.
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

#define UNWALL_FOLDS_WIDE __attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq")))
constexpr int64_t WIDE_BYTES = 256;  // four registers

UNWALL_FOLDS_WIDE inline __m512i folded_wide(__m512i value, __m512i factors, __m512i other) {
  const __m512i low = _mm512_clmulepi64_epi128(value, factors, 0x00), high = _mm512_clmulepi64_epi128(value, factors, 0x11);
  return _mm512_ternarylogic_epi64(low, high, other, 0x96);  // all three added
}

UNWALL_FOLDS_WIDE inline __m512i four_times(const uint64_t* factors) {
  const auto low = static_cast<long long>(factors[0]), high = static_cast<long long>(factors[1]);
  return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

// See [Note: folding]. At least WIDE_BYTES. Without Copy `dst` is not used; otherwise it begins a line of the cache.
template <bool Copy>
UNWALL_FOLDS_WIDE uint32_t by_wide_folding(char* dst, const unsigned char* src, int64_t n, uint32_t state) {
  static const uint64_t far[2] = {factor(4 * 512 + 32), factor(4 * 512 - 32)};
  static const uint64_t near[2] = {factor(512 + 32), factor(512 - 32)};
  static const uint64_t nearest[2] = {factor(128 + 32), factor(128 - 32)};
  const auto take = [&](int64_t at) UNWALL_FOLDS_WIDE {
    const __m512i found = _mm512_loadu_si512(src + at);
    if constexpr (Copy) _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), found);
    return found;
  };
  const __m512i factors = four_times(far), factors_near = four_times(near);
  __m512i lanes[4] = {take(0), take(64), take(128), take(192)};
  const __m128i before = _mm_cvtsi32_si128(static_cast<int>(state));
  lanes[0] = _mm512_xor_si512(lanes[0], _mm512_inserti32x4(_mm512_setzero_si512(), before, 0));
  int64_t at = WIDE_BYTES;
  for (; n - at >= WIDE_BYTES; at += WIDE_BYTES)
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = folded_wide(lanes[lane], factors, take(at + 64 * lane));
  for (int lane = 1; lane < 4; ++lane) lanes[lane] = folded_wide(lanes[lane - 1], factors_near, lanes[lane]);
  __m128i parts[4];
  _mm512_storeu_si512(parts, lanes[3]);
  const __m128i factors_nearest = _mm_loadu_si128(reinterpret_cast<const __m128i*>(nearest));
  for (int part = 1; part < 4; ++part) parts[part] = folded(parts[part - 1], factors_nearest, parts[part]);
  unsigned char rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), parts[3]);
  if constexpr (Copy) {
    _mm_sfence();
    std::memcpy(dst + at, src + at, static_cast<size_t>(n - at));
  }
  state = by_table(rest, sizeof rest, 0);
  return n - at >= 64 ? by_folding(src + at, n - at, state) : by_table(src + at, n - at, state);
}

// Where the kernels of AVX-512 are those in use.
bool is_wide() {
  static const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
  return can && &kernels() == &avx512_kernels();
}
#endif

uint32_t updated(const void* src, int64_t n, uint32_t state) {
  const auto* bytes = static_cast<const unsigned char*>(src);
#if defined(__x86_64__)
  if (n >= WIDE_BYTES && is_wide()) return by_wide_folding<false>(nullptr, bytes, n, state);
  static const bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (folds && n >= 64) return by_folding(bytes, n, state);
#endif
  return by_table(bytes, n, state);
}

uint32_t copied(void* dst, const void* src, int64_t n, uint32_t state) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const unsigned char*>(src);
#if defined(__x86_64__)
  const int64_t ahead = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % 64);
  if (n >= ahead + WIDE_BYTES && is_wide()) {
    std::memcpy(to, from, static_cast<size_t>(ahead));
    return by_wide_folding<true>(to + ahead, from + ahead, n - ahead, updated(from, ahead, state));
  }
#endif
  for (int64_t at = 0; at < n; at += CHUNK_BYTES) {
    const int64_t count = std::min(CHUNK_BYTES, n - at);
    state = updated(from + at, count, state);
    kernels().stream_copy(to + at, from + at, count);
  }
  return state;
}

}  // namespace
}  // namespace unwall

using namespace unwall;

uint32_t uw_crc32(const void* src, int64_t n, uint32_t value) { return ~updated(src, n, ~value); }

uint32_t uw_crc32_copy(void* dst, const void* src, int64_t n, uint32_t value) { return ~copied(dst, src, n, ~value); }

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
