#include "emu/fabric/port_space.h"

#include <cerrno>
#include <limits>
#include <vector>

namespace stagecoach::emu {
namespace {

constexpr int kSlots = 256;
// Ports of other processes whose slots are remembered.
constexpr size_t kFoundMax = 1024;

std::string NameOf(uint16_t space, uint16_t port) {
  return "stagecoach-rdma/" + std::to_string(space) + "/" + std::to_string(port);
}

std::string NameOf(uint16_t space, uint16_t port, int slot) {
  return NameOf(space, port) + "/" + std::to_string(slot);
}

// Taken after that with the slot, so that nobody looks for a slot who would not find one.
std::string NameOfListener(uint16_t space, uint16_t port) {
  return NameOf(space, port) + "/listens";
}

}  // namespace

// A port that a process here has.
class PortSpace::Entry {
 public:
  Entry(Key key, uint64_t holder, std::unique_ptr<Name> name) : key_(key), holder_(holder), name_(std::move(name)) {}
  const Key& key() const { return key_; }
  uint64_t holder() const { return holder_; }

  // --- Guarded by the space's lock ---
  // Names of this port with the slot; 0, or an errno.
  int Publish(System& system, uint8_t slot) {
    auto with_slot = system.Take(NameOf(key_.first, key_.second, slot));
    if (!with_slot) return with_slot.error();
    auto listens = system.Take(NameOfListener(key_.first, key_.second));
    if (!listens) return listens.error();
    slot_name_ = std::move(*with_slot);
    listener_name_ = std::move(*listens);
    return 0;
  }
  void Withdraw() {
    listener_name_.reset();
    slot_name_.reset();
  }
  // Of claims that listen, the oldest in front.
  std::map<uint64_t, uint8_t> slots;

 private:
  std::unique_ptr<Name> slot_name_;
  std::unique_ptr<Name> listener_name_;
  const Key key_;
  const uint64_t holder_;
  const std::unique_ptr<Name> name_;
};

class PortSpace::Claimed final : public PortClaim {
 public:
  // With the space's lock held. Of nothing yet, so that there is nothing to take back when it cannot be made.
  explicit Claimed(PortSpace& space) : space_(space), serial_(space.next_claim_++) {}
  // Likewise, once.
  void Take(std::shared_ptr<Entry> entry) { entry_ = std::move(entry); }
  ~Claimed() override {
    if (entry_ == nullptr) return;
    std::lock_guard lock(space_.mutex_);
    entry_->slots.erase(serial_);
    if (entry_->slots.empty()) entry_->Withdraw();
    const Key key = entry_->key();
    entry_.reset();
    const auto found = space_.entries_.find(key);
    if (found != space_.entries_.end() && found->second.expired()) space_.entries_.erase(found);
  }

  uint16_t port() const override { return entry_->key().second; }

  int Publish(uint8_t slot) override {
    std::lock_guard lock(space_.mutex_);
    std::map<uint64_t, uint8_t> alone{{serial_, slot}};
    if (entry_->slots.empty() && space_.system_ != nullptr) {
      if (const int error = entry_->Publish(*space_.system_, slot); error != 0) return error;
    }
    entry_->slots.erase(serial_);
    entry_->slots.merge(alone);
    return 0;
  }

 private:
  PortSpace& space_;
  std::shared_ptr<Entry> entry_;
  const uint64_t serial_;
};

PortSpace::PortSpace(std::unique_ptr<System> system, uint16_t first_choice)
    : system_(std::move(system)), next_choice_(first_choice) {}

uint64_t PortSpace::NewHolder() {
  std::lock_guard lock(mutex_);
  return next_holder_++;
}

Result<std::shared_ptr<PortSpace::Entry>, int> PortSpace::Take(const Key& key, uint64_t holder) {
  std::unique_ptr<Name> name;
  if (system_ != nullptr) {
    auto taken = system_->Take(NameOf(key.first, key.second));
    if (!taken) return Err(int{taken.error()});
    name = std::move(*taken);
  }
  auto entry = std::make_shared<Entry>(key, holder, std::move(name));
  entries_[key] = entry;
  return entry;
}

Result<std::unique_ptr<PortClaim>, int> PortSpace::Claim(uint16_t space, uint16_t port, uint64_t holder) {
  std::lock_guard lock(mutex_);
  auto claim = std::make_unique<Claimed>(*this);
  if (port != 0) {
    const auto found = entries_.find({space, port});
    std::shared_ptr<Entry> entry = found != entries_.end() ? found->second.lock() : nullptr;
    if (entry == nullptr) {
      auto taken = Take({space, port}, holder);
      if (!taken) return Err(int{taken.error()});
      entry = std::move(*taken);
    } else if (entry->holder() != holder) {
      return Err(EADDRINUSE);
    }
    claim->Take(std::move(entry));
    return claim;
  }
  constexpr int kChoices = std::numeric_limits<uint16_t>::max() - kFirstDynamic + 1;
  for (int i = 0; i < kChoices; ++i) {
    const Key key{space, next_choice_};
    next_choice_ =
        next_choice_ == std::numeric_limits<uint16_t>::max() ? kFirstDynamic : static_cast<uint16_t>(next_choice_ + 1);
    if (entries_.count(key) != 0) continue;
    auto taken = Take(key, holder);
    if (taken) {
      claim->Take(std::move(*taken));
      return claim;
    }
    if (taken.error() != EADDRINUSE) return Err(int{taken.error()});
  }
  return Err(EADDRINUSE);
}

std::optional<uint8_t> PortSpace::Find(uint16_t space, uint16_t port) const {
  const Key key{space, port};
  std::optional<uint8_t> before;
  {
    std::lock_guard lock(mutex_);
    if (const auto entry = entries_.find(key); entry != entries_.end()) {
      // With the lock: its last claim erases it under that.
      const std::shared_ptr<Entry> own = entry->second.lock();
      if (own->slots.empty()) return std::nullopt;
      return own->slots.begin()->second;
    }
    if (const auto found = found_.find(key); found != found_.end()) before = found->second;
  }
  if (system_ == nullptr) return std::nullopt;
  // Anybody can have taken the other names.
  const std::optional<System::Owner> owner = system_->OwnerOf(NameOf(space, port));
  const auto is_its = [&](const std::string& name) { return system_->OwnerOf(name) == owner; };
  std::optional<uint8_t> now;
  if (owner && before && is_its(NameOf(space, port, *before))) return before;
  if (owner && is_its(NameOfListener(space, port))) {
    for (int slot = 0; slot < kSlots && !now; ++slot) {
      if (is_its(NameOf(space, port, slot))) now = static_cast<uint8_t>(slot);
    }
  }
  std::lock_guard lock(mutex_);
  found_.erase(key);
  if (found_.size() >= kFoundMax) found_.clear();
  if (now) found_[key] = *now;
  return now;
}

}  // namespace stagecoach::emu
