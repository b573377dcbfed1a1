// Real time, both ends in this process, over loopback; or over the address that STAGECOACH_TEST_ADDRESS names (IPv4),
// for devices that do not answer on loopback, such as rxe on an Ethernet interface. STAGECOACH_TEST_ADDRESS6 is its
// IPv6 address, if it has one. STAGECOACH_TEST_PATIENCE multiplies the bound of waits, for slow machines.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/check.h"

#include "verbs_shim/tests/surroundings.h"

namespace stagecoach::verbs {
namespace {

class LoopbackSurroundings final : public Surroundings {
 public:
  void Begin() override {}
  void End() override {}
  void ActAsServer() override {}
  void ActAsClient() override {}

  sockaddr_storage ServerAddress() const override { return Address(); }

  std::optional<sockaddr_storage> ServerAddress6() const override {
    const char* named = std::getenv("STAGECOACH_TEST_ADDRESS6");
    if (named == nullptr && std::getenv("STAGECOACH_TEST_ADDRESS") != nullptr) return std::nullopt;
    sockaddr_storage storage{};
    auto* address = reinterpret_cast<sockaddr_in6*>(&storage);
    address->sin6_family = AF_INET6;
    STAGECOACH_CHECK(inet_pton(AF_INET6, named != nullptr ? named : "::1", &address->sin6_addr) == 1);
    // A host without IPv6 cannot bind it.
    const int probe = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool usable =
        probe >= 0 && bind(probe, reinterpret_cast<const sockaddr*>(address), sizeof(sockaddr_in6)) == 0;
    if (probe >= 0) close(probe);
    if (!usable) return std::nullopt;
    return storage;
  }

  sockaddr_storage RefusingAddress() const override {
    // Bound but not listening, and kept bound: nobody else can take the port.
    static const int held = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_storage address = Address();
    socklen_t length = sizeof(sockaddr_in);
    bind(held, reinterpret_cast<sockaddr*>(&address), length);
    getsockname(held, reinterpret_cast<sockaddr*>(&address), &length);
    return address;
  }

  bool Until(const std::function<bool()>& done) override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10) * Patience();
    while (!done()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      sched_yield();
    }
    return true;
  }

  bool Elapse(Duration) override { return false; }

  void SideBySide(std::function<void()> server, std::function<void()> client) override {
    std::thread other(std::move(server));
    client();
    other.join();
  }

  bool HasThreads() const override { return true; }

 private:
  static int Patience() {
    const char* factor = std::getenv("STAGECOACH_TEST_PATIENCE");
    return factor != nullptr ? std::max(1, std::atoi(factor)) : 1;
  }
  // With port 0.
  static sockaddr_storage Address() {
    sockaddr_storage storage{};
    auto* address = reinterpret_cast<sockaddr_in*>(&storage);
    address->sin_family = AF_INET;
    const char* named = std::getenv("STAGECOACH_TEST_ADDRESS");
    STAGECOACH_CHECK(inet_pton(AF_INET, named != nullptr ? named : "127.0.0.1", &address->sin_addr) == 1);
    return storage;
  }
};

}  // namespace

Surroundings& TheSurroundings() {
  static LoopbackSurroundings surroundings;
  return surroundings;
}

}  // namespace stagecoach::verbs
