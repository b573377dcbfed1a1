#include "base/mark.h"

#include <algorithm>
#include <string_view>

namespace stagecoach {
namespace {

// Built by the first mark that registers, whatever the order of initialisation.
std::vector<const Mark*>& Registered() {
  static std::vector<const Mark*> marks;
  return marks;
}

}  // namespace

Mark::Mark(const char* name) : name_(name) {
  Registered().push_back(this);
}

std::vector<const Mark*> AllMarks() {
  std::vector<const Mark*> marks = Registered();
  std::sort(marks.begin(), marks.end(),
            [](const Mark* a, const Mark* b) { return std::string_view(a->name()) < std::string_view(b->name()); });
  return marks;
}

}  // namespace stagecoach
