// Nfs3Client against a service that answers with whatever bytes a test lays out: how its calls travel, and what becomes
// of the answers of a server that lies.
#include "rpcrdma/ulb/nfs3/nfs3_client.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/ulb/nfs3/binding.h"

namespace stagecoach::rpcrdma::nfs3 {
namespace {

// Keeps the arguments of the last call, and answers with words and, behind them, an item that may be placed directly.
class ScriptedService final : public Service {
 public:
  explicit ScriptedService(const Binding& binding) : binding_(binding) {}

  uint32_t program() const override { return binding_.program; }
  VersionRange versions() const override { return {binding_.version, binding_.version}; }
  std::span<const Binding> bindings() const override { return {&binding_, 1}; }
  void Handle(Request request) override {
    procedure = request.procedure();
    credentials = request.header().cred;
    xids.push_back(request.header().xid);
    if (hold) {
      held.push_back(std::move(request));
      return;
    }
    XdrReader& args = request.args();
    words_before.clear();
    for (size_t i = 0; i < argument_words; ++i) words_before.push_back(args.U32("word"));
    const ConstBytes item = argument_is_item ? args.EligibleOpaque("item", 1 << 20) : ConstBytes();
    argument.assign(item.begin(), item.end());
    request.Reply([&](XdrWriter& out) {
      for (const uint32_t word : result_words) out.U32(word);
      if (result_item) out.EligibleOpaque(*result_item);
    });
  }

  // How the arguments begin, and whether an item follows.
  size_t argument_words = 0;
  bool argument_is_item = false;
  std::vector<uint32_t> result_words;
  std::optional<std::vector<std::byte>> result_item;

  bool hold = false;  // calls stay without an answer
  std::vector<Request> held;

  uint32_t procedure = 0;
  OpaqueAuth credentials;
  std::vector<uint32_t> xids;
  std::vector<uint32_t> words_before;
  std::vector<std::byte> argument;

 private:
  const Binding& binding_;
};

std::vector<std::byte> Pattern(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + (i >> 8));
  return bytes;
}

class Nfs3ClientTest : public ::testing::Test {
 protected:
  Nfs3ClientTest() : nfs_(kBinding), acl_(kAclBinding), server_(loop_, {}), client_(loop_, {}) {
    server_.Register(&nfs_);
    server_.Register(&acl_);
    EXPECT_TRUE(server_.Listen("127.0.0.1", 0).has_value());
    std::optional<bool> connected;
    client_.Connect("127.0.0.1", server_.port(),
                    [&](Result<void, CallError> result) { connected = result.has_value(); });
    EXPECT_TRUE(RunUntil([&] { return connected.has_value(); }));
    EXPECT_TRUE(connected.value_or(false));
    files_.emplace(client_, *MakeAuthSys({.machine_name = "test", .uid = 12, .gid = 34}));
  }

  template <typename Condition>
  bool RunUntil(Condition condition) {
    const Instant bound = loop_.Now() + 20s;
    while (!condition() && loop_.Now() < bound) loop_.RunOnce(50ms);
    return condition();
  }
  // Waits for one call. Views in the result are looked at while they are valid.
  template <typename T, typename Start, typename Look>
  Result<T, Failure> Await(Start start, Look look) {
    std::optional<Result<T, Failure>> outcome;
    start([&](Result<T, Failure> done) {
      if constexpr (!std::is_void_v<T>) {
        if (done) look(*done);
      }
      outcome.emplace(std::move(done));
    });
    if (!RunUntil([&] { return outcome.has_value(); })) {
      ADD_FAILURE() << "no answer";
      std::abort();  // the handler refers to this frame
    }
    return std::move(*outcome);
  }
  template <typename T, typename Start>
  Result<T, Failure> Await(Start start) {
    return Await<T>(start, [](const auto&) {});
  }
  template <typename T>
  static Failure::Kind KindOf(const Result<T, Failure>& result) {
    EXPECT_FALSE(result.has_value());
    return result ? Failure::Kind::kCall : result.error().kind;
  }

  AsioLoop loop_;
  ScriptedService nfs_;
  ScriptedService acl_;
  Server server_;
  Client client_;
  std::optional<Nfs3Client> files_;
  const FileHandle handle_{std::span<const std::byte>(Pattern(8))};
};

TEST_F(Nfs3ClientTest, EveryCallHasTheCredentials) {
  ASSERT_TRUE(Await<void>([&](auto done) { files_->Null(std::move(done)); }).has_value());
  const auto sys = ParseAuthSys(nfs_.credentials);
  ASSERT_TRUE(sys.has_value());
  EXPECT_EQ(sys->uid, 12u);
  nfs_.result_words = {70};
  EXPECT_EQ(KindOf(Await<Attributes>([&](auto done) { files_->GetAttributes(handle_, std::move(done)); })),
            Failure::Kind::kStatus);
  EXPECT_TRUE(ParseAuthSys(nfs_.credentials).has_value());
}

TEST_F(Nfs3ClientTest, DataOfReadIsPlacedInTheCallersMemory) {
  for (const size_t size : {size_t{0}, size_t{5}, size_t{3000}, size_t{65537}}) {
    SCOPED_TRACE(size);
    nfs_.result_words = {0, 0, static_cast<uint32_t>(size), 1};
    nfs_.result_item = Pattern(size);
    std::vector<std::byte> into(size + 8);
    const auto read = Await<ReadData>([&](auto done) { files_->Read(handle_, 4, into, std::move(done)); },
                                      [&](const ReadData& result) {
                                        EXPECT_EQ(result.data.data(), into.data());
                                        EXPECT_EQ(ToHex(result.data), ToHex(Pattern(size)));
                                      });
    ASSERT_TRUE(read.has_value()) << read.error().message;
    EXPECT_TRUE(read->end);
  }
  EXPECT_EQ(client_.stats().bytes_placed_by_write, 65537u);
  EXPECT_EQ(client_.stats().replies_long, 0u);
}

TEST_F(Nfs3ClientTest, DataOfWriteIsReadFromTheCallersMemory) {
  // handle (count and 8 bytes), offset, count, stable.
  nfs_.argument_words = 3 + 2 + 1 + 1;
  nfs_.argument_is_item = true;
  for (const size_t size : {size_t{1}, size_t{3000}, size_t{65539}}) {
    SCOPED_TRACE(size);
    nfs_.result_words = {0, 0, 0, static_cast<uint32_t>(size), 2, 1, 2};
    const auto data = Pattern(size);
    const auto written = Await<Written>([&](auto done) {
      files_->Write({handle_, 0x100000000, Stable::kFileSync, data}, std::move(done));
    });
    ASSERT_TRUE(written.has_value()) << written.error().message;
    EXPECT_EQ(written->count, size);
    EXPECT_EQ(nfs_.words_before[3], 1u);
    EXPECT_EQ(nfs_.words_before[5], size);
    EXPECT_EQ(ToHex(nfs_.argument), ToHex(data));
  }
  EXPECT_EQ(client_.stats().bytes_placed_by_read, 65539u);
  EXPECT_EQ(client_.stats().calls_long, 0u);
}

TEST_F(Nfs3ClientTest, PathsOfLinksMayBePlacedToo) {
  const std::string path(4000, 'p');
  // handle, name "l", six words of sattr3.
  nfs_.argument_words = 3 + 2 + 6;
  nfs_.argument_is_item = true;
  nfs_.result_words = {0, 0, 0, 0, 0};
  const auto made = Await<Created>([&](auto done) {
    files_->MakeSymlink({{handle_, "l"}, {}, path}, std::move(done));
  });
  ASSERT_TRUE(made.has_value()) << made.error().message;
  EXPECT_EQ(AsText(nfs_.argument), path);
  EXPECT_EQ(client_.stats().calls_by_read_chunk, 1u);

  nfs_.argument_is_item = false;
  nfs_.result_words = {0, 0};
  nfs_.result_item = nfs_.argument;
  std::vector<std::byte> into(kPathMax);
  const auto text = Await<LinkText>([&](auto done) { files_->ReadLink(handle_, into, std::move(done)); },
                                    [&](const LinkText& result) { EXPECT_EQ(AsText(result.path), path); });
  ASSERT_TRUE(text.has_value()) << text.error().message;
  EXPECT_EQ(client_.stats().calls_by_write_chunk, 1u);
  EXPECT_EQ(client_.stats().bytes_placed_by_write, path.size());
}

TEST_F(Nfs3ClientTest, LongDirectoriesComeByReplyChunk) {
  // Entries of 9 words: present, fileid, name "abcd", cookie, no attributes, no handle.
  nfs_.result_words = {0, 0, 1, 2};
  constexpr uint32_t kEntries = 1000;
  for (uint32_t i = 0; i < kEntries; ++i) {
    for (const uint32_t word : {1u, 0u, i, 4u, 0x61626364u, 0u, i + 1, 0u, 0u}) nfs_.result_words.push_back(word);
  }
  nfs_.result_words.insert(nfs_.result_words.end(), {0, 1});
  const ReadDirectoryPlusArgs args{.directory = handle_, .names_max = 8192, .results_max = 4 * 9 * kEntries + 8};
  const auto page = Await<DirectoryPage>([&](auto done) { files_->ReadDirectoryPlus(args, std::move(done)); });
  ASSERT_TRUE(page.has_value()) << page.error().message;
  ASSERT_EQ(page->entries.size(), kEntries);
  EXPECT_EQ(page->entries[999].name, "abcd");
  EXPECT_EQ(page->entries[999].file, 999u);
  EXPECT_TRUE(page->end);
  EXPECT_EQ(client_.stats().replies_long, 1u);
  EXPECT_EQ(client_.stats().calls_by_write_chunk, 0u);

  // One that is asked for little goes without.
  const ReadDirectoryArgs few{.directory = handle_, .count = 512};
  nfs_.result_words = {0, 0, 1, 2, 0, 1};
  ASSERT_TRUE(Await<DirectoryPage>([&](auto done) { files_->ReadDirectory(few, std::move(done)); }).has_value());
  EXPECT_EQ(client_.stats().replies_long, 1u);
}

TEST_F(Nfs3ClientTest, LongAclsGoByPositionZeroChunkAndComeByReplyChunk) {
  SetAclArgs set{.object = handle_};
  for (uint32_t i = 0; i < 400; ++i) set.entries.push_back({2, i, 7});
  acl_.argument_words = 3 + 1 + 2 + 3 * 400 + 2;
  acl_.result_words = {0, 0};
  ASSERT_TRUE(Await<AclSet>([&](auto done) { files_->SetAcl(set, std::move(done)); }).has_value());
  EXPECT_EQ(client_.stats().calls_long, 1u);
  EXPECT_EQ(acl_.words_before[4], 400u);
  EXPECT_EQ(acl_.words_before[6 + 3 * 399 + 1], 399u);

  acl_.argument_words = 0;
  acl_.result_words = {0, 0, 3, 400, 400};
  for (const AclEntry& entry : set.entries) {
    acl_.result_words.insert(acl_.result_words.end(), {entry.tag, entry.id, entry.permissions});
  }
  acl_.result_words.insert(acl_.result_words.end(), {0, 0});
  const auto acl = Await<Acl>([&](auto done) { files_->GetAcl({handle_}, std::move(done)); });
  ASSERT_TRUE(acl.has_value()) << acl.error().message;
  EXPECT_EQ(acl->entries, set.entries);
  EXPECT_EQ(client_.stats().replies_long, 1u);
}

TEST_F(Nfs3ClientTest, LiesEndTheirCallAndNothingElse) {
  // Nothing at all; a status and no more; bytes behind the end.
  nfs_.result_words = {};
  EXPECT_EQ(KindOf(Await<Attributes>([&](auto done) { files_->GetAttributes(handle_, std::move(done)); })),
            Failure::Kind::kBadReply);
  nfs_.result_words = {0};
  EXPECT_EQ(KindOf(Await<Found>([&](auto done) {
              files_->Lookup({handle_, "x"}, std::move(done));
            })),
            Failure::Kind::kBadReply);
  nfs_.result_words = {70, 0};
  EXPECT_EQ(KindOf(Await<Attributes>([&](auto done) { files_->GetAttributes(handle_, std::move(done)); })),
            Failure::Kind::kBadReply);
  nfs_.result_words = {1};
  EXPECT_EQ(KindOf(Await<void>([&](auto done) { files_->Null(std::move(done)); })), Failure::Kind::kBadReply);

  // More data than was asked for, inline; a longer path; more written than was sent.
  std::vector<std::byte> into(100);
  nfs_.result_words = {0, 0, 104, 0};
  nfs_.result_item = Pattern(104);
  EXPECT_EQ(KindOf(Await<ReadData>([&](auto done) { files_->Read(handle_, 0, into, std::move(done)); })),
            Failure::Kind::kBadReply);
  nfs_.result_words = {0, 0};
  EXPECT_EQ(KindOf(Await<LinkText>([&](auto done) { files_->ReadLink(handle_, into, std::move(done)); })),
            Failure::Kind::kBadReply);
  nfs_.result_item.reset();
  nfs_.result_words = {0, 0, 0, 101, 0, 1, 2};
  EXPECT_EQ(KindOf(Await<Written>([&](auto done) {
              files_->Write({handle_, 0, Stable::kUnstable, into}, std::move(done));
            })),
            Failure::Kind::kBadReply);

  // Entries beyond what the call has room for: the server finds no chunk that they fit.
  nfs_.result_words.assign(5000, 1);
  const auto page = Await<DirectoryPage>(
      [&](auto done) { files_->ReadDirectory({.directory = handle_, .count = 512}, std::move(done)); });
  ASSERT_EQ(KindOf(page), Failure::Kind::kCall);
  EXPECT_EQ(page.error().call, CallError::Kind::kTransport);

  // All over one connection, which serves on.
  nfs_.result_words = {};
  EXPECT_TRUE(Await<void>([&](auto done) { files_->Null(std::move(done)); }).has_value());
  EXPECT_TRUE(client_.connected());
}

TEST_F(Nfs3ClientTest, CallsOfASessionOutliveTheServerAndKeepTheirXids) {
  std::optional<Server> server(std::in_place, loop_, ServerOptions());
  server->Register(&nfs_);
  ASSERT_TRUE(server->Listen("127.0.0.1", 0).has_value());
  const uint16_t port = server->port();
  SessionOptions options;
  options.reconnect.delay_first = 5ms;
  options.reconnect.delay_max = 20ms;
  Session session(loop_, "127.0.0.1", port, options);
  Nfs3Client files(session, *MakeAuthSys({.machine_name = "test"}));
  nfs_.result_words = {};
  ASSERT_TRUE(Await<void>([&](auto done) { files.Null(std::move(done)); }).has_value());

  // The server dies over READs that it has in hand.
  constexpr size_t kReads = 4;
  const auto data = Pattern(65537);
  std::vector<std::vector<std::byte>> into(kReads, std::vector<std::byte>(data.size()));
  std::vector<std::string> outcomes;
  nfs_.hold = true;
  nfs_.xids.clear();
  for (std::vector<std::byte>& buffer : into) {
    files.Read(handle_, 0, buffer, [&](Result<ReadData, Failure> read) {
      outcomes.push_back(read ? ToHex(read->data) == ToHex(data) ? "good" : "other bytes" : read.error().message);
    });
  }
  ASSERT_TRUE(RunUntil([&] { return nfs_.held.size() == kReads; }));
  std::vector<uint32_t> before = std::exchange(nfs_.xids, {});
  server.reset();
  nfs_.held.clear();
  nfs_.hold = false;
  nfs_.result_words = {0, 0, static_cast<uint32_t>(data.size()), 1};
  nfs_.result_item = data;
  server.emplace(loop_, ServerOptions());
  server->Register(&nfs_);
  ASSERT_TRUE(server->Listen("127.0.0.1", port).has_value());
  ASSERT_TRUE(RunUntil([&] { return outcomes.size() == kReads; })) << session.DebugString();
  EXPECT_EQ(outcomes, std::vector<std::string>(kReads, "good"));
  std::ranges::sort(before);
  std::ranges::sort(nfs_.xids);
  EXPECT_EQ(nfs_.xids, before);
  // By the Bindings, on the second connection as on the first.
  EXPECT_EQ(session.stats().connections.bytes_placed_by_write, kReads * data.size());
  EXPECT_EQ(session.stats().retransmissions, kReads);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::nfs3
