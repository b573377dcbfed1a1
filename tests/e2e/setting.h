// Where an end-to-end test takes place: a client host and a server host on one event loop, over loopback TCP (or the
// system's RDMA device), or in virtual time.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "base/event_loop.h"
#include "base/prng.h"
#include "base/trace.h"

namespace stagecoach::e2e {

class Setting {
 public:
  virtual ~Setting() = default;
  virtual EventLoop& loop() = 0;
  // Whose program runs from now on: matters where new objects are made.
  virtual void ActAsServer() {}
  virtual void ActAsClient() {}
  // A numeric address, of either family.
  virtual std::string server_host() const = 0;
  // "10.0.0.1:20049", "[::1]:20049": a port of the server host, as messages name it.
  std::string HostPort(uint16_t port) const;
  // Runs the loop until `done`; false if that takes longer than any test should wait.
  virtual bool Until(const std::function<bool()>& done) = 0;
  // Runs the loop for this long.
  void For(Duration time);
};

inline std::string Setting::HostPort(uint16_t port) const {
  const std::string host = server_host();
  const bool brackets = host.find(':') != std::string::npos;
  return (brackets ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

inline void Setting::For(Duration time) {
  bool over = false;
  loop().At(loop().Now() + time, [&over] { over = true; });
  Until([&over] { return over; });
}

// ServerOptions::shared_receives for servers that have no number of their own: the tests run with 0, and once more with
// TEST_SHARED_RECEIVES.
inline uint32_t SharedReceivesByDefault() {
  const char* const number = std::getenv("TEST_SHARED_RECEIVES");
  return number != nullptr ? static_cast<uint32_t>(std::strtoul(number, nullptr, 10)) : 0;
}

// A fresh one for each test. `seed` and `trace` matter in virtual time.
std::unique_ptr<Setting> MakeSetting(uint64_t seed, TraceSink* trace);

// With a seed that each test has for itself: its name.
inline std::unique_ptr<Setting> MakeSettingOfThisTest() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return MakeSetting(StableHash(test->name()), nullptr);
}

}  // namespace stagecoach::e2e
