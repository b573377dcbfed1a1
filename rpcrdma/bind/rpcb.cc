#include "rpcrdma/bind/rpcb.h"

#include <algorithm>

#include "base/check.h"
#include "base/cursor.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kLastFragment = 0x80000000;
constexpr size_t kMarkSize = 4;
// A mapping without the bytes of its strings: two numbers and three counts.
constexpr size_t kMappingFixedSize = 20;
constexpr size_t kQuotedMax = 64;

RpcbFault Malformed(std::string text) {
  return {.kind = RpcbFault::Kind::kMalformed, .text = std::move(text)};
}

std::string VersionsText(const VersionRange& versions) {
  return std::to_string(versions.low) + " to " + std::to_string(versions.high);
}

// Reads the reply header; `in` then stands at the results.
Result<void, RpcbFault> BeginResults(XdrReader& in, uint32_t xid) {
  const auto header = DecodeReply(in);
  if (!header) return Err(Malformed(ToString(header.error())));
  if (header->xid != xid) {
    return Err(RpcbFault{.kind = RpcbFault::Kind::kForeign, .text = "it answers another call"});
  }
  if (header->success()) return {};
  if (const auto* denied = std::get_if<DeniedReply>(&header->body)) {
    if (denied->stat == RejectStat::kRpcMismatch) {
      return Err(RpcbFault{.kind = RpcbFault::Kind::kDenied,
                           .text = "it speaks RPC versions " + VersionsText(denied->mismatch) + " only"});
    }
    return Err(RpcbFault{.kind = RpcbFault::Kind::kDenied,
                         .text = std::string("it denied the call: ") + ToString(denied->auth_stat)});
  }
  const auto& accepted = std::get<AcceptedReply>(header->body);
  if (accepted.stat == AcceptStat::kProgMismatch) {
    return Err(RpcbFault{.kind = RpcbFault::Kind::kVersions,
                         .versions = accepted.mismatch,
                         .text = "it speaks versions " + VersionsText(accepted.mismatch) +
                                 " of the rpcbind protocol, and 3 or 4 is needed"});
  }
  return Err(RpcbFault{.kind = RpcbFault::Kind::kUnavailable,
                       .text = std::string("it did not do the call: ") + ToString(accepted.stat)});
}

RpcbFault ResultsFault(const XdrFault& fault) {
  return Malformed(ToString(fault));
}

}  // namespace

std::vector<std::byte> EncodeRpcbCall(uint32_t xid, uint32_t version, RpcbProcedure procedure,
                                      const RpcbMapping& mapping) {
  const CallHeader header{.xid = xid, .prog = kRpcbProgram, .vers = version, .proc = static_cast<uint32_t>(procedure)};
  const bool has_argument = procedure != RpcbProcedure::kDump;
  size_t size = EncodedSize(header);
  if (has_argument) {
    size += kMappingFixedSize + XdrRoundUp(mapping.netid.size()) + XdrRoundUp(mapping.address.size()) +
            XdrRoundUp(mapping.owner.size());
  }
  std::vector<std::byte> record(kMarkSize + size);
  ByteWriter(record).U32(kLastFragment | static_cast<uint32_t>(size));
  XdrWriter out(MutableBytes(record).subspan(kMarkSize));
  EncodeCall(header, out);
  if (has_argument) {
    out.U32(mapping.program);
    out.U32(mapping.version);
    out.String(mapping.netid);
    out.String(mapping.address);
    out.String(mapping.owner);
  }
  STAGECOACH_CHECK(out.ok() && out.written().size() == size);
  return record;
}

Result<bool, RpcbFault> DecodeRpcbDone(ConstBytes record, uint32_t xid) {
  XdrReader in(record);
  if (auto begun = BeginResults(in, xid); !begun) return Err(begun.error());
  const bool done = in.Bool("done");
  if (const auto end = in.Finish(); !end) return Err(ResultsFault(end.error()));
  return done;
}

Result<std::vector<RpcbMapping>, RpcbFault> DecodeRpcbDump(ConstBytes record, uint32_t xid, uint32_t program) {
  XdrReader in(record);
  if (auto begun = BeginResults(in, xid); !begun) return Err(begun.error());
  std::vector<RpcbMapping> mappings;
  // Ends: each turn takes 24 bytes of the record or more, and a reader that has failed reads "absent".
  while (in.Optional("another mapping")) {
    const uint32_t its_program = in.U32("r_prog");
    const uint32_t version = in.U32("r_vers");
    const std::string_view netid = in.String("r_netid", kRpcbStringMax);
    const std::string_view address = in.String("r_addr", kRpcbStringMax);
    const std::string_view owner = in.String("r_owner", kRpcbStringMax);
    if (!in.ok() || its_program != program) continue;
    mappings.push_back({.program = program,
                        .version = version,
                        .netid = std::string(netid),
                        .address = std::string(address),
                        .owner = std::string(owner)});
  }
  if (const auto end = in.Finish(); !end) return Err(ResultsFault(end.error()));
  return mappings;
}

Result<bool, RecordAssembler::Fault> RecordAssembler::Take(ConstBytes bytes) {
  while (!bytes.empty()) {
    if (whole_) return Err(Fault::kTrailing);
    if (mark_bytes_ < static_cast<int>(kMarkSize)) {
      mark_ = mark_ << 8 | std::to_integer<uint32_t>(bytes[0]);
      bytes = bytes.subspan(1);
      if (++mark_bytes_ < static_cast<int>(kMarkSize)) continue;
      fragment_left_ = mark_ & ~kLastFragment;
      const bool last = (mark_ & kLastFragment) != 0;
      // Marks without bytes would be work without an end that the bound on bytes does not see.
      if (fragment_left_ == 0 && !last) return Err(Fault::kEmptyFragment);
      if (fragment_left_ > bytes_max_ - record_.size()) return Err(Fault::kTooLong);
    }
    const ConstBytes part = bytes.first(std::min(bytes.size(), fragment_left_));
    // Grows by what came, not by what a mark promised.
    record_.insert(record_.end(), part.begin(), part.end());
    fragment_left_ -= part.size();
    bytes = bytes.subspan(part.size());
    if (fragment_left_ > 0) continue;
    whole_ = (mark_ & kLastFragment) != 0;
    mark_bytes_ = 0;
  }
  return whole_;
}

const char* ToString(RecordAssembler::Fault fault) {
  switch (fault) {
    case RecordAssembler::Fault::kTooLong:
      return "the record is too long";
    case RecordAssembler::Fault::kEmptyFragment:
      return "a fragment of the record is empty";
    case RecordAssembler::Fault::kTrailing:
      return "more comes behind the record";
  }
  return "unknown fault";
}

std::string Quoted(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string quoted = "'";
  for (const char c : text.substr(0, kQuotedMax)) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte >= 0x20 && byte < 0x7f && c != '\\') {
      quoted += c;
    } else {
      quoted += "\\x";
      quoted += kDigits[byte >> 4];
      quoted += kDigits[byte & 15];
    }
  }
  quoted += text.size() > kQuotedMax ? "...'" : "'";
  return quoted;
}

}  // namespace stagecoach::rpcrdma
