// Words for state dumps.
#pragma once

#include <cstdio>
#include <string>

#include "base/time.h"

namespace stagecoach::rpcrdma {

// "12.000003000", as traces print it.
inline std::string Seconds(Instant instant) {
  const auto ns = static_cast<long long>(instant.time_since_epoch().count());
  char text[40];
  std::snprintf(text, sizeof(text), "%lld.%09lld", ns / 1'000'000'000, ns % 1'000'000'000);
  return text;
}

}  // namespace stagecoach::rpcrdma
