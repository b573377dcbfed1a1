#include "emu/fabric/port_space.h"

#include <cerrno>
#include <limits>
#include <vector>

namespace stagecoach::emu {
namespace {

constexpr int kSlots = 256;

std::string NameOf(uint16_t space, uint16_t port) {
  return "stagecoach-rdma/" + std::to_string(space) + "/" + std::to_string(port);
}

std::string NameOf(uint16_t space, uint16_t port, int slot) {
  return NameOf(space, port) + "/" + std::to_string(slot);
}

}  // namespace

// A port that this process has.
class PortSpace::Entry {
 public:
  Entry(Key key, std::unique_ptr<Name> name) : key_(key), name_(std::move(name)) {}
  const Key& key() const { return key_; }

  // Of claims that listen; guarded by the space's lock.
  std::map<const Claimed*, uint8_t> slots;
  std::unique_ptr<Name> published;  // while there are any

 private:
  const Key key_;
  const std::unique_ptr<Name> name_;
};

class PortSpace::Claimed final : public PortClaim {
 public:
  Claimed(PortSpace& space, std::shared_ptr<Entry> entry) : space_(space), entry_(std::move(entry)) {}
  ~Claimed() override {
    std::lock_guard lock(space_.mutex_);
    entry_->slots.erase(this);
    if (entry_->slots.empty()) entry_->published.reset();
    const Key key = entry_->key();
    entry_.reset();
    const auto found = space_.entries_.find(key);
    if (found != space_.entries_.end() && found->second.expired()) space_.entries_.erase(found);
  }

  uint16_t port() const override { return entry_->key().second; }

  int Publish(uint8_t slot) override {
    std::lock_guard lock(space_.mutex_);
    if (entry_->published == nullptr && space_.system_ != nullptr) {
      auto name = space_.system_->Take(NameOf(entry_->key().first, entry_->key().second, slot));
      if (!name) return name.error();
      entry_->published = std::move(*name);
    }
    entry_->slots[this] = slot;
    return 0;
  }

 private:
  PortSpace& space_;
  std::shared_ptr<Entry> entry_;
};

PortSpace::PortSpace(std::unique_ptr<System> system, uint16_t first_choice)
    : system_(std::move(system)), next_choice_(first_choice) {}

Result<std::shared_ptr<PortSpace::Entry>, int> PortSpace::Take(const Key& key) {
  std::unique_ptr<Name> name;
  if (system_ != nullptr) {
    auto taken = system_->Take(NameOf(key.first, key.second));
    if (!taken) return Err(int{taken.error()});
    name = std::move(*taken);
  }
  auto entry = std::make_shared<Entry>(key, std::move(name));
  entries_[key] = entry;
  return entry;
}

Result<std::unique_ptr<PortClaim>, int> PortSpace::Claim(uint16_t space, uint16_t port) {
  std::lock_guard lock(mutex_);
  if (port != 0) {
    const auto found = entries_.find({space, port});
    std::shared_ptr<Entry> entry = found != entries_.end() ? found->second.lock() : nullptr;
    if (entry == nullptr) {
      auto taken = Take({space, port});
      if (!taken) return Err(int{taken.error()});
      entry = std::move(*taken);
    }
    return std::make_unique<Claimed>(*this, std::move(entry));
  }
  constexpr int kChoices = std::numeric_limits<uint16_t>::max() - kFirstDynamic + 1;
  for (int i = 0; i < kChoices; ++i) {
    const Key key{space, next_choice_};
    next_choice_ =
        next_choice_ == std::numeric_limits<uint16_t>::max() ? kFirstDynamic : static_cast<uint16_t>(next_choice_ + 1);
    if (entries_.count(key) != 0) continue;
    auto taken = Take(key);
    if (taken) return std::make_unique<Claimed>(*this, std::move(*taken));
    if (taken.error() != EADDRINUSE) return Err(int{taken.error()});
  }
  return Err(EADDRINUSE);
}

std::optional<uint8_t> PortSpace::Find(uint16_t space, uint16_t port) const {
  {
    std::lock_guard lock(mutex_);
    const auto found = entries_.find({space, port});
    const std::shared_ptr<Entry> entry = found != entries_.end() ? found->second.lock() : nullptr;
    if (entry != nullptr) {
      if (entry->slots.empty()) return std::nullopt;
      return entry->slots.begin()->second;
    }
  }
  if (system_ == nullptr || !system_->IsTaken(NameOf(space, port))) return std::nullopt;
  for (int slot = 0; slot < kSlots; ++slot) {
    if (system_->IsTaken(NameOf(space, port, slot))) return static_cast<uint8_t>(slot);
  }
  return std::nullopt;
}

}  // namespace stagecoach::emu
