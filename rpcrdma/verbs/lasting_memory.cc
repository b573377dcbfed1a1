#include "rpcrdma/verbs/lasting_memory.h"

#include <algorithm>

namespace stagecoach::rpcrdma {

LastingMemory::~LastingMemory() {
  for (internal::DomainRegions* domain : domains_) domain->Drop(this);
}

bool LastingMemory::Contains(ConstBytes part) const {
  if (part.empty()) return true;
  const auto first = reinterpret_cast<uintptr_t>(bytes_.data());
  const auto begin = reinterpret_cast<uintptr_t>(part.data());
  return begin >= first && begin - first <= bytes_.size() && part.size() <= bytes_.size() - (begin - first);
}

namespace internal {

void DomainRegions::Open(ibv_pd* domain, bool bindable) {
  domain_ = domain;
  bindable_ = bindable;
}

DomainRegions::Found DomainRegions::Find(LastingMemory& memory) {
  if (const auto known = entries_.find(&memory); known != entries_.end()) return {.region = known->second.region.get()};
  if (domain_ == nullptr || memory.bytes().empty()) return {};
  int access = 0;
  if (bindable_) access = IBV_ACCESS_MW_BIND | (memory.writable() ? IBV_ACCESS_LOCAL_WRITE : 0);
  // The stock prototype takes the address without const; without IBV_ACCESS_LOCAL_WRITE nothing is written.
  auto region =
      verbs::RegisterMemory(domain_, const_cast<std::byte*>(memory.bytes().data()), memory.bytes().size(), access);
  Entry& entry = entries_[&memory];
  entry.number = made_++;
  memory.domains_.push_back(this);
  if (!region) return {.first = true, .error = region.error().error};
  entry.region = std::move(*region);
  ++registered_;
  return {.region = entry.region.get(), .first = true};
}

// Should the device refuse to deregister, nobody gains access by it: peers have none but through windows, which are
// invalid by now, and no work request names the key any more.
void DomainRegions::Drop(LastingMemory* memory) {
  const auto found = entries_.find(memory);
  if (found->second.region) --registered_;
  entries_.erase(found);
}

void DomainRegions::Close() {
  domain_ = nullptr;
  registered_ = 0;
  // In the order in which they were registered, not in that of their addresses, which may differ from run to run.
  std::vector<std::pair<uint64_t, LastingMemory*>> order;
  for (const auto& [memory, entry] : entries_) order.emplace_back(entry.number, memory);
  std::sort(order.begin(), order.end());
  for (const auto& [number, memory] : order) {
    std::erase(memory->domains_, this);
    entries_.erase(memory);
  }
}

}  // namespace internal
}  // namespace stagecoach::rpcrdma
