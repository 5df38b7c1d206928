// Packs numbers into blocks of small integers, and unpacks them: the submit functions. See quantise.hpp.
#include "quantise.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "pool.hpp"

namespace unwall {
namespace {

constexpr int64_t CHUNK_BLOCKS = 128;

const QuantiseKernels& quantise_kernels() {
#if defined(__x86_64__)
  const char* name = kernels().name;
  if (std::strcmp(name, "avx512") == 0) return avx512_quantise();
  if (std::strcmp(name, "avx2") == 0) return avx2_quantise();
#endif
  return baseline_quantise();
}

// Where the blocks of a piece lie: first all scales, then all codes.
struct Pieces {
  int64_t blocks;  // of each
  int64_t code_bytes;
  int32_t count;

  int64_t bytes() const { return blocks * (static_cast<int64_t>(sizeof(float)) + code_bytes); }
  int64_t scale_at(int64_t block) const { return block * static_cast<int64_t>(sizeof(float)); }
  int64_t codes_at(int64_t block) const { return scale_at(blocks) + block * code_bytes; }
};

bool check(const void* packed, const void* plain, int32_t dtype, int64_t n, int32_t pieces, int32_t bits, uw_error* err) {
  uw_error wrong = no_error();
  if (n < 0 || n > INT64_MAX / (64 * std::max<int64_t>(1, pieces)) || n % QUANTISE_BLOCK != 0) {
    wrong = make_error(EINVAL, "`n` is %lld, expected a multiple of 256", static_cast<long long>(n));
  } else if (pieces < 1) {
    wrong = make_error(EINVAL, "`pieces` is %d, expected 1 or more", pieces);
  } else if (bits != 8 && bits != 4) {
    wrong = make_error(EINVAL, "`bits` is %d, expected 8 or 4", bits);
  } else if (dtype < 0 || dtype >= DTYPES) {
    wrong = make_error(EINVAL, "`dtype` is %d, which is no uw_dtype (0 float32, 1 bfloat16, 2 float16)", dtype);
  } else if (n > 0 && (packed == nullptr || plain == nullptr)) {
    wrong = make_error(EINVAL, "`%s` is null", packed == nullptr ? "packed" : "dst or src");
  }
  if (wrong.code != 0) report(err, wrong);
  return wrong.code == 0;
}

// Runs body(block) for each block; one moves `traffic_bytes`.
template <class Body>
uw_ticket submit(uw_pool* handle, int64_t blocks, int64_t traffic_bytes, Body body, const uw_ticket* after, int32_t n_after,
                 uw_error* err) {
  try {
    if (n_after < 0 || (n_after > 0 && after == nullptr)) {
      report(err, make_error(EINVAL, "`after` is null or its length negative (%d)", n_after));
      return 0;
    }
    std::shared_ptr<Pool> pool = find_pool(handle, err);
    if (!pool) return 0;
    Work work;
    work.chunks = (blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
    work.run = [blocks, traffic_bytes, body = std::move(body)](int64_t chunk) {
      int64_t begin = chunk * CHUNK_BLOCKS, end = std::min(blocks, begin + CHUNK_BLOCKS);
      for (int64_t block = begin; block < end; ++block) body(block);
      return (end - begin) * traffic_bytes;
    };
    TicketRef ticket = pool->submit(std::move(work), after, n_after, err);
    return ticket ? register_ticket(std::move(ticket)) : 0;
  } catch (const std::bad_alloc&) {
    report(err, make_error(ENOMEM, "no memory to queue a job"));
    return 0;
  }
}

int64_t block_bytes(int32_t dtype) { return QUANTISE_BLOCK * (dtype == UW_F32 ? 4 : 2); }

}  // namespace
}  // namespace unwall

using namespace unwall;

extern "C" {

uw_ticket uw_quantise(uw_pool* pool, void* packed, const void* src, void* residual, int32_t dtype, int64_t n, int32_t pieces,
                      int32_t bits, int32_t stochastic, uint32_t seed, const uw_ticket* after, int32_t n_after, uw_error* err) {
  if (!check(packed, src, dtype, n, pieces, bits, err)) return 0;
  auto kernel = quantise_kernels().pack[dtype][bits == 4];
  Pieces place = {n / QUANTISE_BLOCK, QUANTISE_BLOCK * bits / 8, pieces};
  Rounding rounding = {stochastic != 0, seed};
  int64_t item = block_bytes(dtype);
  auto body = [=](int64_t index) {
    char* piece = static_cast<char*>(packed) + index / place.blocks * place.bytes();
    int64_t block = index % place.blocks;
    void* rest = residual == nullptr ? nullptr : static_cast<char*>(residual) + index * item;
    kernel(reinterpret_cast<float*>(piece + place.scale_at(block)), piece + place.codes_at(block),
           static_cast<const char*>(src) + index * item, rest, static_cast<uint32_t>(index * QUANTISE_BLOCK), rounding);
  };
  return submit(pool, place.blocks * pieces, item + place.code_bytes, body, after, n_after, err);
}

uw_ticket uw_dequantise(uw_pool* pool, void* dst, const void* packed, int32_t dtype, int64_t n, int32_t pieces, int32_t bits,
                        float divisor, const uw_ticket* after, int32_t n_after, uw_error* err) {
  if (!check(packed, dst, dtype, n, pieces, bits, err)) return 0;
  auto kernel = quantise_kernels().unpack[dtype][bits == 4];
  Pieces place = {n / QUANTISE_BLOCK, QUANTISE_BLOCK * bits / 8, pieces};
  bool adds = divisor != 0.0f;  // otherwise the pieces are put side by side
  int64_t item = block_bytes(dtype);
  auto body = [=](int64_t index) {
    const char* piece = static_cast<const char*>(packed) + index / place.blocks * place.bytes();
    int64_t block = index % place.blocks;
    kernel(static_cast<char*>(dst) + index * item, piece + place.scale_at(block), piece + place.codes_at(block), place.bytes(),
           adds ? pieces : 1, adds ? divisor : 1.0f);
  };
  return submit(pool, place.blocks * (adds ? 1 : pieces), item + place.code_bytes, body, after, n_after, err);
}

}  // extern "C"
