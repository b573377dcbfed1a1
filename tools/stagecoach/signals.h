// The signals that ask a process to end.
#pragma once

#include <asio/signal_set.hpp>

namespace stagecoach::cli {

// Adds SIGINT, SIGTERM and SIGHUP to the set. SIGHUP not if the process was started with it ignored, as nohup does.
void AddEndingSignals(asio::signal_set& signals);

}  // namespace stagecoach::cli
