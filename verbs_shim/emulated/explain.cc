#include "verbs_shim/emulated/explain.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>

namespace stagecoach::verbs::emulated {
namespace {

constexpr std::array<const char*, 4> kWords = {
    "iWARP connects queue pairs by rdma_cm alone; a program that does it itself needs --profile roce "
    "(STAGECOACH_PROFILE=roce), or its option for rdma_cm (perftest: -R)",
    "iWARP has no datagrams; --profile roce (STAGECOACH_PROFILE=roce) has",
    "multicast is not offered",
    "rsockets are not offered; the program has to use sockets, or rdma_cm and verbs",
};
static_assert(static_cast<size_t>(Lack::kRsockets) + 1 == kWords.size());

}  // namespace

void Explain(Lack lack) {
  static std::array<std::atomic<bool>, kWords.size()> said{};
  const auto i = static_cast<size_t>(lack);
  if (!said[i].exchange(true)) std::fprintf(stderr, "stagecoach: %s\n", kWords[i]);
}

}  // namespace stagecoach::verbs::emulated
