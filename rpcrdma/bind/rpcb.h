// The rpcbind protocol (RFC 1833 section 2), versions 3 and 4, which agree in all that is used here: calls encoded,
// answers decoded, and the records of a stream put together.
//
// Used are SET and UNSET, which rpcbind takes from its own host, and DUMP. Left out is GETADDR: it answers for the
// netid of the transport it was asked over (RFC 1833 section 2.2.1), which rpcbind has only of TCP, UDP and local
// sockets, so no answer to it can ever be an address of "rdma"; and version 2, the port mapper's, has no netids.
//
// An answer comes from whoever has port 111. It is bounded and checked here, and may hold any bytes that a string can:
// Quoted() makes text of it that a terminal can take.
//
// Values own their bytes. Thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
#include "rpcrdma/bind/universal_address.h"
#include "rpcrdma/onc/rpc_message.h"

namespace stagecoach::rpcrdma {

inline constexpr uint32_t kRpcbProgram = 100000;
inline constexpr uint32_t kRpcbVersionMin = 3;
inline constexpr uint32_t kRpcbVersionMax = 4;
// TCP and UDP, of every host that has one.
inline constexpr uint16_t kRpcbPort = 111;
// Where programs of the same host find it, on Linux.
inline constexpr const char* kRpcbLocalSocket = "/run/rpcbind.sock";

enum class RpcbProcedure : uint32_t { kSet = 1, kUnset = 2, kDump = 4 };

// RFC 1833's struct rpcb. `owner` is text that rpcbind decides on ("superuser", a user's number, "unknown").
struct RpcbMapping {
  uint32_t program = 0;
  uint32_t version = 0;
  std::string netid;
  std::string address;
  std::string owner;

  friend bool operator==(const RpcbMapping&, const RpcbMapping&) = default;
};

// Of netid, address and owner each, when decoded; netids have 128 at most (RFC 5665 section 5.1.2), paths of local
// sockets 108.
inline constexpr uint32_t kRpcbStringMax = 1024;
// Of one answer: some ten thousand mappings.
inline constexpr size_t kRpcbAnswerMax = 1 << 20;

// One call, as a record of one fragment, ready for a stream (RFC 5531 section 11). `mapping` is the argument of SET and
// UNSET (which ignores the address) and not looked at for DUMP. AUTH_NONE: who calls is told by the socket.
std::vector<std::byte> EncodeRpcbCall(uint32_t xid, uint32_t version, RpcbProcedure procedure,
                                      const RpcbMapping& mapping);

struct RpcbFault {
  enum class Kind : uint8_t {
    kMalformed,    // no RPC reply, or results that are not those of the procedure
    kForeign,      // an answer to another call
    kVersions,     // the daemon speaks other versions of the protocol: `versions`
    kUnavailable,  // accepted and not done: another program, no such procedure, a failure of the daemon
    kDenied,       // rejected: who asks may not
  };
  Kind kind = Kind::kMalformed;
  VersionRange versions;
  std::string text;  // what is wrong, as a clause
};

// SET and UNSET: whether it was done.
Result<bool, RpcbFault> DecodeRpcbDone(ConstBytes record, uint32_t xid);
// DUMP: the mappings of one program, in the daemon's order. Those of other programs are checked and dropped.
Result<std::vector<RpcbMapping>, RpcbFault> DecodeRpcbDump(ConstBytes record, uint32_t xid, uint32_t program);

// Puts the fragments of one record together, from a stream in which nothing else is expected: one call, one answer.
class RecordAssembler {
 public:
  enum class Fault : uint8_t {
    kTooLong,        // more than bytes_max
    kEmptyFragment,  // says nothing and is not the last
    kTrailing,       // bytes behind the record
  };

  explicit RecordAssembler(size_t bytes_max) : bytes_max_(bytes_max) {}

  // Takes the next bytes of the stream, divided in any way: whether the record is whole now. After a fault nothing more
  // may be given.
  Result<bool, Fault> Take(ConstBytes bytes);
  // The record without its marks; whole when Take has said so.
  ConstBytes record() const { return record_; }

 private:
  const size_t bytes_max_;
  std::vector<std::byte> record_;
  uint32_t mark_ = 0;
  int mark_bytes_ = 0;  // of the present mark that are in; 4 when its fragment's bytes follow
  size_t fragment_left_ = 0;
  bool whole_ = false;
};
const char* ToString(RecordAssembler::Fault fault);

// "'text'", with what is not printable ASCII as \xHH, cut after 64 bytes.
std::string Quoted(std::string_view text);

}  // namespace stagecoach::rpcrdma
