#include "rpcrdma/ulb/nfs3/binding.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "rpcrdma/ulb/nfs3/codec.h"

namespace stagecoach::rpcrdma::nfs3 {
namespace {

struct Expected {
  const char* name;
  size_t arguments;
  size_t results;
  uint64_t reply_words;  // counted by hand in RFC 1813, all optional parts present
};

// RFC 8267: one argument of two procedures, one result of two others, nothing else.
constexpr Expected kExpected[] = {
    {"NULL", 0, 0, 0},                         //
    {"GETATTR", 0, 0, 1 + 21},                 //
    {"SETATTR", 0, 0, 1 + 29},                 //
    {"LOOKUP", 0, 0, 1 + 17 + 22 + 22},        //
    {"ACCESS", 0, 0, 1 + 22 + 1},              //
    {"READLINK", 0, 1, 1 + 22 + 1},            //
    {"READ", 0, 1, 1 + 22 + 3},                //
    {"WRITE", 1, 0, 1 + 29 + 4},               //
    {"CREATE", 0, 0, 1 + 18 + 22 + 29},        //
    {"MKDIR", 0, 0, 1 + 18 + 22 + 29},         //
    {"SYMLINK", 1, 0, 1 + 18 + 22 + 29},       //
    {"MKNOD", 0, 0, 1 + 18 + 22 + 29},         //
    {"REMOVE", 0, 0, 1 + 29},                  //
    {"RMDIR", 0, 0, 1 + 29},                   //
    {"RENAME", 0, 0, 1 + 29 + 29},             //
    {"LINK", 0, 0, 1 + 22 + 29},               //
    {"READDIR", 0, 0, 1 + 22 + 2},             // and what `count` says
    {"READDIRPLUS", 0, 0, 1 + 22 + 2},         // and what `maxcount` says
    {"FSSTAT", 0, 0, 1 + 22 + 13},             //
    {"FSINFO", 0, 0, 1 + 22 + 7 + 2 + 2 + 1},  //
    {"PATHCONF", 0, 0, 1 + 22 + 6},            //
    {"COMMIT", 0, 0, 1 + 29 + 2},              //
};

TEST(Nfs3Binding, HasEveryProcedureOfRfc1813) {
  EXPECT_EQ(kBinding.program, 100003u);
  EXPECT_EQ(kBinding.version, 3u);
  EXPECT_EQ(kBinding.port, 20049);
  EXPECT_EQ(kBinding.on_violation, AcceptStat::kGarbageArgs);
  ASSERT_EQ(kBinding.procedures.size(), std::size(kExpected));
  for (uint32_t number = 0; number < std::size(kExpected); ++number) {
    const ProcedureBinding* procedure = kBinding.Find(number);
    ASSERT_NE(procedure, nullptr) << number;
    SCOPED_TRACE(procedure->name);
    EXPECT_STREQ(procedure->name, kExpected[number].name);
    EXPECT_EQ(procedure->arguments.size(), kExpected[number].arguments);
    EXPECT_EQ(procedure->results.size(), kExpected[number].results);
    EXPECT_EQ(procedure->reply_fixed, 4 * kExpected[number].reply_words);
    EXPECT_EQ(procedure->reply_grows != nullptr, number == 16 || number == 17);
  }
  EXPECT_EQ(kBinding.Find(22), nullptr);
}

TEST(Nfs3Binding, NamesTheFourItemsOfRfc8267) {
  EXPECT_STREQ(kBinding.Find(7)->arguments[0], "WRITE3args.data");
  EXPECT_STREQ(kBinding.Find(10)->arguments[0], "SYMLINK3args.symlink.symlink_data");
  EXPECT_STREQ(kBinding.Find(6)->results[0], "READ3resok.data");
  EXPECT_STREQ(kBinding.Find(5)->results[0], "READLINK3resok.data");
}

TEST(NfsAclBinding, HasNothingThatMayBePlaced) {
  EXPECT_EQ(kAclBinding.program, 100227u);
  EXPECT_EQ(kAclBinding.version, 3u);
  EXPECT_EQ(kAclBinding.procedures.size(), 3u);
  for (const ProcedureBinding& procedure : kAclBinding.procedures) {
    EXPECT_TRUE(procedure.arguments.empty());
    EXPECT_TRUE(procedure.results.empty());
  }
}

// A call with these arguments; the items that the encoder marks stay in the message or leave it.
class Call {
 public:
  template <typename Args>
  Call(const Args& args, size_t eligible_max) : buffer_(8192) {
    XdrWriter out(buffer_, eligible_max);
    EncodeCall({.xid = 1, .prog = kProgram, .vers = kVersion}, out);
    Encode(out, args);
    EXPECT_TRUE(out.ok());
    message = out.written();
    items = out.eligible();
  }
  ConstBytes message;
  EligibleItems items;

 private:
  std::vector<std::byte> buffer_;
};

FileHandle HandleOf(size_t size) {
  return FileHandle(std::vector<std::byte>(size, std::byte{0x5a}));
}

TEST(Nfs3Binding, RepliesOfDirectoriesAreAsLongAsTheCallAllows) {
  for (const size_t handle : {0u, 1u, 20u, 64u}) {
    for (const uint32_t count : {0u, 8u, 512u, 65536u, 0x7fffffffu}) {
      const uint64_t list = std::max(count, 8u);
      const Call plain(ReadDirectoryArgs{.directory = HandleOf(handle), .cookie = 77, .count = count}, 0);
      EXPECT_EQ(ReplyBytesMax(*kBinding.Find(16), plain.message, plain.items), 424 + 100 + list);
      const Call plus(
          ReadDirectoryPlusArgs{
              .directory = HandleOf(handle), .cookie = 77, .names_max = 0xffffffff, .results_max = count},
          0);
      EXPECT_EQ(ReplyBytesMax(*kBinding.Find(17), plus.message, plus.items), 424 + 100 + list);
    }
  }
}

// A reply of Linux's server to a maxcount of 65536 was 65652 bytes long, of which the list of entries was 65528.
TEST(Nfs3Binding, RepliesOfDirectoriesHaveRoomForTheListBesideTheRest) {
  const Call call(ReadDirectoryPlusArgs{.directory = HandleOf(8), .names_max = 4096, .results_max = 65536}, 0);
  EXPECT_GE(ReplyBytesMax(*kBinding.Find(17), call.message, call.items), 65652u);
}

TEST(NfsAclBinding, RepliesHaveTheListsThatAreAskedFor) {
  const auto most = [](uint32_t mask) {
    const Call call(GetAclArgs{HandleOf(28), mask}, 0);
    return ReplyBytesMax(*kAclBinding.Find(1), call.message, call.items);
  };
  EXPECT_EQ(most(0), 424 + 112u);
  EXPECT_EQ(most(kAclCount | kDefaultAclCount), 424 + 112u);
  EXPECT_EQ(most(kAcl), 424 + 112 + 12288u);
  EXPECT_EQ(most(kAcl | kAclCount | kDefaultAcl | kDefaultAclCount), 424 + 112 + 2 * 12288u);
}

// [5666bis:5.2.2#3] What the codec marks is what the Binding lists, so that the i-th of one is the i-th of the other.
TEST(Nfs3Binding, TheCodecMarksWhatTheBindingLists) {
  const std::vector<std::byte> data(100, std::byte{1});
  const FileHandle handle = HandleOf(20);
  const DirectoryEntryName where{handle, "name"};
  const auto marked = [](const auto& args) { return Call(args, SIZE_MAX).items.size(); };
  const size_t arguments[] = {
      0,
      marked(handle),
      marked(SetAttributesArgs{.object = handle}),
      marked(where),
      marked(AccessArgs{handle, 1}),
      marked(handle),
      marked(ReadArgs{handle, 0, 100}),
      marked(WriteArgs{handle, 0, Stable::kUnstable, data}),
      marked(CreateArgs{.where = where}),
      marked(MakeDirectoryArgs{where, {}}),
      marked(SymlinkArgs{where, {}, "path"}),
      marked(MakeNodeArgs{where, Type::kFifo, {}, {}}),
      marked(where),
      marked(where),
      marked(RenameArgs{where, where}),
      marked(LinkArgs{handle, where}),
      marked(ReadDirectoryArgs{.directory = handle}),
      marked(ReadDirectoryPlusArgs{.directory = handle}),
      marked(handle),
      marked(handle),
      marked(handle),
      marked(CommitArgs{handle, 0, 0}),
  };
  for (uint32_t number = 0; number < std::size(arguments); ++number) {
    EXPECT_EQ(arguments[number], kBinding.Find(number)->arguments.size()) << kBinding.Find(number)->name;
  }
  EXPECT_EQ(marked(GetAclArgs{handle}), 0u);
  EXPECT_EQ(marked(SetAclArgs{handle, kAcl, {{1, 2, 3}}, {}}), 0u);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::nfs3
