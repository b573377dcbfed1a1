#include "emu/nic/objects/stag_source.h"

#include <sys/random.h>

#include <cerrno>

#include "base/check.h"

namespace stagecoach::emu {
namespace {

// [5666bis:10.1+3]
// Draws in blocks: a registration takes a few bits and should not cost a system call each.
class SystemSource final : public StagSource {
 public:
  uint64_t Next() override {
    if (left_ == 0) Refill();
    return block_[--left_];
  }
  std::unique_ptr<StagSource> Fork(std::string_view) const override { return std::make_unique<SystemSource>(); }

 private:
  static constexpr size_t kBlock = 32;  // 256 bytes: getrandom(2) gives as much in one piece

  void Refill() {
    for (;;) {
      const ssize_t got = getrandom(block_, sizeof block_, 0);
      if (got == static_cast<ssize_t>(sizeof block_)) break;
      STAGECOACH_CHECK(got < 0 && errno == EINTR);
    }
    left_ = kBlock;
  }

  uint64_t block_[kBlock];
  size_t left_ = 0;
};

class SeededSource final : public StagSource {
 public:
  explicit SeededSource(const Prng& prng) : prng_(prng) {}
  uint64_t Next() override { return prng_.Next(); }
  std::unique_ptr<StagSource> Fork(std::string_view name) const override {
    return std::make_unique<SeededSource>(prng_.Fork(name));
  }

 private:
  Prng prng_;
};

}  // namespace

std::unique_ptr<StagSource> SystemStagSource() {
  return std::make_unique<SystemSource>();
}

std::unique_ptr<StagSource> SeededStagSource(const Prng& prng) {
  return std::make_unique<SeededSource>(prng.Fork("stags"));
}

}  // namespace stagecoach::emu
