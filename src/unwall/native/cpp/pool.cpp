#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cfenv>
#include <chrono>
#include <csignal>
#include <cstring>
#include <new>
#include <system_error>
#include <unordered_map>

namespace unwall {

Job::Job(std::shared_ptr<Pool> owner, Work what) : pool(std::move(owner)), work(std::move(what)) {
  chunks = std::max<int64_t>(1, work.chunks);
  left.store(chunks);
  std::lock_guard<std::mutex> lock(pool->mutex_);
  admitted = !pool->closing_;
  if (admitted) ++pool->jobs_;
}

Job::~Job() {
  if (!admitted) return;
  if (!ticket->done()) ticket->finish(make_error(ECANCELED, "a ticket this job was to follow was dropped unfinished"));
  pool->job_ended();
}

Pool::Pool() : owner_(getpid()) {}

namespace {

uw_error bind_to_core(std::thread& thread, int core) {
  int code = EINVAL;
  if (core >= 0 && core < CPU_SETSIZE) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    code = pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
  }
  return code == 0 ? no_error()
                   : make_error(code, "cannot bind a worker to core %d: it does not exist here or is not ours to use", core);
}

}  // namespace

bool Pool::start(int threads, const int32_t* cores, int n_cores, uw_error* err) {
  // The workers inherit a full mask: signals go to the threads of the application.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  uw_error error = no_error();
  try {
    workers_.reserve(static_cast<size_t>(threads));
    for (int i = 0; i < threads && error.code == 0; ++i) {
      workers_.emplace_back([this] { worker(); });
      pthread_setname_np(workers_.back().native_handle(), "unwall-pool");
      if (n_cores > 0) error = bind_to_core(workers_.back(), cores[i % n_cores]);
    }
  } catch (const std::system_error& fault) {
    error = make_error(fault.code().value(), "cannot start worker %d of %d", static_cast<int>(workers_.size()) + 1, threads);
  } catch (const std::bad_alloc&) {
    error = make_error(ENOMEM, "no memory for %d workers", threads);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error.code == 0) return true;
  stop();
  report(err, error);
  return false;
}

TicketRef Pool::submit(Work work, const uw_ticket* after, int n_after, uw_error* err) {
  auto job = std::make_shared<Job>(shared_from_this(), std::move(work));
  TicketRef ticket = job->ticket;
  if (!job->admitted) {
    report(err, make_error(EINVAL, "the worker pool is closed"));
    return nullptr;
  }
  if (job->work.chunks == 0 && n_after == 0) {
    ticket->mark_started();
    ticket->finish(job->work.end ? job->work.end() : no_error());
    return ticket;
  }
  // A job whose `after` failed goes through the line as well: finishing it here, in the callback, would nest as deep as
  // the chain of jobs behind it is long.
  auto start = [job](const uw_error& error) {
    job->failed = error;
    if (error.code != 0) {
      job->chunks = 1;
      job->left.store(1);
    }
    job->pool->push(job);
  };
  if (!start_after(after, n_after, start, err)) return nullptr;
  return ticket;
}

void Pool::push(JobRef job) {
  bool one = job->chunks == 1;
  std::lock_guard<std::mutex> lock(mutex_);
  line_.push_back(std::move(job));
  if (one) {
    work_or_stop_.notify_one();
  } else {
    work_or_stop_.notify_all();
  }
}

void Pool::worker() {
  // A new thread inherits the floating-point mode of its creator, who may flush denormals or round another way.
  std::fesetenv(FE_DFL_ENV);
  while (true) {
    JobRef job;  // destroyed before the next wait: close() counts jobs by their destruction
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_or_stop_.wait(lock, [this] { return stopping_ || !line_.empty(); });
      if (line_.empty()) return;
      job = line_.front();
    }
    run_chunks(*job);
    // All chunks are taken, though others may still run: the next job may start.
    std::lock_guard<std::mutex> lock(mutex_);
    if (!line_.empty() && line_.front() == job) line_.pop_front();
  }
}

void Pool::run_chunks(Job& job) {
  bool runs = job.failed.code == 0;
  for (int64_t chunk = job.next.fetch_add(1); chunk < job.chunks; chunk = job.next.fetch_add(1)) {
    job.ticket->mark_started();
    if (runs && job.work.chunks > 0) pace(job.work.run(chunk));
    if (job.left.fetch_sub(1) > 1) continue;
    uw_error outcome = runs && job.work.end ? job.work.end() : job.failed;
    job.ticket->finish(outcome);
  }
}

// One clock for the whole pool: each chunk books its time at the end of the line and its worker sleeps until then, so
// neither one job nor several at once move more than the limit.
void Pool::pace(int64_t bytes) {
  double rate = throttle_.load();
  if (rate <= 0.0 || bytes == 0) return;
  int64_t until;
  {
    std::lock_guard<std::mutex> lock(pace_mutex_);
    until = std::max(paced_until_ns_, now_ns()) + static_cast<int64_t>(static_cast<double>(bytes) / rate * 1e9);
    paced_until_ns_ = until;
  }
  constexpr int64_t nap_ns = 5'000'000;  // a change of the throttle is noticed this soon
  for (int64_t now = now_ns(); now < until && throttle_.load() == rate; now = now_ns()) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(until - now, nap_ns)));
  }
}

void Pool::throttle(double bytes_per_second) {
  std::lock_guard<std::mutex> lock(pace_mutex_);
  throttle_.store(bytes_per_second);
  paced_until_ns_ = 0;
}

void Pool::job_ended() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (--jobs_ == 0) all_ended_.notify_all();
}

void Pool::close() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    all_ended_.wait(lock, [this] { return jobs_ == 0; });
  }
  stop();
}

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    work_or_stop_.notify_all();
  }
  for (std::thread& thread : workers_) {
    if (thread.joinable()) thread.join();
  }
}

namespace {

// A handle is a number, never used twice, so a closed pool is answered with an error and not with a crash. Leaked on
// purpose, as the registry of tickets is.
struct Pools {
  std::mutex mutex;
  std::unordered_map<uintptr_t, std::shared_ptr<Pool>> pools;
  uintptr_t next = 1;
};

Pools& pools() {
  static Pools* instance = [] {
    auto* made = new Pools;
    // Another thread may hold the lock at the moment of a fork, and the child would wait for it for ever.
    pthread_atfork([] { pools().mutex.lock(); }, [] { pools().mutex.unlock(); }, [] { pools().mutex.unlock(); });
    return made;
  }();
  return *instance;
}

uw_error wrong_process(pid_t owner) {
  return make_error(EPERM, "this worker pool belongs to process %d and its threads are there: make a new pool after a fork",
                    static_cast<int>(owner));
}

}  // namespace

std::shared_ptr<Pool> find_pool(const uw_pool* handle, uw_error* err) {
  std::shared_ptr<Pool> pool;
  {
    Pools& all = pools();
    std::lock_guard<std::mutex> lock(all.mutex);
    auto found = all.pools.find(reinterpret_cast<uintptr_t>(handle));
    if (found != all.pools.end()) pool = found->second;
  }
  if (!pool) {
    report(err, make_error(EINVAL, "the worker pool is closed or never existed"));
  } else if (pool->owner() != getpid()) {
    report(err, wrong_process(pool->owner()));
    pool = nullptr;
  }
  return pool;
}

}  // namespace unwall

using namespace unwall;

extern "C" {

uw_pool* uw_pool_create(int32_t threads, const int32_t* cores, int32_t n_cores, uw_error* err) {
  if (threads < 1 || threads > 4096) {
    report(err, make_error(EINVAL, "a worker pool needs 1 to 4096 threads, got %d", threads));
    return nullptr;
  }
  if (n_cores < 0 || (n_cores > 0 && cores == nullptr)) {
    report(err, make_error(EINVAL, "got %d cores and %s list of them", n_cores, cores == nullptr ? "no" : "a"));
    return nullptr;
  }
  try {
    auto pool = std::make_shared<Pool>();
    if (!pool->start(threads, cores, n_cores, err)) return nullptr;
    Pools& all = pools();
    std::lock_guard<std::mutex> lock(all.mutex);
    uintptr_t handle = all.next++;
    all.pools.emplace(handle, std::move(pool));
    return reinterpret_cast<uw_pool*>(handle);
  } catch (const std::bad_alloc&) {
    report(err, make_error(ENOMEM, "no memory for a worker pool"));
    return nullptr;
  }
}

int uw_pool_close(uw_pool* handle) {
  uw_error error = no_error();
  std::shared_ptr<Pool> pool = find_pool(handle, &error);
  if (!pool) return -error.code;
  {
    Pools& all = pools();
    std::lock_guard<std::mutex> lock(all.mutex);
    if (all.pools.erase(reinterpret_cast<uintptr_t>(handle)) == 0) return -EINVAL;  // another thread was faster
  }
  pool->close();
  return 0;
}

int uw_pool_threads(const uw_pool* handle) {
  uw_error error = no_error();
  std::shared_ptr<Pool> pool = find_pool(handle, &error);
  return pool ? pool->threads() : -error.code;
}

int uw_pool_throttle(uw_pool* handle, double bytes_per_second) {
  uw_error error = no_error();
  std::shared_ptr<Pool> pool = find_pool(handle, &error);
  if (!pool) return -error.code;
  if (!(bytes_per_second >= 0.0)) return -EINVAL;  // a NaN as well
  pool->throttle(bytes_per_second);
  return 0;
}

}  // extern "C"
