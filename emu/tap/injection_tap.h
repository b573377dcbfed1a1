// WithInjections: a record layer that does to its connection what injection rules say (emu/inject/plan.h).
//
// What each action is, to the owner and on the wire:
//
//   drop        The record is not sent, and counts as sent; or what has arrived is thrown away. InfiniBand alone.
//   delay       The record waits here, and those behind it with it: what is late is never overtaken.
//   duplicate   The record is given to the layer below twice. Where that has room for one, the second waits here, and
//               what follows behind it. InfiniBand alone.
//   overtake    The record waits for what is queued before the next flush, and for nothing else. If there is nothing,
//               it has not been overtaken (ConnectionInjections::NotOvertaken). InfiniBand alone.
//   stall       From this record on nothing leaves, and nothing that arrives is taken. The stream stays. On iWARP it
//               fills up; an InfiniBand network that is silent loses what is sent, which then counts as sent.
//   disconnect  The record is not sent, or not taken, and nothing is any more. On iWARP the stream is reset, behind
//               what it has taken so far; both ends find out as they would from any reset (ECONNRESET). An InfiniBand
//               QP would open another stream, so the peer is told by a packet of our own, `farewell`, and the owner
//               by ConnectionInjections::end(). It leaves behind what the stream has taken so far, when there is room
//               for it: until then TxIdle() is false, and the owner is to go on as if nothing had happened. What
//               arrives is lost.
//
// Goes on top of a capture's tap, so that captures show what is on the wire when this is done with it: a record that is
// dropped is not in the capture of the end that drops it on its way out, one that is delayed is there when it leaves.
// Segments that cannot be decoded are passed on as they are; the engines judge them.
//
// Not thread-safe, as the layer below.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/trace.h"
#include "emu/fabric/fabric.h"
#include "emu/inject/plan.h"
#include "emu/llp/llp.h"

namespace stagecoach::emu {

struct InjectionTapOptions {
  const Fabric& fabric;  // its clock; outlives the tap, as does `trace`
  TraceSink* trace = nullptr;
  std::string name;  // in traces
  InjectionTransport transport = InjectionTransport::kIwarp;
  // Of InfiniBand connections.
  uint32_t mtu = 0;
  std::function<std::vector<std::byte>()> farewell;  // asked for when it leaves
};

// `injections` may have been through an earlier stream of the same connection.
std::unique_ptr<Llp> WithInjections(std::unique_ptr<Llp> below, std::shared_ptr<ConnectionInjections> injections,
                                    InjectionTapOptions options);

}  // namespace stagecoach::emu
