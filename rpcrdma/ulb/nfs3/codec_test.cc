// Bytes of a Linux 6.1 client and server (NFS/RDMA over siw), read with tshark: what we encode must be what the client
// sent, what we decode must be what tshark shows of the server's results. What the capture lacks was laid out by hand
// after RFC 1813.
#include "rpcrdma/ulb/nfs3/codec.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "rpcrdma/ulb/nfs3/mount.h"

namespace stagecoach::rpcrdma::nfs3 {
namespace {

std::vector<std::byte> Hex(std::string_view text) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::vector<std::byte> bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(digit(text[i]) * 16 + digit(text[i + 1])));
  }
  return bytes;
}

FileHandle Handle(std::string_view hex) {
  return FileHandle(Hex(hex));
}

const FileHandle kRoot = Handle("0100010000000000");
const FileHandle kSub = Handle("0100010100000000e88a6c230002000000000000");

constexpr NewAttributes Mode(uint32_t mode) {
  return {.mode = mode};
}

// --- Arguments ---

template <typename T>
std::string Encoded(const T& args, size_t eligible_max = 0) {
  std::vector<std::byte> buffer(4096);
  XdrWriter out(buffer, eligible_max);
  Encode(out, args);
  EXPECT_TRUE(out.ok());
  return ToHex(out.written());
}

TEST(Nfs3Arguments, AreTheBytesALinuxClientSends) {
  EXPECT_EQ(Encoded(kRoot), "000000080100010000000000");
  EXPECT_EQ(Encoded(AccessArgs{kRoot, 0x1f}), "0000000801000100000000000000001f");
  EXPECT_EQ(Encoded(DirectoryEntryName{kRoot, "empty"}), "00000008010001000000000000000005656d707479000000");
  EXPECT_EQ(Encoded(CreateArgs{.where = {kRoot, "f1"}, .attributes = Mode(0644)}),
            "000000080100010000000000000000026631000000000000"
            "00000001000001a40000000000000000000000000000000000000000");
  EXPECT_EQ(Encoded(MakeDirectoryArgs{{kRoot, "d"}, Mode(0755)}),
            "000000080100010000000000000000016400000000000001000001ed0000000000000000000000000000000000000000");
  EXPECT_EQ(Encoded(RenameArgs{{kRoot, "f1"}, {kSub, "g1"}}),
            "00000008010001000000000000000002663100000000001401000101"
            "00000000e88a6c2300020000000000000000000267310000");
  EXPECT_EQ(Encoded(SymlinkArgs{{kSub, "link"}, Mode(0777), "../f100"}),
            "000000140100010100000000e88a6c230002000000000000000000046c696e6b00000001000001ff"
            "0000000000000000000000000000000000000000000000072e2e2f6631303000");
  EXPECT_EQ(Encoded(ReadDirectoryPlusArgs{.directory = kSub, .names_max = 65536, .results_max = 65536}),
            "000000140100010100000000e88a6c230002000000000000000000000000000000000000000000000001000000010000");
  EXPECT_EQ(Encoded(CommitArgs{Handle("0100010100000000ce7d0c860302000000000000"), 0, 0}),
            "000000140100010100000000ce7d0c860302000000000000000000000000000000000000");
  EXPECT_EQ(Encoded(ReadArgs{Handle("0100010100000000143daf9b0300000000000000"), 0, 16384}),
            "000000140100010100000000143daf9b0300000000000000000000000000000000004000");
  EXPECT_EQ(Encoded(GetAclArgs{kRoot, kDefaultAcl | kDefaultAclCount}), "0000000801000100000000000000000c");
  const auto data = Hex("cb");
  EXPECT_EQ(Encoded(WriteArgs{Handle("01000101000000003c3058cffa01000000000000"), 0, Stable::kFileSync, data}),
            "0000001401000101000000003c3058cffa010000000000000000000000000000000000010000000200000001cb000000");
}

TEST(Nfs3Arguments, AreLaidOutAsRfc1813Has) {
  // Every member of sattr3, and the guard.
  SetAttributesArgs set{.object = kRoot,
                        .attributes = {.mode = 0600,
                                       .uid = 1,
                                       .gid = 2,
                                       .size = 0x100000003,
                                       .accessed = SetTime{.to_server_time = true},
                                       .modified = SetTime{.time = {7, 8}}},
                        .guard = Time{9, 10}};
  EXPECT_EQ(Encoded(set),
            "000000080100010000000000"
            "0000000100000180"  // mode
            "0000000100000001"  // uid
            "0000000100000002"  // gid
            "000000010000000100000003"
            "00000001"                  // SET_TO_SERVER_TIME
            "000000020000000700000008"  // SET_TO_CLIENT_TIME
            "00000001000000090000000a");
  EXPECT_EQ(Encoded(SetAttributesArgs{.object = kRoot}),
            "000000080100010000000000" + std::string(6 * 8, '0') + "00000000");
  CreateArgs exclusive{.where = {kRoot, "ab"}, .how = CreateArgs::How::kExclusive};
  exclusive.verifier.fill(std::byte{0xee});
  EXPECT_EQ(Encoded(exclusive),
            "000000080100010000000000"
            "0000000261620000"
            "00000002eeeeeeeeeeeeeeee");
  EXPECT_EQ(Encoded(MakeNodeArgs{{kRoot, "p"}, Type::kFifo, {}, {}}),
            "000000080100010000000000"
            "0000000170000000"
            "00000007" +
                std::string(6 * 8, '0'));
  EXPECT_EQ(Encoded(MakeNodeArgs{{kRoot, "c"}, Type::kCharacterDevice, {}, {5, 6}}),
            "000000080100010000000000"
            "0000000163000000"
            "00000004" +
                std::string(6 * 8, '0') + "0000000500000006");
  EXPECT_EQ(Encoded(LinkArgs{kRoot, {kRoot, "l"}}),
            "000000080100010000000000"
            "000000080100010000000000"
            "000000016c000000");
  EXPECT_EQ(Encoded(ReadDirectoryArgs{.directory = kRoot, .cookie = 3, .count = 512}),
            "000000080100010000000000"
            "0000000000000003"
            "0000000000000000"
            "00000200");
  EXPECT_EQ(Encoded(SetAclArgs{kRoot, kAcl | kDefaultAcl, {{1, 0, 7}}, {}}),
            "000000080100010000000000"
            "00000005"
            "00000001000000010000000100000000"
            "00000007"
            "0000000000000000");
}

TEST(Nfs3Arguments, DataAndPathsOfLinksMayLeaveTheMessage) {
  const auto data = Hex("0102030405");
  EXPECT_EQ(Encoded(WriteArgs{kRoot, 0, Stable::kUnstable, data}, 1),
            "000000080100010000000000"
            "0000000000000000"
            "00000005"
            "00000000"
            "00000005");
  EXPECT_EQ(Encoded(SymlinkArgs{{kRoot, "l"}, {}, "abcde"}, 1),
            "000000080100010000000000"
            "000000016c000000" +
                std::string(6 * 8, '0') + "00000005");
}

// --- Results ---

// Decodes all of `hex`, fails cleanly on every shorter prefix (in memory of its own, for ASan) and with a word too
// many.
template <typename T, typename Decode>
Result<T, Status> DecodeAll(std::string_view hex, Decode decode) {
  std::vector<std::byte> bytes = Hex(hex);
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::vector<std::byte> cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
    XdrReader in{ConstBytes(cut)};
    static_cast<void>(decode(in));
    EXPECT_FALSE(in.Finish().has_value()) << size << " of " << bytes.size();
  }
  XdrReader in{ConstBytes(bytes)};
  Result<T, Status> result = decode(in);
  EXPECT_TRUE(in.Finish().has_value()) << ToString(*in.fault());
  bytes.resize(bytes.size() + 4);
  XdrReader more{ConstBytes(bytes)};
  static_cast<void>(decode(more));
  EXPECT_FALSE(more.Finish().has_value());
  return result;
}
template <typename T>
Result<T, Status> DecodeAll(std::string_view hex) {
  return DecodeAll<T>(hex, &DecodeResult<T>);
}

// Root directory, in LOOKUP and RENAME of the capture.
constexpr std::string_view kRootAttributes =
    "00000002000001ff00000004000000000000000000000000000000f0000000000000000000000000000000000000000000000000"
    "00000000000000016b0065d92887fa006b0065dc07de29006b0065dc07de2900";

TEST(Nfs3Results, AttributesAreThoseThatTsharkShows) {
  const auto attributes = DecodeAll<Attributes>(
      "0000000000000002000001ff000000030000000000000000000000000000006400000000000000000000000000000000000000000000"
      "000000000000000000016b0065d92887fa006b0065db1d164a006b0065db1d164a00");
  ASSERT_TRUE(attributes.has_value());
  EXPECT_EQ(*attributes, (Attributes{.type = Type::kDirectory,
                                     .mode = 0777,
                                     .links = 3,
                                     .size = 100,
                                     .file = 1,
                                     .accessed = {1795188185, 680000000},
                                     .modified = {1795188187, 488000000},
                                     .changed = {1795188187, 488000000}}));
}

TEST(Nfs3Results, LookupGivesHandleAndBothAttributes) {
  const auto found = DecodeAll<Found>(
      "000000000000001401000101000000001d344fc20400000000000000"
      "0000000100000002000001ed000000020000000000000000000000000000273800000000000000000000000000000000000000000000"
      "000000000000000000046b0065db1d164a006b0065db1efe92006b0065db1efe9200"
      "00000001" +
      std::string(kRootAttributes));
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(ToHex(found->object), "01000101000000001d344fc20400000000000000");
  EXPECT_EQ(found->attributes->size, 10040u);
  EXPECT_EQ(found->attributes->mode, 0755u);
  EXPECT_EQ(found->directory->file, 1u);
  EXPECT_EQ(found->directory->links, 4u);
}

TEST(Nfs3Results, ErrorsHaveWhatFollowsThem) {
  EXPECT_EQ(DecodeAll<Found>("0000000200000001" + std::string(kRootAttributes)).error(), Status::kNoEntry);
  EXPECT_EQ(DecodeAll<Attributes>("00000046").error(), Status::kStale);
  // RMDIR of the capture.
  EXPECT_EQ(DecodeAll<Changed>("00000042"
                               "0000000100000000000000f06b0065dc1ff2b6006b0065dc1ff2b600"
                               "00000001" +
                               std::string(kRootAttributes))
                .error(),
            Status::kNotEmpty);
  EXPECT_EQ(DecodeAll<Renamed>("0000001200000000000000000000000000000000").error(), Status::kOtherFileSystem);
  EXPECT_EQ(DecodeAll<Linked>("0000001f000000000000000000000000").error(), Status::kTooManyLinks);
  EXPECT_EQ(ToString(DecodeAll<ReadData>("0000126700000000").error()), "nfsstat3 4711");
}

TEST(Nfs3Results, CreateAndWriteAndCommit) {
  const auto created = DecodeAll<Created>(
      "00000000000000010000001401000101000000003c3058cffa01000000000000"
      "0000000100000001000001a4000000010000000000000000000000000000000000000000000000000000000000000000000000000000"
      "000000000000000001fa6b0065db3b5dc1006b0065db3b5dc1006b0065db3b5dc100"
      "0000000100000000000000786b0065db3ae3af006b0065db3ae3af00"
      "00000001" +
      std::string(kRootAttributes));
  ASSERT_TRUE(created.has_value());
  EXPECT_EQ(ToHex(*created->object), "01000101000000003c3058cffa01000000000000");
  EXPECT_EQ(created->attributes->file, 0x1fau);
  EXPECT_EQ(*created->directory.before,
            (BriefAttributes{.size = 120, .modified = {1795188187, 988000000}, .changed = {1795188187, 988000000}}));

  const auto written = DecodeAll<Written>(
      "000000000000000000000001"
      "00000001000001a4000000010000000000000000000000000000000100000000000010000000000000000000000000000000000000000000"
      "000001fa6b0065db3b5dc1006b0065dc003d09006b0065dc003d0900"
      "000000010000000283579613c4ea0738");
  ASSERT_TRUE(written.has_value());
  EXPECT_FALSE(written->change.before.has_value());
  EXPECT_EQ(written->change.after->used, 4096u);
  EXPECT_EQ(written->count, 1u);
  EXPECT_EQ(written->committed, Stable::kFileSync);
  EXPECT_EQ(ToHex(written->verifier), "83579613c4ea0738");

  const auto committed = DecodeAll<Committed>("00000000000000000000000083579613c4ea0738");
  ASSERT_TRUE(committed.has_value());
  EXPECT_EQ(ToHex(committed->verifier), "83579613c4ea0738");
}

TEST(Nfs3Results, OfTheFileSystem) {
  const auto info = DecodeAll<FsInfo>(
      "0000000000000000000200000002000000001000000200000002000000001000000200007fffffffffffffff0000000100000000"
      "0000001b");
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->read_max, 131072u);
  EXPECT_EQ(info->read_multiple, 4096u);
  EXPECT_EQ(info->write_preferred, 131072u);
  EXPECT_EQ(info->directory_preferred, 131072u);
  EXPECT_EQ(info->file_size_max, uint64_t{0x7fffffffffffffff});
  EXPECT_EQ(info->time_granularity, (Time{1, 0}));
  EXPECT_EQ(info->properties, 0x1bu);

  const auto stat = DecodeAll<FsStat>(
      "0000000000000000000000000c800000000000000c4f8000000000000c4f8000000000000001df3c000000000001dd3a"
      "000000000001dd3a00000000");
  ASSERT_TRUE(stat.has_value());
  EXPECT_EQ(stat->bytes_total, 209715200u);
  EXPECT_EQ(stat->bytes_free, 206536704u);
  EXPECT_EQ(stat->files_total, 122684u);
  EXPECT_EQ(stat->files_available, 122170u);

  const auto conf = DecodeAll<PathConf>("0000000000000000000000ff000000ff00000000000000010000000000000001");
  ASSERT_TRUE(conf.has_value());
  EXPECT_EQ(conf->links_max, 255u);
  EXPECT_EQ(conf->name_max, 255u);
  EXPECT_FALSE(conf->no_truncation);
  EXPECT_TRUE(conf->chown_restricted);
  EXPECT_FALSE(conf->case_insensitive);
  EXPECT_TRUE(conf->case_preserving);
}

// ".", "..", "longlink", "link" and "g1", in a Reply chunk of the capture.
TEST(Nfs3Results, ReadDirectoryPlusListsEntriesWithAttributesAndHandles) {
  const auto page = DecodeAll<DirectoryPage>(
      "000000000000000100000002000001ed000000020000000000000000000000000000006400000000000000000000000000000000"
      "000000000000000000000000000002006b0065dc0a7d8c006b0065dc098968006b0065dc09896800000000000000000000000001"
      "0000000000000200000000012e00000000000000000000010000000100000002000001ed00000002000000000000000000000000"
      "0000006400000000000000000000000000000000000000000000000000000000000002006b0065dc0a7d8c006b0065dc09896800"
      "6b0065dc0989680000000001000000140100010100000000e88a6c23000200000000000000000001000000000000000100000002"
      "2e2e000000000000000000020000000100000002000001ff00000004000000000000000000000000000000f00000000000000000"
      "0000000000000000000000000000000000000000000000016b0065d92887fa006b0065dc07de29006b0065dc07de290000000001"
      "000000080100010000000000000000010000000000000202000000086c6f6e676c696e6b00000000000000030000000100000005"
      "000001ff00000001000000000000000000000000000005dc00000000000010000000000000000000000000000000000000000000"
      "000002026b0065dc098968006b0065dc098968006b0065dc0989680000000001000000140100010100000000ee8c843402020000"
      "00000000000000010000000000000201000000046c696e6b00000000000000040000000100000005000001ff0000000100000000"
      "00000000000000000000000700000000000000000000000000000000000000000000000000000000000002016b0065dc08583b00"
      "6b0065dc08583b006b0065dc08583b0000000001000000140100010100000000eb32a49101020000000000000000000100000000"
      "000001fa000000026731000000000000000000050000000100000001000001a40000000100000000000000000000000000000001"
      "00000000000010000000000000000000000000000000000000000000000001fa6b0065db3b5dc1006b0065dc003d09006b0065dc"
      "07de2900000000010000001401000101000000003c3058cffa010000000000000000000000000001",
      &DecodeReadDirectoryPlus);
  ASSERT_TRUE(page.has_value());
  EXPECT_EQ(page->directory->size, 100u);
  EXPECT_TRUE(page->end);
  ASSERT_EQ(page->entries.size(), 5u);
  const char* names[] = {".", "..", "longlink", "link", "g1"};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(page->entries[i].name, names[i]);
    EXPECT_EQ(page->entries[i].cookie, i + 1);
  }
  EXPECT_EQ(page->entries[0].handle, kSub);
  EXPECT_EQ(page->entries[1].handle, kRoot);
  EXPECT_EQ(page->entries[2].attributes->type, Type::kSymlink);
  EXPECT_EQ(page->entries[2].attributes->size, 1500u);
  EXPECT_EQ(page->entries[3].attributes->size, 7u);
  EXPECT_EQ(page->entries[4].attributes->type, Type::kRegular);
  EXPECT_EQ(page->entries[4].file, 0x1fau);

  const auto bare = DecodeAll<DirectoryPage>(
      "00000000000000000102030405060708"
      "000000010000000000000009000000016100000000000000000000050000000000000000"
      "0000000000000001",
      &DecodeReadDirectoryPlus);
  ASSERT_TRUE(bare.has_value());
  ASSERT_EQ(bare->entries.size(), 1u);
  EXPECT_EQ(bare->entries[0].name, "a");
  EXPECT_FALSE(bare->entries[0].attributes.has_value());
  EXPECT_FALSE(bare->entries[0].handle.has_value());

  const auto plain = DecodeAll<DirectoryPage>(
      "00000000000000000102030405060708"
      "00000001000000000000000900000001610000000000000000000005"
      "0000000000000000");
  ASSERT_TRUE(plain.has_value());
  EXPECT_FALSE(plain->end);
  EXPECT_EQ(plain->entries.size(), 1u);
  EXPECT_EQ(plain->entries[0].cookie, 5u);
  EXPECT_EQ(ToHex(plain->verifier), "0102030405060708");
}

TEST(Nfs3Results, DataComesInTheMessageOrByChunk) {
  const auto read = DecodeAll<ReadData>("000000000000000000000003000000010000000361626300");
  ASSERT_TRUE(read.has_value());
  EXPECT_TRUE(read->end);
  // In the message that was decoded last; only its size may be looked at.
  EXPECT_EQ(read->data.size(), 3u);

  // The READ of the capture: 16384 bytes by Write chunk, 104 in the message.
  const auto rest =
      Hex("000000000000000100000001000001a40000000100000000000000000000000000100000000000000010000000000000000000000000"
          "000000"
          "00000000000000000000036b0065dc18cba8006b0065db1cd941006b0065db1cd94100"
          "000040000000000000004000");
  EXPECT_EQ(rest.size(), 104u);
  const std::vector<std::byte> data(16384, std::byte{0xab});
  ReducedStream stream{.base = rest, .order = ReducedStream::ChunkOrder::kInOrder};
  stream.chunks.push_back({0, data});
  XdrReader in(stream);
  const auto placed = DecodeResult<ReadData>(in);
  ASSERT_TRUE(in.Finish().has_value()) << ToString(*in.fault());
  ASSERT_TRUE(placed.has_value());
  EXPECT_EQ(placed->data.data(), data.data());
  EXPECT_EQ(placed->data.size(), data.size());
  EXPECT_FALSE(placed->end);
  EXPECT_EQ(placed->attributes->size, 1048576u);
}

TEST(Nfs3Results, Acls) {
  // GETACL of the capture, in its Reply chunk: both lists are empty.
  const auto none = DecodeAll<Acl>(
      "0000000000000001"
      "00000002000001ff000000030000000000000000000000000000006400000000000000000000000000000000000000000000"
      "000000000000000000016b0065d92887fa006b0065db1d164a006b0065db1d164a00"
      "0000000c00000000000000000000000000000000");
  ASSERT_TRUE(none.has_value());
  EXPECT_EQ(none->mask, 12u);
  EXPECT_TRUE(none->entries.empty());
  const auto some = DecodeAll<Acl>(
      "0000000000000000000000050000000200000002000000010000000000000007000000020000000800000004"
      "0000000300000000");
  ASSERT_TRUE(some.has_value());
  EXPECT_EQ(some->entries, (std::vector<AclEntry>{{1, 0, 7}, {2, 8, 4}}));
  EXPECT_TRUE(DecodeAll<AclSet>("0000000000000000").has_value());
  EXPECT_EQ(DecodeAll<AclSet>("0000001600000000").error(), Status::kInvalid);
}

TEST(Nfs3Results, MountGivesAHandleAndFlavors) {
  const auto mounted = DecodeAll<Mounted>(
      "000000000000000801000100000000000000000200000001"
      "00000006",
      &DecodeMountResult);
  ASSERT_TRUE(mounted.has_value());
  EXPECT_EQ(mounted->root, kRoot);
  ASSERT_EQ(mounted->flavors.size(), 2u);
  EXPECT_EQ(mounted->flavors[1], 6u);
  EXPECT_EQ(DecodeAll<Mounted>("0000000d", &DecodeMountResult).error(), Status::kAccess);
  std::vector<std::byte> buffer(16);
  XdrWriter out(buffer);
  EncodeMountArgs(out, "/export");
  EXPECT_EQ(ToHex(out.written()), "000000072f6578706f727400");
}

// --- What a hostile server may send ---

struct Lie {
  const char* hex;
  XdrFaultKind kind;
  const char* field;
};

template <typename T>
void ExpectFault(const Lie& lie) {
  const auto bytes = Hex(lie.hex);
  XdrReader in{ConstBytes(bytes)};
  static_cast<void>(DecodeResult<T>(in));
  ASSERT_FALSE(in.Finish().has_value()) << lie.hex;
  EXPECT_EQ(in.fault()->kind, lie.kind) << lie.hex;
  EXPECT_STREQ(in.fault()->field, lie.field) << lie.hex;
}

TEST(Nfs3Results, LiesAreFaults) {
  // A handle of 65 bytes, of 4 GiB.
  ExpectFault<Found>({"0000000000000041", XdrFaultKind::kTooLong, "handle"});
  ExpectFault<Found>({"00000000ffffffff", XdrFaultKind::kTooLong, "handle"});
  // An object of no type, of type 0.
  ExpectFault<Attributes>({"0000000000000008", XdrFaultKind::kBadValue, "type"});
  ExpectFault<Attributes>({"0000000000000000", XdrFaultKind::kBadValue, "type"});
  ExpectFault<Found>({"00000000000000000000000200000000", XdrFaultKind::kBadValue, "follows"});
  // Counts of READ that differ; more data than there is; more than anybody asks for.
  ExpectFault<ReadData>({"000000000000000000000004000000010000000361626300", XdrFaultKind::kBadValue, "count"});
  ExpectFault<ReadData>({"0000000000000000000000040000000100000004", XdrFaultKind::kTruncated, "data"});
  ExpectFault<ReadData>({"0000000000000000ffffffff00000001ffffffff", XdrFaultKind::kTooLong, "data"});
  ExpectFault<LinkText>({"000000000000000000001001", XdrFaultKind::kTooLong, "path"});
  ExpectFault<Written>({"0000000000000000000000000000000100000003", XdrFaultKind::kBadValue, "committed"});
  // An entry that goes on and on, and a name of 256 bytes.
  ExpectFault<DirectoryPage>(
      {"00000000000000000102030405060708"
       "00000001000000000000000900000001610000000000000000000005"
       "00000001",
       XdrFaultKind::kTruncated, "fileid"});
  ExpectFault<DirectoryPage>(
      {"00000000000000000102030405060708"
       "0000000100000000000000090000010061000000",
       XdrFaultKind::kTooLong, "name"});
  // Lists of ACL entries: longer than allowed, than there are bytes, than they say.
  ExpectFault<Acl>({"0000000000000000000000010000040100000401", XdrFaultKind::kTooLong, "acl"});
  ExpectFault<Acl>({"0000000000000000000000010000000200000002", XdrFaultKind::kTruncated, "acl"});
  ExpectFault<Acl>({"00000000000000000000000100000002000000010000000100000000000000070000000000000000",
                    XdrFaultKind::kBadValue, "entries"});
}

}  // namespace
}  // namespace stagecoach::rpcrdma::nfs3
