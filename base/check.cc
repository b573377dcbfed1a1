#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace stagecoach::internal {

void CheckFailed(const char* file, int line, const char* condition) noexcept {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, condition);
  std::fflush(stderr);
  std::abort();
}

}  // namespace stagecoach::internal
