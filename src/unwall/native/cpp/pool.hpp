// The worker pool: a first-in-first-out line of jobs, each cut into chunks that the workers take one by one.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ticket.hpp"

namespace unwall {

class Pool;

// What a submit function hands over. `run` is called once for each chunk, from any worker, and returns the bytes it moved;
// `end` (may be empty) once, by the worker that ended the last chunk, before the ticket finishes. Neither throws.
struct Work {
  int64_t chunks = 0;  // 0: nothing to run, the ticket finishes as soon as `after` has
  std::function<int64_t(int64_t chunk)> run;
  std::function<uw_error()> end;
};

// Whatever happens to a job, its ticket finishes: at the latest when the last reference is gone (an `after` ticket that
// was destroyed unfinished takes its callbacks, and so the job, with it).
struct Job {
  Job(std::shared_ptr<Pool> pool, Work work);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  std::shared_ptr<Pool> pool;
  Work work;
  bool admitted = false;  // false: the pool was being closed
  TicketRef ticket = std::make_shared<Ticket>();
  uw_error failed = no_error();  // of a ticket in `after`: the job does not run
  int64_t chunks = 1;            // to take; at least one, so that a worker also ends a job that has nothing to run
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> left{1};
};

using JobRef = std::shared_ptr<Job>;

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  Pool();
  ~Pool() { stop(); }
  // Starts the workers. False with `*err` filled (and none running) where one cannot be started or bound.
  bool start(int threads, const int32_t* cores, int n_cores, uw_error* err);
  // Runs `work` after the tickets in `after`. Null with `*err` filled where one is not a
  // ticket or the pool is closing.
  TicketRef submit(Work work, const uw_ticket* after, int n_after, uw_error* err);
  // Waits until every job has ended, then stops the workers. Whoever submits meanwhile is refused.
  void close();
  void throttle(double bytes_per_second);
  int threads() const { return static_cast<int>(workers_.size()); }
  pid_t owner() const { return owner_; }

 private:
  friend struct Job;
  void worker();
  void stop();
  void push(JobRef job);
  void run_chunks(Job& job);
  void pace(int64_t bytes);
  void job_ended();

  const pid_t owner_;
  std::vector<std::thread> workers_;

  std::mutex mutex_;  // guards the line, the count of jobs and the two flags
  std::condition_variable work_or_stop_;
  std::condition_variable all_ended_;
  std::deque<JobRef> line_;
  int64_t jobs_ = 0;  // submitted and not destroyed yet, those that wait for `after` among them
  bool closing_ = false;
  bool stopping_ = false;

  std::atomic<double> throttle_{0.0};
  std::mutex pace_mutex_;  // guards paced_until_ns_
  int64_t paced_until_ns_ = 0;
};

// The pool behind a handle, or null with `*err` filled: a closed pool, a made-up handle, or one of the parent process.
std::shared_ptr<Pool> find_pool(const uw_pool* handle, uw_error* err);

}  // namespace unwall
