// Forks while all threads of a process use the libraries: whatever they were in the middle of, the child can have a
// device of its own.

#include <gtest/gtest.h>
#include <rdma/rdma_cma.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "verbs_shim/emulated/want.h"

#undef ibv_reg_mr

extern "C" int ibv_read_sysfs_file(const char*, const char*, char*, size_t);

namespace stagecoach::verbs::emulated {
namespace {

constexpr int kForks = 80;

// Threads that do the same things over and over.
class Load {
 public:
  explicit Load(const std::vector<std::function<void()>>& things) {
    for (const auto& thing : things) {
      threads_.emplace_back([this, thing] {
        while (!done_.load()) thing();
      });
    }
  }
  ~Load() {
    done_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

 private:
  std::atomic<bool> done_{false};
  std::vector<std::thread> threads_;
};

// The exit code of a child that does `run`; 128 and a signal's number, where one has ended it.
int ExitCodeOf(const std::function<int()>& run) {
  const pid_t child = fork();
  if (child < 0) return -1;
  if (child == 0) {
    alarm(kWantPatience / 1000);
    _exit(run());
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Of an errno, which fits an exit code.
int Play() {
  return Scene().Play();
}

void Register() {
  ibv_device** const devices = ibv_get_device_list(nullptr);
  ASSERT_NE(devices, nullptr);
  ibv_context* const context = ibv_open_device(devices[0]);
  ASSERT_NE(context, nullptr);
  ibv_pd* const pd = ibv_alloc_pd(context);
  char memory[64];
  for (int i = 0; i < 20; ++i) {
    ibv_mr* const mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
    ASSERT_NE(mr, nullptr);
    EXPECT_EQ(ibv_dereg_mr(mr), 0);
  }
  char text[100];
  ibv_read_sysfs_file(devices[0]->ibdev_path, "node_type", text, sizeof text);
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);
  EXPECT_EQ(ibv_close_device(context), 0);
  ibv_free_device_list(devices);
}

// Comes first: nothing has been used in this process yet, and each child is the first to use anything.
TEST(ForkLoadTest, AChildOfAProcessThatIsAboutToBegin) {
  for (int i = 0; i < kForks && !HasFailure(); ++i) {
    EXPECT_EQ(ExitCodeOf([i] {
                std::atomic<int> begun{0};
                const auto begin = [&begun] {
                  ++begun;
                  if (ibv_device** const devices = ibv_get_device_list(nullptr)) ibv_free_device_list(devices);
                  Play();
                };
                const Load load({begin, begin});
                // At another moment of their beginning each time.
                while (begun.load() == 0) {
                }
                for (std::atomic<int> spins = i * 500; spins.load() > 0;) --spins;
                return ExitCodeOf(Play);
              }),
              0);
  }
}

TEST(ForkLoadTest, AChildOfABusyProcess) {
  ASSERT_EQ(Play(), 0);
  const Load load({[] { EXPECT_EQ(Play(), 0); }, [] { EXPECT_EQ(Play(), 0); }, Register, Register});
  for (int i = 0; i < kForks && !HasFailure(); ++i) EXPECT_EQ(ExitCodeOf(Play), 0);
}

}  // namespace
}  // namespace stagecoach::verbs::emulated
