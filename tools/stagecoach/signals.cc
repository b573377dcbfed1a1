#include "tools/stagecoach/signals.h"

#include <csignal>

namespace stagecoach::cli {

void AddEndingSignals(asio::signal_set& signals) {
  asio::error_code ignored;  // only SIGKILL and SIGSTOP cannot be added
  signals.add(SIGINT, ignored);
  signals.add(SIGTERM, ignored);
  struct sigaction hangup = {};
  ::sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) signals.add(SIGHUP, ignored);
}

}  // namespace stagecoach::cli
