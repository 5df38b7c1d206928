// Backend: io_uring. One thread owns the ring; nobody else touches it.
//
// The thread sleeps in the kernel for completions only. A read of an eventfd is always posted on the ring, so a submitter
// that writes the eventfd wakes it like a completion does. A throttled lane gives the sleep a timeout instead of blocking
// the thread, so blocks of the other op go on.
#include "disk.hpp"

#ifdef UNWALL_URING

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace unwall {

namespace {

constexpr uint64_t kWakeTag = 0;  // user data of the eventfd read; slot i has tag i + 1

class UringBackend final : public Backend {
 public:
  UringBackend(DiskEngine& engine, int depth) : engine_(engine), slots_(static_cast<size_t>(depth)) {
    free_.reserve(slots_.size());
    for (size_t i = slots_.size(); i > 0; --i) free_.push_back(i - 1);
  }

  ~UringBackend() override {
    stop();
    if (ring_ready_) io_uring_queue_exit(&ring_);
    if (event_ >= 0) ::close(event_);
  }

  // 0 or an errno. Room for every slot, the eventfd read and, on old kernels, liburing's own timeout.
  int start() {
    event_ = eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) return errno;
    const int result = io_uring_queue_init(static_cast<unsigned>(slots_.size()) + 2, &ring_, 0);
    if (result < 0) return -result;
    ring_ready_ = true;
    thread_ = quiet_thread([this] { work(); });
    return 0;
  }

  void wake() override {
    const uint64_t one = 1;
    while (write(event_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void stop() override {
    if (thread_.joinable()) thread_.join();
  }

 private:
  void work() {
    // stopping() is only set once every request has finished, so nothing but the eventfd read is in flight then.
    while (!engine_.stopping()) {
      int64_t again_ns = kNever;
      fill(&again_ns);
      post_wake();
      wait(again_ns);
      reap();
    }
    while (wake_posted_) {  // close() wakes after it has set stopping(): the kernel must not write event_count_ later
      wait(kNever);
      reap();
    }
  }

  // Issues blocks until the depth is reached or the queue has none that may start.
  void fill(int64_t* again_ns) {
    while (!free_.empty()) {
      const size_t slot = free_.back();
      Block& block = slots_[slot];
      if (!engine_.take(&block, again_ns)) return;
      if (block.fault != 0) {
        engine_.advance(&block, 0);
        block = Block();
        continue;
      }
      free_.pop_back();
      issue(slot);
    }
    *again_ns = kNever;  // full: only a completion makes room
  }

  void issue(size_t slot) {
    const Block& block = slots_[slot];
    io_uring_sqe* sqe = next_sqe();
    char* address = block.address + block.done_bytes;
    const unsigned length = static_cast<unsigned>(block.length - block.done_bytes);
    const uint64_t offset = static_cast<uint64_t>(block.offset + block.done_bytes);
    if (block.request->op == UW_READ) {
      io_uring_prep_read(sqe, block.part->fd, address, length, offset);
    } else {
      io_uring_prep_write(sqe, block.part->fd, address, length, offset);
    }
    io_uring_sqe_set_data64(sqe, slot + 1);
  }

  void post_wake() {
    if (wake_posted_) return;
    io_uring_sqe* sqe = next_sqe();
    io_uring_prep_read(sqe, event_, &event_count_, sizeof event_count_, 0);
    io_uring_sqe_set_data64(sqe, kWakeTag);
    wake_posted_ = true;
  }

  // The ring has an entry for everything that can be in flight, so this only loops when the kernel is short of memory.
  io_uring_sqe* next_sqe() {
    io_uring_sqe* sqe;
    while ((sqe = io_uring_get_sqe(&ring_)) == nullptr) {
      if (io_uring_submit(&ring_) < 0) usleep(1000);
    }
    return sqe;
  }

  // Submits, then sleeps until a completion or until `again_ns`. A submission the kernel refuses for now (out of memory)
  // stays in the ring and is submitted again by the next round.
  void wait(int64_t again_ns) {
    int result;
    if (again_ns == kNever) {
      result = io_uring_submit_and_wait(&ring_, 1);
    } else {
      const int64_t left_ns = std::max<int64_t>(again_ns - now_ns(), 0);
      __kernel_timespec timeout = {left_ns / 1000000000, left_ns % 1000000000};
      io_uring_cqe* cqe = nullptr;
      result = io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &timeout, nullptr);
    }
    if (result < 0 && result != -ETIME && result != -EINTR) usleep(1000);
  }

  // Each completion is marked as seen before it is handed on, since that may take long (callbacks of the ticket).
  void reap() {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
      const uint64_t tag = io_uring_cqe_get_data64(cqe);
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if (tag == kWakeTag) {
        wake_posted_ = false;
      } else if (tag <= slots_.size()) {
        Block& block = slots_[tag - 1];
        if (engine_.advance(&block, result)) {
          block = Block();
          free_.push_back(tag - 1);
        } else {
          issue(tag - 1);
        }
      }
    }
  }

  DiskEngine& engine_;
  io_uring ring_;
  bool ring_ready_ = false;
  int event_ = -1;
  uint64_t event_count_ = 0;  // the kernel writes here while wake_posted_
  bool wake_posted_ = false;
  std::vector<Block> slots_;  // blocks in flight, by tag
  std::vector<size_t> free_;  // never grows beyond what was reserved
  std::thread thread_;
};

}  // namespace

bool uring_available() {
  io_uring ring;
  if (io_uring_queue_init(2, &ring, 0) < 0) return false;
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  const bool usable = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                      io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  if (probe != nullptr) io_uring_free_probe(probe);
  io_uring_queue_exit(&ring);
  return usable;
}

std::unique_ptr<Backend> start_uring_backend(DiskEngine& engine, int depth, uw_error* err) {
  int code = ENOSYS;
  if (uring_available()) {
    auto backend = std::make_unique<UringBackend>(engine, depth);
    try {
      code = backend->start();
    } catch (const std::system_error& error) {
      code = error.code().value();
    }
    if (code == 0) return backend;
  }
  report(err, make_error(code, "cannot start the io_uring backend (use the thread backend instead)"));
  return nullptr;
}

}  // namespace unwall

#else

#include <cerrno>

namespace unwall {

bool uring_available() { return false; }

std::unique_ptr<Backend> start_uring_backend(DiskEngine&, int, uw_error* err) {
  report(err, make_error(ENOSYS, "unwall was built without liburing: use the thread backend, or install it and rebuild"));
  return nullptr;
}

}  // namespace unwall

#endif
