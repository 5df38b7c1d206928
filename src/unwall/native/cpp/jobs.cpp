// The submit functions of the pool: check the arguments, cut the range into chunks, hand both to the workers.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"

namespace unwall {
namespace {

// Elements per chunk, whatever the number of workers. Large enough that taking one costs nothing and the hardware
// prefetchers run in, small enough that a few workers end within a fraction of a millisecond of each other.
constexpr int64_t CHUNK_NUMEL = 1 << 16;
constexpr int64_t COPY_CHUNK_BYTES = 1 << 20;
// Copies from here on are written past the cache: a plain store reads the line first, a third more traffic (measured: 1.6
// times as fast). Smaller ones are likely to be read again while they are still in the cache.
constexpr int64_t STREAM_BYTES = 4 << 20;

std::vector<const Kernels*> supported_kernels() {
  std::vector<const Kernels*> found;  // the best first
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512dq");
  if (avx2 && avx512) found.push_back(&avx512_kernels());
  if (avx2) found.push_back(&avx2_kernels());
#endif
  found.push_back(&baseline_kernels());
  return found;
}

std::atomic<const Kernels*>& chosen_kernels() {
  static std::atomic<const Kernels*> chosen{supported_kernels().front()};
  return chosen;
}

// ---- argument checks: each writes `*err` and answers false ---------------------------------------------------------

bool refuse(uw_error* err, const uw_error& error) {
  report(err, error);
  return false;
}

bool check_count(int64_t n, uw_error* err) {
  if (n >= 0 && n <= INT64_MAX / 64) return true;  // so that no byte count overflows
  return refuse(err, make_error(EINVAL, "a count of %lld elements or bytes makes no sense", static_cast<long long>(n)));
}

bool check_pointer(const void* pointer, const char* name, int64_t n, uw_error* err) {
  if (pointer != nullptr || n == 0) return true;
  return refuse(err, make_error(EINVAL, "`%s` is null", name));
}

bool check_dtype(int32_t dtype, const char* name, uw_error* err) {
  if (dtype >= 0 && dtype < DTYPES) return true;
  return refuse(err, make_error(EINVAL, "`%s` is %d, which is no uw_dtype (0 float32, 1 bfloat16, 2 float16)", name, dtype));
}

int64_t size_of(int32_t dtype) { return dtype == UW_F32 ? 4 : 2; }

template <class Type>
Type* moved(Type* pointer, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Type>, const char, char>;
  // A null (an absent copy or remainder) stays null.
  return pointer == nullptr ? nullptr : reinterpret_cast<Type*>(reinterpret_cast<Byte*>(pointer) + bytes);
}

struct After {
  const uw_ticket* tickets;
  int32_t count;
};

// Runs body(begin, count) for each chunk of [0, n); an element moves `traffic_bytes`.
template <class Body>
uw_ticket submit(uw_pool* handle, int64_t n, int64_t chunk, int64_t traffic_bytes, Body body, std::function<uw_error()> end,
                 After after, uw_error* err) {
  if (after.count < 0 || (after.count > 0 && after.tickets == nullptr)) {
    report(err, make_error(EINVAL, "`after` is null or its length negative (%d)", after.count));
    return 0;
  }
  std::shared_ptr<Pool> pool = find_pool(handle, err);
  if (!pool) return 0;
  Work work;
  work.chunks = (n + chunk - 1) / chunk;
  work.run = [n, chunk, traffic_bytes, body = std::move(body)](int64_t index) {
    int64_t begin = index * chunk;
    int64_t count = std::min(chunk, n - begin);
    body(begin, count);
    return count * traffic_bytes;
  };
  work.end = std::move(end);
  TicketRef ticket = pool->submit(std::move(work), after.tickets, after.count, err);
  return ticket ? register_ticket(std::move(ticket)) : 0;
}

// No exception leaves the library. What the submit functions allocate is a few hundred bytes.
template <class Function>
uw_ticket guarded(uw_error* err, Function function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    report(err, make_error(ENOMEM, "no memory to queue a job"));
    return 0;
  }
}

}  // namespace

// ---- AdamW --------------------------------------------------------------------------------------------------------

bool check_adamw(const uw_adamw_args& args, uw_error* err) {
  if (!check_count(args.n, err) || !check_dtype(args.grad_dtype, "grad_dtype", err)) return false;
  if (!check_pointer(args.param, "param", args.n, err) || !check_pointer(args.grad, "grad", args.n, err)) return false;
  if (!check_pointer(args.exp_avg, "exp_avg", args.n, err)) return false;
  if (!check_pointer(args.exp_avg_sq, "exp_avg_sq", args.n, err)) return false;
  if (args.master == UW_MASTER_SPLIT) {
    if (!check_pointer(args.remainder, "remainder", args.n, err)) return false;
    if (args.copy != nullptr) return refuse(err, make_error(EINVAL, "a split master has no `copy`: its half is one"));
  } else if (args.master == UW_MASTER_F32) {
    if (args.remainder != nullptr) return refuse(err, make_error(EINVAL, "a float32 master has no `remainder`"));
    if (args.copy != nullptr && args.copy_dtype != UW_BF16 && args.copy_dtype != UW_F16) {
      return refuse(err, make_error(EINVAL, "`copy_dtype` is %d, expected 1 (bfloat16) or 2 (float16)", args.copy_dtype));
    }
  } else {
    return refuse(err, make_error(EINVAL, "`master` is %d, expected 0 (float32) or 1 (split)", args.master));
  }
  if (args.step < 1) {
    return refuse(err, make_error(EINVAL, "`step` is %lld, expected 1 or more", static_cast<long long>(args.step)));
  }
  bool betas = args.beta1 >= 0 && args.beta1 < 1 && args.beta2 >= 0 && args.beta2 < 1;
  if (betas) return true;
  return refuse(err, make_error(EINVAL, "betas are %g and %g, expected 0 <= beta < 1", args.beta1, args.beta2));
}

namespace {

struct Range {
  const char* name;
  const void* begin;
  int64_t bytes;
};

bool overlap(const Range& left, const Range& right) {
  auto left_begin = reinterpret_cast<uintptr_t>(left.begin), right_begin = reinterpret_cast<uintptr_t>(right.begin);
  if (left_begin == 0 || right_begin == 0) return false;
  return left_begin < right_begin + right.bytes && right_begin < left_begin + left.bytes;
}

// All outputs that apply or none, and none of them where it destroys what is yet to be read or has just been written.
bool check_adamw_out(const uw_adamw_args& args, uw_error* err) {
  bool any = args.out_param != nullptr || args.out_remainder != nullptr || args.out_exp_avg != nullptr ||
             args.out_exp_avg_sq != nullptr;
  if (!any || args.n == 0) return true;
  int64_t n = args.n, param_bytes = args.master == UW_MASTER_SPLIT ? 2 * n : 4 * n;
  constexpr int REPLACED = 4, ALL = 5;  // the first four outputs each replace the input beside them
  const Range in[ALL] = {{"param", args.param, param_bytes},
                         {"remainder", args.remainder, 2 * n},
                         {"exp_avg", args.exp_avg, 4 * n},
                         {"exp_avg_sq", args.exp_avg_sq, 4 * n},
                         {"grad", args.grad, n * size_of(args.grad_dtype)}};
  const Range out[ALL] = {{"out_param", args.out_param, param_bytes},
                          {"out_remainder", args.out_remainder, 2 * n},
                          {"out_exp_avg", args.out_exp_avg, 4 * n},
                          {"out_exp_avg_sq", args.out_exp_avg_sq, 4 * n},
                          {"copy", args.copy, 2 * n}};
  for (int i = 0; i < REPLACED; ++i) {
    if ((in[i].begin == nullptr) == (out[i].begin == nullptr)) continue;
    const char* fault = out[i].begin == nullptr ? "`%s` is null: an update out of place needs every output, one in place none"
                                                : "`%s` is given, but a float32 master has no remainder";
    return refuse(err, make_error(EINVAL, fault, out[i].name));
  }
  for (int i = 0; i < ALL; ++i) {
    for (int j = 0; j < ALL; ++j) {
      bool itself = i == j && i < REPLACED && in[j].begin == out[i].begin;
      if (!itself && overlap(out[i], in[j])) {
        return refuse(err, make_error(EINVAL, "`%s` overlaps `%s`", out[i].name, in[j].name));
      }
      if (j < i && overlap(out[i], out[j])) {
        return refuse(err, make_error(EINVAL, "`%s` overlaps `%s`", out[i].name, out[j].name));
      }
    }
  }
  return true;
}

}  // namespace

AdamWConstants constants_of(const uw_adamw_args& args) {
  double lr = args.lr, beta1 = args.beta1, beta2 = args.beta2;
  double step = static_cast<double>(args.step);
  AdamWConstants constants;
  constants.grad_scale = static_cast<float>(args.grad_scale);
  constants.beta1 = static_cast<float>(beta1);
  constants.grad_weight = static_cast<float>(1.0 - beta1);
  constants.beta2 = static_cast<float>(beta2);
  constants.square_weight = static_cast<float>(1.0 - beta2);
  constants.keep = static_cast<float>(1.0 - lr * args.weight_decay);
  constants.unbias = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, step)));
  constants.eps = static_cast<float>(args.eps);
  constants.rate = static_cast<float>(lr / (1.0 - std::pow(beta1, step)));
  return constants;
}

AdamWVariant variant_of(const uw_adamw_args& args) {
  if (args.master == UW_MASTER_SPLIT) return ADAMW_SPLIT;
  if (args.copy == nullptr) return ADAMW_F32;
  return args.copy_dtype == UW_BF16 ? ADAMW_F32_COPY_BF16 : ADAMW_F32_COPY_F16;
}

AdamWSpan span_of(const uw_adamw_args& args, int64_t begin, int64_t count) {
  int64_t param_bytes = args.master == UW_MASTER_SPLIT ? 2 : 4;
  return {moved(args.param, begin * param_bytes),
          moved(args.remainder, begin * 2),
          moved(args.copy, begin * 2),
          args.exp_avg + begin,
          args.exp_avg_sq + begin,
          moved(args.grad, begin * size_of(args.grad_dtype)),
          moved(args.out_param, begin * param_bytes),
          moved(args.out_remainder, begin * 2),
          moved(args.out_exp_avg, begin * 4),
          moved(args.out_exp_avg_sq, begin * 4),
          count};
}

namespace {

uw_ticket submit_adamw(uw_pool* pool, const uw_adamw_args& args, After after, uw_error* err) {
  const auto& table = args.out_param == nullptr ? kernels().adamw : kernels().adamw_out;
  auto kernel = table[args.grad_dtype][variant_of(args)];
  int64_t param_bytes = args.master == UW_MASTER_SPLIT ? 2 : 4;
  auto body = [args, kernel, constants = constants_of(args)](int64_t begin, int64_t count) {
    kernel(span_of(args, begin, count), constants);
  };
  int64_t state_bytes = param_bytes + (args.remainder != nullptr ? 2 : 0) + 8;  // read and written
  int64_t traffic_bytes = 2 * state_bytes + size_of(args.grad_dtype) + (args.copy != nullptr ? 2 : 0);
  return submit(pool, args.n, CHUNK_NUMEL, traffic_bytes, body, {}, after, err);
}

}  // namespace

const Kernels& kernels() { return *chosen_kernels().load(); }

}  // namespace unwall

using namespace unwall;

extern "C" {

const char* uw_isa(void) { return kernels().name; }

int uw_isa_select(const char* name) {
  if (name == nullptr) return -EINVAL;
  for (const Kernels* table : supported_kernels()) {
    if (std::strcmp(table->name, name) != 0) continue;
    chosen_kernels().store(table);
    return 0;
  }
  return -EINVAL;
}

uw_ticket uw_adamw(uw_pool* pool, const uw_adamw_args* args, const uw_ticket* after, int32_t n_after, uw_error* err) {
  if (!check_pointer(args, "args", 1, err) || !check_adamw(*args, err) || !check_adamw_out(*args, err)) return 0;
  return guarded(err, [&] { return submit_adamw(pool, *args, {after, n_after}, err); });
}

uw_ticket uw_sum_squares(uw_pool* pool, const void* src, int32_t dtype, int64_t n, double* sum, int64_t* nonfinite,
                         const uw_ticket* after, int32_t n_after, uw_error* err) {
  if (!check_count(n, err) || !check_dtype(dtype, "dtype", err) || !check_pointer(src, "src", n, err)) return 0;
  if (!check_pointer(sum, "sum", 1, err) || !check_pointer(nonfinite, "nonfinite", 1, err)) return 0;
  return guarded(err, [&] {
    auto kernel = kernels().sum_squares[dtype];
    auto partials = std::make_shared<std::vector<SquareSum>>((n + CHUNK_NUMEL - 1) / CHUNK_NUMEL);
    auto body = [=](int64_t begin, int64_t count) {
      (*partials)[begin / CHUNK_NUMEL] = kernel(moved(src, begin * size_of(dtype)), count);
    };
    auto end = [=] {  // in the order of the chunks, whoever ran them
      SquareSum total = {0.0, 0};
      for (const SquareSum& partial : *partials) {
        total.sum += partial.sum;
        total.nonfinite += partial.nonfinite;
      }
      *sum = total.sum;
      *nonfinite = total.nonfinite;
      return no_error();
    };
    return submit(pool, n, CHUNK_NUMEL, size_of(dtype), body, end, {after, n_after}, err);
  });
}

uw_ticket uw_accumulate(uw_pool* pool, float* dst, const void* src, int32_t dtype, int64_t n, const uw_ticket* after,
                        int32_t n_after, uw_error* err) {
  if (!check_count(n, err) || !check_dtype(dtype, "dtype", err)) return 0;
  if (!check_pointer(dst, "dst", n, err) || !check_pointer(src, "src", n, err)) return 0;
  return guarded(err, [&] {
    auto kernel = kernels().accumulate[dtype];
    auto body = [=](int64_t begin, int64_t count) { kernel(dst + begin, moved(src, begin * size_of(dtype)), count); };
    return submit(pool, n, CHUNK_NUMEL, 8 + size_of(dtype), body, {}, {after, n_after}, err);
  });
}

uw_ticket uw_cast(uw_pool* pool, void* dst, int32_t dst_dtype, const void* src, int32_t src_dtype, int64_t n,
                  const uw_ticket* after, int32_t n_after, uw_error* err) {
  if (!check_count(n, err) || !check_dtype(dst_dtype, "dst_dtype", err) || !check_dtype(src_dtype, "src_dtype", err)) return 0;
  if (!check_pointer(dst, "dst", n, err) || !check_pointer(src, "src", n, err)) return 0;
  return guarded(err, [&] {
    auto kernel = kernels().cast[dst_dtype][src_dtype];
    auto body = [=](int64_t begin, int64_t count) {
      kernel(moved(dst, begin * size_of(dst_dtype)), moved(src, begin * size_of(src_dtype)), count);
    };
    return submit(pool, n, CHUNK_NUMEL, size_of(dst_dtype) + size_of(src_dtype), body, {}, {after, n_after}, err);
  });
}

uw_ticket uw_split(uw_pool* pool, void* half, int16_t* remainder, const float* src, int64_t n, const uw_ticket* after,
                   int32_t n_after, uw_error* err) {
  if (!check_count(n, err) || !check_pointer(half, "half", n, err)) return 0;
  if (!check_pointer(remainder, "remainder", n, err) || !check_pointer(src, "src", n, err)) return 0;
  return guarded(err, [&] {
    auto kernel = kernels().split;
    auto body = [=](int64_t begin, int64_t count) { kernel(moved(half, begin * 2), remainder + begin, src + begin, count); };
    return submit(pool, n, CHUNK_NUMEL, 8, body, {}, {after, n_after}, err);
  });
}

uw_ticket uw_join(uw_pool* pool, float* dst, const void* half, const int16_t* remainder, int64_t n, const uw_ticket* after,
                  int32_t n_after, uw_error* err) {
  if (!check_count(n, err) || !check_pointer(dst, "dst", n, err)) return 0;
  if (!check_pointer(half, "half", n, err) || !check_pointer(remainder, "remainder", n, err)) return 0;
  return guarded(err, [&] {
    auto kernel = kernels().join;
    auto body = [=](int64_t begin, int64_t count) { kernel(dst + begin, moved(half, begin * 2), remainder + begin, count); };
    return submit(pool, n, CHUNK_NUMEL, 8, body, {}, {after, n_after}, err);
  });
}

uw_ticket uw_copy(uw_pool* pool, void* dst, const void* src, int64_t bytes, const uw_ticket* after, int32_t n_after,
                  uw_error* err) {
  if (!check_count(bytes, err) || !check_pointer(dst, "dst", bytes, err) || !check_pointer(src, "src", bytes, err)) return 0;
  return guarded(err, [&] {
    auto stream_copy = kernels().stream_copy;
    auto body = [=](int64_t begin, int64_t count) {
      char* to = static_cast<char*>(dst) + begin;
      const char* from = static_cast<const char*>(src) + begin;
      if (bytes < STREAM_BYTES) {
        std::memcpy(to, from, count);
      } else {
        stream_copy(to, from, count);
      }
    };
    return submit(pool, bytes, COPY_CHUNK_BYTES, 2, body, {}, {after, n_after}, err);
  });
}

}  // extern "C"
