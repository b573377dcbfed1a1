#include "emu/backend/tcp/abstract_names.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

namespace stagecoach::emu {
namespace {

// Of this process alone, whatever else runs on the host.
std::string FreshName() {
  static int count = 0;
  return "stagecoach-test/" + std::to_string(getpid()) + "/" + std::to_string(++count);
}

TEST(AbstractNamesTest, ANameIsTakenOnceAndGoesWithItsHolder) {
  AbstractNames names;
  const std::string name = FreshName();
  EXPECT_FALSE(names.IsTaken(name));
  auto taken = names.Take(name);
  ASSERT_TRUE(taken);
  EXPECT_TRUE(names.IsTaken(name));
  EXPECT_FALSE(names.IsTaken(name + "0"));
  auto again = names.Take(name);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error(), EADDRINUSE);
  taken->reset();
  EXPECT_FALSE(names.IsTaken(name));
  EXPECT_TRUE(names.Take(name).has_value());
}

TEST(AbstractNamesTest, ANameOfAProcessGoesWhenItIsKilled) {
  AbstractNames names;
  const std::string name = FreshName();
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto taken = names.Take(name);
    const char told = taken ? 'y' : 'n';
    if (write(ready[1], &told, 1) != 1) _exit(1);
    for (;;) pause();
  }
  char told = 0;
  ASSERT_EQ(read(ready[0], &told, 1), 1);
  EXPECT_EQ(told, 'y');
  EXPECT_TRUE(names.IsTaken(name));
  EXPECT_EQ(names.Take(name).error(), EADDRINUSE);
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(names.IsTaken(name));
  close(ready[0]);
  close(ready[1]);
}

TEST(AbstractNamesTest, AForkedChildDoesNotKeepANameOfItsParents) {
  AbstractNames names;
  const std::string name = FreshName();
  auto taken = names.Take(name);
  ASSERT_TRUE(taken);
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (write(ready[1], "y", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char told = 0;
  ASSERT_EQ(read(ready[0], &told, 1), 1);
  EXPECT_TRUE(names.IsTaken(name));
  taken->reset();
  EXPECT_FALSE(names.IsTaken(name));
  EXPECT_TRUE(names.Take(name).has_value());
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  close(ready[0]);
  close(ready[1]);
}

}  // namespace
}  // namespace stagecoach::emu
