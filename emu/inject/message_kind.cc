#include "emu/inject/message_kind.h"

#include <array>

namespace stagecoach::emu {
namespace {

constexpr std::array<KindRow, kMessageKinds> kRows = {{
    {.name = "send", .has_segments = true},
    {.name = "write", .has_segments = true, .receives_last = true},
    {.name = "read"},
    {.name = "read-response", .has_segments = true},
    {.name = "atomic"},
    {.name = "atomic-response"},
    {.name = "immediate",
     .why_not_on_infiniband = "InfiniBand has no messages of immediate data: that is part of a Send or a Write"},
    {.name = "terminate", .why_not_on_infiniband = "InfiniBand has no Terminates"},
    {.name = "ack",
     .why_not_on_iwarp = "iWARP has no acknowledgements of its own, and TCP's are not seen",
     .is_repeated = false},
    {.name = "datagram", .why_not_on_iwarp = "iWARP has no datagrams", .is_repeated = false},
}};

constexpr std::array<const char*, 2> kTransportNames = {"iWARP", "InfiniBand"};

}  // namespace

const char* ToString(InjectionTransport transport) {
  return kTransportNames[static_cast<size_t>(transport)];
}

const char* ToString(MessageKind kind) {
  return RowOf(kind).name.data();
}

std::span<const KindRow, kMessageKinds> AllKinds() {
  return kRows;
}

const KindRow& RowOf(MessageKind kind) {
  return kRows[static_cast<size_t>(kind)];
}

KindSet KindsOn(InjectionTransport transport) {
  KindSet kinds = 0;
  for (size_t i = 0; i < kMessageKinds; ++i) {
    const std::string_view why_not =
        transport == InjectionTransport::kIwarp ? kRows[i].why_not_on_iwarp : kRows[i].why_not_on_infiniband;
    if (why_not.empty()) kinds |= KindBit(static_cast<MessageKind>(i));
  }
  return kinds;
}

}  // namespace stagecoach::emu
