// The program that end-to-end tests call.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "rpcrdma/api/service.h"

namespace stagecoach::e2e {

inline constexpr uint32_t kProgram = 0x20000099;
enum Procedure : uint32_t {
  kNull = 0,
  kEcho = 1,    // opaque -> the same; both eligible
  kSize = 2,    // opaque -> its size
  kSource = 3,  // size -> that many bytes of Pattern
  kHold = 4,    // a number -> the same, when the test says so
  kWords = 5,   // words<> -> the same, none eligible
  kJoin = 6,    // opaque, opaque -> their sizes; the first is eligible, the second only if a Binding says so
};

inline constexpr uint32_t kDataMax = 32u << 20;

inline constexpr const char* kData[] = {"data"};
inline constexpr const char* kFirstAndSecond[] = {"first", "second"};
inline constexpr rpcrdma::ProcedureBinding kProcedures[] = {
    {.number = kNull, .name = "NULL"},
    {.number = kEcho, .name = "ECHO", .arguments = kData, .results = kData, .reply_fixed = 4},
    {.number = kSize, .name = "SIZE", .arguments = kData, .reply_fixed = 4},
    {.number = kSource, .name = "SOURCE", .results = kData, .reply_fixed = 4},
    {.number = kHold, .name = "HOLD", .reply_fixed = 4},
    {.number = kWords,
     .name = "WORDS",
     .reply_fixed = 4,
     .reply_grows = [](rpcrdma::XdrReader& args) { return 4 * uint64_t{args.U32("words")}; }},
    {.number = kJoin, .name = "JOIN", .arguments = {kFirstAndSecond, 1}, .reply_fixed = 8},
};
// One for each version of the service.
inline constexpr rpcrdma::Binding kBindings[] = {
    {.program = kProgram, .version = 3, .name = "test version 3", .procedures = kProcedures},
    {.program = kProgram, .version = 4, .name = "test version 4", .procedures = kProcedures},
};

inline std::vector<std::byte> Pattern(size_t size, uint8_t seed = 1) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i * 31 + (i >> 8));
  return bytes;
}

class TestService : public rpcrdma::Service {
 public:
  uint32_t program() const override { return kProgram; }
  rpcrdma::VersionRange versions() const override { return {3, 4}; }
  std::span<const rpcrdma::Binding> bindings() const override { return kBindings; }
  std::span<const rpcrdma::AuthFlavor> flavors() const override { return taken ? *taken : Service::flavors(); }

  void Handle(rpcrdma::Request request) override {
    using rpcrdma::AcceptStat;
    using rpcrdma::XdrWriter;
    ++handled;
    last_call = request.header();
    rpcrdma::XdrReader& args = request.args();
    switch (request.procedure()) {
      case kNull:
        return request.Reply();
      case kEcho: {
        const ConstBytes data = args.EligibleOpaque("data", kDataMax);
        if (!args.Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        auto copy = request.Allocate(data.size());
        if (!copy) return request.Fail(AcceptStat::kSystemErr);
        CopyBytes(copy->bytes(), data);
        const ConstBytes result = copy->bytes();
        return request.Reply([&](XdrWriter& results) { results.EligibleOpaque(result); }, std::move(*copy));
      }
      case kSize: {
        const ConstBytes data = args.EligibleOpaque("data", kDataMax);
        if (!args.Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        last_data.assign(data.begin(), data.end());
        last_data_at = reinterpret_cast<uintptr_t>(data.data());
        const auto size = static_cast<uint32_t>(data.size());
        return request.Reply([&](XdrWriter& results) { results.U32(size); });
      }
      case kSource: {
        const uint32_t size = args.U32("size");
        if (!args.Finish() || size > kDataMax) return request.Fail(AcceptStat::kGarbageArgs);
        auto data = std::make_shared<std::vector<std::byte>>(Pattern(size));
        const ConstBytes result = *data;
        return request.Reply([&](XdrWriter& results) { results.EligibleOpaque(result); }, std::move(data));
      }
      case kHold: {
        const uint32_t number = args.U32("number");
        if (!args.Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        held.emplace(number, std::move(request));
        return;
      }
      case kWords: {
        const uint32_t count = args.Count("words", 100000, 4);
        std::vector<uint32_t> words(count);
        for (uint32_t& word : words) word = args.U32("word");
        if (!args.Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        return request.Reply([&](XdrWriter& results) {
          results.U32(count);
          for (const uint32_t word : words) results.U32(word);
        });
      }
      case kJoin: {
        const auto first = static_cast<uint32_t>(args.EligibleOpaque("first", kDataMax).size());
        const auto second = static_cast<uint32_t>(args.EligibleOpaque("second", kDataMax).size());
        if (!args.Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        return request.Reply([&](XdrWriter& results) {
          results.U32(first);
          results.U32(second);
        });
      }
      default:
        return request.Fail(AcceptStat::kProcUnavail);
    }
  }

  void Answer(uint32_t number) {
    const auto found = held.find(number);
    rpcrdma::Request request = std::move(found->second);
    held.erase(found);
    request.Reply([&](rpcrdma::XdrWriter& results) { results.U32(number); });
  }

  bool idempotent(uint32_t version, uint32_t procedure) const override {
    return repeatable.contains(procedure) || Service::idempotent(version, procedure);
  }
  void OnClientConnected(rpcrdma::ClientId, const std::string&) override { ++clients; }
  void OnClientGone(rpcrdma::ClientId) override { --clients; }

  std::set<uint32_t> repeatable;                          // procedures said to be idempotent
  std::optional<std::vector<rpcrdma::AuthFlavor>> taken;  // flavors of credentials; absent: says nothing
  size_t handled = 0;
  std::vector<std::byte> last_data;  // of kSize, and where it was
  uintptr_t last_data_at = 0;
  rpcrdma::CallHeader last_call;
  int clients = 0;
  std::multimap<uint32_t, rpcrdma::Request> held;
};

// The same program, of which nothing may be placed directly.
class UnboundService final : public TestService {
 public:
  std::span<const rpcrdma::Binding> bindings() const override { return {}; }
};

}  // namespace stagecoach::e2e
