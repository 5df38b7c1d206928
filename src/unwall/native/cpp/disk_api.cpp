// The C face of the disk engine: checks what comes in, so that the engine behind it sees valid requests only.
#include <unistd.h>

#include <cerrno>
#include <new>

#include "disk.hpp"

using namespace unwall;

// The handle. It is never freed (a few dozen bytes per engine, kept reachable in a list), so that a call that comes after
// or during uw_disk_close finds a closed engine and not freed memory. `owner` is read without the lock: in a forked child
// the lock may be held for ever by a thread that does not exist there.
struct uw_disk {
  const pid_t owner = getpid();
  std::mutex mutex;
  std::shared_ptr<DiskEngine> engine;  // null once closed
  uw_disk* next = nullptr;
};

namespace {

std::atomic<uw_disk*> all_disks{nullptr};

bool here(const uw_disk* disk, uw_error* err) {
  if (disk == nullptr) {
    report(err, make_error(EINVAL, "the disk engine is a null pointer"));
    return false;
  }
  if (disk->owner == getpid()) return true;
  report(err, make_error(EPERM, "this disk engine belongs to process %d; create a new one after fork", (int)disk->owner));
  return false;
}

// The engine behind the handle, or null with *err (EPERM after fork, EBADF when closed).
std::shared_ptr<DiskEngine> live(uw_disk* disk, uw_error* err) {
  if (!here(disk, err)) return nullptr;
  std::lock_guard<std::mutex> lock(disk->mutex);
  if (!disk->engine) report(err, make_error(EBADF, "this disk engine is closed"));
  return disk->engine;
}

std::shared_ptr<DiskFile> open_file(DiskEngine& engine, int id, uw_error* err) {
  auto file = engine.find_file(id);
  if (!file) report(err, make_error(EBADF, "disk file %d is closed or never existed", id));
  return file;
}

bool refuse(uw_error* err, const uw_error& error) {
  report(err, error);
  return false;
}

bool valid_options(const uw_disk_options* options, uw_error* err) {
  if (options == nullptr) return refuse(err, make_error(EINVAL, "the disk options are a null pointer"));
  if (options->backend != UW_THREADS && options->backend != UW_URING)
    return refuse(err, make_error(EINVAL, "backend is %d, expected 0 (threads) or 1 (uring)", options->backend));
  if (options->threads < 1 || options->threads > 1024)
    return refuse(err, make_error(EINVAL, "threads is %d, expected 1 to 1024", options->threads));
  if (options->depth < 1 || options->depth > 4096)
    return refuse(err, make_error(EINVAL, "depth is %d, expected 1 to 4096", options->depth));
  if (options->queue_blocks < 1)
    return refuse(err, make_error(EINVAL, "queue_blocks is %d, expected at least 1", options->queue_blocks));
  if (options->block_bytes < kDiskAlign || options->block_bytes > (1 << 30) || options->block_bytes % kDiskAlign != 0)
    return refuse(err, make_error(EINVAL, "block_bytes is %lld, expected a multiple of 4096 up to 1 GiB",
                                  (long long)options->block_bytes));
  return true;
}

bool valid_op(int32_t op) { return op == UW_READ || op == UW_WRITE; }

bool valid_size(int64_t size_bytes, uw_error* err) {
  if (size_bytes >= 0 && size_bytes % kDiskAlign == 0) return true;
  return refuse(err, make_error(EINVAL, "size_bytes is %lld, expected a multiple of 4096", (long long)size_bytes));
}

bool valid_layout(const char* const* paths, int32_t n_paths, int64_t stripe_bytes, uw_error* err) {
  if (paths == nullptr || n_paths < 1) return refuse(err, make_error(EINVAL, "a disk file needs at least one path"));
  for (int32_t i = 0; i < n_paths; ++i) {
    if (paths[i] == nullptr || paths[i][0] == 0) return refuse(err, make_error(EINVAL, "path %d of the disk file is empty", i));
  }
  if (n_paths > 1 && (stripe_bytes <= 0 || stripe_bytes % kDiskAlign != 0))
    return refuse(err,
                  make_error(EINVAL, "stripe_bytes is %lld, expected a positive multiple of 4096", (long long)stripe_bytes));
  return true;
}

bool valid_request(const Request& request, uw_error* err) {
  const long long offset = request.offset, length = request.length;
  if (!valid_op(request.op)) return refuse(err, make_error(EINVAL, "op is %d, expected 1 (read) or 2 (write)", request.op));
  if (length <= 0) return refuse(err, make_error(EINVAL, "length is %lld, expected more than 0", length));
  if (length % kDiskAlign != 0) return refuse(err, make_error(EINVAL, "length %lld is not a multiple of 4096", length));
  if (offset < 0 || offset % kDiskAlign != 0)
    return refuse(err, make_error(EINVAL, "offset %lld is not a multiple of 4096", offset));
  if (request.address == nullptr || reinterpret_cast<uintptr_t>(request.address) % kDiskAlign != 0)
    return refuse(err, make_error(EINVAL, "address %p is not a multiple of 4096", (void*)request.address));
  const int64_t size_bytes = request.file->size_bytes();
  if (length > size_bytes || offset > size_bytes - length)
    return refuse(err, make_error(EINVAL, "bytes %lld to %lld lie past the end of the file, which has %lld bytes", offset,
                                  (long long)((uint64_t)offset + (uint64_t)length), (long long)size_bytes));
  return true;
}

// Runs a body that may throw and gives its result, or `failed` with ENOMEM.
template <typename Result, typename Body>
Result guarded(Result failed, uw_error* err, Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    report(err, make_error(ENOMEM, "disk engine: %s", error.what()));
    return failed;
  }
}

}  // namespace

extern "C" {

int uw_disk_has_uring(void) { return uring_available() ? 1 : 0; }

uw_disk* uw_disk_create(const uw_disk_options* options, uw_error* err) {
  return guarded<uw_disk*>(nullptr, err, [&]() -> uw_disk* {
    if (!valid_options(options, err)) return nullptr;
    auto handle = std::make_unique<uw_disk>();
    handle->engine = DiskEngine::create(*options, err);
    if (!handle->engine) return nullptr;
    uw_disk* disk = handle.release();
    disk->next = all_disks.load();
    while (!all_disks.compare_exchange_weak(disk->next, disk)) {
    }
    return disk;
  });
}

int uw_disk_close(uw_disk* disk) {
  uw_error error = no_error();
  return guarded(-ENOMEM, nullptr, [&]() -> int {
    if (!here(disk, &error)) return -error.code;
    std::shared_ptr<DiskEngine> engine;
    {
      std::lock_guard<std::mutex> lock(disk->mutex);
      engine.swap(disk->engine);
    }
    if (!engine) return -EBADF;
    engine->close();
    return 0;
  });
}

int uw_disk_open(uw_disk* disk, const char* const* paths, const int32_t* descriptors, int32_t n_paths, int64_t stripe_bytes,
                 int64_t size_bytes, int32_t create, int32_t* direct, uw_error* err) {
  return guarded(-ENOMEM, err, [&]() -> int {
    uw_error error = no_error();
    auto engine = live(disk, &error);
    std::shared_ptr<DiskFile> file;
    if (engine && valid_layout(paths, n_paths, stripe_bytes, &error) && valid_size(size_bytes, &error)) {
      file = DiskFile::open(paths, descriptors, n_paths, stripe_bytes, size_bytes, create != 0, &error);
    }
    const bool took_direct = file && file->direct();
    const int id = file ? engine->add_file(std::move(file)) : -error.code;
    if (file == nullptr && id == -EBADF && error.code == 0) error = make_error(EBADF, "this disk engine is closed");
    if (id < 0) report(err, error);
    if (id >= 0 && direct != nullptr) *direct = took_direct ? 1 : 0;
    return id;
  });
}

int uw_disk_resize(uw_disk* disk, int32_t id, int64_t size_bytes, uw_error* err) {
  return guarded(-ENOMEM, err, [&]() -> int {
    uw_error error = no_error();
    auto engine = live(disk, &error);
    auto file = engine ? open_file(*engine, id, &error) : nullptr;
    if (file && valid_size(size_bytes, &error) && file->resize(size_bytes, &error)) return 0;
    report(err, error);
    return -error.code;
  });
}

int uw_disk_close_file(uw_disk* disk, int32_t id, uw_error* err) {
  return guarded(-ENOMEM, err, [&]() -> int {
    uw_error error = no_error();
    auto engine = live(disk, &error);
    if (engine && engine->remove_file(id)) return 0;
    if (engine) error = make_error(EBADF, "disk file %d is closed or never existed", id);
    report(err, error);
    return -error.code;
  });
}

uw_ticket uw_disk_submit(uw_disk* disk, int32_t op, int32_t id, int64_t offset, void* address, int64_t length,
                         const uw_ticket* after, int32_t n_after, uw_error* err) {
  return guarded<uw_ticket>(0, err, [&]() -> uw_ticket {
    auto engine = live(disk, err);
    auto file = engine ? open_file(*engine, id, err) : nullptr;
    if (!file) return 0;
    auto request = std::make_shared<Request>();
    request->ticket = std::make_shared<Ticket>();
    request->file = std::move(file);
    request->op = op;
    request->offset = offset;
    request->address = static_cast<char*>(address);
    request->length = length;
    return valid_request(*request, err) ? engine->submit(request, after, n_after, err) : 0;
  });
}

int64_t uw_disk_pending(uw_disk* disk) {
  uw_error error = no_error();
  auto engine = live(disk, &error);
  return engine ? engine->pending() : -error.code;
}

int uw_disk_fault(uw_disk* disk, int32_t op, int64_t skip, int64_t count, int32_t code) {
  uw_error error = no_error();
  auto engine = live(disk, &error);
  if (!engine) return -error.code;
  if (!valid_op(op) || skip < 0 || count < 0 || code <= 0) return -EINVAL;
  engine->fault(op, skip, count, code);
  return 0;
}

int uw_disk_throttle(uw_disk* disk, int32_t op, double bytes_per_second) {
  uw_error error = no_error();
  auto engine = live(disk, &error);
  if (!engine) return -error.code;
  if (!valid_op(op) || !(bytes_per_second >= 0)) return -EINVAL;
  engine->throttle(op, bytes_per_second);
  return 0;
}

}  // extern "C"
