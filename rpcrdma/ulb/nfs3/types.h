// Values of NFS version 3 (RFC 1813) and of NFSACL version 3, apart from how XDR writes them (codec.h).
//
// NFSACL has no RFC: program 100227 is Solaris's, and Linux serves it on the same connections as NFS.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/small_vector.h"

namespace stagecoach::rpcrdma::nfs3 {

inline constexpr uint32_t kProgram = 100003;
inline constexpr uint32_t kVersion = 3;
// RFC 8267 section 4.2 and IANA: NFS on RDMA transports.
inline constexpr uint16_t kPort = 20049;

enum class Procedure : uint32_t {
  kNull = 0,
  kGetAttributes = 1,
  kSetAttributes = 2,
  kLookup = 3,
  kAccess = 4,
  kReadLink = 5,
  kRead = 6,
  kWrite = 7,
  kCreate = 8,
  kMakeDirectory = 9,
  kSymlink = 10,
  kMakeNode = 11,
  kRemove = 12,
  kRemoveDirectory = 13,
  kRename = 14,
  kLink = 15,
  kReadDirectory = 16,
  kReadDirectoryPlus = 17,
  kFsStat = 18,
  kFsInfo = 19,
  kPathConf = 20,
  kCommit = 21,
};

inline constexpr uint32_t kAclProgram = 100227;
inline constexpr uint32_t kAclVersion = 3;
enum class AclProcedure : uint32_t { kNull = 0, kGetAcl = 1, kSetAcl = 2 };

// RFC 1813 section 2.4.
inline constexpr uint32_t kFileHandleMax = 64;
// RFC 1813 bounds neither names nor paths. These are Linux's and everybody's; a longer one is a bad reply.
inline constexpr uint32_t kNameMax = 255;
inline constexpr uint32_t kPathMax = 4096;
// Of one READ or WRITE: what this end takes, a server may allow less (FSINFO).
inline constexpr uint32_t kDataMax = 16u << 20;
// NFS_ACL_MAX_ENTRIES, of each of the two lists.
inline constexpr uint32_t kAclEntriesMax = 1024;

// nfsstat3, RFC 1813 section 2.6. Other numbers are kept: what follows them is what follows any error.
enum class Status : uint32_t {
  kOk = 0,
  kNotOwner = 1,
  kNoEntry = 2,
  kIo = 5,
  kNoDevice = 6,
  kAccess = 13,
  kExists = 17,
  kOtherFileSystem = 18,
  kNoSuchDevice = 19,
  kNotDirectory = 20,
  kIsDirectory = 21,
  kInvalid = 22,
  kTooBig = 27,
  kNoSpace = 28,
  kReadOnly = 30,
  kTooManyLinks = 31,
  kNameTooLong = 63,
  kNotEmpty = 66,
  kQuota = 69,
  kStale = 70,
  kRemote = 71,
  kBadHandle = 10001,
  kNotSynchronized = 10002,
  kBadCookie = 10003,
  kNotSupported = 10004,
  kTooSmall = 10005,
  kServerFault = 10006,
  kBadType = 10007,
  kTryLater = 10008,
};
// "NFS3ERR_NOENT"; "nfsstat3 4711" for what RFC 1813 does not know.
std::string ToString(Status status);

enum class Type : uint32_t {
  kRegular = 1,
  kDirectory = 2,
  kBlockDevice = 3,
  kCharacterDevice = 4,
  kSymlink = 5,
  kSocket = 6,
  kFifo = 7,
};

using FileHandle = SmallVector<std::byte, kFileHandleMax>;
// cookieverf3, createverf3, writeverf3.
using Verifier = std::array<std::byte, 8>;

struct Time {
  uint32_t seconds = 0;
  uint32_t nanoseconds = 0;
  friend bool operator==(const Time&, const Time&) = default;
};

struct Device {
  uint32_t major = 0;
  uint32_t minor = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// fattr3.
struct Attributes {
  Type type = Type::kRegular;
  uint32_t mode = 0;
  uint32_t links = 0;
  uint32_t uid = 0;
  uint32_t gid = 0;
  uint64_t size = 0;
  uint64_t used = 0;
  Device device;
  uint64_t file_system = 0;
  uint64_t file = 0;
  Time accessed;
  Time modified;
  Time changed;
  friend bool operator==(const Attributes&, const Attributes&) = default;
};

// wcc_data.
struct BriefAttributes {
  uint64_t size = 0;
  Time modified;
  Time changed;
  friend bool operator==(const BriefAttributes&, const BriefAttributes&) = default;
};
struct CacheConsistency {
  std::optional<BriefAttributes> before;
  std::optional<Attributes> after;
  friend bool operator==(const CacheConsistency&, const CacheConsistency&) = default;
};

// sattr3: what is absent stays, or is the server's choice.
struct SetTime {
  bool to_server_time = false;  // else to `time`
  Time time;
};
struct NewAttributes {
  std::optional<uint32_t> mode;
  std::optional<uint32_t> uid;
  std::optional<uint32_t> gid;
  std::optional<uint64_t> size;
  std::optional<SetTime> accessed;
  std::optional<SetTime> modified;
};

// --- Arguments ---

struct DirectoryEntryName {
  FileHandle directory;
  std::string name;
};
struct SetAttributesArgs {
  FileHandle object;
  NewAttributes attributes;
  std::optional<Time> guard;  // only if it was changed then
};
struct AccessArgs {
  FileHandle object;
  uint32_t access = 0;
};
struct ReadArgs {
  FileHandle file;
  uint64_t offset = 0;
  uint32_t count = 0;
};
enum class Stable : uint32_t { kUnstable = 0, kDataSync = 1, kFileSync = 2 };
struct WriteArgs {
  FileHandle file;
  uint64_t offset = 0;
  Stable stable = Stable::kUnstable;
  ConstBytes data;
};
struct CreateArgs {
  DirectoryEntryName where;
  enum class How : uint32_t { kUnchecked = 0, kGuarded = 1, kExclusive = 2 } how = How::kUnchecked;
  NewAttributes attributes;  // unless kExclusive
  Verifier verifier{};       // with kExclusive
};
struct MakeDirectoryArgs {
  DirectoryEntryName where;
  NewAttributes attributes;
};
struct SymlinkArgs {
  DirectoryEntryName where;
  NewAttributes attributes;
  std::string_view path;
};
struct MakeNodeArgs {
  DirectoryEntryName where;
  Type type = Type::kFifo;  // not regular, directory or symbolic link
  NewAttributes attributes;
  Device device;  // of a block or character device
};
struct RenameArgs {
  DirectoryEntryName from;
  DirectoryEntryName to;
};
struct LinkArgs {
  FileHandle file;
  DirectoryEntryName link;
};
struct ReadDirectoryArgs {
  FileHandle directory;
  uint64_t cookie = 0;
  Verifier verifier{};
  uint32_t count = 0;  // bytes of results
};
struct ReadDirectoryPlusArgs {
  FileHandle directory;
  uint64_t cookie = 0;
  Verifier verifier{};
  uint32_t names_max = 0;    // dircount: bytes of results without attributes and handles
  uint32_t results_max = 0;  // maxcount: bytes of results
};
struct CommitArgs {
  FileHandle file;
  uint64_t offset = 0;
  uint32_t count = 0;
};

// --- Results, of success ---

struct Changed {  // SETATTR, REMOVE, RMDIR
  CacheConsistency change;
};
struct Found {
  FileHandle object;
  std::optional<Attributes> attributes;
  std::optional<Attributes> directory;
};
struct Access {
  std::optional<Attributes> attributes;
  uint32_t access = 0;
};
struct LinkText {
  std::optional<Attributes> attributes;
  ConstBytes path;  // not necessarily text
};
struct ReadData {
  std::optional<Attributes> attributes;
  bool end = false;
  ConstBytes data;
};
struct Written {
  CacheConsistency change;
  uint32_t count = 0;
  Stable committed = Stable::kUnstable;
  Verifier verifier{};
};
struct Created {  // CREATE, MKDIR, SYMLINK, MKNOD
  std::optional<FileHandle> object;
  std::optional<Attributes> attributes;
  CacheConsistency directory;
};
struct Renamed {
  CacheConsistency from;
  CacheConsistency to;
};
struct Linked {
  std::optional<Attributes> attributes;
  CacheConsistency directory;
};
struct Entry {
  uint64_t file = 0;
  std::string name;
  uint64_t cookie = 0;
  // READDIRPLUS only, and not always there.
  std::optional<Attributes> attributes;
  std::optional<FileHandle> handle;
};
struct DirectoryPage {
  std::optional<Attributes> directory;
  Verifier verifier{};
  std::vector<Entry> entries;
  bool end = false;
};
struct FsStat {
  std::optional<Attributes> attributes;
  uint64_t bytes_total = 0;
  uint64_t bytes_free = 0;
  uint64_t bytes_available = 0;
  uint64_t files_total = 0;
  uint64_t files_free = 0;
  uint64_t files_available = 0;
  uint32_t unchanged_seconds = 0;
};
struct FsInfo {
  std::optional<Attributes> attributes;
  uint32_t read_max = 0;
  uint32_t read_preferred = 0;
  uint32_t read_multiple = 0;
  uint32_t write_max = 0;
  uint32_t write_preferred = 0;
  uint32_t write_multiple = 0;
  uint32_t directory_preferred = 0;
  uint64_t file_size_max = 0;
  Time time_granularity;
  uint32_t properties = 0;
};
struct PathConf {
  std::optional<Attributes> attributes;
  uint32_t links_max = 0;
  uint32_t name_max = 0;
  bool no_truncation = false;
  bool chown_restricted = false;
  bool case_insensitive = false;
  bool case_preserving = false;
};
struct Committed {
  CacheConsistency change;
  Verifier verifier{};
};

// --- NFSACL ---

// Bits of the mask: which of the two lists, or of their lengths, are meant.
inline constexpr uint32_t kAcl = 1;
inline constexpr uint32_t kAclCount = 2;
inline constexpr uint32_t kDefaultAcl = 4;
inline constexpr uint32_t kDefaultAclCount = 8;

struct AclEntry {
  uint32_t tag = 0;  // 1 owner, 2 user, 4 owning group, 8 group, 16 mask, 32 others; 4096 more in a default list
  uint32_t id = 0;
  uint32_t permissions = 0;
  friend bool operator==(const AclEntry&, const AclEntry&) = default;
};
struct GetAclArgs {
  FileHandle object;
  uint32_t mask = kAcl | kAclCount;
};
struct SetAclArgs {
  FileHandle object;
  uint32_t mask = kAcl | kAclCount;
  std::vector<AclEntry> entries;
  std::vector<AclEntry> default_entries;
};
struct Acl {
  std::optional<Attributes> attributes;
  uint32_t mask = 0;
  std::vector<AclEntry> entries;
  std::vector<AclEntry> default_entries;
};
struct AclSet {
  std::optional<Attributes> attributes;
};

}  // namespace stagecoach::rpcrdma::nfs3
