#include "scenarios/runner/guarded_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/prng.h"

namespace stagecoach::scenario {
namespace {

constexpr std::byte kGuardByte{0xc5};

}  // namespace

GuardedBuffer::GuardedBuffer(size_t size) : size_(size), storage_(size + 2 * kGuard, kGuardByte) {}

bool GuardedBuffer::GuardsIntact() const {
  if (storage_.empty()) return true;
  const auto intact = [](std::byte byte) { return byte == kGuardByte; };
  return std::all_of(storage_.begin(), storage_.begin() + kGuard, intact) &&
         std::all_of(storage_.end() - kGuard, storage_.end(), intact);
}

bool GuardedBuffer::Untouched(size_t from) const {
  if (from >= size_) return true;
  return std::all_of(storage_.begin() + static_cast<ptrdiff_t>(kGuard + from),
                     storage_.begin() + static_cast<ptrdiff_t>(kGuard + size_),
                     [](std::byte byte) { return byte == kGuardByte; });
}

uint64_t GuardedBuffer::Fingerprint() const {
  return StableHash(AsText(storage_));
}

void ColdStorage::Keep(GuardedBuffer buffer, std::string label, Instant now) {
  if (buffer.size() == 0) return;
  bytes_ += buffer.size();
  const uint64_t fingerprint = buffer.Fingerprint();
  kept_.push_back({std::move(buffer), fingerprint, std::move(label), now});
  while (bytes_ > kBytesMax) {
    Check(kept_.front(), now);
    bytes_ -= kept_.front().buffer.size();
    kept_.pop_front();
  }
}

void ColdStorage::CheckAll(Instant now) {
  for (const Kept& kept : kept_) Check(kept, now);
}

void ColdStorage::Check(const Kept& kept, Instant now) {
  if (kept.buffer.Fingerprint() == kept.fingerprint) return;
  violations_->Add(
      now, "memory.cold",
      fmt::format("{} changed after {} ns, when the call was over", kept.label, kept.since.time_since_epoch().count()));
}

}  // namespace stagecoach::scenario
