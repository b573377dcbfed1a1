#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "emu/backend/shm/shm_fabric.h"
#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/nic/test_records.h"

namespace stagecoach::emu {
namespace {

std::atomic<int> chosen{0};
std::atomic<int> chosen_shared{0};

class SomeAreShared final : public testing::Environment {
 public:
  void TearDown() override { EXPECT_TRUE(chosen == 0 || chosen_shared > 0) << "no records went through shared memory"; }
};

[[maybe_unused]] const auto* const environment = testing::AddGlobalTestEnvironment(new SomeAreShared);

}  // namespace

// In a simulated world there is no memory to share.
std::unique_ptr<Fabric> WithTestRecords(Fabric& beneath) {
  auto* const tcp = dynamic_cast<TcpFabric*>(&beneath);
  if (tcp == nullptr) return nullptr;
  ShmFabric::Options options;
  options.on_choice = [](const IpEndpoint&, const IpEndpoint&, const Carriage& carriage) {
    ++chosen;
    if (carriage.by == "shm") ++chosen_shared;
  };
  return std::make_unique<ShmFabric>(*tcp, std::move(options));
}

void ResetTestRecords() {}

}  // namespace stagecoach::emu
