#include "base/mutant.h"

#include <algorithm>
#include <cstdlib>

namespace stagecoach {
namespace {

std::vector<Mutant*>& Registered() {
  static std::vector<Mutant*> mutants;
  return mutants;
}

}  // namespace

Mutant::Mutant(const char* its_name, const char* its_defect) : name(its_name), defect(its_defect) {
  Registered().push_back(this);
  // So that it is on in a test's process as well, and before main().
  const char* const wanted = std::getenv("STAGECOACH_MUTANT");
  on = wanted != nullptr && std::string_view(wanted) == name;
}

std::vector<const Mutant*> AllMutants() {
  std::vector<const Mutant*> mutants(Registered().begin(), Registered().end());
  std::sort(mutants.begin(), mutants.end(),
            [](const Mutant* a, const Mutant* b) { return std::string_view(a->name) < std::string_view(b->name); });
  const auto same = [](const Mutant* a, const Mutant* b) { return std::string_view(a->name) == b->name; };
  mutants.erase(std::unique(mutants.begin(), mutants.end(), same), mutants.end());
  return mutants;
}

bool SelectMutant(std::string_view name) {
  bool found = name.empty();
  for (Mutant* mutant : Registered()) {
    mutant->on = mutant->name == name;
    found = found || mutant->on;
  }
  return found;
}

}  // namespace stagecoach
