// How each of the documents calls the fields of a transport header, where it defines them, and what it says of them.
// What differs between the documents is a row here, or a field of the row's profile (rpcrdma/wire/profile.h), by which
// the engines go, too.
#pragma once

#include "rpcrdma/wire/profile.h"
#include "tools/decode/field.h"

namespace stagecoach::decode {

// What a rule of version 1, or of 2, is in this document.
enum class Force : uint8_t {
  kNone,     // the document has no such rule
  kAdvice,   // to break it is worth a note
  kBinding,  // to break it is illegal
};

struct Rule {
  Force force = Force::kNone;
  const char* section = "";
};

struct Terms {
  Document document;
  // In version 2 chunks are used as in the newest document of version 1.
  const rpcrdma::ProtocolProfile* profile;

  // Names.
  const char* type;
  const char* position;
  const char* handle;
  const char* length;
  const char* offset;
  const char* error;
  const char* call_size;  // of the Connection Configuration Protocol, and the next one
  const char* reply_size;

  // Where they are defined.
  const char* fixed_fields;
  const char* xid;
  const char* version;
  const char* credit;
  const char* message_type;
  const char* read_list;
  const char* read_position;
  const char* alignment;  // of positions
  const char* segment;
  const char* write_list;
  const char* reply_chunk;
  const char* padded;  // RDMA_MSGP
  const char* done;
  const char* errors;
  const char* message;  // that the RPC message follows RDMA_MSG
  const char* long_call;
  const char* no_message;  // that nothing follows RDMA_NOMSG
  Section configuration;   // of connections: RFC 5666 is the last document that has it

  // Rules.
  Rule xid_of_message;       // the XIDs of header and RPC message are the same
  Rule nonzero_grant;        // a reply grants credits, whatever is in progress
  Rule nonzero_idle_grant;   // it does so when nothing is in progress
  Rule sorted_reads;         // the Read list is in the order of positions
  Rule position_zero_first;  // the Position-Zero Read chunk is the first entry
  Rule round_up_chunk;       // round-up of a Read chunk is not an entry of its own
  Rule no_read_read;         // replies have no Read list
  Rule no_padded;            // RDMA_MSGP is not sent
  Rule no_done;              // RDMA_DONE is not sent
  Rule write_list_returned;  // a reply returns the segments that were offered, no longer than they were
  Rule reply_chunk_or_message;
};

// Of version 1. `profile`: one of rpcrdma::AllProfiles().
const Terms& TermsOf(const rpcrdma::ProtocolProfile& profile);
const Terms& TermsOfVersion2();

inline Section In(const Terms& terms, const char* section) {
  return {terms.document, section};
}

}  // namespace stagecoach::decode
