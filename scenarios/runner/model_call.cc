#include "scenarios/runner/model_call.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "base/crc32c.h"
#include "rpcrdma/wire/private_data.h"
#include "rpcrdma/wire/profile.h"

namespace stagecoach::scenario {
namespace {

using rpcrdma::Reply;
using rpcrdma::XdrReader;
using rpcrdma::XdrRoundUp;
using rpcrdma::XdrWriter;

// RPC header, and the results of TRANSFORM that are not data.
constexpr uint32_t kReplyOverhead = 64;
// RPC header without credentials, and the arguments of TRANSFORM that are not data, the lengths of those that are
// included (RFC 5531 section 9, RFC 4506).
constexpr uint64_t kCallOverhead = 40 + 24 + 4 + 4;
// Transport header of a message without chunks (RFC 8166 section 4.2).
constexpr uint64_t kInlineHeader = 28;
// The same in version 2 (draft-cel-nfsv4-rpcrdma-version-two-09 section 6.4).
constexpr uint64_t kInlineHeaderOfVersion2 = 36;

uint32_t ResultRoom(const Call& call) {
  return call.has_result_room_bytes() ? call.result_room_bytes() : call.result_bytes();
}

uint64_t WholeReplyOf(const Call& call) {
  return kReplyOverhead + XdrRoundUp(call.plain_result_bytes()) + XdrRoundUp(call.result_bytes());
}

uint32_t PlainRoom(const Call& call) {
  return call.has_plain_result_room_bytes() ? call.plain_result_room_bytes() : call.plain_result_bytes();
}

// What both ends agree on, or more where they are configured. In steps of 1024 bytes.
uint64_t Threshold(const Client& client, const Service& service) {
  if (!HavePrivateData(client, service)) return rpcrdma::kDefaultInlineThreshold;
  return std::min(client.inline_threshold(), service.inline_threshold()) / 1024 * 1024;
}

}  // namespace

ModelCall::ModelCall(uint64_t its_number, const Call& its_spec, bool lends)
    : number(its_number),
      spec(its_spec),
      argument(its_spec.argument_bytes()),
      plain_argument(its_spec.plain_argument_bytes()),
      result(lends ? ResultRoom(its_spec) : 0) {
  FillPattern(number, Datum::kArgument, argument.bytes());
  FillPattern(number, Datum::kPlainArgument, plain_argument.bytes());
}

rpcrdma::ProcedureId ModelCall::procedure() const {
  return {kModelProgram, kModelVersion, spec.idempotent() ? kModelTransformAgain : kModelTransform};
}

void ModelCall::Write(XdrWriter& args) {
  args.U64(number);
  args.U64(spec.service_ns());
  args.U32(spec.result_bytes());
  args.U32(spec.plain_result_bytes());
  args.Opaque(plain_argument.bytes());
  args.EligibleOpaque(argument.bytes());
}

rpcrdma::CallOptions ModelCall::Options() {
  rpcrdma::CallOptions options;
  if (result.size() > 0) options.result_buffers = {result.bytes()};
  options.reply_bytes_max = kReplyOverhead + PlainRoom(spec);
  options.timeout = Duration(spec.timeout_ns());
  options.retransmit = spec.retransmit();
  return options;
}

uint32_t ModelCall::WholeReply() const {
  return static_cast<uint32_t>(WholeReplyOf(spec));
}

void ModelCall::CheckReply(Stage& stage, const std::string& who, const Reply& reply) {
  XdrReader results = reply.results();
  const uint64_t answered = results.U64("call");
  const uint32_t crc = results.U32("crc");
  const ConstBytes plain = results.Opaque("plain result", kModelDataMax);
  ConstBytes data = results.EligibleOpaque("result", kModelDataMax);
  const auto wrong = [&](std::string text) {
    stage.Violate("call.reply", Label(who, "reply") + ": " + std::move(text));
  };
  if (const auto end = results.Finish(); !end) return wrong("does not decode: " + ToString(end.error()));
  if (answered != number) return wrong(fmt::format("is that of call {:#x}", answered));
  const Execution& execution = stage.executions()[number];
  if (execution.times == 0 || (execution.times > 1 && !execution.repeatable)) {
    wrong(fmt::format("executed {} times", execution.times));
  }
  if (crc != ComputeCrc32c(argument.bytes())) wrong("the service saw another argument");
  const auto check = [&](const char* what, Datum datum, ConstBytes bytes, size_t wanted) {
    if (bytes.size() != wanted) return wrong(fmt::format("{} of {} bytes instead of {}", what, bytes.size(), wanted));
    const size_t matched = MatchPattern(number, datum, bytes);
    if (matched != wanted) wrong(fmt::format("{} of {} bytes is damaged from byte {} on", what, wanted, matched));
  };
  if (result.size() > 0) data = reply.Settle(data, 0);
  check("plain result", Datum::kPlainResult, plain, spec.plain_result_bytes());
  check("result", Datum::kResult, data, spec.result_bytes());
  if (!result.Untouched(spec.result_bytes())) {
    stage.Violate("memory.guard", Label(who, "result") + ": bytes behind it were written");
  }
}

void ModelCall::Retire(Stage& stage, const std::string& who, ColdStorage* cold) {
  const auto check = [&](GuardedBuffer& buffer, const char* what) {
    if (!buffer.GuardsIntact()) stage.Violate("memory.guard", Label(who, what) + ": bytes beside it were written");
  };
  check(argument, "argument");
  check(plain_argument, "plain argument");
  check(result, "result");
  if (MatchPattern(number, Datum::kArgument, argument.bytes()) != argument.size()) {
    stage.Violate("memory.guard", Label(who, "argument") + ": was written to");
  }
  // A Read that comes too late finds something else here.
  MutableBytes bytes = argument.bytes();
  std::fill(bytes.begin(), bytes.end(), std::byte{0xdd});
  cold->Keep(std::move(argument), Label(who, "argument"), stage.Now());
  cold->Keep(std::move(result), Label(who, "result"), stage.Now());
}

std::string ModelCall::Label(const std::string& who, const char* what) const {
  return fmt::format("{}, call {:#x}, {}", who, number, what);
}

const Service& ServiceOf(const Scenario& scenario, const Client& client) {
  const auto found = std::find_if(scenario.service().begin(), scenario.service().end(),
                                  [&](const Service& service) { return service.host() == client.server(); });
  STAGECOACH_CHECK(found != scenario.service().end());
  return *found;
}

void ServeReverse(Stage& stage, const Client& client, std::unique_ptr<ModelService>* service,
                  rpcrdma::ClientOptions* options) {
  if (client.reverse_credits() == 0) return;
  if (*service == nullptr) {
    *service = std::make_unique<ModelService>(stage.loop(client.host()), &stage.executions(), &stage.violations());
  }
  options->reverse_services = {service->get()};
  options->reverse_credits = client.reverse_credits();
}

void SetTerms(const Client& client, rpcrdma::ClientOptions* options) {
  options->profile = DocumentOf(client.rpcrdma_profile());
  options->outgoing_reads = static_cast<uint8_t>(client.outgoing_reads());
  options->read_bytes_max = client.read_bytes_max();
  options->padding_align = client.padding_align();
  options->padding_threshold = client.padding_threshold();
  options->ccp.enabled = client.ccp();
  options->versions = {client.version_low(), client.version_high()};
  options->grown_bytes_max = client.grown_bytes_max();
  options->reverse_chunks = client.reverse_chunks();
  options->exact_lengths = true;  // of servers that keep to the document
}

bool HasRoomForReverse(const Device& device) {
  const emu::DeviceProfile profile = MakeProfile(device);
  return profile.max_qp_wr >= 8 && profile.max_cqe >= 16;
}

// --- Calls that cannot but fail, or may ---

namespace {

// That the device of the host registers at once.
uint64_t LongestRegion(const Scenario& scenario, const std::string& host) {
  uint64_t longest = UINT32_MAX;
  for (const Host& each : scenario.host()) {
    if (each.name() == host) longest = std::min(longest, MakeProfile(each.device()).max_mr_size);
  }
  return longest;
}

// What is sent if nothing of the call goes by a chunk of its own.
uint64_t WholeCallOf(const Call& call) {
  return kCallOverhead + XdrRoundUp(call.plain_argument_bytes()) + XdrRoundUp(call.argument_bytes());
}

// The service takes so few chunks, or segments of them, that a call may have to go as one and its reply as another, and
// that cannot be had: the device would make several segments of them, or there is no memory to put the call together.
bool NeedsMoreChunks(const Scenario& scenario, const Client& client, const Call& call) {
  const Service& service = ServiceOf(scenario, client);
  const bool few = service.has_read_segments_max() || service.has_write_chunks_max() ||
                   service.has_segments_per_chunk_max() || service.has_write_segments_max();
  if (!few) return false;
  const uint64_t reply =
      XdrRoundUp(kReplyOverhead + PlainRoom(call)) + XdrRoundUp(std::max(ResultRoom(call), call.result_bytes()));
  return WholeCallOf(call) > client.grown_bytes_max() ||
         std::max(WholeCallOf(call), reply) > LongestRegion(scenario, client.host());
}

// In version 2, whatever was offered: the client is told what the reply needs, and has memory for it and, beside that,
// for a call that has to be put together.
bool ReplyGetsItsRoom(const Scenario& scenario, const Client& client, const Call& call) {
  return WholeReplyOf(call) <= LongestRegion(scenario, client.host()) &&
         2 * WholeReplyOf(call) + WholeCallOf(call) <= client.grown_bytes_max();
}

// So few Receives, maybe, that none can be kept for RDMA_DONE beside that of a call.
bool HasFewReceives(const Scenario& scenario, const Service& service) {
  return std::any_of(scenario.host().begin(), scenario.host().end(), [&](const Host& host) {
    return host.name() == service.host() && !HasRoomForReverse(host.device());
  });
}

// In version 1, where RepliesAreRead: it is one that the service can expose. The header has room for what was offered,
// and for what is exposed: the message before and behind the result, and that, in as many pieces as the devices make of
// them.
bool ReplyCanBeRead(const Scenario& scenario, const Client& client, const Call& call) {
  const Service& service = ServiceOf(scenario, client);
  if (HasFewReceives(scenario, service)) return false;
  constexpr uint64_t kHeaderWithoutSegments = 48;
  const auto segments = [&](uint64_t bytes, const std::string& host) {
    const uint64_t longest = LongestRegion(scenario, host);
    return (bytes + longest - 1) / longest;
  };
  const uint64_t offered =
      segments(ResultRoom(call), client.host()) + segments(XdrRoundUp(kReplyOverhead + PlainRoom(call)), client.host());
  const uint64_t exposed = 3 + segments(WholeReplyOf(call), service.host());
  return kHeaderWithoutSegments + 16 * offered + 24 * exposed <= Threshold(client, service) && exposed <= 64 &&
         WholeReplyOf(call) <= service.exposed_bytes_max();
}

}  // namespace

// Counted as if everything had to be exposed, in as many pieces as the device makes of it. A header may name 64
// segments, and must fit the smaller inline threshold with all of them (24 bytes for one that is read, 16 for one that
// is written; RFC 8166 section 4.3).
bool TooLarge(const Scenario& scenario, const Client& client, const Call& call) {
  constexpr uint64_t kSegmentsMax = 64;
  constexpr uint64_t kHeaderWithoutSegments = 48;
  const uint64_t message = kCallOverhead + XdrRoundUp(call.plain_argument_bytes());
  if (message > std::max<uint64_t>(client.message_bytes_max(), 1024)) return true;
  const uint64_t longest = LongestRegion(scenario, client.host());
  const auto segments = [longest](uint64_t bytes) { return (bytes + longest - 1) / longest; };
  const uint64_t reads = segments(message) + segments(call.argument_bytes());
  const uint64_t writes = segments(ResultRoom(call)) + segments(XdrRoundUp(kReplyOverhead + PlainRoom(call)));
  return reads + writes > kSegmentsMax || NeedsMoreChunks(scenario, client, call) ||
         kHeaderWithoutSegments + 24 * reads + 16 * writes > Threshold(client, ServiceOf(scenario, client));
}

bool TooLargeForReverse(const Client& client, const Service& service, const Call& call) {
  const uint64_t header = MayBeOfVersion2(client, service) ? kInlineHeaderOfVersion2 : kInlineHeader;
  return header + std::max(WholeCallOf(call), WholeReplyOf(call)) > Threshold(client, service);
}

bool ReplyCannotTravel(const Scenario& scenario, const Client& client, const Call& call) {
  const Service& service = ServiceOf(scenario, client);
  if (NeedsMoreChunks(scenario, client, call)) return true;
  if (call.result_bytes() <= ResultRoom(call) && call.plain_result_bytes() <= PlainRoom(call)) return false;
  // A client that speaks both versions may come to either, whichever the service would rather have.
  const bool fails_in_1 =
      MayBeOfVersion1(client, service) && !(RepliesAreRead(client, service) && ReplyCanBeRead(scenario, client, call));
  const bool fails_in_2 = MayBeOfVersion2(client, service) && !ReplyGetsItsRoom(scenario, client, call);
  return fails_in_1 || fails_in_2;
}

// [v2:5.3.3#9] A message that may be too long to go inline, beside the longest header.
bool EndsForReadChunks(const Client& client, const Service& service, const Call& call) {
  constexpr uint64_t kInlineOfVersion2 = 4096;
  constexpr uint64_t kHeaderMax = 52 + 64 * 24;
  return MayBeOfVersion2(client, service) && service.has_read_segments_max() && service.read_segments_max() == 1 &&
         call.argument_bytes() > 0 &&
         kHeaderMax + kCallOverhead + XdrRoundUp(call.plain_argument_bytes()) > kInlineOfVersion2;
}

bool ReplyExceedsClient(const Client& client, const Service& service, const Call& call) {
  return RepliesAreRead(client, service) && WholeReplyOf(call) > client.read_bytes_max();
}

bool ReplyExceedsDevice(const Scenario& scenario, const Client& client, const Call& call) {
  return RepliesAreRead(client, ServiceOf(scenario, client)) &&
         WholeReplyOf(call) > LongestRegion(scenario, client.host());
}

bool ArgumentsExceedServer(const Service& service, const Call& call) {
  return WholeCallOf(call) > service.call_bytes_max();
}

bool ServerMayLackMemory(const Scenario& scenario, const Client& client, const Call& call) {
  constexpr uint64_t kPage = 4096;
  const Service& service = ServiceOf(scenario, client);
  uint64_t largest = 0;
  bool cancels = false;
  for (const Call& each : client.call()) {
    largest = std::max(largest, uint64_t{each.argument_bytes()} + each.plain_argument_bytes() + each.result_bytes());
    // One that is sent again may be executed for a connection that is gone.
    cancels = cancels || each.cancel_ns() != 0 || client.session();
  }
  const uint64_t credits =
      uint64_t{std::min(client.credits(), service.credits())} * (client.session() ? client.connections() : 1);
  // One beside those whose replies are exposed: see credits.h.
  const uint64_t at_a_time = (cancels ? credits : std::min<uint64_t>(credits, client.concurrency())) +
                             (RepliesAreRead(client, service) ? 1 : 0);
  // What it was given in addition: see ServerOptions::client_bytes_max.
  const uint64_t memory = std::max(service.client_bytes_max(), service.call_bytes_max() + (1u << 20));
  return 2 * at_a_time * (largest + 3 * kPage) + call.result_bytes() + kPage > memory;
}

bool ReplyExceedsServer(const Service& service, const Call& call) {
  return kReplyOverhead + XdrRoundUp(call.plain_result_bytes()) > service.message_bytes_max();
}

bool ReplyIsNotKept(const Service& service, const Call& call) {
  const uint64_t most = kReplyOverhead + XdrRoundUp(call.plain_result_bytes()) + call.result_bytes();
  return !call.idempotent() && most > service.replay_reply_bytes_max();
}

}  // namespace stagecoach::scenario
