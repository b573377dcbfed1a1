#include "emu/backend/tcp/short_slices.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include "emu/backend/tcp/tcp_fabric.h"

namespace stagecoach::emu {
namespace {

// What sched_getattr(2) says of a thread.
struct Attributes {
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime, deadline, period;
};
Attributes Of(pid_t thread) {
  Attributes attributes{};
  EXPECT_EQ(syscall(SYS_sched_getattr, thread, &attributes, sizeof(attributes), 0), 0);
  return attributes;
}

// Linux 6.12 and later.
bool KernelHasSlices() {
  utsname system{};
  int major = 0;
  int minor = 0;
  if (uname(&system) != 0 || std::sscanf(system.release, "%d.%d", &major, &minor) != 2) return false;
  return major > 6 || (major == 6 && minor >= 12);
}

TEST(ShortSlicesTest, TheSliceChangesAndNothingElse) {
  std::thread([] {
    const pid_t self = gettid();
    ASSERT_EQ(setpriority(PRIO_PROCESS, static_cast<id_t>(self), 5), 0);
    const sched_param none{};
    ASSERT_EQ(sched_setscheduler(0, SCHED_BATCH, &none), 0);
    ASSERT_EQ(TakeSlices(kShortestSlice), 0);
    const Attributes after = Of(0);
    EXPECT_EQ(after.policy, static_cast<uint32_t>(SCHED_BATCH));
    EXPECT_EQ(after.nice, 5);
    if (KernelHasSlices()) {
      EXPECT_EQ(after.runtime, 100'000u);
    }
  }).join();
}

TEST(ShortSlicesTest, TheDevicesThreadHasThemAndTheProgramsHasNot) {
  if (!KernelHasSlices()) GTEST_SKIP() << "skipped: this kernel has no slices to ask for";
  TcpFabric fabric;
  pid_t thread = 0;
  DIR* const tasks = opendir("/proc/self/task");
  ASSERT_NE(tasks, nullptr);
  // Its name and its slices are of the thread's own making, and what is posted comes after that.
  std::promise<void> runs;
  fabric.loop().Post([&] { runs.set_value(); });
  runs.get_future().wait();
  while (const dirent* const task = readdir(tasks)) {
    std::string name;
    std::getline(std::ifstream(std::string("/proc/self/task/") + task->d_name + "/comm"), name);
    if (name == "stagecoach-nic") thread = std::stoi(task->d_name);
  }
  closedir(tasks);
  ASSERT_NE(thread, 0);
  EXPECT_EQ(Of(thread).runtime, 100'000u);
  EXPECT_NE(Of(0).runtime, 100'000u);
}

}  // namespace
}  // namespace stagecoach::emu
