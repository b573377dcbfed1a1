#include "tools/decode/rpc_walk.h"

#include <array>
#include <iterator>

#include "rpcrdma/onc/rpc_message.h"

namespace stagecoach::decode {
namespace {

using rpcrdma::AuthFlavor;

constexpr Section kMessage = {Document::kRfc5531, "9"};
constexpr Section kAuth = {Document::kRfc5531, "8.2"};

struct ProgramName {
  uint32_t number;
  const char* name;
};
// Of IANA's registry, but for the last, which is the file service of this project.
constexpr ProgramName kPrograms[] = {
    {100000, "rpcbind"},
    {100003, "NFS"},
    {100005, "MOUNT"},
    {100021, "NLM"},
    {100024, "NSM"},
    {100227, "NFS_ACL"},
    {rpcrdma::kCcpProgram, "CONFIG_RDMA"},
    {0x20534347, "stagecoach files"},
};

constexpr std::array kNfs3Procedures = {"NULL",   "GETATTR", "SETATTR",  "LOOKUP", "ACCESS",  "READLINK",
                                        "READ",   "WRITE",   "CREATE",   "MKDIR",  "SYMLINK", "MKNOD",
                                        "REMOVE", "RMDIR",   "RENAME",   "LINK",   "READDIR", "READDIRPLUS",
                                        "FSSTAT", "FSINFO",  "PATHCONF", "COMMIT"};

const char* NameOfProgram(uint32_t program) {
  for (const ProgramName& each : kPrograms) {
    if (each.number == program) return each.name;
  }
  return nullptr;
}

std::string NameOfProcedure(const Procedure& which) {
  if (which.procedure == 0) return "NULL";
  if (which.program == 100003 && which.version == 3 && which.procedure < kNfs3Procedures.size()) {
    return kNfs3Procedures[which.procedure];
  }
  if (which.program == 100003 && which.version == 4 && which.procedure == 1) return "COMPOUND";
  if (which.program == rpcrdma::kCcpProgram && which.version == rpcrdma::kCcpVersion &&
      which.procedure == rpcrdma::kConfRdma) {
    return "CONF_RDMA";
  }
  return {};
}

const char* NameOfFlavor(uint32_t flavor) {
  switch (static_cast<AuthFlavor>(flavor)) {
    case AuthFlavor::kNone:
      return "AUTH_NONE";
    case AuthFlavor::kSys:
      return "AUTH_SYS";
    case AuthFlavor::kShort:
      return "AUTH_SHORT";
    case AuthFlavor::kDh:
      return "AUTH_DH";
    case AuthFlavor::kRpcsecGss:
      return "RPCSEC_GSS";
  }
  return "";
}

// One opaque_auth.
void WalkAuth(Walker& walker, const char* name) {
  const uint32_t flavor = walker.U32(name, kAuth);
  if (!walker.ok()) return;
  walker.Mean(NameOfFlavor(flavor));
  walker.Enter();
  const uint32_t length = walker.U32("body", kAuth);
  walker.Mean(std::to_string(length) + " bytes");
  if (walker.ok() && length > rpcrdma::kAuthBodyMax) walker.Malformed("more than 400 bytes", kAuth);
  walker.Opaque("body", length, kAuth);
  walker.Opaque("pad", XdrPad(length), kAuth);
  walker.Leave();
}

void WalkRange(Walker& walker) {
  walker.U32("low", kMessage);
  walker.Mean("the lowest version that is supported");
  walker.U32("high", kMessage);
  walker.Mean("the highest version that is supported");
}

bool IsConfiguration(const std::optional<Procedure>& which) {
  return which && which->program == rpcrdma::kCcpProgram && which->version == rpcrdma::kCcpVersion &&
         which->procedure == rpcrdma::kConfRdma;
}

// The arguments (reply: results) of CONF_RDMA.
void WalkConfiguration(Walker& walker, const Terms& terms, bool reply) {
  const Section& section = terms.configuration;
  walker.U32(terms.call_size, section);
  walker.Mean(reply ? "bytes: the largest call the server takes inline" : "bytes: the largest inline call");
  if (reply) {
    const uint32_t align = walker.U32("align", section);
    walker.Mean(align == 0 ? "the server asks for no padding" : "the server's Receive buffers are aligned to this");
  } else {
    walker.U32(terms.reply_size, section);
    walker.Mean("bytes: the largest inline reply");
  }
  const uint32_t reads = walker.U32("maxrdmaread", section);
  walker.Mean(reads == 0 ? "the peer must not send what takes an RDMA Read" : "RDMA Reads that may be active at once");
  if (walker.ok() && walker.remaining() > 0) {
    walker.Opaque("(rest)", walker.remaining(), section);
    walker.Illegal(reply ? "the results end before this" : "the arguments end before this", section);
  }
}

void WalkRest(Walker& walker, const char* name) {
  walker.Opaque(name, walker.remaining(), kMessage);
}

void WalkCall(Walker& walker, const Terms& terms, SeenRpc& rpc) {
  const uint32_t version = walker.U32("rpcvers", kMessage);
  if (!walker.ok()) return;
  if (version != rpcrdma::kRpcVersion) {
    walker.Illegal("RPC has version 2", kMessage);
    return WalkRest(walker, "(rest)");
  }
  Procedure which;
  which.program = walker.U32("prog", kMessage);
  const char* program = NameOfProgram(which.program);
  if (program != nullptr) walker.Mean(program);
  which.version = walker.U32("vers", kMessage);
  which.procedure = walker.U32("proc", kMessage);
  walker.Mean(NameOfProcedure(which));
  if (!walker.ok()) return;
  rpc.procedure = which;
  WalkAuth(walker, "cred");
  if (walker.ok()) WalkAuth(walker, "verf");
  if (!walker.ok()) return;
  if (IsConfiguration(which)) WalkConfiguration(walker, terms, false);
  if (walker.ok()) WalkRest(walker, "(arguments)");
}

void WalkAccepted(Walker& walker, const Terms& terms, const std::optional<Procedure>& called, SeenRpc& rpc) {
  static constexpr const char* kStatus[] = {"SUCCESS",      "PROG_UNAVAIL", "PROG_MISMATCH",
                                            "PROC_UNAVAIL", "GARBAGE_ARGS", "SYSTEM_ERR"};
  WalkAuth(walker, "verf");
  const uint32_t status = walker.U32("accept_stat", kMessage);
  if (!walker.ok()) return;
  if (status >= std::size(kStatus)) return walker.Illegal("no such status", kMessage);
  rpc.status = kStatus[status];
  walker.Mean(rpc.status);
  if (status == 2) WalkRange(walker);
  if (status == 0 && IsConfiguration(called)) WalkConfiguration(walker, terms, true);
}

void WalkDenied(Walker& walker, SeenRpc& rpc) {
  static constexpr const char* kReasons[] = {"AUTH_OK",           "AUTH_BADCRED", "AUTH_REJECTEDCRED", "AUTH_BADVERF",
                                             "AUTH_REJECTEDVERF", "AUTH_TOOWEAK", "AUTH_INVALIDRESP",  "AUTH_FAILED"};
  const uint32_t status = walker.U32("reject_stat", kMessage);
  if (!walker.ok()) return;
  switch (status) {
    case 0:
      rpc.status = "RPC_MISMATCH";
      walker.Mean(rpc.status);
      return WalkRange(walker);
    case 1: {
      rpc.status = "AUTH_ERROR";
      walker.Mean(rpc.status);
      const uint32_t reason = walker.U32("auth_stat", kMessage);
      if (reason < std::size(kReasons)) walker.Mean(kReasons[reason]);
      return;
    }
    default:
      walker.Illegal("no such status", kMessage);
  }
}

}  // namespace

std::string ToString(const Procedure& procedure) {
  const char* program = NameOfProgram(procedure.program);
  const std::string name = NameOfProcedure(procedure);
  std::string text = program != nullptr ? std::string(program) + " " + std::to_string(procedure.version)
                                        : "program " + std::to_string(procedure.program) + " version " +
                                              std::to_string(procedure.version);
  return text + (name.empty() ? " procedure " + std::to_string(procedure.procedure) : " " + name);
}

SeenRpc WalkRpc(Walker& walker, const Terms& terms, const std::optional<Procedure>& called) {
  SeenRpc rpc;
  const uint32_t xid = walker.U32("xid", kMessage, Format::kHex);
  rpc.xid_field = walker.last_index();
  if (!walker.ok()) return rpc;
  rpc.xid = xid;
  const uint32_t direction = walker.U32("mtype", kMessage);
  rpc.direction_field = walker.last_index();
  if (!walker.ok()) return rpc;
  switch (direction) {
    case 0:
      walker.Mean("CALL");
      rpc.reply = false;
      WalkCall(walker, terms, rpc);
      return rpc;
    case 1: {
      walker.Mean("REPLY");
      rpc.reply = true;
      const uint32_t status = walker.U32("reply_stat", kMessage);
      if (!walker.ok()) return rpc;
      walker.Mean(status == 0 ? "MSG_ACCEPTED" : status == 1 ? "MSG_DENIED" : "");
      if (status > 1) {
        walker.Illegal("no such status", kMessage);
      } else if (status == 0) {
        WalkAccepted(walker, terms, called, rpc);
      } else {
        WalkDenied(walker, rpc);
      }
      if (walker.ok()) WalkRest(walker, "(results)");
      return rpc;
    }
    default:
      walker.Illegal("neither CALL nor REPLY", kMessage);
      WalkRest(walker, "(rest)");
      return rpc;
  }
}

}  // namespace stagecoach::decode
