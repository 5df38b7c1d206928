// Host memory in exact sizes, on huge pages, touched in parallel.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>

#include "pool.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers lack it
#endif

namespace unwall {
namespace {

constexpr int64_t HUGE_BYTES = 2 << 20;
// Touched at a time by one worker: several huge pages, so that a system call is worth its cost.
constexpr int64_t PIECE_BYTES = 8 * HUGE_BYTES;

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// An anonymous mapping that starts on a huge page where it is large enough to hold one: maps more, gives the edges back.
char* map_aligned(int64_t bytes) {
  int64_t slack = bytes >= HUGE_BYTES ? HUGE_BYTES : 0;
  void* found = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char* mapped = static_cast<char*>(found);
  if (slack == 0) return mapped;
  int64_t before = round_up(reinterpret_cast<intptr_t>(mapped), HUGE_BYTES) - reinterpret_cast<intptr_t>(mapped);
  char* start = mapped + before;
  if (before > 0) munmap(mapped, before);
  if (before < slack) munmap(start + bytes, slack - before);
  return start;
}

// 0, or the errno of a system that could not give the pages.
int touch(char* start, int64_t bytes) {
  if (madvise(start, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  volatile char* page = start;  // an older kernel: a write brings the page in
  for (int64_t offset = 0; offset < bytes; offset += page_bytes()) page[offset] = 0;
  return 0;
}

// False with `*err` filled where the pages are not to be had.
bool touch_all(Pool& pool, char* start, int64_t bytes, uw_error* err) {
  auto code = std::make_shared<std::atomic<int>>(0);
  Work work;
  work.chunks = (bytes + PIECE_BYTES - 1) / PIECE_BYTES;
  work.run = [=](int64_t piece) -> int64_t {
    int64_t begin = piece * PIECE_BYTES;
    int failed = touch(start + begin, std::min(PIECE_BYTES, bytes - begin));
    if (failed != 0) code->store(failed);
    return 0;  // no job of a user: the throttle does not count it
  };
  work.end = [=] {
    if (code->load() == 0) return no_error();
    return make_error(ENOMEM, "cannot get pages for %lld bytes of host memory: %s", static_cast<long long>(bytes),
                      std::strerror(code->load()));
  };
  TicketRef ticket = pool.submit(std::move(work), nullptr, 0, err);
  if (!ticket) return false;
  uw_error outcome = no_error();
  ticket->wait(-1, &outcome);
  if (outcome.code != 0) report(err, outcome);
  return outcome.code == 0;
}

void* map_and_touch(int64_t bytes, Pool* pool, uw_error* err) {
  int64_t rounded = round_up(bytes, page_bytes());
  char* start = map_aligned(rounded);
  if (start == nullptr) {
    report(err,
           make_error(ENOMEM, "cannot map %lld bytes of host memory: %s", static_cast<long long>(bytes), std::strerror(errno)));
    return nullptr;
  }
  madvise(start, rounded, MADV_HUGEPAGE);  // a wish: a system without huge pages says EINVAL and gives small ones
  try {
    if (pool == nullptr || touch_all(*pool, start, rounded, err)) return start;
  } catch (const std::bad_alloc&) {
    report(err, make_error(ENOMEM, "no memory to queue a job"));
  }
  munmap(start, rounded);
  return nullptr;
}

}  // namespace
}  // namespace unwall

using namespace unwall;

extern "C" {

void* uw_memory_map(int64_t bytes, uw_pool* handle, uw_error* err) {
  if (bytes <= 0 || bytes > INT64_MAX / 2) {
    report(err, make_error(EINVAL, "host memory needs a size above 0, got %lld bytes", static_cast<long long>(bytes)));
    return nullptr;
  }
  std::shared_ptr<Pool> pool;
  if (handle != nullptr) {
    pool = find_pool(handle, err);
    if (!pool) return nullptr;
  }
  return map_and_touch(bytes, pool.get(), err);
}

int uw_memory_unmap(void* address, int64_t bytes) {
  if (address == nullptr || bytes <= 0) return -EINVAL;
  return munmap(address, round_up(bytes, page_bytes())) == 0 ? 0 : -errno;
}

}  // extern "C"
