// Marks: places in the code that only rare histories reach. A mark counts how often it was passed, so that a campaign
// of simulated worlds can say which rare branches none of its seeds has ever taken: a checker that never saw a branch
// has not checked it.
//
//   STAGECOACH_MARK("requester.reply_to_abandoned_call");
//
// Every mark linked into the program is known from the start, passed or not. Costs one relaxed increment where it
// stands; meant for rare branches, not for a hot path.
//
// Thread-safe once main() runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace stagecoach {

class Mark {
 public:
  // Registers itself; for STAGECOACH_MARK, before main().
  explicit Mark(const char* name);
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

  const char* name() const { return name_; }
  uint64_t passed() const { return passed_.load(std::memory_order_relaxed); }
  void Pass() { passed_.fetch_add(1, std::memory_order_relaxed); }

 private:
  const char* const name_;
  std::atomic<uint64_t> passed_{0};
};

// All marks of the program, by name. One name may stand at several places; each is an entry of its own.
std::vector<const Mark*> AllMarks();

namespace internal {
// A static member of a template is initialised at start-up wherever the template is used, reached or not, which a
// static variable of a function is not.
template <typename Site>
struct MarkAt {
  static inline Mark mark{Site::Name()};
};
}  // namespace internal

}  // namespace stagecoach

#define STAGECOACH_MARK(text)                                    \
  do {                                                           \
    struct StagecoachSite {                                      \
      static constexpr const char* Name() { return text; }       \
    };                                                           \
    ::stagecoach::internal::MarkAt<StagecoachSite>::mark.Pass(); \
  } while (false)
