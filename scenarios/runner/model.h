// The model service: a program whose every answer can be computed beforehand.
//
// All data of a call is a pattern made of the call's number and the datum's role, so that each end knows what the other
// must have sent, and bytes that belong to another call, another datum or another place never look right.
//
//   TRANSFORM(call, service time, bytes of result, bytes of plain result, plain argument, argument)
//     -> (call, CRC32c of the argument, plain result, result)
//
// Argument and result are eligible for direct placement; "plain" data is not. The result's memory is pooled, the
// service's own, or copied into the message, by the call's number.
//
// The service checks the arguments, counts executions (a call must be executed at most once: the client never sends one
// twice), and answers late when asked to.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/event_loop.h"
#include "rpcrdma/api/service.h"
#include "scenarios/runner/violations.h"

namespace stagecoach::scenario {

inline constexpr uint32_t kModelProgram = 0x20000100;
inline constexpr uint32_t kModelVersion = 1;
enum ModelProcedure : uint32_t { kModelNull = 0, kModelTransform = 1 };
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

// How often each call was executed, over all incarnations of all services.
using Executions = std::map<uint64_t, uint32_t>;

class ModelService final : public rpcrdma::Service {
 public:
  // All outlive the service.
  ModelService(EventLoop& loop, Executions* executions, Violations* violations);
  // Requests it still holds are let go of.
  ~ModelService() override;

  uint32_t program() const override { return kModelProgram; }
  rpcrdma::VersionRange versions() const override { return {kModelVersion, kModelVersion}; }
  std::span<const rpcrdma::Binding> bindings() const override { return {&kModelBinding, 1}; }
  void Handle(rpcrdma::Request request) override;

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
  std::map<EventLoop::TimerId, Held> held_;
};

}  // namespace stagecoach::scenario
