// RPC-over-RDMA transport headers of every version, field by field; and CM private data.
//
// Where codecs (rpcrdma/wire) give up at the first thing that is wrong, a walk goes on and says what it found. What it
// calls well-formed the codecs decode, and the other way round, but for their limits on how many segments and
// properties they take, and for errors of version 1 that have a code of nobody's and the words that it takes.
//
// Judged here is what a header says by itself; what it means beside its message, and the messages before it, is judged
// in message_decoder.h. Pure functions over values; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "rpcrdma/wire/chunk_list.h"
#include "tools/decode/field.h"
#include "tools/decode/terms.h"
#include "tools/decode/walker.h"

namespace stagecoach::decode {

// A segment with the fields that name it.
struct SeenSegment {
  rpcrdma::Segment segment;
  size_t handle_field = 0;
  size_t length_field = 0;
};
struct SeenRead {
  uint32_t position = 0;
  size_t position_field = 0;
  SeenSegment target;
};
struct SeenChunk {
  size_t count_field = 0;
  std::vector<SeenSegment> segments;
};
struct SeenLists {
  std::vector<SeenRead> reads;
  std::vector<SeenChunk> writes;
  std::optional<SeenChunk> reply;
  size_t reads_field = 0;  // the word that begins each
  size_t writes_field = 0;
  size_t reply_field = 0;
};

enum class HeaderType : uint8_t { kUnknown, kMsg, kNomsg, kMsgp, kDone, kError, kConnProp };

struct SeenHeader {
  const Terms* terms = nullptr;  // of the text it was judged by
  HeaderType type = HeaderType::kUnknown;
  const char* type_name = "";  // "RDMA_MSG", static storage; empty when there is no such type
  uint32_t xid = 0;
  uint32_t version = 0;
  uint32_t credits = 0;
  std::optional<uint32_t> flags;  // of version 2
  uint32_t invalidate = 0;        // rdma_inv_handle
  SeenLists lists;
  bool has_message = false;  // an RPC message is to follow
  std::optional<uint32_t> error;
  std::optional<uint32_t> receive_buffer_size;  // that RDMA2_CONNPROP names
  // Fields of interest.
  size_t xid_field = 0;
  size_t version_field = 0;
  size_t credit_field = 0;
  size_t type_field = 0;
  size_t flags_field = 0;
  size_t invalidate_field = 0;
  bool well_formed = false;
  bool walked = false;  // to the end of the header, so that what follows it is known
  size_t size = 0;      // bytes, as far as it was walked
};

// Walks one header; `version1` judges what is of version 1. The walker then stands at what follows the header.
SeenHeader WalkHeader(Walker& walker, const Terms& version1);

// The eight bytes of RFC 8797's message, which begins at walker.position(). False: it is of another version than 1,
// and its identifier and version alone were noted.
bool WalkPrivateData(Walker& walker);

}  // namespace stagecoach::decode
