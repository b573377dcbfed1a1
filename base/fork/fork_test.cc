#include "base/fork/fork.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace stagecoach {
namespace {

bool IsOpen(int fd) {
  return fcntl(fd, F_GETFD) >= 0;
}

// What the child says of itself.
template <typename Holds>
bool InChild(Holds holds) {
  const pid_t child = fork();
  if (child == 0) _exit(holds() ? 0 : 1);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(Fork, ChildrenDoNotHaveWhatIsKeptFromThem) {
  const int kept = KeepFromChildren(dup(STDIN_FILENO));
  const int shared = dup(STDIN_FILENO);
  const int far = KeepFromChildren(fcntl(STDIN_FILENO, F_DUPFD, 1000));
  ASSERT_GE(far, 1000);
  EXPECT_TRUE(InChild([&] { return !IsOpen(kept) && IsOpen(shared) && !IsOpen(far); }));
  EXPECT_TRUE(IsOpen(kept));
  CloseDescriptor(kept);
  CloseDescriptor(far);
  EXPECT_FALSE(IsOpen(kept));
  // The number is somebody else's now.
  const int again = dup(STDIN_FILENO);
  ASSERT_EQ(again, kept);
  EXPECT_TRUE(InChild([&] { return IsOpen(again); }));
  close(again);
  close(shared);
}

TEST(Fork, AChildIsOfAnotherGenerationAndItsChildrenAgain) {
  const uint32_t ours = ForkGeneration();
  KeepFromChildren(-1);
  EXPECT_TRUE(InChild([&] {
    const uint32_t childs = ForkGeneration();
    return childs != ours && InChild([&] { return ForkGeneration() != ours && ForkGeneration() != childs; });
  }));
  EXPECT_EQ(ForkGeneration(), ours);
}

}  // namespace
}  // namespace stagecoach
