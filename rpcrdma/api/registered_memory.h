// RegisteredMemory: memory of the program that RDMA devices get to know once, for any number of calls or replies.
//
// From examples/placement.cc#registered:
//
//   // Memory for many calls: the device gets to know it once, and each call exposes its own part of it while it lasts.
//   std::vector<std::byte> arena(2 * kBlockMax);
//   CallOptions part;
//   part.registered_memory = RegisteredMemory{arena};
//   for (size_t at = 0; at < arena.size(); at += kBlockMax) {
//     part.result_buffers = {MutableBytes(arena).subspan(at, kBlockMax)};
//     const Result<Reply, CallError> again = co_await client.AsyncCall(kFetch, no_args, part, asio::use_awaitable);
//     if (!again || again->placed_bytes(0) != data.size()) co_return false;
//   }
//
// A Service gives it to Request::Reply with results that lie in it.
//
// What it saves. The device must know memory before it moves data there, and getting to know it (pinning its pages,
// filling the device's tables) can take longer than the transfer. Without this, that is done for every chunk of every
// call. With it, a connection registers the whole of the memory when a call or reply first uses it there, which blocks
// the loop meanwhile, and deregisters it when the memory or the connection goes. A Session's connections each do.
//
// Who can reach it. Nobody, through that registration. For each call a type 2 memory window is bound on the bytes of
// that call's arguments and results, and no others, with the right that the call needs; it is invalid again before the
// call's handler runs. So a server gets of this memory what it would get of any other [5666bis:10.1#1]. A server's
// results are sent by RDMA Writes of its own, and its clients get no access at all.
//
// Where that cannot be had. Without type 2 windows (ClientOptions::memory_windows, and devices that have none) a
// client's memory is registered for each call after all, part by part; so is, until the next connection, what a device
// refuses to register in one piece. ConnectionStats::memory_reused and memory_not_reused say how often it was the one
// and how often the other.
//
// Until when. Copies are the same memory. When the last of them is gone, and the last call and reply that was given one
// has ended, nothing of it is registered any more, and `owner` is let go. Calls in progress are not disturbed by that:
// each holds the memory until just before its handler runs, a reply until the device has sent it. The bytes must be
// there as long: a program that frees them itself does so when it has given its copies up and had its handlers run; of
// replies nobody tells it, so a service passes an owner.
//
// Threading: on one loop's thread, or before it runs.
#pragma once

#include <memory>

#include "base/bytes.h"

namespace stagecoach::rpcrdma {

class LastingMemory;

namespace internal {
struct RegisteredMemoryAccess;
}  // namespace internal

class RegisteredMemory {
 public:
  // None.
  RegisteredMemory() = default;
  // For arguments and results. Does not touch a device yet. `owner`, if any, keeps the bytes.
  explicit RegisteredMemory(MutableBytes bytes, std::shared_ptr<const void> owner = nullptr);
  // For what is only read: arguments, and the results of a Service. The pages may be mapped without write access.
  static RegisteredMemory ReadOnly(ConstBytes bytes, std::shared_ptr<const void> owner = nullptr);

  explicit operator bool() const { return memory_ != nullptr; }
  // Empty of none.
  ConstBytes bytes() const;
  // Whether all of `part` is in it. No bytes are in any memory.
  bool Contains(ConstBytes part) const;

 private:
  friend struct internal::RegisteredMemoryAccess;

  std::shared_ptr<LastingMemory> memory_;
};

}  // namespace stagecoach::rpcrdma
