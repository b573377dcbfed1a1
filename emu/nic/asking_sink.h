// AskingSink: one who asks when an injection is told, as an observer may: what it calls takes locks, none of which may
// be held by who tells. It asks on another thread and waits for that, so that a lock that is held is found out, and not
// waited for in vain.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

#include "base/trace.h"

namespace stagecoach::emu {

class AskingSink final : public TraceSink {
 public:
  // Asks from now on; an empty function ends it.
  void Ask(std::function<void()> question) { question_ = std::move(question); }
  // How often it was told, and how often of these it had no answer in time.
  int told() const { return told_; }
  int kept_waiting() const { return kept_waiting_; }

  void OnEvent(Instant, std::string_view, std::string_view event, std::initializer_list<TraceFact>) override {
    if (!question_ || event != "injection.fired") return;
    ++told_;
    std::future<void> answer = std::async(std::launch::async, question_);
    if (answer.wait_for(kEnough) != std::future_status::ready) ++kept_waiting_;
    leftovers_.push_back(std::move(answer));
  }

 private:
  static constexpr std::chrono::seconds kEnough{5};

  std::function<void()> question_;
  int told_ = 0;
  int kept_waiting_ = 0;
  std::vector<std::future<void>> leftovers_;  // end when the lock is free again
};

}  // namespace stagecoach::emu
