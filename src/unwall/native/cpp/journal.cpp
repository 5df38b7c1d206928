// AdamW updates in place that can be taken back: the submit functions. See [Note: journal] in journal_impl.hpp.
#include "journal.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "pool.hpp"

namespace unwall {
namespace {

constexpr int64_t CHUNK_NUMEL = 1 << 16;  // so that 16 bits say where in its chunk an element is
constexpr int64_t LINE = 64;

int64_t whole_lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }
int64_t chunks_of(int64_t n) { return (n + CHUNK_NUMEL - 1) / CHUNK_NUMEL; }

// Escapes that a chunk has room for. From the fifth step on 0.5% of normally distributed gradients are the most that was seen,
// 0.1% is usual (both measured); small chunks need a reserve, because there it varies more.
int64_t capacity_of(int64_t numel) { return numel / 128 + 16; }

int64_t chunk_bytes(int64_t numel) {
  return whole_lines(numel * 2) + whole_lines(capacity_of(numel) * static_cast<int64_t>(sizeof(Escape)));
}

// First the states of all chunks, then chunk after chunk: its words, its escapes.
int64_t chunk_offset(int64_t n, int64_t index) { return whole_lines(chunks_of(n) * 4) + index * chunk_bytes(CHUNK_NUMEL); }

JournalSpan journal_span(void* journal, int64_t n, int64_t begin, int64_t count) {
  int64_t index = begin / CHUNK_NUMEL;
  char* chunk = static_cast<char*>(journal) + chunk_offset(n, index);
  return {static_cast<int32_t*>(journal) + index, reinterpret_cast<uint16_t*>(chunk),
          reinterpret_cast<Escape*>(chunk + whole_lines(count * 2)), capacity_of(count)};
}

const JournalKernels& journal_kernels() {
#if defined(__x86_64__)
  const char* name = kernels().name;
  if (std::strcmp(name, "avx512") == 0) return avx512_journal();
  if (std::strcmp(name, "avx2") == 0) return avx2_journal();
#endif
  return baseline_journal();
}

bool refuse(uw_error* err, const char* what) {
  report(err, make_error(EINVAL, "%s", what));
  return false;
}

bool check(const uw_adamw_args* args, const void* journal, uw_error* err) {
  if (args == nullptr) return refuse(err, "`args` is null");
  if (!check_adamw(*args, err)) return false;
  if (args->out_param != nullptr || args->out_remainder != nullptr || args->out_exp_avg != nullptr ||
      args->out_exp_avg_sq != nullptr) {
    return refuse(err, "a journal is for an update in place: it has no outputs");
  }
  if (args->n > 0 && journal == nullptr) return refuse(err, "`journal` is null");
  if (reinterpret_cast<uintptr_t>(journal) % LINE != 0) return refuse(err, "`journal` does not start a line of 64 bytes");
  return true;
}

bool same_arrays(const uw_adamw_args& left, const uw_adamw_args& right) {
  return left.param == right.param && left.remainder == right.remainder && left.copy == right.copy &&
         left.exp_avg == right.exp_avg && left.exp_avg_sq == right.exp_avg_sq && left.grad == right.grad && left.n == right.n &&
         left.master == right.master && left.grad_dtype == right.grad_dtype &&
         (left.copy == nullptr || left.copy_dtype == right.copy_dtype);
}

// Runs body(span, journal span) for each chunk.
template <class Body>
uw_ticket submit(uw_pool* handle, const uw_adamw_args& args, void* journal, Body body, const uw_ticket* after, int32_t n_after,
                 uw_error* err) {
  try {
    if (n_after < 0 || (n_after > 0 && after == nullptr)) {
      report(err, make_error(EINVAL, "`after` is null or its length negative (%d)", n_after));
      return 0;
    }
    std::shared_ptr<Pool> pool = find_pool(handle, err);
    if (!pool) return 0;
    int64_t state_bytes = 8 + 4 + (args.copy == nullptr ? 0 : 2);
    int64_t traffic_bytes = 2 * state_bytes + (args.grad_dtype == UW_F32 ? 4 : 2) + 2;
    Work work;
    work.chunks = chunks_of(args.n);
    work.run = [args, journal, traffic_bytes, body](int64_t index) {
      int64_t begin = index * CHUNK_NUMEL, count = std::min(CHUNK_NUMEL, args.n - begin);
      body(span_of(args, begin, count), journal_span(journal, args.n, begin, count));
      return count * traffic_bytes;
    };
    TicketRef ticket = pool->submit(std::move(work), after, n_after, err);
    return ticket ? register_ticket(std::move(ticket)) : 0;
  } catch (const std::bad_alloc&) {
    report(err, make_error(ENOMEM, "no memory to queue a job"));
    return 0;
  }
}

}  // namespace
}  // namespace unwall

using namespace unwall;

extern "C" {

int64_t uw_journal_bytes(int64_t n) {
  if (n <= 0) return 0;
  int64_t whole = (n - 1) / CHUNK_NUMEL;
  return chunk_offset(n, whole) + chunk_bytes(n - whole * CHUNK_NUMEL);
}

uw_ticket uw_adamw_journaled(uw_pool* pool, const uw_adamw_args* args, void* journal, const uw_ticket* after, int32_t n_after,
                             uw_error* err) {
  if (!check(args, journal, err)) return 0;
  auto kernel = journal_kernels().update[args->grad_dtype][variant_of(*args)];
  auto body = [kernel, constants = constants_of(*args)](const AdamWSpan& span, const JournalSpan& kept) {
    kernel(span, constants, kept);
  };
  return submit(pool, *args, journal, body, after, n_after, err);
}

uw_ticket uw_adamw_resolve(uw_pool* pool, const uw_adamw_args* args, const uw_adamw_args* again, void* journal,
                           const uw_ticket* after, int32_t n_after, uw_error* err) {
  if (!check(args, journal, err)) return 0;
  if (again != nullptr && !check(again, journal, err)) return 0;
  if (again != nullptr && !same_arrays(*args, *again)) {
    refuse(err, "`again` names other arrays than `args`");
    return 0;
  }
  auto kernel = journal_kernels().take_back[args->grad_dtype][variant_of(*args)];
  AdamWConstants used = constants_of(*args), other = again == nullptr ? used : constants_of(*again);
  bool redo = again != nullptr, kept = redo && std::memcmp(&used, &other, sizeof used) == 0;
  auto body = [=](const AdamWSpan& span, const JournalSpan& journal_of) {
    if (kept && *journal_of.state >= JOURNAL_APPLIED) {
      *journal_of.state = JOURNAL_NOTHING;
    } else {
      kernel(span, used, redo ? &other : nullptr, journal_of);
    }
  };
  return submit(pool, *args, journal, body, after, n_after, err);
}

int uw_journal_read(const void* journal, int64_t n, int64_t* escaped, int64_t* owing) {
  if (n < 0 || (n > 0 && journal == nullptr) || escaped == nullptr || owing == nullptr) return -EINVAL;
  *escaped = *owing = 0;
  const int32_t* states = static_cast<const int32_t*>(journal);
  for (int64_t index = 0; index < chunks_of(n); ++index) {
    if (states[index] >= JOURNAL_APPLIED) *escaped += states[index] - JOURNAL_APPLIED;
    if (states[index] == JOURNAL_OWING) *owing += std::min(CHUNK_NUMEL, n - index * CHUNK_NUMEL);
  }
  return 0;
}

}  // extern "C"
