#include "disk.hpp"

#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

namespace unwall {

uw_error file_error(int code, int op, const std::string& path, int64_t offset, int64_t length, const char* what) {
  char text[128];
  uw_error error = make_error(code, "%s: %s", what, strerror_r(code, text, sizeof text));
  error.op = op;
  error.offset = offset;
  error.length = length;
  std::snprintf(error.path, sizeof error.path, "%s", path.c_str());
  return error;
}

std::thread quiet_thread(std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(std::move(body));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

// ---- engine: requests in --------------------------------------------------------------------------------------------

std::shared_ptr<DiskEngine> DiskEngine::create(const uw_disk_options& options, uw_error* err) {
  auto engine = std::make_shared<DiskEngine>(options);
  engine->backend_ = options.backend == UW_URING ? start_uring_backend(*engine, options.depth, err)
                                                 : start_thread_backend(*engine, std::min(options.threads, options.depth), err);
  return engine->backend_ ? engine : nullptr;
}

DiskEngine::~DiskEngine() { close(); }

uw_ticket DiskEngine::submit(const RequestRef& request, const uw_ticket* after, int n_after, uw_error* err) {
  request->open_bytes = request->length;
  request->error = no_error();
  request->submitter = std::this_thread::get_id();
  const uw_ticket id = register_ticket(request->ticket);
  auto self = shared_from_this();
  auto ready = [self, request](const uw_error& error) { self->start(request, error); };
  if (!start_after(after, n_after, ready, err)) {
    uw_ticket_release(id);
    return 0;
  }
  request->submitting = false;
  if (request->ready) enqueue(request, true);
  return id;
}

// The dependencies have finished. On the submitting thread the request is left to submit(), which may wait for room; on
// any other this is a callback of a ticket, which must not block, so the request goes in over the bound.
void DiskEngine::start(const RequestRef& request, const uw_error& error) {
  if (error.code != 0) {
    request->file.reset();
    request->ticket->finish(error);
  } else if (!accept()) {
    uw_error canceled = make_error(ECANCELED, "the disk engine was closed before this request could start");
    canceled.op = request->op;
    canceled.offset = request->offset;
    canceled.length = request->length;
    std::snprintf(canceled.path, sizeof canceled.path, "%s", request->file->path().c_str());
    request->file.reset();
    request->ticket->finish(canceled);
  } else if (request->submitter == std::this_thread::get_id() && request->submitting) {
    request->ready = true;
  } else {
    enqueue(request, false);
  }
}

bool DiskEngine::accept() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closing_) return false;
  ++open_requests_;
  return true;
}

// Piecewise: as many blocks as there is room for, then the next when there is room again, so a request larger than the
// whole queue gets through. Out of memory fails the part that could not be queued.
void DiskEngine::enqueue(const RequestRef& request, bool may_wait) {
  const int64_t bound = options_.queue_blocks;
  bool more = true;
  try {
    while (more) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        if (may_wait) room_.wait(lock, [&] { return queued_blocks_ < bound; });
        while (more && (!may_wait || queued_blocks_ < bound)) more = push_next(request);
        work_.notify_one();
      }
      backend_->wake();
    }
  } catch (const std::bad_alloc&) {
    backend_->wake();
    retire(request, request->length - request->cut_bytes, make_error(ENOMEM, "out of memory while queueing"), false);
  }
}

// Cuts the next block off and queues it; true while there is more to cut. The caller holds mutex_.
bool DiskEngine::push_next(const RequestRef& request) {
  const int64_t at = request->cut_bytes;
  const Place place = request->file->locate(request->offset + at);
  Block block;
  block.request = request;
  block.part = place.part;
  block.offset = place.offset;
  block.address = request->address + at;
  block.length = std::min({options_.block_bytes, place.length, request->length - at});
  block.sequence = next_sequence_++;
  Lane& into = lane(request->op);
  const bool first = into.blocks.empty();
  const int64_t cut = at + block.length;
  into.blocks.push_back(std::move(block));
  request->cut_bytes = cut;
  ++queued_blocks_;
  if (first) arm(into, std::max(into.ready_ns, now_ns()));
  return cut < request->length;
}

// ---- engine: blocks out ---------------------------------------------------------------------------------------------

// Sets when the head of the lane may start: its own transfer time at the throttled speed after `from_ns`.
void DiskEngine::arm(Lane& lane, int64_t from_ns) {
  if (lane.bytes_per_second <= 0 || lane.blocks.empty()) return;
  const Block& head = lane.blocks.front();
  head.request->ticket->mark_started();
  lane.ready_ns = from_ns + static_cast<int64_t>(1e9 * static_cast<double>(head.length) / lane.bytes_per_second);
}

bool DiskEngine::take_locked(Block* block, int64_t* again_ns) {
  *again_ns = kNever;
  const int64_t now = now_ns();
  Lane* chosen = nullptr;
  for (Lane& lane : lanes_) {
    if (lane.blocks.empty()) continue;
    if (lane.bytes_per_second > 0 && lane.ready_ns > now) {
      *again_ns = std::min(*again_ns, lane.ready_ns);
    } else if (chosen == nullptr || lane.blocks.front().sequence < chosen->blocks.front().sequence) {
      chosen = &lane;
    }
  }
  if (chosen == nullptr) return false;
  *block = std::move(chosen->blocks.front());
  chosen->blocks.pop_front();
  arm(*chosen, chosen->ready_ns);
  block->request->ticket->mark_started();
  if (block->request->error.code != 0) {
    block->fault = ECANCELED;  // the request has failed already: its other blocks need not touch the disk
  } else if (chosen->fault_count > 0 && chosen->fault_skip-- <= 0) {
    --chosen->fault_count;
    block->fault = chosen->fault_code;
  }
  --queued_blocks_;
  ++in_flight_blocks_;
  room_.notify_one();
  if (queued_blocks_ > 0) work_.notify_one();  // each taker wakes the next one
  return true;
}

bool DiskEngine::take(Block* block, int64_t* again_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  return take_locked(block, again_ns);
}

bool DiskEngine::wait_take(Block* block) {
  using Clock = std::chrono::steady_clock;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    int64_t again_ns;
    if (take_locked(block, &again_ns)) return true;
    if (again_ns == kNever) {
      work_.wait(lock);
    } else {
      work_.wait_until(lock, Clock::time_point(std::chrono::nanoseconds(again_ns)));
    }
  }
  return false;
}

// A transfer came back without getting further: a read at the end of the file, or a write the file system cuts short.
static uw_error stuck_error(const Block& block, int64_t at) {
  const bool reading = block.request->op == UW_READ;
  uw_error error = file_error(EIO, block.request->op, block.part->path, block.offset, block.length, "short write");
  struct stat info;
  if (reading && fstat(block.part->fd, &info) == 0) at = info.st_size;
  std::snprintf(error.message, sizeof error.message, "%s byte %lld, the block ends at byte %lld",
                reading ? "read failed: the file ends at" : "write failed: stuck at", static_cast<long long>(at),
                static_cast<long long>(block.offset + block.length));
  return error;
}

bool DiskEngine::advance(Block* block, int64_t result) {
  if (block->fault == 0 && (result == -EINTR || result == -EAGAIN)) return false;
  const int op = block->request->op;
  const char* failed = op == UW_READ ? "read failed" : "write failed";
  uw_error error = no_error();
  if (block->fault != 0) {
    error = file_error(block->fault, op, block->part->path, block->offset, block->length, failed);
  } else if (result < 0) {
    error = file_error(static_cast<int>(-result), op, block->part->path, block->offset, block->length, failed);
  } else {
    // O_DIRECT goes on at an aligned place only; what lies behind it is transferred again.
    const int64_t done = block->done_bytes + result;
    const int64_t kept = block->part->direct && done < block->length ? done / kDiskAlign * kDiskAlign : done;
    if (kept > block->done_bytes) {
      block->done_bytes = kept;
      if (kept < block->length) return false;
    } else {
      error = stuck_error(*block, block->offset + done);
    }
  }
  RequestRef request = std::move(block->request);
  retire(request, block->length, error, true);
  return true;
}

// Accounts for `bytes` of the request. The last call finishes it: see [Note: life of a request].
void DiskEngine::retire(const RequestRef& request, int64_t bytes, const uw_error& error, bool in_flight) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (in_flight) --in_flight_blocks_;
    if (error.code != 0 && request->error.code == 0) request->error = error;
    request->open_bytes -= bytes;
    if (request->open_bytes > 0) return;
  }
  request->file.reset();
  try {
    request->ticket->finish(request->error);
  } catch (...) {  // a callback of someone else's work ran out of memory; this thread has to go on
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (--open_requests_ == 0) idle_.notify_all();
}

// ---- engine: the rest -----------------------------------------------------------------------------------------------

int DiskEngine::add_file(std::shared_ptr<DiskFile> file) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closing_) return -EBADF;
  files_.emplace(next_file_, std::move(file));
  return next_file_++;
}

std::shared_ptr<DiskFile> DiskEngine::find_file(int id) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = files_.find(id);
  return found == files_.end() ? nullptr : found->second;
}

bool DiskEngine::remove_file(int id) {
  std::shared_ptr<DiskFile> last;  // closes descriptors after the lock is gone
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = files_.find(id);
  if (found == files_.end()) return false;
  last = std::move(found->second);
  files_.erase(found);
  return true;
}

// Accepted requests run to their end, at full speed; callbacks that come later find the engine closing. The backend
// object stays until the engine goes, since a submitter may still be about to wake it.
void DiskEngine::close() {
  throttle(UW_READ, 0);
  throttle(UW_WRITE, 0);
  std::map<int, std::shared_ptr<DiskFile>> files;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    idle_.wait(lock, [this] { return open_requests_ == 0; });
    stopping_ = true;
    files.swap(files_);
    work_.notify_all();
  }
  if (!backend_) return;
  backend_->wake();
  backend_->stop();
}

bool DiskEngine::stopping() {
  std::lock_guard<std::mutex> lock(mutex_);
  return stopping_;
}

int64_t DiskEngine::pending() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queued_blocks_ + in_flight_blocks_;
}

void DiskEngine::fault(int op, int64_t skip, int64_t count, int code) {
  std::lock_guard<std::mutex> lock(mutex_);
  lane(op).fault_skip = skip;
  lane(op).fault_count = count;
  lane(op).fault_code = code;
}

void DiskEngine::throttle(int op, double bytes_per_second) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lane(op).bytes_per_second = bytes_per_second;
    lane(op).ready_ns = 0;
    arm(lane(op), now_ns());
    work_.notify_all();
  }
  if (backend_) backend_->wake();
}

}  // namespace unwall
