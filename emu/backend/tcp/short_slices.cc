#include "emu/backend/tcp/short_slices.h"

#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace stagecoach::emu {
namespace {

// sched_setattr(2), which the C library does not declare.
struct SchedulingAttributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime;  // nanoseconds; of SCHED_OTHER and SCHED_BATCH the slice
  uint64_t deadline;
  uint64_t period;
};

}  // namespace

int TakeSlices(Duration length) {
  SchedulingAttributes attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return errno;
  if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return 0;
  attributes.size = sizeof(attributes);
  attributes.runtime = static_cast<uint64_t>(length.count());
  return syscall(SYS_sched_setattr, 0, &attributes, 0) == 0 ? 0 : errno;
}

}  // namespace stagecoach::emu
