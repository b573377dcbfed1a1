#include "tools/decode/header_walk.h"

#include <limits>
#include <string>

#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/private_data.h"
#include "rpcrdma/wire/properties.h"
#include "rpcrdma/wire/v2_numbers.h"

namespace stagecoach::decode {
namespace {

using namespace rpcrdma;  // the numbers of version 2

constexpr uint32_t kTypeError = kRdma2Error;  // in both versions

std::string Number(uint64_t value) {
  return std::to_string(value);
}

// --- Chunk lists: the same in both versions ---

SeenSegment WalkSegment(Walker& walker, const Terms& terms) {
  const Section section = In(terms, terms.segment);
  SeenSegment seen;
  seen.segment.handle = walker.U32(terms.handle, section, Format::kHex);
  if (!walker.ok()) return seen;
  seen.handle_field = walker.last_index();
  seen.segment.length = walker.U32(terms.length, section);
  if (!walker.ok()) return seen;
  seen.length_field = walker.last_index();
  seen.segment.offset = walker.U64(terms.offset, section, Format::kHex);
  if (walker.ok() && seen.segment.length > 0 &&
      seen.segment.offset > std::numeric_limits<uint64_t>::max() - (seen.segment.length - 1)) {
    walker.Illegal("the segment passes the end of the address space", section);
  }
  return seen;
}

// The word before an item of optional-data. Anything but zero is taken for "there is one".
bool WalkPresent(Walker& walker, const char* name, Section section, const std::string& what, const char* end) {
  const uint32_t word = walker.U32(name, section);
  if (!walker.ok()) return false;
  walker.Mean(word == 0 ? end : what);
  if (word > 1) walker.Malformed("neither 0 nor 1", section);
  return word != 0;
}

SeenChunk WalkChunk(Walker& walker, const Terms& terms, Section section) {
  SeenChunk chunk;
  const uint32_t count = walker.U32("rdma_target", section);
  if (!walker.ok()) return chunk;
  chunk.count_field = walker.last_index();
  walker.Mean(Number(count) + (count == 1 ? " segment" : " segments"));
  if (uint64_t{count} * kSegmentSize > walker.remaining()) {
    walker.Malformed(
        "there is room for " + Number(walker.remaining() / kSegmentSize) + " of them in what is left of the message",
        section);
  }
  walker.Enter();
  for (uint32_t i = 0; i < count && walker.ok(); ++i) {
    const SeenSegment segment = WalkSegment(walker, terms);
    if (walker.ok()) chunk.segments.push_back(segment);
  }
  walker.Leave();
  return chunk;
}

SeenLists WalkChunkLists(Walker& walker, const Terms& terms) {
  SeenLists lists;
  const Section reads = In(terms, terms.read_list);
  while (WalkPresent(walker, lists.reads.empty() ? "rdma_reads" : "rdma_next", reads,
                     "Read segment " + Number(lists.reads.size()),
                     lists.reads.empty() ? "no Read list" : "end of the Read list")) {
    if (lists.reads.empty()) lists.reads_field = walker.last_index();
    walker.Enter();
    SeenRead read;
    read.position = walker.U32(terms.position, In(terms, terms.read_position));
    read.position_field = walker.last_index();
    read.target = WalkSegment(walker, terms);
    walker.Leave();
    if (walker.ok()) lists.reads.push_back(read);
  }
  if (!walker.ok()) return lists;
  if (lists.reads.empty()) lists.reads_field = walker.last_index();

  const Section writes = In(terms, terms.write_list);
  while (WalkPresent(walker, lists.writes.empty() ? "rdma_writes" : "rdma_next", writes,
                     "Write chunk " + Number(lists.writes.size()),
                     lists.writes.empty() ? "no Write list" : "end of the Write list")) {
    if (lists.writes.empty()) lists.writes_field = walker.last_index();
    walker.Enter();
    SeenChunk chunk = WalkChunk(walker, terms, writes);
    walker.Leave();
    if (walker.ok()) lists.writes.push_back(std::move(chunk));
  }
  if (!walker.ok()) return lists;
  if (lists.writes.empty()) lists.writes_field = walker.last_index();

  const Section reply = In(terms, terms.reply_chunk);
  const bool present = WalkPresent(walker, "rdma_reply", reply, "Reply chunk", "no Reply chunk");
  if (!walker.ok()) return lists;
  lists.reply_field = walker.last_index();
  if (present) {
    walker.Enter();
    SeenChunk chunk = WalkChunk(walker, terms, reply);
    walker.Leave();
    if (walker.ok()) lists.reply = std::move(chunk);
  }
  return lists;
}

void WalkVersions(Walker& walker, Section section) {
  const uint32_t low = walker.U32("rdma_vers_low", section);
  walker.Mean("the lowest version that is supported");
  const uint32_t high = walker.U32("rdma_vers_high", section);
  walker.Mean("the highest version that is supported");
  // Every end supports a version.
  if (walker.ok() && low > high) walker.Illegal("the range has no version in it", section);
}

// --- Version 1 ---

struct TypeName {
  HeaderType type;
  const char* name;
};
constexpr TypeName kTypesOfVersion1[] = {
    {HeaderType::kMsg, "RDMA_MSG"},   {HeaderType::kNomsg, "RDMA_NOMSG"}, {HeaderType::kMsgp, "RDMA_MSGP"},
    {HeaderType::kDone, "RDMA_DONE"}, {HeaderType::kError, "RDMA_ERROR"},
};

// The name of the type alone, in the meaning of its field.
void NameType(Walker& walker, SeenHeader& header, HeaderType type, const char* name) {
  header.type = type;
  header.type_name = name;
  walker.at(header.type_field).meaning = name;
}

void Advise(Walker& walker, size_t field, const Rule& rule, const Terms& terms, const std::string& text) {
  if (rule.force == Force::kAdvice) walker.Note(field, text, In(terms, rule.section));
  if (rule.force == Force::kBinding) walker.Illegal(field, text, In(terms, rule.section));
}

void WalkErrorOfVersion1(Walker& walker, SeenHeader& header) {
  const Terms& terms = *header.terms;
  const Section section = In(terms, terms.errors);
  const uint32_t code = walker.U32(terms.error, section);
  if (!walker.ok()) return;
  header.error = code;
  switch (code) {
    case 1:
      walker.Mean("ERR_VERS: version not supported");
      return WalkVersions(walker, section);
    case 2:
      walker.Mean("ERR_CHUNK: header or chunks cannot be decoded");
      return;
    default:
      break;
  }
  if (!terms.profile->unknown_errors_have_words) return walker.Malformed("no error code of version 1", section);
  walker.Mean("no code that is known");
  for (int i = 0; i < 8 && walker.ok(); ++i) walker.U32("rdma_extra", section, Format::kHex);
}

void WalkRpcRdmaVersion1(Walker& walker, uint32_t type, SeenHeader& header) {
  const Terms& terms = *header.terms;
  if (type >= std::size(kTypesOfVersion1)) {
    return walker.Malformed("no message type of version 1", In(terms, terms.message_type));
  }
  NameType(walker, header, kTypesOfVersion1[type].type, kTypesOfVersion1[type].name);
  switch (header.type) {
    case HeaderType::kMsgp:
      Advise(walker, header.type_field, terms.no_padded, terms, "deprecated: should not be sent");
      walker.U32("rdma_align", In(terms, terms.padded));
      walker.Mean("padded data begin at multiples of this, in bytes");
      walker.U32("rdma_thresh", In(terms, terms.padded));
      walker.Mean("data of this many bytes and more are padded");
      header.lists = WalkChunkLists(walker, terms);
      header.has_message = true;
      break;
    case HeaderType::kMsg:
      header.lists = WalkChunkLists(walker, terms);
      header.has_message = true;
      break;
    case HeaderType::kNomsg:
      header.lists = WalkChunkLists(walker, terms);
      break;
    case HeaderType::kDone:
      Advise(walker, header.type_field, terms.no_done, terms, "deprecated: there is never a need to send it");
      break;
    case HeaderType::kError:
      WalkErrorOfVersion1(walker, header);
      break;
    case HeaderType::kConnProp:
    case HeaderType::kUnknown:
      break;
  }
}

// --- Version 2 ---

void WalkProperty(Walker& walker, SeenHeader& header, std::vector<uint32_t>& seen) {
  constexpr Section kModel = {Document::kV2, "4.1"};
  constexpr Section kSize = {Document::kV2, "4.2.1"};
  constexpr Section kReverse = {Document::kV2, "4.2.2"};
  const uint32_t which = walker.U32("rdma_which", kModel);
  const bool size = which == kRdma2PropidRbsiz;
  if (!walker.ok()) return;
  const char* name = which == kRdma2PropidRbsiz ? "Receive Buffer Size"
                     : which == kRdma2PropidBrs ? "Reverse Request Support"
                                                : nullptr;
  walker.Mean(name != nullptr ? name : "a property that is not known");
  if (name == nullptr) walker.Note("receivers ignore it", {Document::kV2, "5.3.4"});
  // They are a set. Of those that are not known nothing is known, not even this.
  if (name != nullptr && std::ranges::find(seen, which) != seen.end()) {
    walker.Malformed("stands here a second time", kModel);
  }
  if (name != nullptr) seen.push_back(which);

  const uint32_t length = walker.U32("rdma_data", kModel);
  if (!walker.ok()) return;
  walker.Mean(length == 0 ? "no bytes: the default" : Number(length) + " bytes");
  if (length == 0) return;
  if (uint64_t{length} + XdrPad(length) > walker.remaining()) {
    walker.Malformed("there are " + Number(walker.remaining()) + " bytes left in the message", kModel);
  } else if (name != nullptr && length != 4) {
    walker.Malformed(std::string("the property's type has 4 bytes"), kModel);
  }
  walker.Enter();
  if (name != nullptr && length == 4) {
    const uint32_t value = walker.U32(size ? "rpcrdma2_prop_rbsiz" : "rpcrdma2_prop_brs", size ? kSize : kReverse);
    if (walker.ok() && size && value < kMinReceiveBufferSize) {
      walker.Malformed("less than the 1024 bytes that every end takes", {Document::kV2, "7"});
    } else if (walker.ok() && size) {
      walker.Mean("bytes");
      if (!header.receive_buffer_size) header.receive_buffer_size = value;
    } else if (walker.ok()) {
      static constexpr const char* kLevels[] = {"RDMA2_RVREQSUP_NONE", "RDMA2_RVREQSUP_INLINE", "RDMA2_RVREQSUP_GENL"};
      if (value < std::size(kLevels)) {
        walker.Mean(kLevels[value]);
      } else {
        walker.Malformed("no level of support", kReverse);
      }
    }
  } else {
    walker.Opaque("rdma_data", static_cast<size_t>(length), kModel);
    if (walker.ok()) walker.Opaque("pad", XdrPad(length), kModel);
  }
  walker.Leave();
}

void WalkProperties(Walker& walker, SeenHeader& header) {
  constexpr Section kSection = {Document::kV2, "5.3.4"};
  const uint32_t count = walker.U32("rdma_props", kSection);
  if (!walker.ok()) return;
  walker.Mean(Number(count) + (count == 1 ? " property" : " properties"));
  // Each has at least its code and the length of its value.
  if (uint64_t{count} * 8 > walker.remaining()) {
    walker.Malformed("there is room for " + Number(walker.remaining() / 8) + " of them in what is left of the message",
                     kSection);
  }
  std::vector<uint32_t> seen;
  walker.Enter();
  for (uint32_t i = 0; i < count && walker.ok(); ++i) {
    WalkProperty(walker, header, seen);
  }
  walker.Leave();
  if (walker.ok() && walker.remaining() > 0) {
    walker.Opaque("(rest)", walker.remaining(), kSection);
    walker.Malformed("nothing is to follow the properties", kSection);
  }
}

void WalkErrorOfVersion2(Walker& walker, SeenHeader& header) {
  constexpr Section kSection = {Document::kV2, "5.3.3"};
  const uint32_t code = walker.U32("rdma_err", kSection);
  if (!walker.ok()) return;
  header.error = code;
  switch (code) {
    case kRdma2ErrVers:
      walker.Mean("RDMA2_ERR_VERS: version not supported");
      return WalkVersions(walker, kSection);
    case kRdma2ErrBadXdr:
      return walker.Mean("RDMA2_ERR_BAD_XDR: the header cannot be parsed");
    case kRdma2ErrInvalHtype:
      return walker.Mean("RDMA2_ERR_INVAL_HTYPE: header type not supported");
    case kRdma2ErrReadChunks:
      walker.Mean("RDMA2_ERR_READ_CHUNKS: too many Read chunks");
      walker.U32("rdma_max_chunks", kSection);
      return;
    case kRdma2ErrWriteChunks:
      walker.Mean("RDMA2_ERR_WRITE_CHUNKS: too many Write chunks");
      walker.U32("rdma_max_chunks", kSection);
      return;
    case kRdma2ErrSegments:
      walker.Mean("RDMA2_ERR_SEGMENTS: too many segments in a chunk");
      walker.U32("rdma_max_segments", kSection);
      return;
    case kRdma2ErrWriteResource: {
      walker.Mean("RDMA2_ERR_WRITE_RESOURCE: a Write chunk is too small");
      const uint32_t index = walker.U32("rdma_chunk_index", kSection);
      walker.Mean(index == 0 ? "not known which one" : "counted from 1");
      walker.U32("rdma_length_needed", kSection);
      return;
    }
    case kRdma2ErrReplyResource:
      walker.Mean("RDMA2_ERR_REPLY_RESOURCE: the Reply chunk is too small, or there is none");
      walker.U32("rdma_length_needed", kSection);
      return;
    case kRdma2ErrSystem:
      return walker.Mean("RDMA2_ERR_SYSTEM: permanent");
    default:
      walker.Mean("no error code of this document");
      walker.Note("an extension may have it", {Document::kV2, "9.3"});
  }
}

// A server of version 1 may echo the version that it refuses, as Linux does: seven words whose fifth is ERR_VERS. In
// the layout of version 2 that word is the flags, whose one legal value is the same, and ERR_VERS takes eight words.
bool IsEchoedVersion(ConstBytes message) {
  if (message.size() != 28) return false;
  ByteReader in(message);
  in.Skip(4);
  const uint32_t version = in.U32();
  in.Skip(4);
  const uint32_t type = in.U32();
  const uint32_t code = in.U32();
  const uint32_t low = in.U32();
  const uint32_t high = in.U32();
  return version == kRpcRdmaVersion2 && type == kTypeError && code == kRdma2ErrVers && low == 1 && high >= low;
}

void WalkRpcRdmaVersion2(Walker& walker, uint32_t type, SeenHeader& header) {
  constexpr Section kFlags = {Document::kV2, "3.2"};
  const uint32_t flags = walker.U32("rdma_flags", kFlags, Format::kHex);
  if (!walker.ok()) return;
  header.flags = flags;
  header.flags_field = walker.last_index();
  walker.Mean((flags & kFlagResponse) != 0 ? "RPCRDMA2_F_RESPONSE" : "");
  if ((flags & ~kFlagResponse) != 0) walker.Illegal("reserved flags are set", kFlags);

  switch (type) {
    case kRdma2Msg:
    case kRdma2Nomsg: {
      const bool msg = type == kRdma2Msg;
      NameType(walker, header, msg ? HeaderType::kMsg : HeaderType::kNomsg, msg ? "RDMA2_MSG" : "RDMA2_NOMSG");
      header.invalidate = walker.U32("rdma_inv_handle", {Document::kV2, "3.3"}, Format::kHex);
      if (!walker.ok()) return;
      header.invalidate_field = walker.last_index();
      if (header.invalidate == 0) walker.Mean("no remote invalidation");
      header.lists = WalkChunkLists(walker, *header.terms);
      header.has_message = msg;
      return;
    }
    case kTypeError:
      NameType(walker, header, HeaderType::kError, "RDMA2_ERROR");
      if ((flags & kFlagResponse) == 0) walker.Illegal("an error is a response: the flag is to be set", kFlags);
      return WalkErrorOfVersion2(walker, header);
    case kRdma2ConnProp:
      NameType(walker, header, HeaderType::kConnProp, "RDMA2_CONNPROP");
      return WalkProperties(walker, header);
    default:
      return walker.Malformed(header.type_field, "no header type of this document; an extension may have it",
                              {Document::kV2, "5.2"});
  }
}

}  // namespace

SeenHeader WalkHeader(Walker& walker, const Terms& version1) {
  SeenHeader header;
  // The version decides by which document the word before it is called.
  const ConstBytes message = walker.Rest();
  const size_t start = walker.position();
  const uint32_t version = message.size() < 8 ? kRpcRdmaVersion1 : ByteReader(message.subspan(4)).U32();
  const bool echoed = IsEchoedVersion(message);
  header.terms = version == kRpcRdmaVersion2 && !echoed ? &TermsOfVersion2() : &version1;
  const Terms& terms = *header.terms;

  header.xid = walker.U32("rdma_xid", In(terms, terms.xid), Format::kHex);
  header.xid_field = walker.last_index();
  header.version = walker.U32("rdma_vers", In(terms, terms.version));
  header.version_field = walker.last_index();
  header.credits = walker.U32("rdma_credit", In(terms, terms.credit));
  header.credit_field = walker.last_index();
  const uint32_t type = walker.U32(terms.type, In(terms, terms.message_type));
  header.type_field = walker.last_index();
  if (walker.ok()) {
    if (header.version == kRpcRdmaVersion2 && !echoed) {
      WalkRpcRdmaVersion2(walker, type, header);
    } else if (header.version == kRpcRdmaVersion1 || type == kTypeError) {
      WalkRpcRdmaVersion1(walker, type, header);
      if (header.version != kRpcRdmaVersion1) {
        if (header.error == 1u) {
          walker.Note(header.version_field, "the version that is refused, returned as it came",
                      In(terms, terms.errors));
        } else {
          walker.Malformed(header.version_field, "no version that is known", In(terms, terms.version));
        }
      }
    } else {
      walker.Malformed(header.version_field, "no version that is known; what follows is laid out as it says",
                       In(terms, terms.version));
    }
  }
  header.size = walker.position() - start;
  header.well_formed = walker.LeaveHeader();
  header.walked = walker.ok() && header.type != HeaderType::kUnknown;
  return header;
}

bool WalkPrivateData(Walker& walker) {
  constexpr Section kFormat = {Document::kPvtData, "4"};
  constexpr Section kSizes = {Document::kPvtData, "4.2"};
  walker.U32("Format Identifier", kFormat, Format::kHex);
  const uint8_t version = walker.U8("Version", kFormat);
  if (!walker.ok()) return false;
  if (version != rpcrdma::kPrivateDataVersion) {
    walker.Note("a version that is not known: taken as if there were no private data", {Document::kPvtData, "5.2"});
    return false;
  }
  const uint8_t flags = walker.U8("Flags", kFormat, Format::kHex);
  if (walker.ok()) {
    walker.Mean((flags & 1) != 0 ? "R: supports remote invalidation" : "no remote invalidation");
    if ((flags & 0xfe) != 0) walker.Illegal("reserved bits are set", kFormat);
  }
  const uint8_t send = walker.U8("Send Size", kSizes);
  walker.Mean("sends at most " + Number((uint64_t{send} + 1) * 1024) + " bytes");
  const uint8_t receive = walker.U8("Receive Size", kSizes);
  walker.Mean("receives at most " + Number((uint64_t{receive} + 1) * 1024) + " bytes");
  return walker.ok();
}

}  // namespace stagecoach::decode
