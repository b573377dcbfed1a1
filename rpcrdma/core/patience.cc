#include "rpcrdma/core/patience.h"

#include <algorithm>
#include <chrono>

#include "base/check.h"

namespace stagecoach::rpcrdma {

Patience::Debt Patience::Owe(Instant now) {
  if (of_this_round_ > 0) {
    ++of_the_next_;
    return round_ + 1;
  }
  of_this_round_ = 1;
  Renew(now);
  return round_;
}

void Patience::Paid(Debt debt, Instant now) {
  uint64_t& unpaid = debt == round_ ? of_this_round_ : of_the_next_;
  STAGECOACH_CHECK(unpaid > 0 && debt - round_ <= 1);
  --unpaid;
  if (of_this_round_ > 0) return;
  ++round_;
  of_this_round_ = of_the_next_;
  of_the_next_ = 0;
  Renew(now);
}

void Patience::Moved(uint64_t bytes, Instant now) {
  if (!until_) return;
  until_ = std::min(now + time_, *until_ + Worth(bytes));
}

void Patience::Renew(Instant now) {
  until_.reset();
  if (of_this_round_ > 0 && time_ > Duration::zero()) until_ = now + time_;
}

// No more than the whole allowance.
Duration Patience::Worth(uint64_t bytes) const {
  using Wide = unsigned __int128;
  static constexpr uint64_t kUnitsPerSecond = Duration::period::den / Duration::period::num;
  if (rate_min_ == 0) return time_;
  const Wide worth = Wide{bytes} * kUnitsPerSecond / rate_min_;
  return Duration(static_cast<int64_t>(std::min(worth, static_cast<Wide>(time_.count()))));
}

}  // namespace stagecoach::rpcrdma
