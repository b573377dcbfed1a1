// CHECK: assertions about our own code, on in every build.
//
// A CHECK that fails is a bug of ours. Bytes from a peer and arguments from a caller are never checked with it: those
// end in a typed error. Conditions have no side effects.
#pragma once

namespace stagecoach::internal {

// Writes "FILE:LINE: check failed: CONDITION" to standard error and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition) noexcept;

}  // namespace stagecoach::internal

#define STAGECOACH_CHECK(condition)                  \
  (__builtin_expect(static_cast<bool>(condition), 1) \
       ? static_cast<void>(0)                        \
       : ::stagecoach::internal::CheckFailed(__FILE__, __LINE__, #condition))
