// Memory of large tensors on CPUs: blocks of one range, in large pages where the system has them.
//
// PyTorch asks the C library for memory that begins at 64 bytes. glibc splits a few bytes off on
// either side of each tensor and gives them to small objects, so that the place of a freed tensor
// is too small for the next one of the same size: of a training's activations a third of the memory
// was gaps. Here a place that was freed holds the next tensor of its size.
//
// The classes of c10 are no stable interface: megatron/ops/cpu_memory.py loads the library only with
// the torch that it was compiled for.
//
// A function whose parameters or meaning change gets another name: Python calls no other source.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/headeronly/version.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "blocks.h"

namespace {

constexpr size_t kPage = 1 << 12, kLargePage = 1 << 21;
constexpr size_t kSmallest = 1 << 18;  // bytes of a tensor; smaller ones are the C library's
constexpr size_t kOpened = 1 << 26;    // bytes that become usable at a time
// Bytes of a block whose memory goes back to the system as it is freed: it may be that of a whole
// checkpoint, and is seldom taken again. glibc does the same (megatron/host.py).
constexpr size_t kGivenBack = 1 << 30;

constexpr size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// A range of addresses as large as the memory of the machine; the system takes what is used.
class Range {
 public:
  // Returns 0, or the system's error.
  int reserve() {
    if (base_ != nullptr) return 0;
    const size_t room = round_up(sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), kOpened);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* found = mmap(nullptr, room + kLargePage, PROT_NONE, flags, -1, 0);
    if (found == MAP_FAILED) return errno;
    base_ = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(found), kLargePage));
    room_ = room, blocks_ = Blocks(room);
    return 0;
  }

  void* take(size_t size) {
    const std::lock_guard<std::mutex> guard(lock_);
    const size_t at = blocks_.take(round_up(size, kPage));
    if (at == Blocks::kNone) return nullptr;
    if (blocks_.end() > open_ && !open()) {
      blocks_.give(at);
      return nullptr;
    }
    return base_ + at;
  }

  // Takes a block back; returns whether it is one.
  bool give(void* place) {
    const size_t at = reinterpret_cast<size_t>(place) - reinterpret_cast<size_t>(base_);
    if (at >= room_) return false;  // below the range it is larger still
    const std::lock_guard<std::mutex> guard(lock_);
    const size_t size = blocks_.give(at);
    if (size >= kGivenBack) madvise(place, size, MADV_DONTNEED);
    return size > 0;
  }

  // Gives the memory of all gaps back to the system.
  void trim() {
    const std::lock_guard<std::mutex> guard(lock_);
    for (const auto& [at, size] : blocks_.gaps()) madvise(base_ + at, size, MADV_DONTNEED);
    if (open_ > blocks_.end()) {
      madvise(base_ + blocks_.end(), open_ - blocks_.end(), MADV_DONTNEED);
    }
  }

  void sizes(size_t* in_use, size_t* end) {
    const std::lock_guard<std::mutex> guard(lock_);
    *in_use = blocks_.in_use(), *end = blocks_.end();
  }

  void lock() { lock_.lock(); }
  void unlock() { lock_.unlock(); }

 private:
  bool open() {
    const size_t wanted = round_up(blocks_.end(), kOpened), size = wanted - open_;
    if (mprotect(base_ + open_, size, PROT_READ | PROT_WRITE) != 0) return false;
    madvise(base_ + open_, size, MADV_HUGEPAGE);  // advice: other systems have small pages
    open_ = wanted;
    return true;
  }

  std::mutex lock_;
  char* base_ = nullptr;
  size_t room_ = 0, open_ = 0;
  Blocks blocks_;
};

Range& range() {
  static Range* const only = new Range;  // tensors may outlive everything that is static
  return *only;
}

c10::Allocator* others = nullptr;  // what serves small tensors
c10::DeleterFnPtr free_of_others = nullptr;

void free_tensor(void* place) {
  if (place == nullptr) return;
  if (range().give(place)) {
    c10::profiledCPUMemoryReporter().Delete(place);
  } else {
    free_of_others(place);
  }
}

class CpuMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* place = size < kSmallest ? nullptr : range().take(size);
    if (place == nullptr) {
      place = others->allocate(size).release_context();
    } else {
      c10::profiledCPUMemoryReporter().New(place, size);
    }
    return {place, place, &free_tensor, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_tensor; }

  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
};

CpuMemory& own() {
  static CpuMemory* const only = new CpuMemory;
  return *only;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The version of torch whose classes these are.
EXPORTED const char* megatron_cpu_memory_torch() { return TORCH_VERSION; }

// Serves tensors from now on; returns 0 or the system's error. Another thread must not make tensors
// meanwhile.
EXPORTED int megatron_cpu_memory_start() {
  c10::Allocator* const before = c10::GetAllocator(c10::DeviceType::CPU);
  if (before == &own()) return EALREADY;
  // Small tensors of an earlier start are freed by what served them.
  if (others != nullptr && before != others) return EBUSY;
  // What wraps pointers of another kind could not be freed by a pointer alone.
  if (before->raw_deleter() == nullptr) return ENOTSUP;
  if (const int error = range().reserve()) return error;
  static const int at_fork = pthread_atfork([] { range().lock(); }, [] { range().unlock(); },
                                            [] { range().unlock(); });
  if (at_fork != 0) return at_fork;
  others = before, free_of_others = before->raw_deleter();
  c10::SetCPUAllocator(&own());
  return c10::GetAllocator(c10::DeviceType::CPU) == &own() ? 0 : EPERM;
}

// Serves no more tensors; those that it has served keep their memory until they are freed.
EXPORTED void megatron_cpu_memory_stop() {
  if (c10::GetAllocator(c10::DeviceType::CPU) == &own()) c10::SetCPUAllocator(others);
  range().trim();
}

// Bytes of the tensors that it serves now, and those up to the end of the last one.
EXPORTED void megatron_cpu_memory_sizes(size_t* in_use, size_t* end) {
  range().sizes(in_use, end);
}
