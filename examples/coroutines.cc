// The same two ends with co_await: a service whose handler is a coroutine and computes on other threads, calls with a
// deadline, and calls that are cancelled.
//
//   bazel run //examples:coroutines
//
// Exit status 0 only if every call ended as it should.

#include <fmt/format.h>

#include <asio/bind_cancellation_slot.hpp>
#include <asio/cancellation_signal.hpp>
#include <asio/co_spawn.hpp>
#include <asio/thread_pool.hpp>
#include <asio/use_awaitable.hpp>
#include <cstdint>
#include <future>
#include <string>
#include <string_view>
#include <utility>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/co_service.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/loop/loop_context.h"

using namespace stagecoach;           // NOLINT: as a program of one file may
using namespace stagecoach::rpcrdma;  // NOLINT

namespace {

constexpr ProcedureId kCount{.program = 0x20000002, .version = 1, .procedure = 1};
constexpr uint32_t kPatternMax = 100;

// How often a pattern occurs in a text, which is still being read when the first calls come.
// [snippet: service]
class SearchService final : public CoService {
 public:
  SearchService(LoopContext& context, asio::thread_pool& pool, std::shared_future<std::string> text)
      : CoService(context.get_executor()), pool_(pool), text_(std::move(text)) {}

  uint32_t program() const override { return kCount.program; }
  VersionRange versions() const override { return {kCount.version, kCount.version}; }

  asio::awaitable<void> Serve(Request request) override {
    if (request.procedure() == 0) co_return request.Reply();
    if (request.procedure() != kCount.procedure) co_return request.Fail(AcceptStat::kProcUnavail);
    const std::string pattern(request.args().String("pattern", kPatternMax));
    if (!request.args().Finish() || pattern.empty()) co_return request.Fail(AcceptStat::kGarbageArgs);
    // Runs on a thread of the pool; what follows, on the loop's again.
    const auto count = [this, pattern] { return Count(pattern); };
    const uint32_t found = co_await RunOn(pool_, count);
    request.Reply([&](XdrWriter& results) { results.U32(found); });
  }

 private:
  uint32_t Count(const std::string& pattern) const {
    const std::string& text = text_.get();  // waits for it
    uint32_t found = 0;
    for (size_t at = text.find(pattern); at != std::string::npos; at = text.find(pattern, at + 1)) ++found;
    return found;
  }

  asio::thread_pool& pool_;
  const std::shared_future<std::string> text_;
};
// [end]

// [snippet: call]
asio::awaitable<Result<uint32_t, CallError>> Count(Client& client, std::string_view pattern, CallOptions options) {
  const auto args = [&](XdrWriter& out) { out.String(pattern); };
  const Result<Reply, CallError> reply = co_await client.AsyncCall(kCount, args, options, asio::use_awaitable);
  if (!reply) co_return Err(reply.error());
  XdrReader results = reply->results();
  const uint32_t found = results.U32("found");
  if (auto end = results.Finish(); !end) {
    co_return Err(CallError{.kind = CallError::Kind::kBadReply, .sent = true, .message = ToString(end.error())});
  }
  co_return found;
}
// [end]

// [snippet: errors]
// What a program can do about a call that failed.
std::string_view Advice(const CallError& error) {
  switch (error.kind) {
    case CallError::Kind::kTransport:
    case CallError::Kind::kBadReply:
    case CallError::Kind::kRpc:
    case CallError::Kind::kDenied:
    case CallError::Kind::kTooLarge:
      return "to repeat it would not help";
    case CallError::Kind::kCancelled:
      return "nobody wants it any more";
    default:
      return error.sent ? "it may have been executed" : "it was not executed: try again";
  }
}
// [end]

// Returns whether all went as it should.
asio::awaitable<bool> Search(EventLoop& loop, uint16_t port, std::promise<std::string> text) {
  Client client(loop, {});
  // [snippet: connect]
  const Result<void, CallError> connected = co_await client.AsyncConnect("127.0.0.1", port, asio::use_awaitable);
  if (!connected) {
    fmt::print(stderr, "{}\n", connected.error().ToString());
    co_return false;
  }
  // [end]

  // [snippet: deadline]
  // The reply of a call that timed out could still come, and must not meet memory that is somebody else's by then, so
  // its connection ends with it.
  CallOptions options;
  options.timeout = 50ms;
  const Result<uint32_t, CallError> late = co_await Count(client, "the", options);
  if (late || late.error().kind != CallError::Kind::kTimedOut || !late.error().connection_gone()) co_return false;
  fmt::print("{} ({})\n", late.error().ToString(), Advice(late.error()));
  Client another(loop, {});
  // [end]
  if (auto again = co_await another.AsyncConnect("127.0.0.1", port, asio::use_awaitable); !again) co_return false;

  // [snippet: cancel]
  // An operation ends early when the signal is emitted, on the loop's thread: here because it took too long for us, in
  // an interactive program because somebody pressed a key.
  asio::cancellation_signal signal;
  const auto timer = loop.At(loop.Now() + 20ms, [&] { signal.emit(asio::cancellation_type::terminal); });
  const auto args = [](XdrWriter& out) { out.String("the"); };
  const Result<Reply, CallError> cancelled =
      co_await another.AsyncCall(kCount, args, {}, asio::bind_cancellation_slot(signal.slot(), asio::use_awaitable));
  loop.Cancel(timer);  // it refers to `signal`
  // [end]
  if (cancelled || cancelled.error().kind != CallError::Kind::kCancelled) co_return false;
  fmt::print("{} ({})\n", cancelled.error().ToString(), Advice(cancelled.error()));

  // The server answers the cancelled call as well, and with that its credit is back: there was only the one.
  text.set_value("the quick brown fox and the lazy dog");
  const Result<uint32_t, CallError> found = co_await Count(another, "the", CallOptions());
  if (!found) {
    fmt::print(stderr, "{}\n", found.error().ToString());
    co_return false;
  }
  fmt::print("\"the\" occurs {} times\n", *found);

  const Result<uint32_t, CallError> refused = co_await Count(another, "", CallOptions());
  if (refused || refused.error().accept_stat != AcceptStat::kGarbageArgs) co_return false;
  fmt::print("{} ({})\n", refused.error().ToString(), Advice(refused.error()));
  co_await another.AsyncClose(asio::use_awaitable);
  co_return *found == 2;
}

}  // namespace

int main() {
  // [snippet: spawn]
  AsioLoop loop;
  LoopContext context(loop);  // what coroutines run on
  asio::thread_pool pool(4);
  std::promise<std::string> text;
  SearchService service(context, pool, text.get_future().share());
  Server server(loop, {});
  server.Register(&service);
  if (auto listening = server.Listen("127.0.0.1", 0); !listening) {
    fmt::print(stderr, "{}\n", listening.error().ToString());
    return 1;
  }
  bool ok = false;
  asio::co_spawn(context.get_executor(), Search(loop, server.port(), std::move(text)),
                 [&](std::exception_ptr, bool result) {
                   ok = result;
                   loop.Stop();
                 });
  loop.Run();
  // [end]

  // [snippet: end]
  server.Stop(5s, [&] { loop.Stop(); });
  loop.Run();
  // The coroutines of calls whose client has gone end as well, before what they use does.
  while (service.running() > 0) loop.RunOnce();
  pool.join();
  // [end]
  return ok ? 0 : 1;
}
