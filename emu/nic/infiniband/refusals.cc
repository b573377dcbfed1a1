#include "emu/nic/infiniband/refusals.h"

#include <algorithm>

namespace stagecoach::emu {
Refusals::Source::Source(const Asked& of, const IpEndpoint& address, std::optional<uint32_t> of_user)
    : asked(of), network(address.Source()), user(of_user) {}

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
