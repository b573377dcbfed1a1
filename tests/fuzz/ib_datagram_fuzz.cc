// Datagrams as links bring them, and the route that a program may find in front of one. Input: one record; its last 40
// bytes, too, as such a route.
#include <algorithm>
#include <array>
#include <vector>

#include "base/cursor.h"
#include "emu/engine/ib_datagram.h"
#include "tests/fuzz/input.h"

namespace stagecoach {
namespace {

using namespace emu;

constexpr size_t kMtu = 64;

void CheckRecord(ConstBytes record) {
  const auto judged = JudgeDatagram({record.first(std::min(record.size(), kMaxRecordHead)), record.size()}, kMtu);
  // The head is all that is needed: the payload behind it changes nothing.
  const auto from_all = JudgeDatagram({record, record.size()}, kMtu);
  FUZZ_PROPERTY(judged.has_value() == from_all.has_value());
  if (!judged.has_value()) {
    FUZZ_PROPERTY(judged.error() == from_all.error());
    return;
  }
  FUZZ_PROPERTY(judged->header == from_all->header);
  FUZZ_PROPERTY(judged->header.service == wire::IbService::kUd);
  FUZZ_PROPERTY(judged->payload <= kMtu);
  FUZZ_PROPERTY(judged->head_size + judged->payload == record.size());
}

void CheckRoute(ConstBytes bytes) {
  const auto route = ReadGrh(bytes);
  if (!route.has_value()) return;
  // What was understood means the same when it is written anew.
  std::array<std::byte, kGrhSize> grh;
  WriteGrh(*route, 100, grh);
  const auto again = ReadGrh(grh);
  FUZZ_PROPERTY(again.has_value() && again->source == route->source && again->destination == route->destination);
  FUZZ_PROPERTY(again->traffic_class == route->traffic_class && again->hop_limit == route->hop_limit);
}

void Run(ConstBytes input) {
  CheckRecord(input);
  CheckRoute(input.last(std::min(input.size(), kGrhSize)));
}

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::Run(stagecoach::AsBytes(data, size));
  return 0;
}
