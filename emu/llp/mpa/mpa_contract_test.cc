// MPA over a stream, as every record layer is: gathered from where the payload lies, and staged for a CRC.
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "emu/fabric/fabric.h"
#include "emu/llp/llp_contract.h"
#include "emu/llp/mpa/mpa_llp.h"
#include "emu/sim/sim_world.h"

namespace stagecoach::emu {
namespace {

template <bool with_crc>
class MpaPair {
 public:
  MpaPair() {
    std::unique_ptr<Stream> a;
    std::unique_ptr<Stream> b;
    const auto listener =
        host_b_.Listen(*IpEndpoint::Parse("10.0.0.2", 1), 1, [&](auto stream) { b = std::move(stream); });
    const auto attempt = host_a_.Connect({}, (*listener)->local(), [&](auto result) { a = std::move(*result); });
    world_.RunUntilIdle();
    a_ = std::make_unique<MpaLlp>(std::move(a), RecordOptions{.crc = with_crc});
    b_ = std::make_unique<MpaLlp>(std::move(b), RecordOptions{.crc = with_crc});
  }
  Llp& a() { return *a_; }
  Llp& b() { return *b_; }
  void DropA() { a_.reset(); }
  void RunLoop() { world_.RunUntilIdle(); }

 private:
  SimWorld world_{1};
  SimFabric& host_a_ = world_.AddHost("a", {*IpEndpoint::Parse("10.0.0.1", 0)});
  SimFabric& host_b_ = world_.AddHost("b", {*IpEndpoint::Parse("10.0.0.2", 0)});
  std::unique_ptr<MpaLlp> a_;
  std::unique_ptr<MpaLlp> b_;
};

INSTANTIATE_TYPED_TEST_SUITE_P(Mpa, LlpContract, MpaPair<false>);
INSTANTIATE_TYPED_TEST_SUITE_P(MpaWithCrc, LlpContract, MpaPair<true>);

}  // namespace
}  // namespace stagecoach::emu
