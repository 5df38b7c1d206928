// The disk engine: logical files, a bounded queue of blocks, and a backend that moves them.
//
// [Note: life of a request] A request is cut into blocks, each a contiguous piece of one physical file. Blocks wait in
// one lane per op, a backend takes them, transfers them and hands them back with `advance`. When the last byte of a
// request is accounted for, its file reference is dropped and its ticket finished, outside every lock, so that a callback
// may queue more work and a waiter may close files or free buffers at once.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ticket.hpp"

namespace unwall {

constexpr int64_t kDiskAlign = 4096;
constexpr int64_t kNever = INT64_MAX;

// One physical file. `created` and `old_bytes` are what a failed open or resize has to restore.
struct Part {
  std::string path;
  int fd = -1;
  bool direct = false;
  bool created = false;
  int64_t old_bytes = kNever;
};

// A contiguous piece of a logical file.
struct Place {
  const Part* part;
  int64_t offset;  // in the part
  int64_t length;  // up to the end of the stripe (kNever with a single part)
};

// A logical file striped over parts: stripe i lives on part i % n at offset (i / n) * stripe. It owns the descriptors and
// is shared by the engine's table and by every request on it, so closing the id leaves requests in flight alone.
class DiskFile {
 public:
  static std::shared_ptr<DiskFile> open(const char* const* paths, const int32_t* descriptors, int n_paths, int64_t stripe_bytes,
                                        int64_t size_bytes, bool create, uw_error* err);
  explicit DiskFile(int64_t stripe_bytes) : stripe_bytes_(stripe_bytes) {}
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  bool resize(int64_t size_bytes, uw_error* err);
  Place locate(int64_t offset) const;
  int64_t size_bytes() const { return size_bytes_.load(); }
  bool direct() const;
  const std::string& path() const { return parts_.front().path; }

 private:
  bool add_part(const char* path, int descriptor, bool create, uw_error* err);
  bool allocate(int64_t size_bytes, uw_error* err);
  void restore();
  int64_t part_bytes(int64_t size_bytes, int64_t index) const;
  int64_t covered_bytes() const;

  int64_t stripe_bytes_;
  std::vector<Part> parts_;
  std::mutex resizing_;
  std::atomic<int64_t> size_bytes_{0};
};

struct Request {
  TicketRef ticket;
  std::shared_ptr<DiskFile> file;
  int op;
  int64_t offset;
  char* address;
  int64_t length;
  int64_t cut_bytes = 0;   // already cut into blocks; only the thread that queues the request touches it
  int64_t open_bytes = 0;  // not accounted for yet; guarded by the engine's mutex
  uw_error error;          // of the first block that failed; guarded by the engine's mutex
  std::thread::id submitter;
  std::atomic<bool> submitting{true};  // the submitter is still inside submit()
  bool ready = false;                  // became ready on the submitter, inside submit(); only that thread touches it
};

using RequestRef = std::shared_ptr<Request>;

struct Block {
  RequestRef request;
  const Part* part = nullptr;
  int64_t offset = 0;
  char* address = nullptr;
  int64_t length = 0;
  int64_t done_bytes = 0;  // a short transfer leaves the rest to be issued again
  int fault = 0;           // an errno: do not touch the disk, hand the block back at once
  int64_t sequence = 0;    // order of arrival over both lanes
};

// Moves blocks between memory and files on threads of its own.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual void wake() = 0;  // something changed in the queue; called without locks, also after stop()
  virtual void stop() = 0;  // joins the threads; the engine is drained and says so by stopping()
};

class DiskEngine : public std::enable_shared_from_this<DiskEngine> {
 public:
  static std::shared_ptr<DiskEngine> create(const uw_disk_options& options, uw_error* err);
  explicit DiskEngine(const uw_disk_options& options) : options_(options) {}
  ~DiskEngine();

  // For disk_api.cpp. A file id is never reused.
  int add_file(std::shared_ptr<DiskFile> file);  // -EBADF when closed
  std::shared_ptr<DiskFile> find_file(int id);
  bool remove_file(int id);
  uw_ticket submit(const RequestRef& request, const uw_ticket* after, int n_after, uw_error* err);
  void close();
  int64_t pending();
  void fault(int op, int64_t skip, int64_t count, int code);
  void throttle(int op, double bytes_per_second);

  // For backends. `take` gives the next block that may start now; otherwise false and when to ask again (kNever: after a
  // wake). `wait_take` sleeps for one and is false when the engine stops. `advance` is told what a transfer returned
  // (bytes or -errno): true when the block has ended and is out of the backend's hands, false to issue its rest again.
  bool take(Block* block, int64_t* again_ns);
  bool wait_take(Block* block);
  bool advance(Block* block, int64_t result);
  bool stopping();

 private:
  // The blocks of one op, with its throttle and its injected faults. Throttling keeps the head of the lane back until
  // `ready_ns`, so it costs neither a thread nor the other lane anything.
  struct Lane {
    std::deque<Block> blocks;
    double bytes_per_second = 0;
    int64_t ready_ns = 0;
    int64_t fault_skip = 0;
    int64_t fault_count = 0;
    int fault_code = 0;
  };

  Lane& lane(int op) { return lanes_[op == UW_WRITE ? 1 : 0]; }
  void start(const RequestRef& request, const uw_error& error);
  bool accept();
  void enqueue(const RequestRef& request, bool may_wait);
  bool push_next(const RequestRef& request);
  void arm(Lane& lane, int64_t from_ns);
  bool take_locked(Block* block, int64_t* again_ns);
  void retire(const RequestRef& request, int64_t bytes, const uw_error& error, bool in_flight);

  const uw_disk_options options_;
  std::unique_ptr<Backend> backend_;
  std::mutex mutex_;
  std::condition_variable work_;  // a block may be taken, or stopping_
  std::condition_variable room_;  // queued_blocks_ fell
  std::condition_variable idle_;  // open_requests_ fell to 0
  Lane lanes_[2];
  int64_t queued_blocks_ = 0;
  int64_t in_flight_blocks_ = 0;
  int64_t open_requests_ = 0;  // accepted (dependencies finished) and not finished
  int64_t next_sequence_ = 0;
  bool closing_ = false;
  bool stopping_ = false;
  std::map<int, std::shared_ptr<DiskFile>> files_;
  int next_file_ = 0;
};

// Both give null with *err where the backend cannot start.
std::unique_ptr<Backend> start_thread_backend(DiskEngine& engine, int workers, uw_error* err);
std::unique_ptr<Backend> start_uring_backend(DiskEngine& engine, int depth, uw_error* err);
bool uring_available();

// A thread that leaves all signals to the threads of the host program. Throws std::system_error.
std::thread quiet_thread(std::function<void()> body);

uw_error file_error(int code, int op, const std::string& path, int64_t offset, int64_t length, const char* what);

}  // namespace unwall
