#include "emu/nic/queue/late_placement.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {

LatePlacements::~LatePlacements() {
  STAGECOACH_CHECK(all_.empty());
}

void LatePlacements::PlaceAll(Instant now) {
  std::lock_guard lock(mutex_);
  for (LatePlacement* const each : all_) each->PlaceAllLocked(now);
}

LatePlacement::LatePlacement(LatePlacements& device, Prng luck, std::string name)
    : device_(device), name_(std::move(name)), luck_(luck) {
  std::lock_guard lock(device_.mutex_);
  device_.all_.push_back(this);
}

LatePlacement::~LatePlacement() {
  std::lock_guard lock(device_.mutex_);
  std::erase(device_.all_, this);
}

std::span<const MutableBytes> LatePlacement::Stage(std::span<const MutableBytes> destination) {
  if (!staging_) {
    staging_ = true;
    current_.bytes.resize(TotalSize(destination));
    current_bytes_ = current_.bytes;
  }
  // Pinned afresh for each piece of the record.
  current_.destination.assign(destination.begin(), destination.end());
  return {&current_bytes_, current_bytes_.empty() ? size_t{0} : size_t{1}};
}

void LatePlacement::Keep(Instant now, Instant latest) {
  staging_ = false;
  Trace(device_.trace_, now, name_, "placement.kept");
  std::lock_guard lock(device_.mutex_);
  current_.due = now + Duration(luck_.Below(static_cast<uint64_t>((latest - now).count()) + 1));
  waiting_bytes_ += current_.bytes.size();
  waiting_.push_back(std::exchange(current_, Write()));
  // The peer decides how much comes before this end has time.
  if (waiting_bytes_ > kMostWaiting) PlaceAllLocked(now);
}

void LatePlacement::Forget() {
  staging_ = false;
  current_ = Write();
}

std::optional<Instant> LatePlacement::Due() const {
  std::lock_guard lock(device_.mutex_);
  std::optional<Instant> due;
  for (const Write& write : waiting_) due = std::min(due.value_or(Instant::max()), write.due);
  return due;
}

void LatePlacement::PlaceDue(Instant now) {
  std::lock_guard lock(device_.mutex_);
  const auto later =
      std::stable_partition(waiting_.begin(), waiting_.end(), [now](const Write& write) { return write.due <= now; });
  const auto placed = static_cast<size_t>(later - waiting_.begin());
  if (placed > 0 && later != waiting_.end()) STAGECOACH_MARK("placement.younger_write_overtakes");
  std::for_each(waiting_.begin(), later, [this](const Write& write) {
    waiting_bytes_ -= write.bytes.size();
    Place(write);
  });
  waiting_.erase(waiting_.begin(), later);
  TellPlaced(now, placed);
}

void LatePlacement::PlaceAll(Instant now) {
  std::lock_guard lock(device_.mutex_);
  PlaceAllLocked(now);
}

void LatePlacement::PlaceAllLocked(Instant now) {
  const size_t placed = waiting_.size();
  if (placed > 1) STAGECOACH_MARK("placement.several_writes_settled_in_any_order");
  while (!waiting_.empty()) {
    std::swap(waiting_[luck_.Below(waiting_.size())], waiting_.back());
    Place(waiting_.back());
    waiting_.pop_back();
  }
  waiting_bytes_ = 0;
  TellPlaced(now, placed);
}

void LatePlacement::Place(const Write& write) {
  constexpr size_t kPiece = 32;
  ConstBytes left = write.bytes;
  for (auto part = write.destination.rbegin(); part != write.destination.rend(); ++part) {
    for (MutableBytes to = *part; !to.empty();) {
      const size_t n = std::min(to.size(), kPiece);
      // What is not mapped any more cannot be looked at either.
      static_cast<void>(SafeCopy(to.last(n), left.last(n)));
      to = to.first(to.size() - n);
      left = left.first(left.size() - n);
    }
  }
}

void LatePlacement::TellPlaced(Instant now, size_t writes) const {
  if (writes > 0) Trace(device_.trace_, now, name_, "placement.done", {{"writes", uint64_t{writes}}});
}

}  // namespace stagecoach::emu
