#include "base/asio_loop/asio_loop.h"
#include "tests/e2e/setting.h"

namespace stagecoach::e2e {
namespace {

class LoopbackSetting final : public Setting {
 public:
  EventLoop& loop() override { return loop_; }
  std::string server_host() const override { return "127.0.0.1"; }
  bool Until(const std::function<bool()>& done) override {
    const Instant limit = loop_.Now() + 30s;
    while (!done()) {
      if (loop_.Now() >= limit) return false;
      loop_.RunOnce(50ms);
    }
    return true;
  }

 private:
  AsioLoop loop_;
};

}  // namespace

std::unique_ptr<Setting> MakeSetting(uint64_t, TraceSink*) {
  return std::make_unique<LoopbackSetting>();
}

}  // namespace stagecoach::e2e
