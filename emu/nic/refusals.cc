#include "emu/nic/refusals.h"

#include <algorithm>
#include <array>

namespace stagecoach::emu {
namespace {

constexpr std::array<uint8_t, 12> kIpv4Prefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr size_t kNetworkSize = 8;

}  // namespace

Refusals::Source::Source(const wire::Gid& address, std::optional<uint32_t> of_user) : network(address), user(of_user) {
  const bool is_ipv4 = std::equal(kIpv4Prefix.begin(), kIpv4Prefix.end(), address.begin());
  if (!is_ipv4) std::fill(network.begin() + kNetworkSize, network.end(), uint8_t{0});
}

bool Refusals::IsTooOften(const Source& source, Instant now) const {
  const auto found = settled_at_.find(source);
  return found != settled_at_.end() && found->second - now > kForEach * (kAtOnce - 1);
}

void Refusals::Count(const Source& source, Instant now) {
  if (settled_at_.size() >= kSourcesMax && settled_at_.count(source) == 0) {
    std::erase_if(settled_at_, [now](const auto& each) { return each.second <= now; });
    if (settled_at_.size() >= kSourcesMax) {
      settled_at_.erase(std::min_element(settled_at_.begin(), settled_at_.end(),
                                         [](const auto& a, const auto& b) { return a.second < b.second; }));
    }
  }
  Instant& settled_at = settled_at_[source];
  settled_at = std::max(settled_at, now) + kForEach;
}

}  // namespace stagecoach::emu
