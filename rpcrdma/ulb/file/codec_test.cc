#include "rpcrdma/ulb/file/codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/prng.h"
#include "rpcrdma/ulb/file/binding.h"

namespace stagecoach::rpcrdma::file {

bool operator==(const WriteRequest& a, const WriteRequest& b) {
  return a.info == b.info && AsText(a.data) == AsText(b.data);
}
bool operator==(const ReadReply& a, const ReadReply& b) {
  return a.info == b.info && AsText(a.data) == AsText(b.data);
}

namespace {

// The stream as it is when nothing is reduced: eligible items put back with their round-up.
std::vector<std::byte> Flatten(const XdrWriter& out) {
  std::vector<std::byte> flat(out.written().begin(), out.written().end());
  for (const EligibleItem& item : out.eligible()) {
    std::vector<std::byte> body(item.data.begin(), item.data.end());
    body.resize(XdrRoundUp(body.size()));
    flat.insert(flat.begin() + static_cast<ptrdiff_t>(item.position), body.begin(), body.end());
  }
  EXPECT_EQ(flat.size(), out.position());
  return flat;
}

const Attributes kFile{Type::kRegular, 0644, 123456789012, {1'700'000'000, 999'999'999}};

// Encodes, decodes to the same value, and fails cleanly on every shorter prefix and on every longer stream.
template <typename T>
void ExpectRoundTrip(const T& value) {
  std::vector<std::byte> buffer(70000);
  XdrWriter out(buffer);
  Encode(out, value);
  ASSERT_TRUE(out.ok());
  std::vector<std::byte> flat = Flatten(out);
  {
    XdrReader in{ConstBytes(flat)};
    T again{};
    Decode(in, again);
    ASSERT_TRUE(in.Finish()) << ToString(*in.fault());
    EXPECT_TRUE(again == value);
  }
  for (size_t size = 0; size < flat.size(); ++size) {
    const std::vector<std::byte> cut(flat.begin(), flat.begin() + static_cast<ptrdiff_t>(size));  // exact, for ASan
    XdrReader in{ConstBytes(cut)};
    T again{};
    Decode(in, again);
    EXPECT_FALSE(in.Finish()) << size << " of " << flat.size();
  }
  flat.resize(flat.size() + 4);
  XdrReader in{ConstBytes(flat)};
  T again{};
  Decode(in, again);
  EXPECT_FALSE(in.Finish());
}

TEST(BulkFileCodec, EveryValueRoundTripsAndEveryTruncationFails) {
  ExpectRoundTrip(Path{});
  ExpectRoundTrip(Path{"a", "bc", "def", std::string(255, 'x')});
  ExpectRoundTrip(kFile);
  ExpectRoundTrip(Attributes{Type::kOther, 0, 0, {-1, 0}});
  ExpectRoundTrip(Limits{1 << 20, 64, 60, true});
  ExpectRoundTrip(ListArgs{{"dir"}, UINT64_MAX, 4096});
  ExpectRoundTrip(Page{7, false, {}});
  ExpectRoundTrip(Page{7, true, {{"one", kFile}, {"second", {Type::kDirectory, 0755, 0, {0, 0}}}}});
  ExpectRoundTrip(Opened{42, kFile});
  ExpectRoundTrip(ReadArgs{42, uint64_t{1} << 40, 1 << 20});
  ExpectRoundTrip(CreateArgs{{"x", "y"}, 0600});
  ExpectRoundTrip(CommitArgs{42, 99, 0xdeadbeef, {12, 34}});
  ExpectRoundTrip(MakeDirectoryArgs{{"d"}, 0755});
  ExpectRoundTrip(Handle{42});
  for (size_t size : {0, 1, 2, 3, 4, 1000}) {
    const std::string data(size, 'd');
    ExpectRoundTrip(WriteRequest{{42, 4096, 0x12345678}, AsBytes(data)});
    ExpectRoundTrip(ReadReply{{kFile, 0x12345678}, AsBytes(data)});
  }
}

template <typename T>
std::string HexOf(const T& value) {
  std::vector<std::byte> buffer(4096);
  XdrWriter out(buffer);
  Encode(out, value);
  return ToHex(Flatten(out));
}

template <typename T>
std::string HexOfResult(const Result<T, Status>& result) {
  std::vector<std::byte> buffer(4096);
  XdrWriter out(buffer);
  EncodeResult<T>(out, result);
  return ToHex(Flatten(out));
}

// The right-hand sides were written by another implementation of the same bulk_file.x: code of rpcgen
// (rpcsvc-proto 1.4.3) over libtirpc 1.3.3, encoding the same values into memory.
TEST(BulkFileCodec, BytesAreThoseOfRpcgen) {
  EXPECT_EQ(HexOfResult<Limits>(Limits{1 << 20, 64, 60, true}), "0000000000100000000000400000003c00000001");
  EXPECT_EQ(HexOf(ListArgs{{"a", "bcdef"}, 0x1122334455667788, 3072}),
            "000000020000000161000000000000056263646566000000112233445566778800000c00");
  EXPECT_EQ(HexOfResult<Page>(Page{7, true, {{"name", {Type::kDirectory, 0755, 0, {-1, 0}}}}}),
            "0000000000000000000000070000000100000001000000046e616d6500000002000001ed0000000000000000ffffffff"
            "ffffffff00000000");
  EXPECT_EQ(HexOfResult<Opened>(Opened{42, kFile}),
            "00000000000000000000002a00000001000001a40000001cbe991a14000000006553f1003b9ac9ff");
  EXPECT_EQ(HexOfResult<Opened>(Err(Status::kOutside)), "00000008");
  EXPECT_EQ(HexOf(ReadArgs{42, uint64_t{1} << 40, 65536}), "000000000000002a000001000000000000010000");
  EXPECT_EQ(HexOfResult<ReadReply>(ReadReply{{kFile, 0x12345678}, AsBytes("hello")}),
            "0000000000000001000001a40000001cbe991a14000000006553f1003b9ac9ff123456780000000568656c6c6f000000");
  EXPECT_EQ(HexOf(CreateArgs{{"a", "bcdef"}, 0600}), "00000002000000016100000000000005626364656600000000000180");
  EXPECT_EQ(HexOf(WriteRequest{{42, 4096, 0x9abcdef0}, AsBytes("hello")}),
            "000000000000002a00000000000010009abcdef00000000568656c6c6f000000");
  EXPECT_EQ(HexOf(CommitArgs{42, 99, 0xdeadbeef, {12, 34}}),
            "000000000000002a0000000000000063deadbeef000000000000000c00000022");
  EXPECT_EQ(HexOf(MakeDirectoryArgs{{"a", "bcdef"}, 0755}), "000000020000000161000000000000056263646566000000000001ed");
  EXPECT_EQ(HexOfResult<void>(Err(Status::kBusy)), "00000013");
}

TEST(BulkFileCodec, ResultsCarryAValueOnlyWithSuccess) {
  std::vector<std::byte> buffer(256);
  XdrWriter good(buffer);
  EncodeResult<Opened>(good, Opened{1, kFile});
  XdrReader in(good.written());
  auto opened = DecodeResult<Opened>(in);
  ASSERT_TRUE(in.Finish());
  ASSERT_TRUE(opened);
  EXPECT_EQ(opened->handle, 1u);

  XdrWriter bad(buffer);
  EncodeResult<Opened>(bad, Err(Status::kOutside));
  EXPECT_EQ(bad.written().size(), 4u);
  XdrReader bad_in(bad.written());
  opened = DecodeResult<Opened>(bad_in);
  ASSERT_TRUE(bad_in.Finish());
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error(), Status::kOutside);
}

TEST(BulkFileCodec, OnlyDataOfReadAndWriteIsEligible) {
  std::vector<std::byte> buffer(70000);
  const std::string data(1000, 'd');
  XdrWriter out(buffer);
  Encode(out, WriteRequest{{42, 0, 1}, AsBytes(data)});
  ASSERT_EQ(out.eligible().size(), 1u);
  EXPECT_EQ(out.eligible()[0].position, 8u + 8 + 4 + 4);
  EXPECT_EQ(out.written().size(), 24u);

  // Reduced, the same message decodes to the same value with its data where the chunk put it.
  ReducedStream stream;
  stream.base = out.written();
  stream.chunks.push_back({24, AsBytes(data)});
  XdrReader in(stream);
  WriteRequest request;
  Decode(in, request);
  ASSERT_TRUE(in.Finish());
  EXPECT_EQ(static_cast<const void*>(request.data.data()), data.data());

  // A chunk in place of a name is refused.
  XdrWriter names(buffer);
  Encode(names, Path{"abcd"});
  ReducedStream bad;
  bad.base = names.written().first(8);
  bad.chunks.push_back({8, names.written().subspan(8)});
  XdrReader bad_in(bad);
  Path path;
  Decode(bad_in, path);
  EXPECT_FALSE(bad_in.Finish());
}

// Decodes a value after one 32-bit word of its encoding was replaced.
template <typename T>
bool DecodesWithWord(const T& value, size_t word, uint32_t replacement) {
  std::vector<std::byte> buffer(4096);
  XdrWriter out(buffer);
  Encode(out, value);
  ByteWriter(MutableBytes(buffer).subspan(4 * word, 4)).U32(replacement);
  XdrReader in(ConstBytes(buffer).first(out.written().size()));
  T again{};
  Decode(in, again);
  return in.Finish().has_value();
}

TEST(BulkFileCodec, ValuesOutOfRangeAreRefused) {
  EXPECT_TRUE(DecodesWithWord(kFile, 0, 4));
  EXPECT_FALSE(DecodesWithWord(kFile, 0, 0));  // type
  EXPECT_FALSE(DecodesWithWord(kFile, 0, 5));
  EXPECT_TRUE(DecodesWithWord(kFile, 1, 0777));
  EXPECT_FALSE(DecodesWithWord(kFile, 1, 04755));              // set-user-id does not travel
  EXPECT_FALSE(DecodesWithWord(kFile, 6, 1'000'000'000));      // nanoseconds
  EXPECT_FALSE(DecodesWithWord(Limits{1, 1, 1, true}, 3, 2));  // a Boolean of 2
  EXPECT_FALSE(DecodesWithWord(Path{"a"}, 0, 65));             // too deep
  EXPECT_FALSE(DecodesWithWord(Path{"a"}, 0, UINT32_MAX));
  EXPECT_FALSE(DecodesWithWord(Path{"a"}, 1, 256));  // name too long
  EXPECT_FALSE(DecodesWithWord(Page{0, true, {}}, 3, 1025));
  EXPECT_FALSE(DecodesWithWord(Page{0, true, {}}, 3, 1));  // an entry that is not there
  EXPECT_TRUE(DecodesWithWord(Status::kOk, 0, 19));
  EXPECT_FALSE(DecodesWithWord(Status::kOk, 0, 20));
}

TEST(BulkFileCodec, RandomBytesNeverDecodeToSomethingUnbounded) {
  Prng prng(7);
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes(prng.Below(96));
    for (std::byte& b : bytes) b = static_cast<std::byte>(prng.OneIn(2) ? 0 : prng.Below(256));
    XdrReader page_in{ConstBytes(bytes)};
    Page page;
    Decode(page_in, page);
    EXPECT_LE(page.entries.size(), kEntriesMax);
    XdrReader path_in{ConstBytes(bytes)};
    Path path;
    Decode(path_in, path);
    EXPECT_LE(path.size(), kDepthMax);
    XdrReader write_in{ConstBytes(bytes)};
    WriteRequest request;
    Decode(write_in, request);
    EXPECT_LE(request.data.size(), bytes.size());
  }
}

TEST(BulkFileCodec, StatedSizesHold) {
  std::vector<std::byte> buffer(70000);
  const Entry entry{std::string(255, 'n'), kFile};
  XdrWriter out(buffer);
  EncodeResult<Page>(out, Page{1, false, {entry}});
  EXPECT_EQ(out.written().size(), kEmptyPageSize + EncodedSize(entry));
  EXPECT_LE(EncodedSize(entry), 300u) << "bulk_file.x promises that 300 bytes hold any entry";

  XdrWriter longest(buffer);
  Encode(longest, ListArgs{Path(15, std::string(255, 'd')), 1, 1});
  EXPECT_LE(longest.written().size(), kArgumentsMax);
  XdrWriter deepest(buffer);
  Encode(deepest, ListArgs{Path(64, std::string(61, 'd')), 1, 1});
  EXPECT_LE(deepest.written().size(), kArgumentsMax);
}

// What a call of `procedure` may be answered with at most, beside the RPC header.
template <typename Args>
uint64_t LongestResults(Procedure procedure, const Args& args) {
  std::vector<std::byte> buffer(70000);
  XdrWriter out(buffer);
  EncodeCall({.prog = kProgram, .vers = kVersion, .proc = static_cast<uint32_t>(procedure)}, out);
  Encode(out, args);
  EXPECT_TRUE(out.ok());
  const ProcedureBinding* binding = kBinding.Find(static_cast<uint32_t>(procedure));
  EXPECT_EQ(out.eligible().size(), binding->arguments.size());
  return ReplyBytesMax(*binding, out.written(), out.eligible()) - kRpcReplyHeaderMax;
}

template <typename T>
uint64_t SizeOfResult(const T& value) {
  std::vector<std::byte> buffer(70000);
  XdrWriter out(buffer);
  EncodeResult<T>(out, value);
  EXPECT_TRUE(out.ok());
  return out.written().size();
}

TEST(FileBinding, RepliesAreAsLongAsTheCodecMakesThem) {
  const Path path{"a", "bcde", std::string(255, 'f')};
  const std::string data = "data";
  EXPECT_EQ(LongestResults(Procedure::kGetAttributes, path), SizeOfResult(kFile));
  EXPECT_EQ(LongestResults(Procedure::kOpen, path), SizeOfResult(Opened{7, kFile}));
  EXPECT_EQ(LongestResults(Procedure::kRead, ReadArgs{7, 0, 4}), SizeOfResult(ReadReply{{kFile, 1}, AsBytes(data)}));
  EXPECT_EQ(LongestResults(Procedure::kClose, file::Handle{7}), 4u);
  EXPECT_EQ(LongestResults(Procedure::kCreate, CreateArgs{path, 0644}), SizeOfResult(file::Handle{7}));
  EXPECT_EQ(LongestResults(Procedure::kWrite, WriteRequest{{7, 0, 1}, AsBytes(data)}), 4u);
  EXPECT_EQ(LongestResults(Procedure::kCommit, CommitArgs{}), SizeOfResult(kFile));
  EXPECT_EQ(LongestResults(Procedure::kMakeDirectory, MakeDirectoryArgs{path, 0755}), 4u);
  EXPECT_EQ(kBinding.Find(static_cast<uint32_t>(Procedure::kLimits))->reply_fixed, SizeOfResult(Limits{}));
  for (const uint32_t room : {0u, 300u, 65536u}) {
    EXPECT_EQ(LongestResults(Procedure::kList, ListArgs{path, 9, room}), SizeOfResult(Page{}) + room);
  }
  EXPECT_EQ(kBinding.procedures.size(), 11u);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::file
