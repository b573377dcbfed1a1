#include "rpcrdma/ulb/file/binding.h"

#include "rpcrdma/ulb/file/codec.h"
#include "rpcrdma/ulb/file/types.h"

namespace stagecoach::rpcrdma::file {
namespace {

constexpr const char* kWriteArguments[] = {"data"};
constexpr const char* kReadResults[] = {"data"};

// Bytes of bf_status, bf_attributes, bf_handle, bf_limits, and of what surrounds the data of READ.
constexpr uint64_t kStatus = 4;
constexpr uint64_t kAttributes = 4 + 4 + 8 + 8 + 4;
constexpr uint64_t kHandle = 8;
constexpr uint64_t kLimits = 4 + 4 + 4 + 4;
constexpr uint64_t kReadRest = kAttributes + 4 + 4;

uint64_t EntriesOfList(XdrReader& args) {
  const uint32_t names = args.Count("path", kDepthMax, 4);
  for (uint32_t i = 0; i < names && args.ok(); ++i) args.Opaque("name", kNameMax);
  args.U64("cookie");
  return args.U32("bytes_max");
}

constexpr uint32_t Number(Procedure procedure) {
  return static_cast<uint32_t>(procedure);
}

constexpr ProcedureBinding kProcedures[] = {
    {.number = Number(Procedure::kNull), .name = "NULL"},
    {.number = Number(Procedure::kLimits), .name = "LIMITS", .reply_fixed = kStatus + kLimits},
    {.number = Number(Procedure::kGetAttributes), .name = "GETATTR", .reply_fixed = kStatus + kAttributes},
    {.number = Number(Procedure::kList), .name = "LIST", .reply_fixed = kEmptyPageSize, .reply_grows = EntriesOfList},
    {.number = Number(Procedure::kOpen), .name = "OPEN", .reply_fixed = kStatus + kHandle + kAttributes},
    {.number = Number(Procedure::kRead), .name = "READ", .results = kReadResults, .reply_fixed = kStatus + kReadRest},
    {.number = Number(Procedure::kClose), .name = "CLOSE", .reply_fixed = kStatus},
    {.number = Number(Procedure::kCreate), .name = "CREATE", .reply_fixed = kStatus + kHandle},
    {.number = Number(Procedure::kWrite), .name = "WRITE", .arguments = kWriteArguments, .reply_fixed = kStatus},
    {.number = Number(Procedure::kCommit), .name = "COMMIT", .reply_fixed = kStatus + kAttributes},
    {.number = Number(Procedure::kMakeDirectory), .name = "MKDIR", .reply_fixed = kStatus},
};

}  // namespace

constexpr Binding kBinding{
    .program = kProgram, .version = kVersion, .name = "bulk file version 1", .procedures = kProcedures};

}  // namespace stagecoach::rpcrdma::file
