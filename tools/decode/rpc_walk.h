// The beginning of an RPC message (RFC 5531), field by field: up to the arguments or results, and those of the
// Connection Configuration Protocol with them.
//
// Pure functions over values; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "rpcrdma/ccp/ccp.h"
#include "tools/decode/field.h"
#include "tools/decode/terms.h"
#include "tools/decode/walker.h"

namespace stagecoach::decode {

struct Procedure {
  uint32_t program = 0;
  uint32_t version = 0;
  uint32_t procedure = 0;
};
// "NFS 3 READ", "program 4711 version 1 procedure 2".
std::string ToString(const Procedure& procedure);

struct SeenRpc {
  std::optional<uint32_t> xid;
  std::optional<bool> reply;  // empty: cut before that, or neither
  size_t xid_field = 0;
  size_t direction_field = 0;
  std::optional<Procedure> procedure;  // of calls
  std::string status;                  // of replies: "SUCCESS", "PROG_UNAVAIL"; empty: cut before that
};

// `called`: the procedure of the call that this may be the reply to, where it is known. `terms` are those of
// the transport header.
SeenRpc WalkRpc(Walker& walker, const Terms& terms, const std::optional<Procedure>& called);

}  // namespace stagecoach::decode
