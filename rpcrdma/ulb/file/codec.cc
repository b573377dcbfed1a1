#include "rpcrdma/ulb/file/codec.h"

namespace stagecoach::rpcrdma::file {
namespace {

// An empty name is no name (names.h), but well-formed XDR: its count alone.
constexpr uint32_t kNameSizeMin = 4;
constexpr uint32_t kAttributesSize = 4 + 4 + 8 + 8 + 4;

void EncodeTime(XdrWriter& out, const Time& time) {
  out.I64(time.seconds);
  out.U32(time.nanoseconds);
}

Time DecodeTime(XdrReader& in) {
  Time time;
  time.seconds = in.I64("seconds");
  time.nanoseconds = in.U32("nanoseconds");
  if (time.nanoseconds > 999'999'999) in.Fail(XdrFaultKind::kBadValue, "nanoseconds");
  return time;
}

uint32_t DecodeMode(XdrReader& in) {
  const uint32_t mode = in.U32("mode");
  if ((mode & ~kModeMask) != 0) in.Fail(XdrFaultKind::kBadValue, "mode");
  return mode;
}

}  // namespace

void Encode(XdrWriter& out, Status status) {
  out.U32(static_cast<uint32_t>(status));
}

void Decode(XdrReader& in, Status& status) {
  status = static_cast<Status>(in.Enum("status", static_cast<uint32_t>(Status::kBusy)));
}

void Encode(XdrWriter& out, Handle handle) {
  out.U64(handle);
}

void Decode(XdrReader& in, Handle& handle) {
  handle = in.U64("handle");
}

void Encode(XdrWriter& out, const Path& path) {
  out.U32(static_cast<uint32_t>(path.size()));
  for (const std::string& name : path) out.String(name);
}

void Decode(XdrReader& in, Path& path) {
  path.clear();
  const uint32_t count = in.Count("path", kDepthMax, kNameSizeMin);
  for (uint32_t i = 0; i < count && in.ok(); ++i) path.emplace_back(in.String("name", kNameMax));
}

void Encode(XdrWriter& out, const Attributes& attributes) {
  out.U32(static_cast<uint32_t>(attributes.type));
  out.U32(attributes.mode);
  out.U64(attributes.size);
  EncodeTime(out, attributes.modified);
}

void Decode(XdrReader& in, Attributes& attributes) {
  const uint32_t type = in.Enum("type", static_cast<uint32_t>(Type::kOther));
  if (in.ok() && type < static_cast<uint32_t>(Type::kRegular)) in.Fail(XdrFaultKind::kBadValue, "type");
  attributes.type = in.ok() ? static_cast<Type>(type) : Type::kOther;
  attributes.mode = DecodeMode(in);
  attributes.size = in.U64("size");
  attributes.modified = DecodeTime(in);
}

void Encode(XdrWriter& out, const Limits& limits) {
  out.U32(limits.data_max);
  out.U32(limits.handles_max);
  out.U32(limits.idle_seconds);
  out.Bool(limits.read_only);
}

void Decode(XdrReader& in, Limits& limits) {
  limits.data_max = in.U32("data_max");
  limits.handles_max = in.U32("handles_max");
  limits.idle_seconds = in.U32("idle_seconds");
  limits.read_only = in.Bool("read_only");
}

void Encode(XdrWriter& out, const ListArgs& args) {
  Encode(out, args.path);
  out.U64(args.cookie);
  out.U32(args.bytes_max);
}

void Decode(XdrReader& in, ListArgs& args) {
  Decode(in, args.path);
  args.cookie = in.U64("cookie");
  args.bytes_max = in.U32("bytes_max");
}

size_t EncodedSize(const Entry& entry) {
  return 4 + XdrRoundUp(entry.name.size()) + kAttributesSize;
}

void Encode(XdrWriter& out, const Page& page) {
  out.U64(page.cookie);
  out.Bool(page.end);
  out.U32(static_cast<uint32_t>(page.entries.size()));
  for (const Entry& entry : page.entries) {
    out.String(entry.name);
    Encode(out, entry.attributes);
  }
}

void Decode(XdrReader& in, Page& page) {
  page.cookie = in.U64("cookie");
  page.end = in.Bool("end");
  page.entries.clear();
  const uint32_t count = in.Count("entries", kEntriesMax, kNameSizeMin + kAttributesSize);
  page.entries.reserve(count);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    Entry& entry = page.entries.emplace_back();
    entry.name = in.String("name", kNameMax);
    Decode(in, entry.attributes);
  }
}

void Encode(XdrWriter& out, const Opened& opened) {
  out.U64(opened.handle);
  Encode(out, opened.attributes);
}

void Decode(XdrReader& in, Opened& opened) {
  opened.handle = in.U64("handle");
  Decode(in, opened.attributes);
}

void Encode(XdrWriter& out, const ReadArgs& args) {
  out.U64(args.handle);
  out.U64(args.offset);
  out.U32(args.count);
}

void Decode(XdrReader& in, ReadArgs& args) {
  args.handle = in.U64("handle");
  args.offset = in.U64("offset");
  args.count = in.U32("count");
}

void Encode(XdrWriter& out, const ReadReply& reply) {
  Encode(out, reply.info.attributes);
  out.U32(reply.info.crc32c);
  out.EligibleOpaque(reply.data);
}

void Decode(XdrReader& in, ReadReply& reply) {
  Decode(in, reply.info.attributes);
  reply.info.crc32c = in.U32("crc32c");
  reply.data = in.EligibleOpaque("data", kDataMax);
}

void Encode(XdrWriter& out, const CreateArgs& args) {
  Encode(out, args.path);
  out.U32(args.mode);
}

void Decode(XdrReader& in, CreateArgs& args) {
  Decode(in, args.path);
  args.mode = DecodeMode(in);
}

void Encode(XdrWriter& out, const WriteRequest& request) {
  out.U64(request.info.handle);
  out.U64(request.info.offset);
  out.U32(request.info.crc32c);
  out.EligibleOpaque(request.data);
}

void Decode(XdrReader& in, WriteRequest& request) {
  request.info.handle = in.U64("handle");
  request.info.offset = in.U64("offset");
  request.info.crc32c = in.U32("crc32c");
  request.data = in.EligibleOpaque("data", kDataMax);
}

void Encode(XdrWriter& out, const CommitArgs& args) {
  out.U64(args.handle);
  out.U64(args.size);
  out.U32(args.crc32c);
  EncodeTime(out, args.modified);
}

void Decode(XdrReader& in, CommitArgs& args) {
  args.handle = in.U64("handle");
  args.size = in.U64("size");
  args.crc32c = in.U32("crc32c");
  args.modified = DecodeTime(in);
}

void Encode(XdrWriter& out, const MakeDirectoryArgs& args) {
  Encode(out, args.path);
  out.U32(args.mode);
}

void Decode(XdrReader& in, MakeDirectoryArgs& args) {
  Decode(in, args.path);
  args.mode = DecodeMode(in);
}

}  // namespace stagecoach::rpcrdma::file
