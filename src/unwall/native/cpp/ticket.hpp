// Work in flight: one Ticket for every kind of native work (disk request, pool job, signal set by hand).
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "unwall.h"

namespace unwall {

int64_t now_ns();
uw_error no_error();
uw_error make_error(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Writes `error` through a caller's pointer, which may be null.
void report(uw_error* out, const uw_error& error);

// A ticket finishes exactly once. `then` callbacks run on the thread that finishes it (or at once when it already has):
// they only queue further work and never block.
class Ticket {
 public:
  Ticket() : submitted_ns_(now_ns()) {}
  void mark_started();  // the first call counts
  void finish(const uw_error& error);
  void then(std::function<void(const uw_error&)> callback);
  // True when finished; fills *error then. A negative timeout waits for ever.
  bool wait(int64_t timeout_ns, uw_error* error);
  bool done();
  void times(int64_t* submitted_ns, int64_t* started_ns, int64_t* finished_ns);

 private:
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  uw_error error_ = no_error();
  std::vector<std::function<void(const uw_error&)>> callbacks_;
  int64_t submitted_ns_;
  std::atomic<int64_t> started_ns_{0};
  int64_t finished_ns_ = 0;
};

using TicketRef = std::shared_ptr<Ticket>;

uw_ticket register_ticket(TicketRef ticket);
TicketRef find_ticket(uw_ticket id);  // null for a stale or made-up id

// Calls `start(error)` once every ticket in `after` has finished; `error` is that of the first one that failed.
// False with `*err` filled (and `start` never called) where an id is not a ticket.
bool start_after(const uw_ticket* after, int n_after, std::function<void(const uw_error&)> start, uw_error* err);

}  // namespace unwall
