// Mutants: deliberate defects, to prove that the simulation's checkers find what they claim to find.
//
//   if (STAGECOACH_MUTANT("skip-fence", "a call completes before its STags are invalid")) return Conclude(index);
//
// In every ordinary build the condition is the constant false and nothing of it is left in the program. Built with
// --config=mutants all of them are compiled in, and at most one at a time is switched on by name (`stagecoach sim
// --mutant NAME`): a build of its own for each would differ in nothing but the time it takes.
//
// Select one before the code under test runs.
#pragma once

#include <string_view>
#include <vector>

namespace stagecoach {

struct Mutant {
  // Registers itself; for STAGECOACH_MUTANT, before main().
  Mutant(const char* its_name, const char* its_defect);
  Mutant(const Mutant&) = delete;
  Mutant& operator=(const Mutant&) = delete;

  const char* const name;
  const char* const defect;  // what is wrong when it is on, in a clause
  bool on = false;
};

// All mutants of the program, by name, once each in however many places it stands; none in an ordinary build.
std::vector<const Mutant*> AllMutants();
// Switches every other one off. An empty name: all. False: there is none of this name.
bool SelectMutant(std::string_view name);

namespace internal {
// See MarkAt.
template <typename Site>
struct MutantAt {
  static inline Mutant mutant{Site::Name(), Site::Defect()};
};
}  // namespace internal

}  // namespace stagecoach

#ifdef STAGECOACH_MUTANTS
#define STAGECOACH_MUTANT(text, what)                                   \
  ([] {                                                                 \
    struct StagecoachSite {                                             \
      static constexpr const char* Name() { return text; }              \
      static constexpr const char* Defect() { return what; }            \
    };                                                                  \
    return ::stagecoach::internal::MutantAt<StagecoachSite>::mutant.on; \
  }())
#else
#define STAGECOACH_MUTANT(text, what) false
#endif
