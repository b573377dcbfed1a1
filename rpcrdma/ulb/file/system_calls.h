// System calls as the store of files makes them: made again when a signal has interrupted them, and one that the C
// library has no function for.
#pragma once

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace stagecoach::rpcrdma::file {

// What `call` returns, which is negative for a failure that errno tells; never EINTR.
template <typename Call>
auto Retry(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// openat2(2) with O_CLOEXEC: `resolve` says what the resolution of `path` may lead through (RESOLVE_...).
inline int OpenAt2(int directory, const char* path, int flags, uint64_t resolve) {
  open_how how{};
  how.flags = static_cast<uint64_t>(flags | O_CLOEXEC);
  how.resolve = resolve;
  return static_cast<int>(::syscall(SYS_openat2, directory, path, &how, sizeof(how)));
}

}  // namespace stagecoach::rpcrdma::file
