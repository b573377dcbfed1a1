#include "emu/fabric/half_open.h"

namespace stagecoach::emu {

std::optional<uint64_t> HalfOpen::Enter(uint64_t key, const IpEndpoint& remote) {
  Leave(key);
  const Place place{remote.Source(), next_age_++};
  streams_.emplace(key, place);
  of_sources_[place.source].emplace(place.age, key);
  if (streams_.size() <= most_) return std::nullopt;
  const uint64_t oldest = OldestOfTheMost();
  Leave(oldest);
  return oldest;
}

void HalfOpen::Leave(uint64_t key) {
  const auto found = streams_.find(key);
  if (found == streams_.end()) return;
  // Not there when there was no memory to enter it.
  const auto of_source = of_sources_.find(found->second.source);
  if (of_source != of_sources_.end()) of_source->second.erase(found->second.age);
  if (of_source != of_sources_.end() && of_source->second.empty()) of_sources_.erase(of_source);
  streams_.erase(found);
}

uint64_t HalfOpen::OldestOfTheMost() const {
  const std::map<uint64_t, uint64_t>* most = nullptr;
  for (const auto& [source, keys] : of_sources_) {
    const bool more = most == nullptr || keys.size() > most->size() ||
                      (keys.size() == most->size() && keys.begin()->first < most->begin()->first);
    if (more) most = &keys;
  }
  return most->begin()->second;
}

}  // namespace stagecoach::emu
