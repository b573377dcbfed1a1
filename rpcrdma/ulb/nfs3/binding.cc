#include "rpcrdma/ulb/nfs3/binding.h"

#include <algorithm>

#include "rpcrdma/ulb/nfs3/types.h"

namespace stagecoach::rpcrdma::nfs3 {
namespace {

// Sizes of RFC 1813's types in bytes, at their longest.
constexpr uint64_t kStatus = 4;
constexpr uint64_t kFattr = 5 * 4 + 2 * 8 + 8 + 2 * 8 + 3 * 8;
constexpr uint64_t kPostOpAttr = 4 + kFattr;
constexpr uint64_t kWccData = (4 + 8 + 2 * 8) + kPostOpAttr;
constexpr uint64_t kHandle = 4 + kFileHandleMax;
constexpr uint64_t kPostOpHandle = 4 + kHandle;
constexpr uint64_t kVerifier = 8;
constexpr uint64_t kCreated = kStatus + kPostOpHandle + kPostOpAttr + kWccData;

// [5666bis:4.4.3.2+1] [5666bis:6+1] Opaque data and paths, no union: symlink_data is within one.
constexpr const char* kWriteArguments[] = {"WRITE3args.data"};
constexpr const char* kSymlinkArguments[] = {"SYMLINK3args.symlink.symlink_data"};
constexpr const char* kReadResults[] = {"READ3resok.data"};
constexpr const char* kReadLinkResults[] = {"READLINK3resok.data"};

// RFC 1813 has `count` and `maxcount` bound all of READDIR3resok and READDIRPLUS3resok; Linux's server has them bound
// the list of entries and `eof` alone, and sends those eight bytes even where less was asked for.
constexpr uint64_t kDirectoryRest = kStatus + kPostOpAttr + kVerifier;
constexpr uint64_t kEmptyList = 4 + 4;

void SkipToCounts(XdrReader& args) {
  args.Opaque("dir", kFileHandleMax);
  args.U64("cookie");
  args.FixedOpaque("cookieverf", kVerifier);
}
uint64_t EntriesOfReadDirectory(XdrReader& args) {
  SkipToCounts(args);
  return std::max<uint64_t>(args.U32("count"), kEmptyList);
}
uint64_t EntriesOfReadDirectoryPlus(XdrReader& args) {
  SkipToCounts(args);
  args.U32("dircount");
  return std::max<uint64_t>(args.U32("maxcount"), kEmptyList);
}

constexpr uint32_t Number(Procedure procedure) {
  return static_cast<uint32_t>(procedure);
}

constexpr ProcedureBinding kProcedures[] = {
    {.number = Number(Procedure::kNull), .name = "NULL"},
    {.number = Number(Procedure::kGetAttributes), .name = "GETATTR", .reply_fixed = kStatus + kFattr},
    {.number = Number(Procedure::kSetAttributes), .name = "SETATTR", .reply_fixed = kStatus + kWccData},
    {.number = Number(Procedure::kLookup), .name = "LOOKUP", .reply_fixed = kStatus + kHandle + 2 * kPostOpAttr},
    {.number = Number(Procedure::kAccess), .name = "ACCESS", .reply_fixed = kStatus + kPostOpAttr + 4},
    {.number = Number(Procedure::kReadLink),
     .name = "READLINK",
     .results = kReadLinkResults,
     .reply_fixed = kStatus + kPostOpAttr + 4},
    {.number = Number(Procedure::kRead),
     .name = "READ",
     .results = kReadResults,
     .reply_fixed = kStatus + kPostOpAttr + 4 + 4 + 4},
    {.number = Number(Procedure::kWrite),
     .name = "WRITE",
     .arguments = kWriteArguments,
     .reply_fixed = kStatus + kWccData + 4 + 4 + kVerifier},
    {.number = Number(Procedure::kCreate), .name = "CREATE", .reply_fixed = kCreated},
    {.number = Number(Procedure::kMakeDirectory), .name = "MKDIR", .reply_fixed = kCreated},
    {.number = Number(Procedure::kSymlink), .name = "SYMLINK", .arguments = kSymlinkArguments, .reply_fixed = kCreated},
    {.number = Number(Procedure::kMakeNode), .name = "MKNOD", .reply_fixed = kCreated},
    {.number = Number(Procedure::kRemove), .name = "REMOVE", .reply_fixed = kStatus + kWccData},
    {.number = Number(Procedure::kRemoveDirectory), .name = "RMDIR", .reply_fixed = kStatus + kWccData},
    {.number = Number(Procedure::kRename), .name = "RENAME", .reply_fixed = kStatus + 2 * kWccData},
    {.number = Number(Procedure::kLink), .name = "LINK", .reply_fixed = kStatus + kPostOpAttr + kWccData},
    {.number = Number(Procedure::kReadDirectory),
     .name = "READDIR",
     .reply_fixed = kDirectoryRest,
     .reply_grows = EntriesOfReadDirectory},
    {.number = Number(Procedure::kReadDirectoryPlus),
     .name = "READDIRPLUS",
     .reply_fixed = kDirectoryRest,
     .reply_grows = EntriesOfReadDirectoryPlus},
    {.number = Number(Procedure::kFsStat), .name = "FSSTAT", .reply_fixed = kStatus + kPostOpAttr + 6 * 8 + 4},
    {.number = Number(Procedure::kFsInfo), .name = "FSINFO", .reply_fixed = kStatus + kPostOpAttr + 7 * 4 + 8 + 8 + 4},
    {.number = Number(Procedure::kPathConf), .name = "PATHCONF", .reply_fixed = kStatus + kPostOpAttr + 6 * 4},
    {.number = Number(Procedure::kCommit), .name = "COMMIT", .reply_fixed = kStatus + kWccData + kVerifier},
};

// As many entries as each list that is asked for can have.
uint64_t EntriesOfAcl(XdrReader& args) {
  constexpr uint64_t kList = kAclEntriesMax * 12;
  args.Opaque("fh", kFileHandleMax);
  const uint32_t mask = args.U32("mask");
  return ((mask & kAcl) != 0 ? kList : 0) + ((mask & kDefaultAcl) != 0 ? kList : 0);
}

constexpr ProcedureBinding kAclProcedures[] = {
    {.number = static_cast<uint32_t>(AclProcedure::kNull), .name = "NULL"},
    {.number = static_cast<uint32_t>(AclProcedure::kGetAcl),
     .name = "GETACL",
     .reply_fixed = kStatus + kPostOpAttr + 4 + 2 * (4 + 4),
     .reply_grows = EntriesOfAcl},
    {.number = static_cast<uint32_t>(AclProcedure::kSetAcl), .name = "SETACL", .reply_fixed = kStatus + kPostOpAttr},
};

}  // namespace

constexpr Binding kBinding{
    .program = kProgram, .version = kVersion, .name = "NFS version 3", .procedures = kProcedures, .port = kPort};
constexpr Binding kAclBinding{.program = kAclProgram,
                              .version = kAclVersion,
                              .name = "NFSACL version 3",
                              .procedures = kAclProcedures,
                              .port = kPort};

}  // namespace stagecoach::rpcrdma::nfs3
