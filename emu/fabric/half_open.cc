#include "emu/fabric/half_open.h"

namespace stagecoach::emu {

std::optional<uint64_t> HalfOpen::Enter(uint64_t key, const IpEndpoint& remote) {
  const IpEndpoint address = remote.WithPort(0);
  addresses_.emplace(key, address);
  keys_[address].insert(key);
  if (addresses_.size() <= most_) return std::nullopt;
  const uint64_t oldest = OldestOfTheMost();
  Leave(oldest);
  return oldest;
}

void HalfOpen::Leave(uint64_t key) {
  const auto found = addresses_.find(key);
  if (found == addresses_.end()) return;
  const auto of_address = keys_.find(found->second);
  of_address->second.erase(key);
  if (of_address->second.empty()) keys_.erase(of_address);
  addresses_.erase(found);
}

uint64_t HalfOpen::OldestOfTheMost() const {
  const std::set<uint64_t>* most = nullptr;
  for (const auto& [address, keys] : keys_) {
    const bool more = most == nullptr || keys.size() > most->size() ||
                      (keys.size() == most->size() && *keys.begin() < *most->begin());
    if (more) most = &keys;
  }
  return *most->begin();
}

}  // namespace stagecoach::emu
