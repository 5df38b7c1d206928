// The submit function of the lean update: checks the arguments, cuts the range into chunks, hands both to the workers.
#include "lean.hpp"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <new>

#include "pool.hpp"

namespace unwall {
namespace {

constexpr int64_t CHUNK_NUMEL = 1 << 16;  // whole blocks; as in jobs.cpp
static_assert(CHUNK_NUMEL % LEAN_BLOCK == 0, "a block must not be cut");

const LeanKernels& lean_kernels() {
  const char* name = kernels().name;
#if defined(__x86_64__)
  if (std::strcmp(name, lean_avx512_kernels().name) == 0) return lean_avx512_kernels();
  if (std::strcmp(name, lean_avx2_kernels().name) == 0) return lean_avx2_kernels();
#endif
  (void)name;
  return lean_baseline_kernels();
}

bool check(const uw_lean_args& args, uw_error* err) {
  auto refuse = [err](const uw_error& error) {
    report(err, error);
    return false;
  };
  if (args.n < 0 || args.n > INT64_MAX / 64) {
    return refuse(make_error(EINVAL, "a count of %lld elements makes no sense", static_cast<long long>(args.n)));
  }
  bool given = args.half != nullptr && args.remainder != nullptr && args.moments != nullptr && args.grad != nullptr &&
               args.out_half != nullptr && args.out_remainder != nullptr && args.out_moments != nullptr;
  if (args.n > 0 && !given) return refuse(make_error(EINVAL, "a lean update needs all of its arrays, but one is null"));
  if (args.grad_dtype < 0 || args.grad_dtype >= DTYPES) {
    return refuse(make_error(EINVAL, "`grad_dtype` is %d, which is no uw_dtype", args.grad_dtype));
  }
  if (args.step < 1) {
    return refuse(make_error(EINVAL, "`step` is %lld, expected 1 or more", static_cast<long long>(args.step)));
  }
  bool betas = args.beta1 >= 0 && args.beta1 < 1 && args.beta2 >= 0 && args.beta2 < 1;
  if (betas) return true;
  return refuse(make_error(EINVAL, "betas are %g and %g, expected 0 <= beta < 1", args.beta1, args.beta2));
}

AdamWConstants constants_of(const uw_lean_args& args) {
  double step = static_cast<double>(args.step);
  AdamWConstants constants;
  constants.grad_scale = static_cast<float>(args.grad_scale);
  constants.beta1 = static_cast<float>(args.beta1);
  constants.grad_weight = static_cast<float>(1.0 - args.beta1);
  constants.beta2 = static_cast<float>(args.beta2);
  constants.square_weight = static_cast<float>(1.0 - args.beta2);
  constants.keep = static_cast<float>(1.0 - args.lr * args.weight_decay);
  constants.unbias = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(args.beta2, step)));
  constants.eps = static_cast<float>(args.eps);
  constants.rate = static_cast<float>(args.lr / (1.0 - std::pow(args.beta1, step)));
  return constants;
}

// Runs body(begin, count) for each chunk of [0, n) and gives back a ticket, or 0 with `*err` filled.
template <class Body>
uw_ticket submit(uw_pool* handle, int64_t n, int64_t traffic_bytes, Body body, const uw_ticket* after, int32_t n_after,
                 uw_error* err) {
  if (n_after < 0 || (n_after > 0 && after == nullptr)) {
    report(err, make_error(EINVAL, "`after` is null or its length negative (%d)", n_after));
    return 0;
  }
  std::shared_ptr<Pool> pool = find_pool(handle, err);
  if (!pool) return 0;
  try {
    Work work;
    work.chunks = (n + CHUNK_NUMEL - 1) / CHUNK_NUMEL;
    work.run = [n, traffic_bytes, body](int64_t index) {
      int64_t begin = index * CHUNK_NUMEL;
      int64_t count = n - begin < CHUNK_NUMEL ? n - begin : CHUNK_NUMEL;
      body(begin, count);
      return count * traffic_bytes;
    };
    TicketRef ticket = pool->submit(std::move(work), after, n_after, err);
    return ticket ? register_ticket(std::move(ticket)) : 0;
  } catch (const std::bad_alloc&) {
    report(err, make_error(ENOMEM, "no memory to queue a job"));
    return 0;
  }
}

bool check_moments(const void* moments, const void* values, int64_t n, uw_error* err) {
  if (n >= 0 && n <= INT64_MAX / 64 && (n == 0 || (moments != nullptr && values != nullptr))) return true;
  report(err, make_error(EINVAL, "lean moments of %lld elements, or an array that is null", static_cast<long long>(n)));
  return false;
}

uw_ticket submit_update(uw_pool* pool, const uw_lean_args& args, const uw_ticket* after, int32_t n_after, uw_error* err) {
  const int64_t grad_bytes = args.grad_dtype == UW_F32 ? 4 : 2;
  const uint32_t key = static_cast<uint32_t>(args.step) * 0x27d4eb2fu;
  auto kernel = lean_kernels().update[args.grad_dtype];
  auto body = [args, kernel, grad_bytes, key, constants = constants_of(args)](int64_t begin, int64_t count) {
    LeanSpan span = {static_cast<const uint16_t*>(args.half) + begin,
                     args.remainder + begin,
                     args.moments + begin,
                     static_cast<const char*>(args.grad) + begin * grad_bytes,
                     static_cast<uint16_t*>(args.out_half) + begin,
                     args.out_remainder + begin,
                     args.out_moments + begin,
                     count};
    kernel(span, constants, key);
  };
  return submit(pool, args.n, 10 + grad_bytes, body, after, n_after, err);
}

}  // namespace
}  // namespace unwall

using namespace unwall;

extern "C" {

uw_ticket uw_lean_adamw(uw_pool* pool, const uw_lean_args* args, const uw_ticket* after, int32_t n_after, uw_error* err) {
  if (args == nullptr) {
    report(err, make_error(EINVAL, "`args` is null"));
    return 0;
  }
  return check(*args, err) ? submit_update(pool, *args, after, n_after, err) : 0;
}

uw_ticket uw_lean_read(uw_pool* pool, float* dst, const uint16_t* moments, int32_t squares, int64_t n, const uw_ticket* after,
                       int32_t n_after, uw_error* err) {
  if (!check_moments(moments, dst, n, err)) return 0;
  auto kernel = lean_kernels().read;
  auto body = [=](int64_t begin, int64_t count) { kernel(dst + begin, moments + begin, squares != 0, count); };
  return submit(pool, n, 6, body, after, n_after, err);
}

uw_ticket uw_lean_write(uw_pool* pool, uint16_t* moments, const float* src, int32_t squares, int64_t n, const uw_ticket* after,
                        int32_t n_after, uw_error* err) {
  if (!check_moments(moments, src, n, err)) return 0;
  auto kernel = lean_kernels().write;
  auto body = [=](int64_t begin, int64_t count) { kernel(moments + begin, src + begin, squares != 0, count); };
  return submit(pool, n, 8, body, after, n_after, err);
}

}  // extern "C"
