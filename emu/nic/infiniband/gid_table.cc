#include "emu/nic/infiniband/gid_table.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/mutant.h"

namespace stagecoach::emu {
namespace {

constexpr std::array<uint8_t, 12> kMappedPrefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr size_t kIpv4Size = 4;

}  // namespace

wire::Gid GidOf(const IpEndpoint& address) {
  wire::Gid gid{};
  if (address.family == IpEndpoint::Family::kIpv4) {
    std::copy(kMappedPrefix.begin(), kMappedPrefix.end(), gid.begin());
    std::copy_n(address.address.begin(), kIpv4Size, gid.begin() + kMappedPrefix.size());
  } else {
    std::copy(address.address.begin(), address.address.end(), gid.begin());
  }
  return gid;
}

void GidTable::Update(const std::vector<LocalAddress>& present) {
  ++updates_;
  std::vector<bool> is_present(slots_.size());
  std::vector<LocalAddress> news;
  for (const LocalAddress& each : present) {
    const auto known = index_of_.find(each.address.WithPort(0));
    if (known == index_of_.end()) {
      news.push_back(each);
      continue;
    }
    is_present[known->second] = true;
    slots_[known->second].empty_since = 0;
    entries_[known->second] = {GidOf(each.address), each.address.WithPort(0), each.interface};
  }
  for (size_t index = 0; index < slots_.size(); ++index) {
    if (is_present[index] || slots_[index].empty_since != 0) continue;
    slots_[index].empty_since = updates_;
    entries_[index] = {};
  }
  const auto first = std::find_if(news.begin(), news.end(), [](const LocalAddress& each) {
    return each.address.family == IpEndpoint::Family::kIpv4 && !each.address.IsLoopback();
  });
  const auto others = first != news.end() ? news.begin() + 1 : news.begin();
  if (first != news.end()) std::rotate(news.begin(), first, first + 1);
  std::stable_partition(others, news.end(), [](const LocalAddress& each) { return each.address.IsLoopback(); });
  for (const LocalAddress& each : news) Place(each);
}

void GidTable::Place(const LocalAddress& address) {
  const IpEndpoint plain = address.address.WithPort(0);
  if (index_of_.count(plain) != 0) return;  // the host names it twice
  size_t index = slots_.size();
  std::optional<IpEndpoint> gives_way;
  if (index < size_ - (STAGECOACH_MUTANT("last-gid-unused", "the last index of the GID table is never used") ? 1 : 0)) {
    if (index == slots_.capacity()) slots_.reserve(2 * index + 1);
    if (index == entries_.capacity()) entries_.reserve(2 * index + 1);
  } else {
    const auto longest = std::min_element(slots_.begin(), slots_.end(), [](const Slot& a, const Slot& b) {
      // Those that are there, with 0, come last.
      return a.empty_since - 1 < b.empty_since - 1;
    });
    if (longest == slots_.end() || longest->empty_since == 0) return;
    index = static_cast<size_t>(longest - slots_.begin());
    gives_way = longest->address;
  }
  // The last that can fail: from here on all three change together.
  index_of_.emplace(plain, index);
  if (gives_way) {
    index_of_.erase(*gives_way);
  } else {
    slots_.emplace_back();
    entries_.emplace_back();
  }
  slots_[index] = {plain, 0};
  entries_[index] = {GidOf(plain), plain, address.interface};
}

std::optional<uint8_t> GidTable::IndexOf(const IpEndpoint& address) const {
  const IpEndpoint plain = address.WithPort(0);
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    IpEndpoint own = entry.address;
    if (plain.scope_id == 0) own.scope_id = 0;
    return entry.gid != wire::Gid{} && own == plain;
  });
  if (found == entries_.end()) return std::nullopt;
  return static_cast<uint8_t>(found - entries_.begin());
}

}  // namespace stagecoach::emu
