#include "base/signals/restarts.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace stagecoach {
namespace {

void Nothing(int) {}
void NothingMore(int, siginfo_t*, void*) {}

class Restarts : public testing::Test {
 protected:
  void TearDown() override {
    for (const int signal : {SIGUSR1, SIGUSR2}) ::signal(signal, SIG_DFL);
  }
  static void Handle(int signal, int flags) {
    struct sigaction action {};
    if ((flags & SA_SIGINFO) != 0) {
      action.sa_sigaction = NothingMore;
    } else {
      action.sa_handler = Nothing;
    }
    action.sa_flags = flags;
    ASSERT_EQ(sigaction(signal, &action, nullptr), 0);
  }
};

TEST_F(Restarts, SaysWhatTheHandlersHaveInCommon) {
  // The test's own surroundings (a sanitizer, a test runner) may have some.
  if (HandlersNow() != Handlers::kNone) GTEST_SKIP() << "handlers of others are there";
  Handle(SIGUSR1, SA_RESTART);
  EXPECT_EQ(HandlersNow(), Handlers::kRestart);
  Handle(SIGUSR2, SA_RESTART | SA_SIGINFO);
  EXPECT_EQ(HandlersNow(), Handlers::kRestart);
  Handle(SIGUSR2, SA_SIGINFO);
  EXPECT_EQ(HandlersNow(), Handlers::kMixed);
  Handle(SIGUSR1, 0);
  EXPECT_EQ(HandlersNow(), Handlers::kInterrupt);
}

TEST_F(Restarts, WhatAThreadBringsUponItselfDoesNotCount) {
  if (HandlersNow() != Handlers::kNone) GTEST_SKIP() << "handlers of others are there";
  struct sigaction before {};
  struct sigaction action {};
  action.sa_handler = Nothing;
  ASSERT_EQ(sigaction(SIGSEGV, &action, &before), 0);
  EXPECT_EQ(HandlersNow(), Handlers::kNone);
  ASSERT_EQ(sigaction(SIGSEGV, &before, nullptr), 0);
}

}  // namespace
}  // namespace stagecoach
