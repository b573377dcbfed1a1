// Real time, both ends in this process, over loopback.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>

#include "verbs_shim/tests/surroundings.h"

namespace stagecoach::verbs {
namespace {

class LoopbackSurroundings final : public Surroundings {
 public:
  void Begin() override {}
  void End() override {}
  void ActAsServer() override {}
  void ActAsClient() override {}

  sockaddr_storage ServerAddress() const override { return Loopback(0); }

  sockaddr_storage RefusingAddress() const override {
    // Bound but not listening, and kept bound: nobody else can take the port.
    static const int held = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_storage address = Loopback(0);
    socklen_t length = sizeof(sockaddr_in);
    bind(held, reinterpret_cast<sockaddr*>(&address), length);
    getsockname(held, reinterpret_cast<sockaddr*>(&address), &length);
    return address;
  }

  bool Until(const std::function<bool()>& done) override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!done()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      sched_yield();
    }
    return true;
  }

  bool HasThreads() const override { return true; }

 private:
  static sockaddr_storage Loopback(uint16_t port) {
    sockaddr_storage storage{};
    auto* address = reinterpret_cast<sockaddr_in*>(&storage);
    address->sin_family = AF_INET;
    address->sin_port = htons(port);
    address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return storage;
  }
};

}  // namespace

Surroundings& TheSurroundings() {
  static LoopbackSurroundings surroundings;
  return surroundings;
}

}  // namespace stagecoach::verbs
