// Direct placement: a Binding of one's own, a large argument by Read chunk and a large result by Write chunk, neither
// copied by either end; and the counters that prove it.
//
//   bazel run //examples:placement
//
// Exit status 0 only if both blocks arrived intact and were placed by RDMA.

#include <fmt/format.h>

#include <asio/co_spawn.hpp>
#include <asio/use_awaitable.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "base/crc32c.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/binding/binding.h"
#include "rpcrdma/loop/loop_context.h"

using namespace stagecoach;           // NOLINT: as a program of one file may
using namespace stagecoach::rpcrdma;  // NOLINT

namespace {

// [snippet: binding]
// program BLOCKS {
//   version V1 {
//     void NULL(void) = 0;
//     unsigned int CHECK(opaque block<>) = 1;   /* the block's CRC32C */
//     opaque<> FETCH(void) = 2;
//   } = 1;
// } = 0x20000004;
constexpr ProcedureId kCheck{.program = 0x20000004, .version = 1, .procedure = 1};
constexpr ProcedureId kFetch{.program = 0x20000004, .version = 1, .procedure = 2};
constexpr uint32_t kBlockMax = 4 << 20;

// What may be placed directly, by procedure, and how long the rest of a reply can be: a CRC, the count of a block.
constexpr const char* kBlock[] = {"block"};
constexpr ProcedureBinding kProcedures[] = {
    {.number = 0, .name = "NULL"},
    {.number = kCheck.procedure, .name = "CHECK", .arguments = kBlock, .reply_fixed = 4},
    {.number = kFetch.procedure, .name = "FETCH", .results = kBlock, .reply_fixed = 4},
};
constexpr Binding kBinding = {
    .program = kCheck.program, .version = kCheck.version, .name = "blocks", .procedures = kProcedures};
// [end]

uint32_t Checksum(ConstBytes bytes) {
  Crc32c checksum;
  checksum.Update(bytes);
  return checksum.Value();
}

std::vector<std::byte> Pattern(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + (i >> 8));
  return bytes;
}

// [snippet: service]
class BlockService final : public Service {
 public:
  explicit BlockService(std::shared_ptr<const std::vector<std::byte>> block) : block_(std::move(block)) {}

  uint32_t program() const override { return kBinding.program; }
  VersionRange versions() const override { return {kBinding.version, kBinding.version}; }
  std::span<const Binding> bindings() const override { return {&kBinding, 1}; }
  // FETCH is, and must say so: its reply is too long to be kept for a client that asks again.
  bool idempotent(uint32_t, uint32_t) const override { return true; }

  void Handle(Request request) override {
    switch (request.procedure()) {
      case 0:
        return request.Reply();
      case kCheck.procedure: {
        // Where the RDMA Read put it, or in the message if the block is short. Valid until the call is answered.
        const ConstBytes block = request.args().EligibleOpaque("block", kBlockMax);
        if (!request.args().Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        const uint32_t checksum = Checksum(block);
        return request.Reply([&](XdrWriter& results) { results.U32(checksum); });
      }
      case kFetch.procedure: {
        if (!request.args().Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        // RDMA Writes read the block where it lies; a reference to it is kept until the device has done so.
        return request.Reply([&](XdrWriter& results) { results.EligibleOpaque(*block_); }, block_);
      }
      default:
        return request.Fail(AcceptStat::kProcUnavail);
    }
  }

 private:
  const std::shared_ptr<const std::vector<std::byte>> block_;
};
// [end]

// Returns whether both blocks arrived as they were, by RDMA.
asio::awaitable<bool> Exchange(EventLoop& loop, uint16_t port, ConstBytes served) {
  // [snippet: register]
  Client client(loop, {});
  client.Register(kBinding);
  // [end]
  if (auto connected = co_await client.AsyncConnect("127.0.0.1", port, asio::use_awaitable); !connected) {
    fmt::print(stderr, "{}\n", connected.error().ToString());
    co_return false;
  }

  // [snippet: argument]
  // The block is not copied: the server reads it from here, and nothing of it is reachable when the call has ended.
  const std::vector<std::byte> block = Pattern(1'000'001);
  const auto check_args = [&](XdrWriter& args) { args.EligibleOpaque(block); };
  const Result<Reply, CallError> checked = co_await client.AsyncCall(kCheck, check_args, {}, asio::use_awaitable);
  // [end]
  if (!checked) {
    fmt::print(stderr, "{}\n", checked.error().ToString());
    co_return false;
  }
  XdrReader results = checked->results();
  const uint32_t checksum = results.U32("checksum");
  if (!results.Finish() || checksum != Checksum(block)) co_return false;

  // [snippet: result]
  // The server writes the result into this memory.
  std::vector<std::byte> sink(kBlockMax);
  CallOptions options;
  options.result_buffers = {sink};
  const auto no_args = [](XdrWriter&) {};
  const Result<Reply, CallError> fetched = co_await client.AsyncCall(kFetch, no_args, options, asio::use_awaitable);
  if (!fetched) {
    fmt::print(stderr, "{}\n", fetched.error().ToString());
    co_return false;
  }
  XdrReader fetched_results = fetched->results();
  // Settle copies what came in the message all the same, as a short block does.
  const ConstBytes data = fetched->Settle(fetched_results.EligibleOpaque("block", kBlockMax), 0);
  if (!fetched_results.Finish()) co_return false;
  // [end]

  // [snippet: proof]
  const ConnectionStats stats = client.stats();
  fmt::print("CHECK: {} bytes by RDMA Read, in {} call\n", stats.bytes_placed_by_read, stats.calls_by_read_chunk);
  fmt::print("FETCH: {} bytes by RDMA Write, in {} call\n", stats.bytes_placed_by_write, stats.calls_by_write_chunk);
  fmt::print("calls: {} Sends, of {} bytes in all\n", stats.sends, stats.send_bytes.sum());
  const bool placed = stats.bytes_placed_by_read == block.size() && stats.bytes_placed_by_write == data.size() &&
                      data.data() == sink.data() && fetched->placed_bytes(0) == data.size();
  // [end]

  // [snippet: registered]
  // Memory for many calls: the device gets to know it once, and each call exposes its own part of it while it lasts.
  std::vector<std::byte> arena(2 * kBlockMax);
  CallOptions part;
  part.registered_memory = RegisteredMemory{arena};
  for (size_t at = 0; at < arena.size(); at += kBlockMax) {
    part.result_buffers = {MutableBytes(arena).subspan(at, kBlockMax)};
    const Result<Reply, CallError> again = co_await client.AsyncCall(kFetch, no_args, part, asio::use_awaitable);
    if (!again || again->placed_bytes(0) != data.size()) co_return false;
  }
  // [end]
  const bool intact = data.size() == served.size() && Checksum(data) == Checksum(served);
  co_await client.AsyncClose(asio::use_awaitable);
  co_return (placed && intact);
}

}  // namespace

int main() {
  AsioLoop loop;
  LoopContext context(loop);
  const auto block = std::make_shared<const std::vector<std::byte>>(Pattern(3'000'003));
  BlockService blocks(block);
  Server server(loop, {});
  server.Register(&blocks);
  if (auto listening = server.Listen("127.0.0.1", 0); !listening) {
    fmt::print(stderr, "{}\n", listening.error().ToString());
    return 1;
  }
  bool ok = false;
  asio::co_spawn(context.get_executor(), Exchange(loop, server.port(), *block), [&](std::exception_ptr, bool result) {
    ok = result;
    loop.Stop();
  });
  loop.Run();
  server.Stop(5s, [&] { loop.Stop(); });
  loop.Run();
  return ok ? 0 : 1;
}
