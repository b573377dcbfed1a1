// The model service: a program whose every answer can be computed beforehand.
//
// All data of a call is a pattern made of the call's number and the datum's role, so that each end knows what the other
// must have sent, and bytes that belong to another call, another datum or another place never look right.
//
//   TRANSFORM(call, service time, bytes of result, bytes of plain result, plain argument, argument)
//     -> (call, CRC32c of the argument, plain result, result)
//
// TRANSFORM_AGAIN is the same and says of itself that it is idempotent: a server's duplicate request cache knows
// nothing of it.
//
// Argument and result are eligible for direct placement; "plain" data is not. The result's memory is pooled, the
// service's own, or copied into the message, by the call's number.
//
// The service checks the arguments, counts executions, and answers late when asked to. A call is executed at most once,
// unless it is one that its caller may send again (a session's, or one in the reverse direction) and that this end has
// not promised to remember.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/event_loop.h"
#include "base/time.h"
#include "rpcrdma/api/service.h"
#include "scenarios/runner/violations.h"

namespace stagecoach::scenario {

inline constexpr uint32_t kModelProgram = 0x20000100;
inline constexpr uint32_t kModelVersion = 1;
enum ModelProcedure : uint32_t { kModelNull = 0, kModelTransform = 1, kModelTransformAgain = 2 };
inline constexpr uint32_t kModelDataMax = 64u << 20;
extern const rpcrdma::Binding kModelBinding;

enum class Datum : uint8_t { kArgument, kPlainArgument, kResult, kPlainResult };

void FillPattern(uint64_t call, Datum datum, MutableBytes into);
// Where `bytes` stop being the pattern; bytes.size() when they never do.
size_t MatchPattern(uint64_t call, Datum datum, ConstBytes bytes);

struct TransformArgs {
  uint64_t call = 0;
  uint64_t service_ns = 0;
  uint32_t result_bytes = 0;
  uint32_t plain_result_bytes = 0;
};

// What became of a call, over all incarnations of all services.
struct Execution {
  // Its caller may send it again when its connection ends. Said by the caller.
  bool repeatable = false;
  uint32_t times = 0;
  // The latest time:
  uint32_t life = 0;  // of the service
  uint32_t xid = 0;
  Instant at{};
};
using Executions = std::map<uint64_t, Execution>;

class ModelService final : public rpcrdma::Service {
 public:
  struct Options {
    // Number of this incarnation, of all that there are.
    uint32_t life = 0;
    // Whether a call that was executed before is remembered, so that it is not executed again. Empty: none is.
    std::function<bool(const Execution&)> remembers;
    // Runs as a call is executed. May be empty.
    std::function<void(uint64_t call, const rpcrdma::Request& request)> on_call;
    // Runs when a client's connection is gone. May be empty.
    std::function<void(rpcrdma::ClientId client)> on_gone;
  };
  // All outlive the service.
  ModelService(EventLoop& loop, Executions* executions, Violations* violations)
      : ModelService(loop, executions, violations, Options()) {}
  ModelService(EventLoop& loop, Executions* executions, Violations* violations, Options options);
  // Requests it still holds are let go of.
  ~ModelService() override;

  uint32_t program() const override { return kModelProgram; }
  rpcrdma::VersionRange versions() const override { return {kModelVersion, kModelVersion}; }
  std::span<const rpcrdma::Binding> bindings() const override { return {&kModelBinding, 1}; }
  void Handle(rpcrdma::Request request) override;
  bool idempotent(uint32_t /*version*/, uint32_t procedure) const override { return procedure != kModelTransform; }

  void OnClientGone(rpcrdma::ClientId client) override {
    if (options_.on_gone) options_.on_gone(client);
  }

  size_t held() const { return held_.size(); }

 private:
  void Transform(rpcrdma::Request request);
  void Answer(rpcrdma::Request request, const TransformArgs& args, uint32_t crc);

  struct Held {
    rpcrdma::Request request;
    TransformArgs args;
    uint32_t crc = 0;
    // In the request's memory, which is the service's until it answers.
    ConstBytes argument;
    ConstBytes plain;
  };
  // Whether they are what the caller sent. `rule`: the one that is broken otherwise.
  void CheckArguments(std::string_view rule, uint64_t call, ConstBytes argument, ConstBytes plain);

  EventLoop& loop_;
  Executions* const executions_;
  Violations* const violations_;
  const Options options_;
  std::map<EventLoop::TimerId, Held> held_;
};

}  // namespace stagecoach::scenario
