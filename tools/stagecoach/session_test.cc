#include "tools/stagecoach/session.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <csignal>

namespace stagecoach::cli {
namespace {

TEST(SessionDeathTest, TheFirstSignalEndsWaitingAndTheSecondTheProcess) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    EXPECT_EXIT(
        {
          std::signal(signal, SIG_DFL);
          Session session({"127.0.0.1", 1}, {});
          std::raise(signal);
          while (session.RunOnce()) {
          }
          if (!session.interrupted()) _exit(1);
          std::raise(signal);
          _exit(2);
        },
        ::testing::KilledBySignal(signal), "");
  }
}

}  // namespace
}  // namespace stagecoach::cli
