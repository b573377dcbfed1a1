// Values of the bulk file program (bulk_file.x): what its procedures carry, apart from how XDR writes it (codec.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace stagecoach::rpcrdma::file {

inline constexpr uint32_t kProgram = 0x20534347;
inline constexpr uint32_t kVersion = 1;

enum class Procedure : uint32_t {
  kNull = 0,
  kLimits = 1,
  kGetAttributes = 2,
  kList = 3,
  kOpen = 4,
  kRead = 5,
  kClose = 6,
  kCreate = 7,
  kWrite = 8,
  kCommit = 9,
  kMakeDirectory = 10,
};

inline constexpr size_t kNameMax = 255;
inline constexpr size_t kDepthMax = 64;
inline constexpr uint32_t kDataMax = 16 * 1024 * 1024;
inline constexpr size_t kEntriesMax = 1024;
inline constexpr uint32_t kModeMask = 0777;
// Names joined with '/' must stay below the system's PATH_MAX.
inline constexpr size_t kPathBytesMax = 4000;

// bf_status. The numbers are the program's, not errno's.
enum class Status : uint32_t {
  kOk = 0,
  kNoEntry = 1,
  kPermission = 2,
  kExists = 3,
  kNotDirectory = 4,
  kIsDirectory = 5,
  kNotRegular = 6,
  kBadName = 7,
  kOutside = 8,
  kLink = 9,
  kReadOnly = 10,
  kNoSpace = 11,
  kTooBig = 12,
  kIo = 13,
  kInvalid = 14,
  kStale = 15,
  kLimit = 16,
  kBadChecksum = 17,
  kIncomplete = 18,
  kBusy = 19,
};

// For people: "no such file or directory". Never empty.
std::string_view Describe(Status status);

enum class Type : uint32_t { kRegular = 1, kDirectory = 2, kSymlink = 3, kOther = 4 };

struct Time {
  int64_t seconds = 0;
  uint32_t nanoseconds = 0;
  bool operator==(const Time&) const = default;
};

struct Attributes {
  Type type = Type::kOther;
  uint32_t mode = 0;
  uint64_t size = 0;
  Time modified;
  bool operator==(const Attributes&) const = default;
};

using Path = std::vector<std::string>;
using Handle = uint64_t;

struct Limits {
  uint32_t data_max = 0;
  uint32_t handles_max = 0;
  uint32_t idle_seconds = 0;
  bool read_only = false;
  bool operator==(const Limits&) const = default;
};

struct Entry {
  std::string name;
  Attributes attributes;
  bool operator==(const Entry&) const = default;
};

struct Page {
  uint64_t cookie = 0;
  bool end = false;
  std::vector<Entry> entries;
  bool operator==(const Page&) const = default;
};

struct ListArgs {
  Path path;
  uint64_t cookie = 0;
  uint32_t bytes_max = 0;
  bool operator==(const ListArgs&) const = default;
};

struct Opened {
  Handle handle = 0;
  Attributes attributes;
  bool operator==(const Opened&) const = default;
};

struct ReadArgs {
  Handle handle = 0;
  uint64_t offset = 0;
  uint32_t count = 0;
  bool operator==(const ReadArgs&) const = default;
};

// READ's result without its data.
struct ReadInfo {
  Attributes attributes;
  uint32_t crc32c = 0;
  bool operator==(const ReadInfo&) const = default;
};

struct CreateArgs {
  Path path;
  uint32_t mode = 0;
  bool operator==(const CreateArgs&) const = default;
};

// WRITE's arguments without their data.
struct WriteInfo {
  Handle handle = 0;
  uint64_t offset = 0;
  uint32_t crc32c = 0;
  bool operator==(const WriteInfo&) const = default;
};

struct CommitArgs {
  Handle handle = 0;
  uint64_t size = 0;
  uint32_t crc32c = 0;
  Time modified;
  bool operator==(const CommitArgs&) const = default;
};

struct MakeDirectoryArgs {
  Path path;
  uint32_t mode = 0;
  bool operator==(const MakeDirectoryArgs&) const = default;
};

}  // namespace stagecoach::rpcrdma::file
