#include "tools/decode/message_decoder.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/validate.h"

namespace stagecoach::decode {
namespace {

using rpcrdma::Segment;

std::string Number(uint64_t value) {
  return std::to_string(value);
}

std::string Hex(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

std::string ListText(std::span<const Segment> segments) {
  std::string text;
  for (const Segment& segment : segments) text += (text.empty() ? "" : " ") + rpcrdma::ToString(segment);
  return text.empty() ? "no segments" : text;
}

void Judge(Walker& walker, size_t field, const Rule& rule, const Terms& terms, const std::string& text) {
  if (rule.force == Force::kAdvice) walker.Note(field, text, In(terms, rule.section));
  if (rule.force == Force::kBinding) walker.Illegal(field, text, In(terms, rule.section));
}

uint64_t LengthOf(const SeenChunk& chunk) {
  uint64_t length = 0;
  for (const SeenSegment& each : chunk.segments) length += each.segment.length;
  return length;
}

// What a call offers to a reply, or a reply returns; nullopt when it is more than is remembered.
std::optional<rpcrdma::ChunkLists> ListsOf(const SeenLists& seen) {
  size_t segments = seen.reply ? seen.reply->segments.size() : 0;
  for (const SeenChunk& chunk : seen.writes) segments += 1 + chunk.segments.size();
  if (segments > MessageDecoder::kOfferedMax) return std::nullopt;
  rpcrdma::ChunkLists lists;
  for (const SeenChunk& chunk : seen.writes) {
    lists.writes.BeginChunk();
    for (const SeenSegment& each : chunk.segments) lists.writes.AppendSegment(each.segment);
  }
  if (seen.reply) {
    lists.reply.emplace();
    for (const SeenSegment& each : seen.reply->segments) lists.reply->push_back(each.segment);
  }
  return lists;
}

bool HasPositionZero(const SeenLists& lists) {
  return std::ranges::any_of(lists.reads, [](const SeenRead& each) { return each.position == 0; });
}

// One chunk of a reply beside the one that was offered. `lengths`: those of the reply, without round-up where the
// document has them count it.
void JudgeReturned(Walker& walker, const Terms& terms, const SeenChunk& returned, std::span<const Segment> lengths,
                   std::span<const Segment> offered) {
  const Rule& rule = terms.write_list_returned;
  if (returned.segments.size() != offered.size()) {
    return Judge(walker, returned.count_field, rule, terms,
                 "the call offers another number of segments here: " + ListText(offered));
  }
  for (size_t i = 0; i < offered.size(); ++i) {
    const SeenSegment& each = returned.segments[i];
    if (each.segment.handle != offered[i].handle || each.segment.offset != offered[i].offset) {
      Judge(walker, each.handle_field, rule, terms, "not what the call offers here: " + rpcrdma::ToString(offered[i]));
      continue;
    }
    if (lengths[i].length > offered[i].length) {
      Judge(walker, each.length_field, rule, terms, "the call offers " + Number(offered[i].length) + " bytes here");
    }
  }
}

bool IsVersion1WithReverseCalls(const SeenHeader& header) {
  return header.version == rpcrdma::kRpcRdmaVersion1 && header.terms->profile->reverse_direction;
}

const char* NameOf(const SeenHeader& header) {
  return header.type == HeaderType::kUnknown ? "unknown message type" : header.type_name;
}

// Where the document says what a header of this type is, and so what is not to follow it.
Section SectionOf(const SeenHeader& header) {
  const Terms& terms = *header.terms;
  switch (header.type) {
    case HeaderType::kMsg:
    case HeaderType::kMsgp:
      return In(terms, terms.message);
    case HeaderType::kNomsg:
      return In(terms, terms.no_message);
    case HeaderType::kDone:
      return In(terms, terms.done);
    case HeaderType::kError:
      return In(terms, terms.errors);
    case HeaderType::kConnProp:
      return {Document::kV2, "5.3.4"};
    case HeaderType::kUnknown:
      break;
  }
  return In(terms, terms.fixed_fields);
}

}  // namespace

// --- Calls that wait for their replies ---

const MessageDecoder::Call* MessageDecoder::FindCall(End replier, uint32_t xid) const {
  const auto find = [&](End sender) -> const Call* {
    const Calls& calls = calls_[static_cast<size_t>(sender)];
    const auto it = calls.by_xid.find(xid);
    return it == calls.by_xid.end() ? nullptr : &it->second;
  };
  if (replier == End::kUnknown) return find(End::kUnknown);
  return find(replier == End::kClient ? End::kServer : End::kClient);
}

void MessageDecoder::Remember(End sender, uint32_t xid, Call call) {
  Calls& calls = calls_[static_cast<size_t>(sender)];
  call.number = calls.next++;
  calls.order.emplace_back(xid, call.number);
  calls.by_xid.insert_or_assign(xid, std::move(call));
  // What has been answered stays in the order until it is its turn.
  while (calls.order.size() > kCallsMax) {
    const auto [oldest, number] = calls.order.front();
    calls.order.pop_front();
    const auto it = calls.by_xid.find(oldest);
    if (it != calls.by_xid.end() && it->second.number == number) calls.by_xid.erase(it);
  }
}

void MessageDecoder::Forget(End replier, uint32_t xid) {
  const End caller = replier == End::kUnknown ? End::kUnknown : replier == End::kClient ? End::kServer : End::kClient;
  calls_[static_cast<size_t>(caller)].by_xid.erase(xid);
}

// --- Judgement ---

// Version 1 does not say of RDMA_NOMSG whether it stands for a call or for a reply.
MessageDecoder::Role MessageDecoder::RoleOfNomsg(End sender, const SeenHeader& header) const {
  if (header.flags) return (*header.flags & 1) != 0 ? Role::kReply : Role::kCall;
  const bool position_zero = HasPositionZero(header.lists);
  const bool awaited = FindCall(sender, header.xid) != nullptr;
  if (!position_zero) return awaited || header.lists.reply ? Role::kReply : Role::kUnknown;
  // Of the legacy protocols' long replies, too.
  return awaited && header.terms->profile->replies_by_read_chunk ? Role::kReply : Role::kCall;
}

void MessageDecoder::JudgeFlags(Walker& walker, const SeenHeader& header, const SeenRpc& rpc) const {
  if (!header.flags || !rpc.reply || *rpc.reply == ((*header.flags & 1) != 0)) return;
  walker.Illegal(header.flags_field,
                 *rpc.reply ? "RPCRDMA2_F_RESPONSE is clear with a reply" : "RPCRDMA2_F_RESPONSE is set with a call",
                 {Document::kV2, "3.2"});
}

void MessageDecoder::JudgeCredits(Walker& walker, End sender, const SeenHeader& header, Role role) const {
  if (role == Role::kUnknown) return;
  walker.at(header.credit_field).meaning = role == Role::kReply ? "granted" : "requested";
  if (role == Role::kCall || header.credits != 0) return;
  const Terms& terms = *header.terms;
  if (terms.nonzero_grant.force == Force::kBinding) {
    return Judge(walker, header.credit_field, terms.nonzero_grant, terms, "a grant is never zero");
  }
  if (terms.nonzero_idle_grant.force == Force::kNone) return;
  const std::string rule = "a grant may be zero only while other calls are in progress";
  if (!from_beginning_ || sender == End::kUnknown) {
    return walker.Note(header.credit_field, rule, In(terms, terms.nonzero_idle_grant.section));
  }
  const End caller = sender == End::kClient ? End::kServer : End::kClient;
  const auto& waiting = calls_[static_cast<size_t>(caller)].by_xid;
  const size_t others = waiting.size() - waiting.count(header.xid);
  if (others == 0) {
    Judge(walker, header.credit_field, terms.nonzero_idle_grant, terms, rule + ", and none is");
  } else {
    walker.Note(header.credit_field, Number(others) + " other calls are in progress", In(terms, terms.credit));
  }
}

void MessageDecoder::JudgeVersion(Walker& walker, End sender, const SeenHeader& header, Role role) {
  if (header.type == HeaderType::kUnknown || header.type == HeaderType::kError || sender == End::kUnknown) return;
  if (version_ && *version_ != header.version) {
    walker.Illegal(header.version_field, "the connection has version " + Number(*version_), {Document::kV2, "7.3"});
  }
  if (!version_ && sender == End::kServer && role == Role::kReply) version_ = header.version;
}

void MessageDecoder::JudgeSize(Walker& walker, End sender, const SeenHeader& header, size_t size) const {
  if (sender == End::kUnknown) return;
  const auto own = static_cast<size_t>(sender);
  const std::string text = "the message has " + Number(size) + " bytes, the inline threshold is ";
  if (header.version == rpcrdma::kRpcRdmaVersion2) {
    if (!from_beginning_) return;
    if (sender == End::kClient && !version_) {
      if (size > rpcrdma::kMinReceiveBufferSize) {
        walker.Illegal(
            header.xid_field,
            text + Number(rpcrdma::kMinReceiveBufferSize) + " until the server has shown that it speaks version 2",
            {Document::kV2, "7"});
      }
      return;
    }
    // What was under way when the properties came was planned by the default.
    const uint32_t most = std::max(rpcrdma::kDefaultReceiveBufferSize, receive_buffer_size_[1 - own].value_or(0));
    if (size > most) walker.Illegal(header.xid_field, text + Number(most), {Document::kV2, "4.2.1"});
    return;
  }
  // The older texts leave it to configuration, by their own protocol or otherwise.
  if (!header.terms->profile->private_data || !private_data_[0] || !private_data_[1]) return;
  const auto& sent = *private_data_[own];
  const auto& received = *private_data_[1 - own];
  const uint32_t most =
      std::min(sent.value_or(rpcrdma::PrivateData{}).send_size, received.value_or(rpcrdma::PrivateData{}).receive_size);
  if (size <= most) return;
  if (sent && received) {
    walker.Illegal(header.xid_field, text + Number(most), {Document::kPvtData, "4.2"});
  } else {
    // They may have been told in another way.
    walker.Note(header.xid_field, text + Number(most) + " unless both ends were told otherwise",
                {Document::kPvtData, "5.1"});
  }
}

// The first ones that are well-formed hold (v2 5.3.4).
void MessageDecoder::TakeProperties(End sender, const SeenHeader& header) {
  if (header.type != HeaderType::kConnProp || !header.well_formed || sender == End::kUnknown) return;
  std::optional<uint32_t>& size = receive_buffer_size_[static_cast<size_t>(sender)];
  if (!size) size = header.receive_buffer_size.value_or(rpcrdma::kDefaultReceiveBufferSize);
}

void MessageDecoder::JudgeReads(Walker& walker, const SeenHeader& header, Role role, size_t inline_size) const {
  const Terms& terms = *header.terms;
  const std::vector<SeenRead>& reads = header.lists.reads;
  const bool nomsg = header.type == HeaderType::kNomsg;
  if (role == Role::kReply) {
    Judge(walker, header.lists.reads_field, terms.no_read_read, terms, "nothing is read from a responder");
  }

  uint64_t base = nomsg ? 0 : inline_size;
  if (role == Role::kReply) {
    // Results that were written are in the message, too; where, only its decoder knows.
    if (nomsg && !HasPositionZero(header.lists) && header.lists.reply) base += LengthOf(*header.lists.reply);
    for (const SeenChunk& chunk : header.lists.writes) base += LengthOf(chunk) + 3;
  }
  for (size_t i = 0; i < reads.size(); ++i) {
    if (i > 0 && reads[i].position < reads[i - 1].position) {
      Judge(walker, reads[i].position_field, terms.sorted_reads, terms, "the list is not in the order of positions");
    }
    if (reads[i].position != 0) continue;
    if (!nomsg) {
      walker.Illegal(reads[i].position_field, "position 0 is for a whole message, with RDMA_NOMSG",
                     In(terms, terms.long_call));
    } else if (i > 0 && reads[i - 1].position != 0) {
      Judge(walker, reads[i].position_field, terms.position_zero_first, terms,
            "the Position-Zero Read chunk is to come first");
    }
    base += reads[i].target.segment.length;
  }

  // Put together as the engines do it (rpcrdma/wire/validate.h), in the order of positions.
  struct Chunk {
    uint32_t position;
    size_t field;
    uint64_t length;
  };
  std::vector<const SeenRead*> sorted;
  for (const SeenRead& each : reads) {
    if (each.position != 0) sorted.push_back(&each);
  }
  std::ranges::stable_sort(sorted, {}, &SeenRead::position);
  std::vector<Chunk> chunks;
  for (const SeenRead* each : sorted) {
    const uint32_t length = each->target.segment.length;
    const bool goes_on = terms.profile->read_entries_join && !chunks.empty() &&
                         each->position == chunks.back().position + chunks.back().length;
    if (goes_on && each->position % 4 != 0 && length == XdrPad(each->position)) {
      Judge(walker, each->position_field, terms.round_up_chunk, terms,
            "a chunk of round-up alone, which had better be left out");
    }
    if (!goes_on && (chunks.empty() || chunks.back().position != each->position)) {
      chunks.push_back({each->position, each->position_field, 0});
    }
    chunks.back().length += length;
  }
  uint64_t end = 0;      // of the chunk before, its round-up with it
  uint64_t removed = 0;  // bytes that are in chunks so far, likewise
  for (const Chunk& chunk : chunks) {
    if (chunk.position % 4 != 0) {
      walker.Illegal(chunk.field, "not a multiple of four: no XDR item begins here", In(terms, terms.alignment));
    } else if (chunk.position < end) {
      walker.Illegal(chunk.field, "begins inside of the chunk before it", In(terms, terms.read_position));
    } else if (chunk.position > base + removed) {
      walker.Illegal(chunk.field, "behind the end of the message, which has " + Number(base + removed) + " bytes here",
                     In(terms, terms.read_position));
    }
    const uint64_t size = chunk.length + XdrPad(chunk.length);
    removed += size;
    end = chunk.position + size;
  }
}

void MessageDecoder::JudgeLong(Walker& walker, const SeenHeader& header, Role role) const {
  const Terms& terms = *header.terms;
  const bool position_zero = HasPositionZero(header.lists);
  const bool legacy = terms.profile->replies_by_read_chunk;
  switch (role) {
    case Role::kCall:
      if (!position_zero) {
        walker.Illegal(header.type_field, "a long call is in a Position-Zero Read chunk, and there is none",
                       In(terms, terms.long_call));
      }
      break;
    case Role::kReply:
      if (!header.lists.reply && !(legacy && position_zero)) {
        walker.Illegal(header.type_field, "a long reply is in the Reply chunk, and there is none",
                       In(terms, terms.reply_chunk));
      }
      break;
    case Role::kUnknown:
      walker.Illegal(header.type_field, "neither a Position-Zero Read chunk nor a Reply chunk: there is no message",
                     In(terms, terms.no_message));
      break;
  }
}

void MessageDecoder::JudgeCall(Walker& walker, End sender, const SeenHeader& header) const {
  const SeenLists& lists = header.lists;
  if (header.flags && header.invalidate != 0) {
    const auto is_it = [&](const SeenSegment& each) { return each.segment.handle == header.invalidate; };
    const auto in_chunk = [&](const SeenChunk& chunk) { return std::ranges::any_of(chunk.segments, is_it); };
    if (!std::ranges::any_of(lists.reads, is_it, &SeenRead::target) && !std::ranges::any_of(lists.writes, in_chunk) &&
        !(lists.reply && in_chunk(*lists.reply))) {
      walker.Illegal(header.invalidate_field, "none of the handles in this header", {Document::kV2, "3.3"});
    }
  }
  if (IsVersion1WithReverseCalls(header) && sender == End::kServer &&
      (header.type != HeaderType::kMsg || !lists.reads.empty() || !lists.writes.empty() || lists.reply)) {
    walker.Illegal(header.type_field, "backward calls are RDMA_MSG without chunks", {Document::k5666bis, "8.3.4"});
  }
}

void MessageDecoder::JudgeReply(Walker& walker, End sender, const SeenHeader& header, const Call* call) const {
  const Terms& terms = *header.terms;
  const SeenLists& lists = header.lists;
  const bool inline_reply = header.type != HeaderType::kNomsg;
  if (lists.reply && LengthOf(*lists.reply) > 0 && (inline_reply || HasPositionZero(lists))) {
    Judge(
        walker, lists.reply->count_field, terms.reply_chunk_or_message, terms,
        std::string(inline_reply ? "an inline reply" : "a Position-Zero Read chunk") + " beside a filled Reply chunk");
  }
  if (IsVersion1WithReverseCalls(header) && sender == End::kClient &&
      (header.type != HeaderType::kMsg || !lists.reads.empty() || !lists.writes.empty() || lists.reply)) {
    walker.Illegal(header.type_field, "backward replies are RDMA_MSG without chunks", {Document::k5666bis, "8.3.5"});
  }
  if (call == nullptr) {
    if (from_beginning_ && sender != End::kUnknown) {
      walker.Note(header.xid_field, "no call of this XID is waiting", In(terms, terms.xid));
    }
    return;
  }
  if (!call->offered) return;
  const rpcrdma::ChunkLists& offered = *call->offered;
  const std::optional<rpcrdma::ChunkLists> returned = ListsOf(lists);
  if (!returned) {
    return walker.Illegal(lists.writes_field, "more than the call offers",
                          In(terms, terms.write_list_returned.section));
  }
  if (!lists.writes.empty()) {
    rpcrdma::WriteList cut = returned->writes;
    if (terms.profile->written_lengths_count_round_up) rpcrdma::CutRoundUp(&cut, offered.writes);
    if (lists.writes.size() != offered.writes.size()) {
      Judge(walker, lists.writes_field, terms.write_list_returned, terms,
            "the call offers " + Number(offered.writes.size()) + " Write chunks");
    } else {
      for (size_t i = 0; i < lists.writes.size(); ++i) {
        JudgeReturned(walker, terms, lists.writes[i], cut[i], offered.writes[i]);
      }
    }
  }
  if (!lists.reply) return;
  if (!offered.reply) {
    walker.Illegal(lists.reply_field, "the call offers no Reply chunk", In(terms, terms.reply_chunk));
  } else {
    JudgeReturned(walker, terms, *lists.reply, *returned->reply, *offered.reply);
  }
}

// --- Messages ---

DecodedMessage MessageDecoder::OnMessage(End sender, ConstBytes message) {
  DecodedMessage decoded;
  Walker walker(message, &decoded.fields);
  const SeenHeader header = WalkHeader(walker, version1_);
  decoded.well_formed = header.well_formed;
  decoded.header_size = header.size;
  decoded.version = header.version;
  decoded.layout = header.terms->document == Document::kV2 ? 2 : 1;
  decoded.summary = std::string(NameOf(header)) + ", version " + Number(header.version);
  JudgeSize(walker, sender, header, message.size());
  if (!header.walked) {
    walker.Opaque("(rest)", walker.remaining(), SectionOf(header));
    return decoded;
  }

  const Terms& terms = *header.terms;
  const size_t inline_size = walker.remaining();
  const Call* call = FindCall(sender, header.xid);
  SeenRpc rpc;
  Role role = Role::kUnknown;
  if (header.has_message) {
    if (inline_size == 0) {
      walker.Illegal(header.type_field, "the RPC message that is to follow is not there", SectionOf(header));
    } else {
      rpc = WalkRpc(walker, terms, call != nullptr ? call->procedure : std::nullopt);
      if (rpc.xid && *rpc.xid != header.xid) {
        Judge(walker, rpc.xid_field, terms.xid_of_message, terms,
              "the transport header has another XID, " + Hex(header.xid));
      }
      if (rpc.reply) role = *rpc.reply ? Role::kReply : Role::kCall;
      JudgeFlags(walker, header, rpc);
    }
  } else {
    if (header.type == HeaderType::kNomsg) role = RoleOfNomsg(sender, header);
    if (inline_size > 0) {
      walker.Opaque("(rest)", inline_size, SectionOf(header));
      walker.Illegal("nothing is to follow the header", SectionOf(header));
    }
  }

  JudgeCredits(walker, sender, header, role);
  JudgeVersion(walker, sender, header, role);
  if (!header.lists.reads.empty()) JudgeReads(walker, header, role, inline_size);
  if (header.type == HeaderType::kNomsg) JudgeLong(walker, header, role);
  const std::string xid = Hex(header.xid);
  if (role != Role::kUnknown) decoded.reply = role == Role::kReply;
  if (role == Role::kCall) {
    JudgeCall(walker, sender, header);
    decoded.summary += ": call " + xid + (rpc.procedure ? ", " + ToString(*rpc.procedure) : "");
    Remember(sender, header.xid, {.offered = ListsOf(header.lists), .procedure = rpc.procedure});
  } else if (role == Role::kReply) {
    JudgeReply(walker, sender, header, call);
    decoded.summary += ": reply " + xid + (rpc.status.empty() ? "" : ", " + rpc.status);
    if (call != nullptr && call->procedure) decoded.summary += " of " + ToString(*call->procedure);
    Forget(sender, header.xid);
  } else {
    decoded.summary += ": " + xid;
    if (header.type == HeaderType::kError) Forget(sender, header.xid);
    TakeProperties(sender, header);
  }
  return decoded;
}

std::optional<DecodedMessage> MessageDecoder::OnPrivateData(End sender, ConstBytes bytes) {
  // It may stand behind another layer's data, at any alignment. What can be used comes first, as for an end; then what
  // cannot, to say why.
  std::optional<size_t> found;
  for (size_t at = 0; at + 4 <= bytes.size(); ++at) {
    const ConstBytes here = bytes.subspan(at, std::min(bytes.size() - at, rpcrdma::kPrivateDataSize));
    if (ByteReader(here).U32() != rpcrdma::kPrivateDataMagic) continue;
    const bool usable = rpcrdma::FindPrivateData(here).has_value();
    if (usable || !found) found = at;
    if (usable) break;
  }
  const auto claims = rpcrdma::FindPrivateData(bytes);
  if (sender != End::kUnknown) private_data_[static_cast<size_t>(sender)].emplace(claims);
  if (!found) return std::nullopt;
  DecodedMessage decoded;
  decoded.summary = "CM private data";
  if (claims) decoded.summary += ": " + rpcrdma::ToString(*claims);
  Walker walker(bytes, &decoded.fields);
  constexpr Section kElsewhere = {Document::kPvtData, "5.2"};
  walker.Opaque("(of another layer)", *found, kElsewhere);
  decoded.well_formed = WalkPrivateData(walker);
  decoded.header_size = walker.position();
  walker.Opaque("(rest)", walker.remaining(), kElsewhere);
  return decoded;
}

}  // namespace stagecoach::decode
