#include "emu/inject/action.h"

#include <array>

namespace stagecoach::emu {
namespace {

constexpr std::array<ActionRow, kInjectionActions> kRows = {{
    {.name = "disconnect",
     .object = "segment",
     .cause = "a cable is pulled, a port goes down, the peer's host dies; here both ends learn at once what they would "
              "find out by their timers",
     .seen = "iWARP: everything is flushed, `RDMA_CM_EVENT_DISCONNECTED` with status `-ECONNRESET`. InfiniBand: on RC "
             "the oldest send that is not acknowledged fails with `IBV_WC_RETRY_EXC_ERR` (sends on UC are over when "
             "they have left), everything else is flushed, `RDMA_CM_EVENT_DISCONNECTED`"},
    {.name = "stall",
     .object = "segment",
     .cause = "a peer that hangs, a path that swallows everything, a priority that is paused for ever",
     .seen = "nothing, until their own time-outs, or those of the queue pair on RC: `IBV_WC_RETRY_EXC_ERR`"},
    {.name = "drop",
     .object = "segment",
     .kinds = kAllKinds,
     .why_not_on_iwarp = "iWARP cannot lose a segment: TCP carries it or the connection ends, and one that was missing "
                         "would be a fault of the peer; the profile roce has loss, and disconnect ends a connection",
     .cause = "congestion where flow control is off, bit errors that a CRC finds",
     .seen = "RC: that it takes longer, or after `retry_cnt` losses `IBV_WC_RETRY_EXC_ERR`; a loss that is to be "
             "survived has `attempt=1` or a probability. UC, UD: that a message is missing"},
    {.name = "delay",
     .object = "segment",
     .received = false,
     .takes_time = true,
     .cause = "a long way, a queue in a switch, a busy host",
     .seen = "that it takes longer. RC: repetitions, when the delay is longer than its `timeout`; they are late as "
             "well, unless the rule has `attempt=1`"},
    {.name = "duplicate",
     .object = "segment",
     .received = false,
     .kinds = kAllKinds,
     .why_not_on_iwarp =
         "iWARP cannot send a segment twice: TCP delivers it once, and a second one would be a fault of "
         "the peer; the profile roce has repetition",
     .cause = "a requester that repeats what was acknowledged too late, a network whose ways change",
     .seen = "RC, UC: nothing, the second one is known by its number. UD: a message that comes twice"},
    {.name = "overtake",
     .object = "segment",
     .received = false,
     .kinds = kAllKinds,
     .needs_another = true,
     .why_not_on_iwarp = "iWARP cannot change the order of segments: TCP keeps it, and another one would be a fault of "
                         "the peer; the profile roce has reordering",
     .cause = "several ways through a network, adaptive routing",
     .seen = "RC: that it takes longer: the gap is reported, and what is behind it sent again. UC: that a message is "
             "missing. UD: messages in another order"},
    {.name = "not-ready",
     .object = "message",
     .sent = false,
     .kinds = KindBit(MessageKind::kSend) | KindBit(MessageKind::kWrite),
     .why_not_on_iwarp = "iWARP has no word for a Receive that is missing: the stream would end, as disconnect does it",
     .cause = "a receiver that posts its Receives too late",
     .seen = "RC: that it takes longer by the peer's `min_rnr_timer`, or after `rnr_retry` of them "
             "`IBV_WC_RNR_RETRY_EXC_ERR` at the sender. UC: that a message is missing"},
    {.name = "fail-registration",
     .depth = InjectionDepth::kDevice,
     .object = "registration",
     .cause = "no room for translations on the device, no more memory that may be locked (`RLIMIT_MEMLOCK`)",
     .seen = "`ibv_reg_mr` fails with `ENOMEM`"},
    {.name = "delay-completion",
     .depth = InjectionDepth::kDevice,
     .object = "completion",
     .takes_time = true,
     .draws = true,
     .cause = "a busy PCI bus, interrupts that are put together",
     .seen = "completions that come late and several at once, in their order; none beyond the end of its connection"},
    {.name = "place-late",
     .depth = InjectionDepth::kDevice,
     .object = "Write",
     .takes_time = true,
     .draws = true,
     .cause = "relaxed ordering on the PCI bus, several DMA engines",
     .seen = "RDMA Writes in memory in any order, last bytes first, before the next Send, immediate data, Read or "
             "atomic of the connection takes effect: a program that polls memory must not trust their order"},
}};

constexpr std::array<const char*, 2> kDepthNames = {"record", "device"};

}  // namespace

const char* ToString(InjectionDepth depth) {
  return kDepthNames[static_cast<size_t>(depth)];
}

const char* ToString(InjectionAction action) {
  return RowOf(action).name.data();
}

std::span<const ActionRow, kInjectionActions> AllActions() {
  return kRows;
}

const ActionRow& RowOf(InjectionAction action) {
  return kRows[static_cast<size_t>(action)];
}

}  // namespace stagecoach::emu
