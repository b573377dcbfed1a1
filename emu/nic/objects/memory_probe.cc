#include "emu/nic/objects/memory_probe.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <memory>

namespace stagecoach::emu {
namespace {

// Of Linux 5.14; Debian's C library headers know them, older ones do not.
constexpr int kPopulateRead = 22;   // MADV_POPULATE_READ
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE

struct FileCloser {
  void operator()(FILE* file) const { fclose(file); }
};

// Walks the list of mappings, which is sorted by address. For kernels that cannot populate, and for mappings of
// devices, which the kernel refuses to populate though they can be accessed.
bool IsMapped(uintptr_t begin, uintptr_t end, bool writable) {
  std::unique_ptr<FILE, FileCloser> maps(fopen("/proc/self/maps", "re"));
  if (maps == nullptr) return false;
  uintptr_t covered = begin;
  char line[512];
  while (covered < end && fgets(line, sizeof line, maps.get()) != nullptr) {
    uintptr_t first = 0;
    uintptr_t last = 0;
    char rights[5] = "";
    if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &first, &last, rights) != 3) continue;  // the rest of a long path
    if (last <= covered) continue;
    if (first > covered || rights[0] != 'r' || (writable && rights[1] != 'w')) return false;
    covered = last;
  }
  return covered >= end;
}

}  // namespace

int ProbeMemory(const void* address, uint64_t length, bool writable) {
  if (length == 0) return 0;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address) & ~(page - 1);
  const uintptr_t last = reinterpret_cast<uintptr_t>(address) + (length - 1);
  if (last < begin || last > UINTPTR_MAX - page) return EFAULT;
  const uintptr_t end = (last | (page - 1)) + 1;
  for (;;) {
    if (madvise(reinterpret_cast<void*>(begin), end - begin, writable ? kPopulateWrite : kPopulateRead) == 0) return 0;
    if (errno != EINTR && errno != EAGAIN) break;
  }
  if (errno != EINVAL) return EFAULT;
  return IsMapped(begin, end, writable) ? 0 : EFAULT;
}

}  // namespace stagecoach::emu
