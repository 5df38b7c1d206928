// Backend: a pool of threads that call pread and pwrite. Each has at most one block in flight.
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "disk.hpp"

namespace unwall {

namespace {

class ThreadBackend final : public Backend {
 public:
  explicit ThreadBackend(DiskEngine& engine) : engine_(engine) {}

  // Throws std::system_error; the workers started until then are idle and end with the engine, joined by stop().
  void start(int workers) {
    workers_.reserve(static_cast<size_t>(workers));
    for (int i = 0; i < workers; ++i) workers_.push_back(quiet_thread([this] { work(); }));
  }
  void wake() override {}  // workers sleep in wait_take, which the engine wakes itself
  void stop() override {
    for (std::thread& worker : workers_) {
      if (worker.joinable()) worker.join();
    }
  }

 private:
  void work() {
    Block block;
    while (engine_.wait_take(&block)) {
      while (!engine_.advance(&block, block.fault != 0 ? 0 : transfer(block))) {
      }
      block = Block();
    }
  }

  static int64_t transfer(const Block& block) {
    char* address = block.address + block.done_bytes;
    const size_t length = static_cast<size_t>(block.length - block.done_bytes);
    const int64_t offset = block.offset + block.done_bytes;
    const ssize_t result = block.request->op == UW_READ ? pread(block.part->fd, address, length, offset)
                                                        : pwrite(block.part->fd, address, length, offset);
    if (result >= 0) return result;
    const int code = errno;
    if (code == EAGAIN) sched_yield();
    return -code;
  }

  DiskEngine& engine_;
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Backend> start_thread_backend(DiskEngine& engine, int workers, uw_error* err) {
  auto backend = std::make_unique<ThreadBackend>(engine);
  try {
    backend->start(workers);
  } catch (const std::system_error& error) {
    engine.close();  // lets the workers that did start come home
    backend->stop();
    report(err, make_error(error.code().value(), "cannot start %d disk threads", workers));
    return nullptr;
  }
  return backend;
}

}  // namespace unwall
