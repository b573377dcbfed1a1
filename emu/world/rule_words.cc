#include "emu/world/rule_words.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <utility>

namespace stagecoach::emu {
namespace {

constexpr uint64_t kFiringsTold = 10;

// One write, so that lines of several processes do not mix.
void Say(const std::string& text) {
  const std::string line = "stagecoach: " + text + "\n";
  // Who does not listen does not hear: a pipe that nobody reads any more is no reason to end the program, whose thread
  // this may be.
  sigset_t pipe;
  sigset_t before;
  sigset_t pending;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  sigpending(&pending);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0 && errno == EPIPE && sigismember(&pending, SIGPIPE) == 0) {
    constexpr timespec kNow{};
    sigtimedwait(&pipe, nullptr, &kNow);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void SayFired(const InjectionFiring& firing) {
  if (firing.count > kFiringsTold) return;
  std::string text = ToString(firing);
  if (firing.count == kFiringsTold && firing.rule->times > kFiringsTold)
    text += "; that makes ten, and no more is said";
  Say(text);
}

std::string Count(uint64_t count, std::string_view what) {
  return std::to_string(count) + " " + std::string(what) + (count == 1 ? "" : "s");
}

// The plans of this process. Its destructor runs at exit.
class Plans {
 public:
  ~Plans() {
    // A forked child has what its parent knew, and nothing to say of it.
    if (process_ != ::getpid()) return;
    for (const std::shared_ptr<InjectionPlan>& plan : plans_) {
      for (const std::string& line : LastWordsOf(*plan)) Say(line);
    }
  }
  // Worlds are made one at a time (World::Current), so that no fork finds this under way.
  void Add(std::shared_ptr<InjectionPlan> plan) {
    std::lock_guard lock(mutex_);
    if (process_ != ::getpid()) plans_.clear();
    process_ = ::getpid();
    plans_.push_back(std::move(plan));
  }

 private:
  std::mutex mutex_;
  pid_t process_ = 0;
  std::vector<std::shared_ptr<InjectionPlan>> plans_;
};

}  // namespace

std::shared_ptr<InjectionPlan> PlanThatSpeaks(std::vector<InjectionRule> rules) {
  static Plans plans;
  auto plan = InjectionPlan::Make(std::move(rules), SayFired);
  plans.Add(plan);
  return plan;
}

std::string WordsOf(const InjectionPlan& plan, size_t rule, uint64_t fired) {
  const std::string words = "rule '" + ToString(plan.rules()[rule]) + "' ";
  if (fired > 0) return words + "fired " + Count(fired, "time");
  const InjectionAction action = plan.rules()[rule].action;
  if (RowOf(action).depth == InjectionDepth::kDevice) {
    return words + "never fired: " + Count(plan.asked(action), RowOf(action).object);
  }
  const InjectionPlan::Seen seen = plan.seen();
  std::string why = Count(seen.connections, "connection");
  if (seen.sent + seen.received > 0) {
    why += ", " + Count(seen.sent, "message") + " sent and " + std::to_string(seen.received) + " received";
  }
  const uint64_t matched = plan.counters(rule).matched;
  if (matched > 0) why += ", of which " + Count(matched, "segment") + " matched";
  return words + "never fired: " + why;
}

std::vector<std::string> LastWordsOf(const InjectionPlan& plan) {
  std::vector<std::string> lines;
  for (size_t i = 0; i < plan.rules().size(); ++i) {
    const uint64_t fired = plan.counters(i).fired;
    if (fired == 0 || fired > kFiringsTold) lines.push_back(WordsOf(plan, i, fired));
  }
  return lines;
}

}  // namespace stagecoach::emu
