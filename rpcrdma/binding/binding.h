// Binding: what an Upper-Layer Binding says about one version of an RPC program, as data.
//
// draft-ietf-nfsv4-rfc5666bis-01 section 6 (RFC 8166 section 6). [5666bis:6#1] A program without a Binding may travel
// over RDMA, but nothing of it is placed directly: its calls and replies go inline, or whole, by a Position-Zero Read
// chunk and a Reply chunk. [5666bis:6#2] The four things a Binding says:
//
//   which items may be placed directly    ProcedureBinding::arguments, ::results
//   how a Write list is used              ::results: entry i of the list is for result i
//   how a violation is reported           Binding::on_violation
//   where the service is found            Binding::port
//
// and, because a requester must provide for the longest reply before it knows the reply, how long that can be.
//
// A Binding is a constant table; the stack consults it and knows no program by name. To add one, write the table and
// hand it to Client::Register, or return it from Service::bindings. rpcrdma/ulb has those of this project.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "rpcrdma/onc/rpc_message.h"
#include "rpcrdma/xdr/reduced_stream.h"
#include "rpcrdma/xdr/xdr_reader.h"

namespace stagecoach::rpcrdma {

struct ProcedureBinding {
  uint32_t number = 0;
  const char* name = "";  // for people
  // The DDP-eligible items by the names of the program's XDR, in the order in which the message has them. Encoder and
  // decoder mark them (XdrWriter::EligibleOpaque and its like): the i-th item they mark is the i-th listed here, and
  // what they mark beyond the list is an item like any other.
  std::span<const char* const> arguments;
  // [5666bis:5.2.2#3] [5666:3.6#2] [2004:3.6#3] Likewise, and entry i of the Write list is for result i, whether the
  // reply has that result or not.
  std::span<const char* const> results;
  // The longest results in bytes as XDR has them, without the RPC header and without eligible results; the count of an
  // eligible result stays in the message and counts. `reply_fixed` is what all calls have; `reply_grows`, when there is
  // one, says by how much this call's arguments let the results be longer. The reader stands at the arguments.
  uint64_t reply_fixed = 0;
  uint64_t (*reply_grows)(XdrReader& args) = nullptr;
};

struct Binding {
  uint32_t program = 0;
  uint32_t version = 0;
  const char* name = "";  // for people: "NFS version 3"
  std::span<const ProcedureBinding> procedures;
  // What a call is answered with that has a chunk for an item that is not eligible.
  AcceptStat on_violation = AcceptStat::kGarbageArgs;
  // Assigned to the service on RDMA transports; 0: none is, rpcbind knows.
  uint16_t port = 0;

  // Null: the program has no such procedure.
  const ProcedureBinding* Find(uint32_t procedure) const;
};

// Bindings by program and version. Each is added by reference and outlives the registry: they are constants.
// Not thread-safe.
class BindingRegistry {
 public:
  // Takes the place of an earlier one of the same program and version.
  void Add(const Binding& binding);
  // Null: nothing of the program may be placed directly.
  const Binding* Find(uint32_t program, uint32_t version) const;
  std::span<const Binding* const> all() const { return bindings_; }

 private:
  std::vector<const Binding*> bindings_;
};

// An RPC reply header at its longest, in bytes: an accepted one, with as large a verifier as there can be (RFC 5531).
inline constexpr uint32_t kRpcReplyHeaderMax = 24 + kAuthBodyMax;
// Longer than any message can be.
inline constexpr uint64_t kEndlessReply = uint64_t{1} << 32;

// The longest reply message to a call, in bytes, without eligible results; at most kEndlessReply. `call` is the encoded
// call without its eligible items.
uint64_t ReplyBytesMax(const ProcedureBinding& procedure, ConstBytes call, const EligibleItems& items);

}  // namespace stagecoach::rpcrdma
