#include "ticket.hpp"

#include <pthread.h>

#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <unordered_map>

namespace unwall {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uw_error no_error() {
  uw_error error;
  std::memset(&error, 0, sizeof error);
  error.offset = -1;
  error.length = -1;
  return error;
}

uw_error make_error(int code, const char* format, ...) {
  uw_error error = no_error();
  error.code = code;
  va_list args;
  va_start(args, format);
  std::vsnprintf(error.message, sizeof error.message, format, args);
  va_end(args);
  return error;
}

void report(uw_error* out, const uw_error& error) {
  if (out != nullptr) *out = error;
}

void Ticket::mark_started() {
  int64_t never = 0;
  started_ns_.compare_exchange_strong(never, now_ns());
}

void Ticket::finish(const uw_error& error) {
  std::vector<std::function<void(const uw_error&)>> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_) return;
    done_ = true;
    error_ = error;
    finished_ns_ = now_ns();
    callbacks.swap(callbacks_);
    finished_.notify_all();
  }
  for (auto& callback : callbacks) callback(error);
}

void Ticket::then(std::function<void(const uw_error&)> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(error_);  // error_ does not change once done_ is set
}

bool Ticket::wait(int64_t timeout_ns, uw_error* error) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto finished = [this] { return done_; };
  if (timeout_ns < 0) {
    finished_.wait(lock, finished);
  } else if (!finished_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), finished)) {
    return false;
  }
  report(error, error_);
  return true;
}

bool Ticket::done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

void Ticket::times(int64_t* submitted_ns, int64_t* started_ns, int64_t* finished_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  *submitted_ns = submitted_ns_;
  *started_ns = started_ns_.load();
  *finished_ns = finished_ns_;
}

namespace {

// Ids are never reused, so a released one stays invalid for ever. Leaked on purpose: tickets may be finished by threads
// that outlive static destruction.
struct Registry {
  std::mutex mutex;
  std::unordered_map<uw_ticket, TicketRef> tickets;
  uw_ticket next = 1;
};

Registry& registry() {
  static Registry* instance = [] {
    auto* made = new Registry;
    // A child forked while another thread holds the mutex would find it locked for ever.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); }, [] { registry().mutex.unlock(); });
    return made;
  }();
  return *instance;
}

struct Countdown {
  std::mutex mutex;
  int left;
  uw_error error = no_error();
  std::function<void(const uw_error&)> start;
};

}  // namespace

uw_ticket register_ticket(TicketRef ticket) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  uw_ticket id = all.next++;
  all.tickets.emplace(id, std::move(ticket));
  return id;
}

TicketRef find_ticket(uw_ticket id) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.tickets.find(id);
  return found == all.tickets.end() ? nullptr : found->second;
}

bool start_after(const uw_ticket* after, int n_after, std::function<void(const uw_error&)> start, uw_error* err) {
  std::vector<TicketRef> needed;
  for (int i = 0; i < n_after; ++i) {
    TicketRef ticket = find_ticket(after[i]);
    if (!ticket) {
      report(err, make_error(EINVAL, "ticket %llu in `after` was released or never existed", (unsigned long long)after[i]));
      return false;
    }
    needed.push_back(std::move(ticket));
  }
  if (needed.empty()) {
    start(no_error());
    return true;
  }
  auto countdown = std::make_shared<Countdown>();
  countdown->left = static_cast<int>(needed.size());
  countdown->start = std::move(start);
  for (auto& ticket : needed) {
    ticket->then([countdown](const uw_error& error) {
      {
        std::lock_guard<std::mutex> lock(countdown->mutex);
        if (error.code != 0 && countdown->error.code == 0) countdown->error = error;
        if (--countdown->left > 0) return;
      }
      countdown->start(countdown->error);
    });
  }
  return true;
}

}  // namespace unwall

using namespace unwall;

extern "C" {

int uw_abi_version(void) { return UW_ABI_VERSION; }

int uw_ticket_wait(uw_ticket id, int64_t timeout_ns, uw_error* err) {
  TicketRef ticket = find_ticket(id);
  if (!ticket) {
    report(err, make_error(EINVAL, "ticket %llu was released or never existed", (unsigned long long)id));
    return -EINVAL;
  }
  uw_error error = no_error();
  if (!ticket->wait(timeout_ns, &error)) return 1;
  report(err, error);
  return -error.code;
}

int uw_ticket_done(uw_ticket id) {
  TicketRef ticket = find_ticket(id);
  return ticket ? static_cast<int>(ticket->done()) : -EINVAL;
}

int uw_ticket_times(uw_ticket id, int64_t* submitted_ns, int64_t* started_ns, int64_t* finished_ns) {
  TicketRef ticket = find_ticket(id);
  if (!ticket) return -EINVAL;
  ticket->times(submitted_ns, started_ns, finished_ns);
  return 0;
}

int uw_ticket_release(uw_ticket id) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.tickets.erase(id) == 1 ? 0 : -EINVAL;
}

int64_t uw_ticket_count(void) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  return static_cast<int64_t>(all.tickets.size());
}

uw_ticket uw_signal_create(void) { return register_ticket(std::make_shared<Ticket>()); }

int uw_signal_set(uw_ticket id, int32_t code, const char* message) {
  TicketRef ticket = find_ticket(id);
  if (!ticket || ticket->done()) return -EINVAL;
  ticket->mark_started();
  ticket->finish(code == 0 ? no_error() : make_error(code, "%s", message != nullptr ? message : "signalled as failed"));
  return 0;
}

}  // extern "C"
