#include "rpcrdma/ulb/nfs3/codec.h"

#include <algorithm>

namespace stagecoach::rpcrdma::nfs3 {
namespace {

// --- Arguments ---

void Encode(XdrWriter& out, Time time) {
  out.U32(time.seconds);
  out.U32(time.nanoseconds);
}

void Encode(XdrWriter& out, Device device) {
  out.U32(device.major);
  out.U32(device.minor);
}

template <typename T>
void EncodeSet(XdrWriter& out, const std::optional<T>& value) {
  out.Bool(value.has_value());
  if (!value) return;
  if constexpr (sizeof(T) == 8) {
    out.U64(*value);
  } else {
    out.U32(*value);
  }
}

// set_atime, set_mtime: DONT_CHANGE, SET_TO_SERVER_TIME, SET_TO_CLIENT_TIME.
void EncodeSetTime(XdrWriter& out, const std::optional<SetTime>& value) {
  out.U32(!value ? 0 : value->to_server_time ? 1 : 2);
  if (value && !value->to_server_time) Encode(out, value->time);
}

void Encode(XdrWriter& out, const NewAttributes& attributes) {
  EncodeSet(out, attributes.mode);
  EncodeSet(out, attributes.uid);
  EncodeSet(out, attributes.gid);
  EncodeSet(out, attributes.size);
  EncodeSetTime(out, attributes.accessed);
  EncodeSetTime(out, attributes.modified);
}

// The length, then the array with its own count.
void EncodeList(XdrWriter& out, const std::vector<AclEntry>& entries) {
  out.U32(static_cast<uint32_t>(entries.size()));
  out.U32(static_cast<uint32_t>(entries.size()));
  for (const AclEntry& entry : entries) {
    out.U32(entry.tag);
    out.U32(entry.id);
    out.U32(entry.permissions);
  }
}

}  // namespace

// --- Results ---
//
// Not in a namespace of their own, where they would hide those of codec.h from one another.

static Time DecodeTime(XdrReader& in) {
  Time time;
  time.seconds = in.U32("seconds");
  time.nanoseconds = in.U32("nanoseconds");
  return time;
}

static void Decode(XdrReader& in, Verifier& verifier) {
  const ConstBytes bytes = in.FixedOpaque("verifier", verifier.size());
  std::copy(bytes.begin(), bytes.end(), verifier.begin());
}

static void DecodeStable(XdrReader& in, Stable& stable) {
  stable = static_cast<Stable>(in.Enum("committed", static_cast<uint32_t>(Stable::kFileSync)));
}

// post_op_attr, post_op_fh3.
template <typename T>
static void DecodeOptional(XdrReader& in, std::optional<T>& value) {
  value.reset();
  if (in.Optional("follows")) Decode(in, value.emplace());
}

static void Decode(XdrReader& in, BriefAttributes& attributes) {
  attributes.size = in.U64("size");
  attributes.modified = DecodeTime(in);
  attributes.changed = DecodeTime(in);
}

static void Decode(XdrReader& in, Changed& result) {
  Decode(in, result.change);
}

static void Decode(XdrReader& in, Found& result) {
  Decode(in, result.object);
  DecodeOptional(in, result.attributes);
  DecodeOptional(in, result.directory);
}

static void Decode(XdrReader& in, Access& result) {
  DecodeOptional(in, result.attributes);
  result.access = in.U32("access");
}

static void Decode(XdrReader& in, LinkText& result) {
  DecodeOptional(in, result.attributes);
  result.path = in.EligibleOpaque("path", kPathMax);
}

static void Decode(XdrReader& in, ReadData& result) {
  DecodeOptional(in, result.attributes);
  const uint32_t count = in.U32("count");
  result.end = in.Bool("eof");
  result.data = in.EligibleOpaque("data", kDataMax);
  if (in.ok() && result.data.size() != count) in.Fail(XdrFaultKind::kBadValue, "count");
}

static void Decode(XdrReader& in, Written& result) {
  Decode(in, result.change);
  result.count = in.U32("count");
  DecodeStable(in, result.committed);
  Decode(in, result.verifier);
}

static void Decode(XdrReader& in, Created& result) {
  DecodeOptional(in, result.object);
  DecodeOptional(in, result.attributes);
  Decode(in, result.directory);
}

static void Decode(XdrReader& in, Renamed& result) {
  Decode(in, result.from);
  Decode(in, result.to);
}

static void Decode(XdrReader& in, Linked& result) {
  DecodeOptional(in, result.attributes);
  Decode(in, result.directory);
}

// entry3, entryplus3: linked lists, each entry 24 bytes long at least.
static void DecodePage(XdrReader& in, DirectoryPage& page, bool plus) {
  DecodeOptional(in, page.directory);
  Decode(in, page.verifier);
  while (in.Optional("entry follows") && in.ok()) {
    Entry& entry = page.entries.emplace_back();
    entry.file = in.U64("fileid");
    entry.name = in.String("name", kNameMax);
    entry.cookie = in.U64("cookie");
    if (!plus) continue;
    DecodeOptional(in, entry.attributes);
    DecodeOptional(in, entry.handle);
  }
  page.end = in.Bool("eof");
}

static void Decode(XdrReader& in, DirectoryPage& page) {
  DecodePage(in, page, false);
}

static void Decode(XdrReader& in, FsStat& result) {
  DecodeOptional(in, result.attributes);
  for (uint64_t* field : {&result.bytes_total, &result.bytes_free, &result.bytes_available, &result.files_total,
                          &result.files_free, &result.files_available}) {
    *field = in.U64("fsstat");
  }
  result.unchanged_seconds = in.U32("invarsec");
}

static void Decode(XdrReader& in, FsInfo& result) {
  DecodeOptional(in, result.attributes);
  for (uint32_t* field : {&result.read_max, &result.read_preferred, &result.read_multiple, &result.write_max,
                          &result.write_preferred, &result.write_multiple, &result.directory_preferred}) {
    *field = in.U32("fsinfo");
  }
  result.file_size_max = in.U64("maxfilesize");
  result.time_granularity = DecodeTime(in);
  result.properties = in.U32("properties");
}

static void Decode(XdrReader& in, PathConf& result) {
  DecodeOptional(in, result.attributes);
  result.links_max = in.U32("linkmax");
  result.name_max = in.U32("name_max");
  for (bool* field :
       {&result.no_truncation, &result.chown_restricted, &result.case_insensitive, &result.case_preserving}) {
    *field = in.Bool("pathconf");
  }
}

static void Decode(XdrReader& in, Committed& result) {
  Decode(in, result.change);
  Decode(in, result.verifier);
}

static void DecodeList(XdrReader& in, std::vector<AclEntry>& entries) {
  // The length alone is sent where only the length was asked for.
  const uint32_t length = in.U32("entries");
  const uint32_t count = in.Count("acl", kAclEntriesMax, 12);
  if (in.ok() && (length > kAclEntriesMax || (count != 0 && count != length))) {
    in.Fail(XdrFaultKind::kBadValue, "entries");
  }
  entries.resize(in.ok() ? count : 0);
  for (AclEntry& entry : entries) {
    entry.tag = in.U32("tag");
    entry.id = in.U32("id");
    entry.permissions = in.U32("permissions");
  }
}

static void Decode(XdrReader& in, Acl& result) {
  DecodeOptional(in, result.attributes);
  result.mask = in.U32("mask");
  DecodeList(in, result.entries);
  DecodeList(in, result.default_entries);
}

static void Decode(XdrReader& in, AclSet& result) {
  DecodeOptional(in, result.attributes);
}

// What follows an error.
namespace {

enum class After { kNothing, kAttributes, kChange, kTwoChanges, kAttributesAndChange };

template <typename T>
constexpr After kAfterError = After::kAttributes;
template <>
constexpr After kAfterError<Attributes> = After::kNothing;
template <>
constexpr After kAfterError<Changed> = After::kChange;
template <>
constexpr After kAfterError<Written> = After::kChange;
template <>
constexpr After kAfterError<Created> = After::kChange;
template <>
constexpr After kAfterError<Committed> = After::kChange;
template <>
constexpr After kAfterError<Renamed> = After::kTwoChanges;
template <>
constexpr After kAfterError<Linked> = After::kAttributesAndChange;

}  // namespace

static void Skip(XdrReader& in, After after) {
  std::optional<Attributes> attributes;
  CacheConsistency change;
  if (after == After::kAttributes || after == After::kAttributesAndChange) DecodeOptional(in, attributes);
  if (after == After::kTwoChanges) Decode(in, change);
  if (after == After::kChange || after == After::kTwoChanges || after == After::kAttributesAndChange) {
    Decode(in, change);
  }
}

void Encode(XdrWriter& out, const FileHandle& handle) {
  out.Opaque(handle.view());
}

void Encode(XdrWriter& out, const DirectoryEntryName& name) {
  Encode(out, name.directory);
  out.String(name.name);
}

void Encode(XdrWriter& out, const SetAttributesArgs& args) {
  Encode(out, args.object);
  Encode(out, args.attributes);
  out.Bool(args.guard.has_value());
  if (args.guard) Encode(out, *args.guard);
}

void Encode(XdrWriter& out, const AccessArgs& args) {
  Encode(out, args.object);
  out.U32(args.access);
}

void Encode(XdrWriter& out, const ReadArgs& args) {
  Encode(out, args.file);
  out.U64(args.offset);
  out.U32(args.count);
}

void Encode(XdrWriter& out, const WriteArgs& args) {
  Encode(out, args.file);
  out.U64(args.offset);
  out.U32(static_cast<uint32_t>(args.data.size()));
  out.U32(static_cast<uint32_t>(args.stable));
  out.EligibleOpaque(args.data);
}

void Encode(XdrWriter& out, const CreateArgs& args) {
  Encode(out, args.where);
  out.U32(static_cast<uint32_t>(args.how));
  if (args.how == CreateArgs::How::kExclusive) {
    out.FixedOpaque(args.verifier);
  } else {
    Encode(out, args.attributes);
  }
}

void Encode(XdrWriter& out, const MakeDirectoryArgs& args) {
  Encode(out, args.where);
  Encode(out, args.attributes);
}

void Encode(XdrWriter& out, const SymlinkArgs& args) {
  Encode(out, args.where);
  Encode(out, args.attributes);
  out.EligibleOpaque(AsBytes(args.path));
}

void Encode(XdrWriter& out, const MakeNodeArgs& args) {
  Encode(out, args.where);
  out.U32(static_cast<uint32_t>(args.type));
  Encode(out, args.attributes);
  if (args.type == Type::kBlockDevice || args.type == Type::kCharacterDevice) Encode(out, args.device);
}

void Encode(XdrWriter& out, const RenameArgs& args) {
  Encode(out, args.from);
  Encode(out, args.to);
}

void Encode(XdrWriter& out, const LinkArgs& args) {
  Encode(out, args.file);
  Encode(out, args.link);
}

void Encode(XdrWriter& out, const ReadDirectoryArgs& args) {
  Encode(out, args.directory);
  out.U64(args.cookie);
  out.FixedOpaque(args.verifier);
  out.U32(args.count);
}

void Encode(XdrWriter& out, const ReadDirectoryPlusArgs& args) {
  Encode(out, args.directory);
  out.U64(args.cookie);
  out.FixedOpaque(args.verifier);
  out.U32(args.names_max);
  out.U32(args.results_max);
}

void Encode(XdrWriter& out, const CommitArgs& args) {
  Encode(out, args.file);
  out.U64(args.offset);
  out.U32(args.count);
}

void Encode(XdrWriter& out, const GetAclArgs& args) {
  Encode(out, args.object);
  out.U32(args.mask);
}

void Encode(XdrWriter& out, const SetAclArgs& args) {
  Encode(out, args.object);
  out.U32(args.mask);
  EncodeList(out, args.entries);
  EncodeList(out, args.default_entries);
}

void Decode(XdrReader& in, FileHandle& handle) {
  handle = FileHandle(in.Opaque("handle", kFileHandleMax));
}

void Decode(XdrReader& in, Attributes& attributes) {
  const uint32_t type = in.Enum("type", static_cast<uint32_t>(Type::kFifo));
  if (in.ok() && type < static_cast<uint32_t>(Type::kRegular)) in.Fail(XdrFaultKind::kBadValue, "type");
  attributes.type = in.ok() ? static_cast<Type>(type) : Type::kRegular;
  attributes.mode = in.U32("mode");
  attributes.links = in.U32("nlink");
  attributes.uid = in.U32("uid");
  attributes.gid = in.U32("gid");
  attributes.size = in.U64("size");
  attributes.used = in.U64("used");
  attributes.device.major = in.U32("rdev");
  attributes.device.minor = in.U32("rdev");
  attributes.file_system = in.U64("fsid");
  attributes.file = in.U64("fileid");
  attributes.accessed = DecodeTime(in);
  attributes.modified = DecodeTime(in);
  attributes.changed = DecodeTime(in);
}

void Decode(XdrReader& in, CacheConsistency& change) {
  DecodeOptional(in, change.before);
  DecodeOptional(in, change.after);
}

template <typename T>
Result<T, Status> DecodeResult(XdrReader& in) {
  const auto status = static_cast<Status>(in.U32("status"));
  if (status != Status::kOk) {
    Skip(in, kAfterError<T>);
    return Err(status);
  }
  T value{};
  Decode(in, value);
  return value;
}

template Result<Attributes, Status> DecodeResult(XdrReader& in);
template Result<Changed, Status> DecodeResult(XdrReader& in);
template Result<Found, Status> DecodeResult(XdrReader& in);
template Result<Access, Status> DecodeResult(XdrReader& in);
template Result<LinkText, Status> DecodeResult(XdrReader& in);
template Result<ReadData, Status> DecodeResult(XdrReader& in);
template Result<Written, Status> DecodeResult(XdrReader& in);
template Result<Created, Status> DecodeResult(XdrReader& in);
template Result<Renamed, Status> DecodeResult(XdrReader& in);
template Result<Linked, Status> DecodeResult(XdrReader& in);
template Result<DirectoryPage, Status> DecodeResult(XdrReader& in);
template Result<FsStat, Status> DecodeResult(XdrReader& in);
template Result<FsInfo, Status> DecodeResult(XdrReader& in);
template Result<PathConf, Status> DecodeResult(XdrReader& in);
template Result<Committed, Status> DecodeResult(XdrReader& in);
template Result<Acl, Status> DecodeResult(XdrReader& in);
template Result<AclSet, Status> DecodeResult(XdrReader& in);

Result<DirectoryPage, Status> DecodeReadDirectoryPlus(XdrReader& in) {
  const auto status = static_cast<Status>(in.U32("status"));
  if (status != Status::kOk) {
    Skip(in, kAfterError<DirectoryPage>);
    return Err(status);
  }
  DirectoryPage page;
  DecodePage(in, page, true);
  return page;
}

}  // namespace stagecoach::rpcrdma::nfs3
