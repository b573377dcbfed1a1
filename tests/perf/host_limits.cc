// What two processes of this host can do with each other's memory at best, without any protocol: the yardsticks of
// rows over shared memory. A cache line that goes back and forth, 1 MiB copied within one process, 1 MiB copied into
// shared memory by one process and out of it by another, and memory of another process read by process_vm_readv(2), 1
// MiB or 32 KiB at a time.
//
// Buffers are used again and again, as those of verbs_bench are.
//
// Usage: host_limits SECONDS
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "tests/perf/measure.h"

namespace {

using stagecoach::perf::PinTo;
using stagecoach::perf::Row;
using stagecoach::perf::Seconds;

constexpr size_t kBlock = 1 << 20;
constexpr size_t kPage = 4096;
// The two copies of a block overlap by pieces, which one process writes while the other reads the one before.
constexpr size_t kPiece = 64 << 10;
constexpr size_t kPieces = 8;

void Must(bool is_done, const char* what) {
  if (is_done) return;
  std::fprintf(stderr, "host_limits: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

// Of this process and its children, zeroed, for good.
void* MapShared(size_t size) {
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Must(memory != MAP_FAILED, "mmap");
  return memory;
}

// A process on the other processor, which does `work` until it is killed, at the latest when its parent ends.
template <typename Work>
class Partner {
 public:
  explicit Partner(const Work& work) : pid_(fork()) {
    Must(pid_ >= 0, "fork");
    if (pid_ > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    PinTo(1);
    work();
    _exit(0);
  }
  ~Partner() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Partner(const Partner&) = delete;
  Partner& operator=(const Partner&) = delete;

  pid_t pid() const { return pid_; }

 private:
  const pid_t pid_;
};

// How often `once` can be done in a second.
template <typename Once>
double RateOf(double seconds, int between_looks, const Once& once) {
  for (int i = 0; i < between_looks; ++i) once();
  double done = 0;
  const double start = Seconds();
  while (Seconds() - start < seconds) {
    for (int i = 0; i < between_looks; ++i) once();
    done += between_looks;
  }
  return done / (Seconds() - start);
}

double InMegabytes(double rate, size_t size) {
  return rate * static_cast<double>(size) / 1e6;
}

// On lines of their own, and no neighbours, which processors fetch in pairs.
struct Counters {
  alignas(256) std::atomic<uint64_t> there{0};
  alignas(256) std::atomic<uint64_t> back{0};
};

void WaitFor(const std::atomic<uint64_t>& counter, uint64_t at_least) {
  while (counter.load(std::memory_order_acquire) < at_least) {
  }
}

void CacheLine(double seconds) {
  auto* const lines = new (MapShared(sizeof(Counters))) Counters;
  const Partner partner([lines] {
    for (uint64_t next = 1;; ++next) {
      WaitFor(lines->there, next);
      lines->back.store(next, std::memory_order_release);
    }
  });
  uint64_t count = 0;
  const double rate = RateOf(seconds, 1000, [&] {
    lines->there.store(++count, std::memory_order_release);
    WaitFor(lines->back, count);
  });
  Row("cache_line_half_rtt", 1e6 / rate / 2, "us");
}

void Copy(double seconds) {
  const std::vector<char> from(kBlock, 1);
  std::vector<char> to(kBlock, 2);
  const double rate = RateOf(seconds, 10, [&] {
    std::memcpy(to.data(), from.data(), kBlock);
    // Or one copy would do for all of them.
    asm volatile("" : : "r"(to.data()) : "memory");
  });
  Row("memcpy_1m", InMegabytes(rate, kBlock), "MB/s");
}

void CopyThroughSharedMemory(double seconds) {
  // `there` counts pieces written, `back` those that have been read.
  auto* const counters = new (MapShared(sizeof(Counters))) Counters;
  auto* const ring = static_cast<char*>(MapShared(kPieces * kPiece));
  const auto piece_of = [ring](uint64_t number) { return ring + number % kPieces * kPiece; };
  const Partner partner([&] {
    std::vector<char> to(kBlock, 2);
    for (uint64_t number = 0;; ++number) {
      WaitFor(counters->there, number + 1);
      std::memcpy(to.data() + number * kPiece % kBlock, piece_of(number), kPiece);
      counters->back.store(number + 1, std::memory_order_release);
    }
  });
  const std::vector<char> from(kBlock, 1);
  uint64_t number = 0;
  const double rate = RateOf(seconds, 10, [&] {
    for (size_t at = 0; at < kBlock; at += kPiece, ++number) {
      if (number >= kPieces) WaitFor(counters->back, number - kPieces + 1);
      std::memcpy(piece_of(number), from.data() + at, kPiece);
      counters->there.store(number + 1, std::memory_order_release);
    }
  });
  Row("copy_through_shm_1m", InMegabytes(rate, kBlock), "MB/s");
}

void ReadAnother(double seconds) {
  auto* const is_filled = new (MapShared(kPage)) std::atomic<uint64_t>(0);
  // At the same address in both processes.
  std::vector<char> theirs(kBlock);
  const Partner partner([&] {
    std::memset(theirs.data(), 1, kBlock);
    is_filled->store(1, std::memory_order_release);
    for (;;) pause();
  });
  WaitFor(*is_filled, 1);
  std::vector<char> ours(kBlock, 2);
  const auto read_at = [&](size_t at, size_t size) {
    const iovec local{ours.data() + at, size};
    const iovec remote{theirs.data() + at, size};
    const ssize_t count = process_vm_readv(partner.pid(), &local, 1, &remote, 1, 0);
    Must(count == static_cast<ssize_t>(size), "process_vm_readv");
  };
  // Where that is forbidden (ptrace(2), a container's filter) there are no such rows.
  const iovec byte_here{ours.data(), 1};
  const iovec byte_there{theirs.data(), 1};
  if (process_vm_readv(partner.pid(), &byte_here, 1, &byte_there, 1, 0) != 1) {
    std::fprintf(stderr, "host_limits: no rows of process_vm_readv: %s\n", std::strerror(errno));
    return;
  }
  Row("process_vm_readv_1m", InMegabytes(RateOf(seconds, 10, [&] { read_at(0, kBlock); }), kBlock), "MB/s");
  constexpr size_t kSmall = 32 << 10;
  size_t at = 0;
  const double rate = RateOf(seconds, 100, [&] {
    read_at(at, kSmall);
    at = (at + kSmall) % kBlock;
  });
  Row("process_vm_readv_32k", InMegabytes(rate, kSmall), "MB/s");
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  PinTo(0);
  CacheLine(seconds);
  Copy(seconds);
  CopyThroughSharedMemory(seconds);
  ReadAnother(seconds);
  return 0;
}
