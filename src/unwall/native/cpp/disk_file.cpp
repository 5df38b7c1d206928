// Logical files: opening, reserving space, and where a byte lives.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>

#include "disk.hpp"

namespace unwall {

DiskFile::~DiskFile() {
  for (Part& part : parts_) {
    if (part.fd >= 0) ::close(part.fd);
  }
}

bool DiskFile::direct() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.direct; });
}

// Creation is a step of its own: a file system that refuses O_DIRECT may have made the file before it says so.
// `descriptor` >= 0: the file behind it, whatever `path` means by now (/proc is the kernel's way to open a descriptor again).
bool DiskFile::add_part(const char* path, int descriptor, bool create, uw_error* err) {
  parts_.emplace_back();
  Part& part = parts_.back();
  part.path = path;
  auto fail = [&](int code, const char* what) {
    report(err, file_error(code, 0, part.path, -1, -1, what));
    return false;
  };
  const bool held = descriptor >= 0;
  const std::string target = held ? "/proc/self/fd/" + std::to_string(descriptor) : part.path;
  const int flags = O_RDWR | O_CLOEXEC | (held ? 0 : O_NOFOLLOW);
  if (create && !held) {
    part.fd = ::open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (part.fd < 0 && errno != EEXIST) return fail(errno, "cannot create the file");
    part.created = part.fd >= 0;
  }
  int direct = ::open(target.c_str(), flags | O_DIRECT);
  if (direct >= 0) {
    if (part.fd >= 0) ::close(part.fd);
    part.fd = direct;
    part.direct = true;
  } else if (errno != EINVAL && errno != EOPNOTSUPP) {
    return fail(errno, "cannot open the file");
  } else if (part.fd < 0 && (part.fd = ::open(target.c_str(), flags)) < 0) {
    return fail(errno, "cannot open the file");
  }
  struct stat info;
  if (fstat(part.fd, &info) != 0) return fail(errno, "cannot stat the file");
  part.old_bytes = info.st_size;
  if (!S_ISREG(info.st_mode)) return fail(EINVAL, "not a regular file");
  for (size_t i = 0; i + 1 < parts_.size(); ++i) {
    struct stat other;
    if (fstat(parts_[i].fd, &other) == 0 && other.st_dev == info.st_dev && other.st_ino == info.st_ino) {
      return fail(EINVAL, "the same file was given twice for one striped file");
    }
  }
  return true;
}

std::shared_ptr<DiskFile> DiskFile::open(const char* const* paths, const int32_t* descriptors, int n_paths,
                                         int64_t stripe_bytes, int64_t size_bytes, bool create, uw_error* err) {
  auto file = std::make_shared<DiskFile>(stripe_bytes);
  file->parts_.reserve(static_cast<size_t>(n_paths));
  bool ok = true;
  for (int i = 0; ok && i < n_paths; ++i) {
    ok = file->add_part(paths[i], descriptors == nullptr ? -1 : descriptors[i], create, err);
  }
  if (ok && size_bytes > 0) ok = file->allocate(size_bytes, err);
  if (!ok) {
    file->restore();
    return nullptr;
  }
  file->size_bytes_ = size_bytes > 0 ? size_bytes : file->covered_bytes();
  return file;
}

Place DiskFile::locate(int64_t offset) const {
  const int64_t n = static_cast<int64_t>(parts_.size());
  if (n == 1) return {&parts_[0], offset, kNever};
  const int64_t stripe = offset / stripe_bytes_, within = offset % stripe_bytes_;
  return {&parts_[static_cast<size_t>(stripe % n)], (stripe / n) * stripe_bytes_ + within, stripe_bytes_ - within};
}

// Bytes of part `index` when the logical file has `size_bytes`.
int64_t DiskFile::part_bytes(int64_t size_bytes, int64_t index) const {
  const int64_t n = static_cast<int64_t>(parts_.size());
  if (n == 1) return size_bytes;
  const int64_t full = size_bytes / stripe_bytes_, last = full % n;
  return (full / n + (index < last ? 1 : 0)) * stripe_bytes_ + (index == last ? size_bytes % stripe_bytes_ : 0);
}

// The logical size that the parts as they are can hold without a hole: up to the first byte that some part lacks.
int64_t DiskFile::covered_bytes() const {
  const int64_t n = static_cast<int64_t>(parts_.size());
  if (n == 1) return parts_[0].old_bytes;
  int64_t covered = kNever;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t bytes = parts_[static_cast<size_t>(i)].old_bytes;
    covered = std::min(covered, (bytes / stripe_bytes_ * n + i) * stripe_bytes_ + bytes % stripe_bytes_);
  }
  return covered;
}

// Reserves the blocks now, so that ENOSPC is met here and not in the middle of training. Never shrinks.
bool DiskFile::allocate(int64_t size_bytes, uw_error* err) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const int64_t bytes = part_bytes(size_bytes, static_cast<int64_t>(i));
    if (bytes == 0) continue;
    int result;
    do result = fallocate(parts_[i].fd, 0, 0, bytes) == 0 ? 0 : errno;
    while (result == EINTR);
    if (result == EOPNOTSUPP || result == ENOSYS) {
      result = bytes <= parts_[i].old_bytes || ftruncate(parts_[i].fd, bytes) == 0 ? 0 : errno;
    }
    if (result != 0) {
      char what[64];
      std::snprintf(what, sizeof what, "cannot reserve %lld bytes", static_cast<long long>(bytes));
      report(err, file_error(result, UW_WRITE, parts_[i].path, 0, bytes, what));
      return false;
    }
  }
  return true;
}

// Undoes what a failed open or resize did: removes the files it created, gives back what it added to others.
void DiskFile::restore() {
  for (Part& part : parts_) {
    struct stat info;
    if (part.created) {
      unlink(part.path.c_str());
    } else if (part.fd >= 0 && fstat(part.fd, &info) == 0 && info.st_size > part.old_bytes) {
      if (ftruncate(part.fd, part.old_bytes) != 0) continue;  // the error being reported matters more
    }
  }
}

bool DiskFile::resize(int64_t size_bytes, uw_error* err) {
  std::lock_guard<std::mutex> lock(resizing_);
  for (Part& part : parts_) {
    struct stat info;
    part.created = false;
    part.old_bytes = fstat(part.fd, &info) == 0 ? info.st_size : kNever;
  }
  if (size_bytes >= size_bytes_) {
    if (!allocate(size_bytes, err)) {
      restore();
      return false;
    }
    size_bytes_ = size_bytes;
    return true;
  }
  size_bytes_ = size_bytes;  // first, so that no new request is let in where the file is about to end
  for (size_t i = 0; i < parts_.size(); ++i) {
    const int64_t bytes = part_bytes(size_bytes, static_cast<int64_t>(i));
    if (ftruncate(parts_[i].fd, bytes) != 0) {
      report(err, file_error(errno, UW_WRITE, parts_[i].path, bytes, -1, "cannot shorten the file"));
      return false;
    }
  }
  return true;
}

}  // namespace unwall
