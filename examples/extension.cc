// An extension of RPC-over-RDMA version 2 that the stack knows nothing of: a ping of the transport, with a payload that
// comes back. It has one of each element that an extension may have: a header type, a transport property that announces
// it, an error code, and a header flag. docs/extensions.md goes through it.
//
//   bazel run //examples:extension
//
// Exit status 0 only if every ping and every call ended as it should.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <asio/co_spawn.hpp>
#include <asio/use_awaitable.hpp>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/loop/loop_context.h"
#include "rpcrdma/wire/extensions.h"
#include "rpcrdma/wire/v2_numbers.h"

using namespace stagecoach;           // NOLINT: as a program of one file may
using namespace stagecoach::rpcrdma;  // NOLINT

namespace {

// [snippet: numbers]
// The numbers, and the XDR of what has any:
//
//   struct rpcrdma2_hdr_ping { opaque payload<512>; };  // a header type; the answer is of the same one
//   typedef uint32 rpcrdma2_prop_ping;                  // a property: bytes of payload that its sender takes
constexpr uint32_t kPing = kExperimentalNumbers + 0x70;
constexpr uint32_t kPingProperty = kExperimentalNumbers + 0x70;
constexpr uint32_t kErrTooBusy = kExperimentalNumbers + 0x70;
// In calls: there is no hurry. It goes to servers whose property is not 0.
constexpr uint32_t kFlagBackground = 0x80000000;
constexpr uint32_t kPayloadMax = 512;
// [end]

// [snippet: feature]
std::optional<size_t> PingSize(ConstBytes rest) {
  XdrReader in(rest);
  in.Opaque("payload", kPayloadMax);
  if (!in.ok()) return std::nullopt;
  return in.position();
}
std::string PingText(ConstBytes body) {
  XdrReader in(body);
  return fmt::format("payload of {} bytes", in.Opaque("payload", kPayloadMax).size());
}
bool IsPingProperty(ConstBytes data) {
  XdrReader in(data);
  in.U32("payload_max");
  return in.Finish().has_value();
}
bool TakesPings(ConstBytes data) {
  return XdrReader(data).U32("payload_max") > 0;
}
FlagUse UseOfBackground(uint32_t header_type) {
  return header_type == kRdma2Msg || header_type == kRdma2Nomsg ? FlagUse::kMay : FlagUse::kMustNot;
}

constexpr HeaderTypeRow kHeaderTypes[] = {{.type = kPing, .name = "PING", .size = PingSize, .text = PingText}};
constexpr PropertyRow kProperties[] = {{.id = kPingProperty, .name = "ping", .valid = IsPingProperty}};
constexpr ErrorRow kErrors[] = {{.code = kErrTooBusy, .name = "TOO_BUSY"}};
constexpr FlagRow kFlags[] = {{.flag = kFlagBackground,
                               .name = "BACKGROUND",
                               .use = UseOfBackground,
                               .property = kPingProperty,
                               .shows = TakesPings}};
constexpr Feature kPingFeature{
    .name = "ping", .header_types = kHeaderTypes, .properties = kProperties, .errors = kErrors, .flags = kFlags};
// [end]

// XDR of a payload, and of a number.
std::vector<std::byte> Encode(std::string_view payload) {
  std::vector<std::byte> bytes(4 + XdrRoundUp(payload.size()));
  XdrWriter(bytes).String(payload);
  return bytes;
}
std::vector<std::byte> Encode(uint32_t number) {
  std::vector<std::byte> bytes(4);
  XdrWriter(bytes).U32(number);
  return bytes;
}

constexpr ProcedureId kNull{.program = 0x20000007, .version = 1, .procedure = 0};
constexpr ProcedureId kWork{.program = 0x20000007, .version = 1, .procedure = 1};

// Work that takes until it is told to be done. Of what is not in the background, one piece at a time makes it busy.
// [snippet: service]
class Worker final : public Service {
 public:
  uint32_t program() const override { return kWork.program; }
  VersionRange versions() const override { return {kWork.version, kWork.version}; }
  void Handle(Request request) override {
    if (request.procedure() == 0) return request.Reply();
    const bool background = (request.transport_flags() & kFlagBackground) != 0;
    (background ? in_background_ : urgent_).push_back(std::move(request));
  }

  bool busy() const { return !urgent_.empty(); }
  void Finish() {
    for (std::deque<Request>* queue : {&urgent_, &in_background_}) {
      for (; !queue->empty(); queue->pop_front()) queue->front().Reply();
    }
  }

 private:
  std::deque<Request> urgent_;
  std::deque<Request> in_background_;
};
// [end]

// [snippet: ask]
// The longest payload that the server takes. 0, the default: it takes no pings.
uint32_t PayloadMax(const Client& client) {
  const PropertySet* said = client.peer_properties();
  const Property* ping = said != nullptr ? FindProperty(*said, kPingProperty) : nullptr;
  return ping != nullptr && !ping->data.empty() ? XdrReader(ping->data).U32("payload_max") : 0;
}

// What came back, or why nothing did.
asio::awaitable<std::string> Ping(Client& client, std::string_view payload) {
  if (payload.size() > PayloadMax(client)) co_return "not sent";
  const Result<Extension, CallError> answer =
      co_await client.AsyncExtension(kPing, Encode(payload), 5s, asio::use_awaitable);
  if (!answer) co_return answer.error().transport_error == kErrTooBusy ? "too busy" : answer.error().ToString();
  XdrReader in(answer->body);
  co_return std::string(in.String("payload", kPayloadMax));
}
// [end]

// Returns whether all went as it should.
asio::awaitable<bool> Use(EventLoop& loop, uint16_t port, std::shared_ptr<const Extensions> extensions,
                          Worker& worker) {
  // [snippet: client]
  ClientOptions options;
  options.versions = kVersion2Alone;
  options.extensions = extensions;
  Client client(loop, options);
  // [end]
  if (auto connected = co_await client.AsyncConnect("127.0.0.1", port, asio::use_awaitable); !connected) {
    fmt::print(stderr, "{}\n", connected.error().ToString());
    co_return false;
  }
  const auto print = [](std::string_view when, const std::string& what) { fmt::print("{}: {}\n", when, what); };
  print("idle", co_await Ping(client, "Hello"));
  print("with 1000 bytes", co_await Ping(client, std::string(1000, 'x')));

  // [snippet: flag]
  CallOptions in_background;
  in_background.transport_flags = kFlagBackground;
  // [end]
  const auto none = [](XdrWriter&) {};
  size_t done = 0;
  const auto count = [&](Result<Reply, CallError> reply) { done += reply ? 1 : 0; };
  // A ping is answered when it comes in, which may be before the service sees the calls ahead of it. NULL comes behind
  // them.
  const auto call_and_ping = [&](const CallOptions& how) -> asio::awaitable<std::string> {
    client.AsyncCall(kWork, none, how, count);
    const auto reached = co_await client.AsyncCall(kNull, none, {}, asio::use_awaitable);
    if (!reached) co_return reached.error().ToString();
    co_return co_await Ping(client, "Hello again");
  };
  print("with work in the background", co_await call_and_ping(in_background));
  const CallOptions urgent;
  print("with urgent work", co_await call_and_ping(urgent));
  worker.Finish();
  print("afterwards", co_await Ping(client, "Hello!"));
  co_await client.AsyncClose(asio::use_awaitable);
  co_return done == 2;
}

}  // namespace

int main() {
  // [snippet: extensions]
  Extensions known;
  if (const auto conflict = known.Add(kPingFeature)) {
    fmt::print(stderr, "{}\n", ToString(*conflict));
    return 1;
  }
  const auto extensions = std::make_shared<const Extensions>(std::move(known));
  // [end]

  AsioLoop loop;
  Worker worker;
  // [snippet: server]
  ServerOptions options;
  options.versions = kVersions1And2;
  options.extensions = extensions;
  options.properties = {{.id = kPingProperty, .data = Encode(kPayloadMax)}};
  options.answer_extension[kPing] = [&worker](const ExtensionRequest& request) -> ExtensionAnswer {
    if (worker.busy()) return Err(ErrOther{kErrTooBusy});
    return request.message;
  };
  Server server(loop, options);
  // [end]
  server.Register(&worker);
  if (auto listening = server.Listen("127.0.0.1", 0); !listening) {
    fmt::print(stderr, "{}\n", listening.error().ToString());
    return 1;
  }

  LoopContext context(loop);
  bool ok = false;
  asio::co_spawn(context.get_executor(), Use(loop, server.port(), extensions, worker),
                 [&](std::exception_ptr, bool result) {
                   ok = result;
                   loop.Stop();
                 });
  loop.Run();
  server.Stop(5s, [&] { loop.Stop(); });
  loop.Run();
  return ok ? 0 : 1;
}
