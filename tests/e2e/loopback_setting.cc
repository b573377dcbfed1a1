// Real time, both ends in this process, over loopback; or over the address that STAGECOACH_TEST_ADDRESS names (IPv4 or
// IPv6), for devices that do not answer on loopback, such as rxe and siw on an Ethernet interface.
// STAGECOACH_TEST_PATIENCE multiplies the bound of waits, for slow machines.
#include <algorithm>
#include <cstdlib>

#include "base/asio_loop/asio_loop.h"
#include "tests/e2e/setting.h"

namespace stagecoach::e2e {
namespace {

class LoopbackSetting final : public Setting {
 public:
  EventLoop& loop() override { return loop_; }
  std::string server_host() const override {
    const char* named = std::getenv("STAGECOACH_TEST_ADDRESS");
    return named != nullptr ? named : "127.0.0.1";
  }
  bool Until(const std::function<bool()>& done) override {
    const Instant limit = loop_.Now() + 30s * Patience();
    while (!done()) {
      if (loop_.Now() >= limit) return false;
      loop_.RunOnce(50ms);
    }
    return true;
  }

 private:
  static int Patience() {
    const char* factor = std::getenv("STAGECOACH_TEST_PATIENCE");
    return factor != nullptr ? std::max(1, std::atoi(factor)) : 1;
  }

  AsioLoop loop_;
};

}  // namespace

std::unique_ptr<Setting> MakeSetting(uint64_t, TraceSink*) {
  return std::make_unique<LoopbackSetting>();
}

}  // namespace stagecoach::e2e
