#include "tests/golden/recorded_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/crc32c.h"

namespace stagecoach::testing {

using emu::MemoryAccess;
using emu::MemoryFault;
using emu::MemoryPin;

namespace {

uint8_t NeededFor(MemoryAccess access) {
  switch (access) {
    case MemoryAccess::kLocalRead:
      return RecordedMemory::kNone;
    case MemoryAccess::kLocalWrite:
    case MemoryAccess::kReceive:
      return RecordedMemory::kLocalWrite;
    case MemoryAccess::kReadSink:
      return RecordedMemory::kLocalWrite | RecordedMemory::kRemoteWrite;
    case MemoryAccess::kRemoteRead:
      return RecordedMemory::kRemoteRead;
    case MemoryAccess::kRemoteWrite:
      return RecordedMemory::kRemoteWrite;
    case MemoryAccess::kRemoteAtomic:
      break;
  }
  return 0xff;
}

std::string Place(uint32_t stag, uint64_t offset) {
  return "STag " + std::to_string(stag) + ", tagged offset " + std::to_string(offset);
}

}  // namespace

RecordedMemory::~RecordedMemory() {
  STAGECOACH_CHECK(pins_ == 0);
}

void RecordedMemory::Declare(uint32_t stag, uint64_t offset, uint64_t length, uint8_t rights) {
  Region& region = regions_[stag];
  region.rights |= rights;
  if (length == 0) return;
  uint64_t end = offset + length;
  // Takes in what it touches.
  auto it = region.ranges.upper_bound(offset);
  if (it != region.ranges.begin() && std::prev(it)->second >= offset) --it;
  while (it != region.ranges.end() && it->first <= end) {
    offset = std::min(offset, it->first);
    end = std::max(end, it->second);
    it = region.ranges.erase(it);
  }
  region.ranges[offset] = end;
}

void RecordedMemory::Seal() {
  for (auto& [stag, region] : regions_) {
    for (const auto& [begin, end] : region.ranges) AddExtent(stag, region, begin, end - begin);
  }
}

void RecordedMemory::AddExtent(uint32_t stag, Region& region, uint64_t offset, uint64_t length) {
  Extent extent{.offset = offset, .length = length, .actual = {}, .expected = {}};
  extent.actual.resize(length + 2 * kGuardSize);
  // Never 0, which is what a byte nobody wrote is most likely to be taken for.
  for (size_t i = 0; i < extent.actual.size(); ++i) extent.actual[i] = static_cast<std::byte>((i * 29 + stag) | 1);
  extent.expected = extent.actual;
  region.extents.push_back(std::move(extent));
}

uint32_t RecordedMemory::AddLocal(size_t size) {
  while (regions_.contains(next_local_)) ++next_local_;
  Region& region = regions_[next_local_];
  region.rights = kLocalWrite;
  AddExtent(next_local_, region, AddressOf(next_local_), size);
  return next_local_;
}

template <typename R>
auto RecordedMemory::Find(R& region, uint64_t offset, uint64_t length) -> decltype(region.extents.data()) {
  for (auto& extent : region.extents) {
    if (offset < extent.offset || offset - extent.offset > extent.length) continue;
    if (length <= extent.length - (offset - extent.offset)) return &extent;
  }
  return nullptr;
}

RecordedMemory::Extent& RecordedMemory::Known(uint32_t stag, uint64_t offset, uint64_t length) {
  Extent* const extent = Find(regions_.at(stag), offset, length);
  STAGECOACH_CHECK(extent != nullptr);
  return *extent;
}

void RecordedMemory::Store(uint32_t stag, uint64_t offset, ConstBytes bytes) {
  Extent& extent = Known(stag, offset, bytes.size());
  CopyBytes(MutableBytes(extent.actual).subspan(IndexOf(extent, offset)), bytes);
  CopyBytes(MutableBytes(extent.expected).subspan(IndexOf(extent, offset)), bytes);
}

void RecordedMemory::Expect(uint32_t stag, uint64_t offset, ConstBytes bytes) {
  Extent& extent = Known(stag, offset, bytes.size());
  CopyBytes(MutableBytes(extent.expected).subspan(IndexOf(extent, offset)), bytes);
}

ConstBytes RecordedMemory::Bytes(uint32_t stag, uint64_t offset, uint64_t length) const {
  const Extent* const extent = Find(regions_.at(stag), offset, length);
  STAGECOACH_CHECK(extent != nullptr);
  return ConstBytes(extent->actual).subspan(IndexOf(*extent, offset), length);
}

std::optional<std::string> RecordedMemory::Difference() const {
  for (const auto& [stag, region] : regions_) {
    for (const Extent& extent : region.extents) {
      if (std::memcmp(extent.actual.data(), extent.expected.data(), extent.actual.size()) == 0) continue;
      const auto at = std::ranges::mismatch(extent.actual, extent.expected).in1 - extent.actual.begin();
      return Place(stag, extent.offset + static_cast<uint64_t>(at) - kGuardSize) + " is not as it should be";
    }
  }
  return std::nullopt;
}

uint32_t RecordedMemory::Checksum() const {
  Crc32c sum;
  for (const auto& [stag, region] : regions_) {
    for (const Extent& extent : region.extents) sum.Update(extent.actual);
  }
  return sum.Value();
}

Result<MemoryPin, MemoryFault> RecordedMemory::Pin(uint32_t stag, uint64_t tagged_offset, uint64_t length,
                                                   MemoryAccess access) {
  const auto it = regions_.find(stag);
  if (it == regions_.end()) return Err(MemoryFault::kUnknownStag);
  Region& region = it->second;
  if (!region.valid) return Err(MemoryFault::kStaleStag);
  const uint8_t needed = NeededFor(access);
  if ((region.rights & needed) != needed) return Err(MemoryFault::kNoPermission);
  Extent* const extent = Find(region, tagged_offset, length);
  if (extent == nullptr) return Err(MemoryFault::kOutOfRange);
  ++pins_;
  return MemoryPin(this, 0, MutableBytes(extent->actual).subspan(IndexOf(*extent, tagged_offset), length),
                   tagged_offset - region.extents.front().offset);
}

Result<void, MemoryFault> RecordedMemory::InvalidateRemotely(uint32_t stag) {
  const auto it = regions_.find(stag);
  if (it == regions_.end()) return Err(MemoryFault::kUnknownStag);
  if (!it->second.valid) return Err(MemoryFault::kStaleStag);
  it->second.valid = false;
  return {};
}

Result<emu::AtomicOutcome, MemoryFault> RecordedMemory::Atomic(uint32_t, uint64_t, emu::AtomicOp, uint64_t, uint64_t) {
  return Err(MemoryFault::kNoPermission);  // no recorded peer has atomics
}

}  // namespace stagecoach::testing
