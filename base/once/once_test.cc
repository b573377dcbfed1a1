#include "base/once/once.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <new>
#include <thread>
#include <vector>

namespace stagecoach {
namespace {

TEST(OnceTest, IsDoneByOneOfManyAndSeenByAll) {
  for (int round = 0; round < 200; ++round) {
    Once once;
    int done = 0;  // guarded by what is tested
    std::promise<void> begin;
    const std::shared_future<void> begun = begin.get_future().share();
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        begun.wait();
        once.Do([&] { ++done; });
        EXPECT_EQ(done, 1);
      });
    }
    begin.set_value();
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(OnceTest, WhatFailsIsTriedAgain) {
  Once once;
  int tries = 0;
  const auto fail_at_first = [&] {
    if (++tries == 1) throw std::bad_alloc();
  };
  EXPECT_THROW(once.Do(fail_at_first), std::bad_alloc);
  EXPECT_NO_THROW(once.Do(fail_at_first));
  EXPECT_NO_THROW(once.Do(fail_at_first));
  EXPECT_EQ(tries, 2);
}

TEST(OnceTest, WhoWaitsForWhatFailsDoesIt) {
  Once once;
  std::promise<void> is_in;
  std::promise<void> may_fail;
  std::thread first([&] {
    EXPECT_THROW(once.Do([&] {
      is_in.set_value();
      may_fail.get_future().wait();
      throw std::bad_alloc();
    }),
                 std::bad_alloc);
  });
  is_in.get_future().wait();
  bool is_done = false;
  std::thread second([&] { once.Do([&] { is_done = true; }); });
  may_fail.set_value();
  first.join();
  second.join();
  EXPECT_TRUE(is_done);
}

// ThreadSanitizer does not follow a process with threads through a fork.
#ifndef __SANITIZE_THREAD__

TEST(OnceTest, AChildForkedInTheMidstBeginsAnew) {
  Once once;
  std::promise<void> is_in;
  std::promise<void> may_end;
  int done = 0;
  std::thread thread([&] {
    once.Do([&] {
      is_in.set_value();
      may_end.get_future().wait();
      ++done;
    });
  });
  is_in.get_future().wait();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    once.Do([&] { done = 5; });
    once.Do([&] { done = 6; });
    _exit(done == 5 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  may_end.set_value();
  thread.join();
  EXPECT_EQ(done, 1) << "it is the parent's still";
}

#endif  // __SANITIZE_THREAD__

TEST(OnceTest, WhatWasDoneBeforeAForkIsDone) {
  Once once;
  once.Do([] {});
  const pid_t child = fork();
  if (child == 0) {
    once.Do([] { _exit(1); });
    _exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace stagecoach
