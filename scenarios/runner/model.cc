#include "scenarios/runner/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/crc32c.h"
#include "base/prng.h"

namespace stagecoach::scenario {
namespace {

using rpcrdma::AcceptStat;
using rpcrdma::Request;
using rpcrdma::XdrReader;
using rpcrdma::XdrWriter;

// The eight bytes at word `index`. Multiplied and mixed: words of one pattern are never another's.
uint64_t PatternWord(uint64_t call, Datum datum, uint64_t index) {
  uint64_t word = (call * 4 + static_cast<uint64_t>(datum) + 1) * 0x9e3779b97f4a7c15u + index * 0xd1342543de82ef95u;
  word ^= word >> 31;
  return word * 0xbf58476d1ce4e5b9u;
}

template <typename Visit>
void ForEachWord(uint64_t call, Datum datum, size_t size, Visit visit) {
  for (size_t offset = 0; offset < size; offset += 8) {
    const uint64_t word = PatternWord(call, datum, offset / 8);
    if (!visit(offset, std::min<size_t>(8, size - offset), word)) return;
  }
}

constexpr const char* kArguments[] = {"argument"};
constexpr const char* kResults[] = {"result"};
uint64_t ReplyGrows(XdrReader& args) {
  args.U64("call");
  args.U64("service_ns");
  args.U32("result_bytes");
  return rpcrdma::XdrRoundUp(args.U32("plain_result_bytes"));
}

constexpr rpcrdma::ProcedureBinding Transforming(uint32_t number, const char* name) {
  return {.number = number,
          .name = name,
          .arguments = kArguments,
          .results = kResults,
          .reply_fixed = 8 + 4 + 4 + 4,
          .reply_grows = ReplyGrows};
}

constexpr rpcrdma::ProcedureBinding kModelProcedures[] = {
    {.number = kModelNull, .name = "NULL"},
    Transforming(kModelTransform, "TRANSFORM"),
    Transforming(kModelTransformAgain, "TRANSFORM_AGAIN"),
};

}  // namespace

constexpr rpcrdma::Binding kModelBinding{
    .program = kModelProgram, .version = kModelVersion, .name = "model", .procedures = kModelProcedures};

void FillPattern(uint64_t call, Datum datum, MutableBytes into) {
  ForEachWord(call, datum, into.size(), [&](size_t offset, size_t size, uint64_t word) {
    std::memcpy(into.data() + offset, &word, size);
    return true;
  });
}

size_t MatchPattern(uint64_t call, Datum datum, ConstBytes bytes) {
  size_t matched = bytes.size();
  ForEachWord(call, datum, bytes.size(), [&](size_t offset, size_t size, uint64_t word) {
    if (std::memcmp(bytes.data() + offset, &word, size) == 0) return true;
    matched = offset;
    while (bytes[matched] == AsBytes(&word, 8)[matched - offset]) ++matched;
    return false;
  });
  return matched;
}

ModelService::ModelService(EventLoop& loop, Executions* executions, Violations* violations, Options options)
    : loop_(loop), executions_(executions), violations_(violations), options_(std::move(options)) {}

ModelService::~ModelService() {
  for (const auto& [timer, held] : held_) loop_.Cancel(timer);
}

void ModelService::Handle(Request request) {
  switch (request.procedure()) {
    case kModelNull:
      return request.Reply();
    case kModelTransform:
    case kModelTransformAgain:
      return Transform(std::move(request));
    default:
      return request.Fail(AcceptStat::kProcUnavail);
  }
}

void ModelService::Transform(Request request) {
  XdrReader& reader = request.args();
  TransformArgs args;
  args.call = reader.U64("call");
  args.service_ns = reader.U64("service_ns");
  args.result_bytes = reader.U32("result_bytes");
  args.plain_result_bytes = reader.U32("plain_result_bytes");
  const ConstBytes plain = reader.Opaque("plain", kModelDataMax);
  const ConstBytes argument = reader.EligibleOpaque("argument", kModelDataMax);
  if (const auto end = reader.Finish(); !end) {
    violations_->Add(loop_.Now(), "call.arguments", "a call's arguments do not decode: " + ToString(end.error()));
    return request.Fail(AcceptStat::kGarbageArgs);
  }
  CheckArguments("call.arguments", args.call, argument, plain);
  Execution& execution = (*executions_)[args.call];
  const bool idempotent = this->idempotent(request.version(), request.procedure());
  const bool remembered = !idempotent && options_.remembers && options_.remembers(execution);
  if (++execution.times > 1 && (!execution.repeatable || remembered)) {
    violations_->Add(loop_.Now(), "call.executed_twice", fmt::format("call {:#x} is executed again", args.call));
  }
  execution.life = options_.life;
  execution.xid = request.header().xid;
  execution.at = loop_.Now();
  if (options_.on_call) options_.on_call(args.call, request);
  const uint32_t crc = ComputeCrc32c(argument);
  if (args.service_ns == 0) return Answer(std::move(request), args, crc);
  auto number = std::make_shared<EventLoop::TimerId>(0);
  *number = loop_.At(loop_.Now() + Duration(args.service_ns), [this, number] {
    const auto found = held_.find(*number);
    Held held = std::move(found->second);
    held_.erase(found);
    CheckArguments("memory.held", held.args.call, held.argument, held.plain);
    Answer(std::move(held.request), held.args, held.crc);
  });
  held_.emplace(*number, Held{std::move(request), args, crc, argument, plain});
}

void ModelService::CheckArguments(std::string_view rule, uint64_t call, ConstBytes argument, ConstBytes plain) {
  const auto check = [&](const char* what, Datum datum, ConstBytes bytes) {
    const size_t matched = MatchPattern(call, datum, bytes);
    if (matched == bytes.size()) return;
    violations_->Add(
        loop_.Now(), rule,
        fmt::format("call {:#x}: {} of {} bytes is damaged from byte {} on", call, what, bytes.size(), matched));
  };
  check("argument", Datum::kArgument, argument);
  check("plain argument", Datum::kPlainArgument, plain);
}

void ModelService::Answer(Request request, const TransformArgs& args, uint32_t crc) {
  std::vector<std::byte> plain(args.plain_result_bytes);
  FillPattern(args.call, Datum::kPlainResult, plain);
  const auto write = [&](XdrWriter& results, ConstBytes result) {
    results.U64(args.call);
    results.U32(crc);
    results.Opaque(plain);
    results.EligibleOpaque(result);
  };
  switch (args.call % 3) {
    case 0: {
      std::optional<rpcrdma::Buffer> pooled = request.Allocate(args.result_bytes);
      if (!pooled) return request.Fail(AcceptStat::kSystemErr);
      FillPattern(args.call, Datum::kResult, pooled->bytes());
      const ConstBytes result = pooled->bytes();
      return request.Reply([&](XdrWriter& results) { write(results, result); }, std::move(*pooled));
    }
    case 1: {
      auto own = std::make_shared<std::vector<std::byte>>(args.result_bytes);
      FillPattern(args.call, Datum::kResult, *own);
      const ConstBytes result = *own;
      return request.Reply([&](XdrWriter& results) { write(results, result); }, std::move(own));
    }
    default: {
      std::vector<std::byte> copied(args.result_bytes);
      FillPattern(args.call, Datum::kResult, copied);
      return request.Reply([&](XdrWriter& results) { write(results, copied); });
    }
  }
}

}  // namespace stagecoach::scenario
