// The client against servers that lie.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "base/crc32c.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/ulb/file/binding.h"
#include "rpcrdma/ulb/file/codec.h"
#include "tests/cli/cli_fixture.h"

namespace stagecoach::tests {
namespace {

using namespace rpcrdma;        // NOLINT: what a hostile server is made of
using namespace rpcrdma::file;  // NOLINT

constexpr Attributes kDirectoryAttributes{Type::kDirectory, 0755, 0, {1'000'000'000, 0}};
constexpr Attributes kFileAttributes{Type::kRegular, 0644, 5, {1'000'000'000, 0}};

// The bulk file program as a liar would offer it. By default it is a directory with one file "file" of five bytes; a
// test replaces what it wants to lie about.
class LyingService final : public Service {
 public:
  std::function<Result<Attributes, Status>(const Path&)> attributes =
      [](const Path& path) -> Result<Attributes, Status> {
    return path.empty() ? kDirectoryAttributes : kFileAttributes;
  };
  std::function<Page(const ListArgs&)> list = [](const ListArgs&) {
    return Page{1, true, {{"file", kFileAttributes}}};
  };
  std::function<Opened(const Path&)> open = [](const Path&) { return Opened{1, kFileAttributes}; };
  std::function<ReadReply(const ReadArgs&)> read = [](const ReadArgs&) {
    return ReadReply{{kFileAttributes, ComputeCrc32c(AsBytes("hello"))}, AsBytes("hello")};
  };
  std::function<Limits()> limits = [] { return Limits{1 << 20, 64, 60, false}; };
  // Called instead of anything else when set; returns whether it has dealt with the request.
  std::function<bool(Request&)> intercept;

  uint32_t program() const override { return kProgram; }
  VersionRange versions() const override { return {kVersion, kVersion}; }
  std::span<const Binding> bindings() const override { return {&kBinding, 1}; }
  void Handle(Request request) override {
    if (intercept && intercept(request)) return;
    switch (static_cast<Procedure>(request.procedure())) {
      case Procedure::kLimits:
        return Answer<Limits>(request, limits());
      case Procedure::kGetAttributes: {
        Path path;
        Decode(request.args(), path);
        return Answer<Attributes>(request, attributes(path));
      }
      case Procedure::kList: {
        ListArgs args;
        Decode(request.args(), args);
        return Answer<Page>(request, list(args));
      }
      case Procedure::kOpen: {
        Path path;
        Decode(request.args(), path);
        return Answer<Opened>(request, open(path));
      }
      case Procedure::kRead: {
        ReadArgs args;
        Decode(request.args(), args);
        return Answer<ReadReply>(request, read(args));
      }
      default:
        return Answer<void>(request, {});
    }
  }

 private:
  template <typename T>
  static void Answer(Request& request, const Result<T, Status>& result) {
    request.Reply([&](XdrWriter& out) { EncodeResult<T>(out, result); });
  }
};

class HostileServerTest : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    liar_ = std::make_unique<Server>(loop_, ServerOptions{});
    liar_->Register(&service_);
    std::string host = Host();
    std::erase_if(host, [](char c) { return c == '[' || c == ']'; });
    const auto listening = liar_->Listen(host, 0);
    ASSERT_TRUE(listening) << listening.error().ToString();
    address_ = Host() + ":" + std::to_string(liar_->port());
  }

  // Runs a command against the server in this process.
  Outcome RunAgainstLiar(std::vector<std::string> arguments) {
    const auto process = Start(std::move(arguments));
    bool ended = false;
    const auto watch = loop_.WatchReadable(process->pidfd(), [&] { ended = true; });
    const Instant bound = loop_.Now() + 60s;
    while (!ended && loop_.Now() < bound) loop_.RunOnce(100ms);
    loop_.Unwatch(watch);
    EXPECT_TRUE(ended) << "still running; so far it said: " << process->Err();
    return {process->Wait(std::chrono::milliseconds(0)).value_or(-1), process->Out(), process->Err()};
  }
  // A `get -r` that must fail, say why, and write nothing but its empty destination directories.
  void ExpectTreeRefused(const std::string& why, std::vector<std::string> options = {}) {
    std::vector<std::string> arguments = {"get", "-r", Url(), (local_ / "tree").string()};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Outcome get = RunAgainstLiar(arguments);
    EXPECT_EQ(get.code, 1) << why;
    EXPECT_NE(get.err.find(why), std::string::npos) << get.err;
    EXPECT_EQ(get.err.find('\x1b'), std::string::npos);
    for (const std::string& name : Tree(local_)) EXPECT_TRUE(fs::is_directory(local_ / name)) << name;
    EXPECT_EQ(Tree(base_).count("planted"), 0u);
  }
  void ExpectFileRefused(const std::string& why) {
    const Outcome get = RunAgainstLiar({"get", Url("file"), (local_ / "file").string()});
    EXPECT_EQ(get.code, 1) << why;
    EXPECT_NE(get.err.find(why), std::string::npos) << get.err;
    EXPECT_TRUE(fs::is_empty(local_));
  }

  AsioLoop loop_;
  LyingService service_;
  std::unique_ptr<Server> liar_;
};

TEST_F(HostileServerTest, TheDefaultIsHonestSoThatTheLiesAreWhatFails) {
  const Outcome get = RunAgainstLiar({"get", "-r", Url(), (local_ / "tree").string()});
  EXPECT_EQ(get.code, 0) << get.err;
  EXPECT_EQ(ReadFile(local_ / "tree/file"), "hello");
}

TEST_F(HostileServerTest, NamesThatLeadElsewhereAreRefused) {
  for (const std::string& name :
       {std::string(".."), std::string("."), std::string(""), std::string("../planted"), std::string("/tmp/planted"),
        std::string("a/planted"), std::string("planted\0x", 9), std::string(".stagecoach.0123456789abcdef.part")}) {
    for (const Attributes& attributes : {kFileAttributes, kDirectoryAttributes}) {
      service_.list = [&](const ListArgs&) { return Page{1, true, {{"file", kFileAttributes}, {name, attributes}}}; };
      ExpectTreeRefused("is not a name");
    }
  }
}

TEST_F(HostileServerTest, ControlCharactersInNamesDoNotReachTheTerminal) {
  service_.list = [](const ListArgs&) { return Page{1, true, {{"evil\x1b[2J/", kFileAttributes}}}; };
  ExpectTreeRefused("evil\\x1b[2J");
  service_.list = [](const ListArgs&) { return Page{1, true, {{"evil\x1b[2J", kFileAttributes}}}; };
  const Outcome ls = RunAgainstLiar({"ls", Url()});
  EXPECT_EQ(ls.code, 0);
  EXPECT_EQ(ls.out.find('\x1b'), std::string::npos);
}

TEST_F(HostileServerTest, ListingsThatRepeatOrNeverEndAreRefused) {
  service_.list = [](const ListArgs&) { return Page{1, true, {{"x", kFileAttributes}, {"x", kDirectoryAttributes}}}; };
  ExpectTreeRefused("there twice");
  service_.list = [](const ListArgs&) { return Page{1, false, {}}; };
  ExpectTreeRefused("empty page");
}

TEST_F(HostileServerTest, ATreeWithoutABottomIsCutOff) {
  service_.attributes = [](const Path&) { return kDirectoryAttributes; };
  service_.list = [](const ListArgs&) { return Page{1, true, {{"d", kDirectoryAttributes}}}; };
  ExpectTreeRefused("too deep");
}

TEST_F(HostileServerTest, DirectoriesThatMultiplyWithoutEndAreCutOff) {
  // 2^64 of them, none too deep.
  service_.attributes = [](const Path&) { return kDirectoryAttributes; };
  size_t listings = 0;
  service_.list = [&](const ListArgs&) {
    ++listings;
    return Page{1, true, {{"a", kDirectoryAttributes}, {"b", kDirectoryAttributes}}};
  };
  ExpectTreeRefused("server lists more than 300 entries; --max-entries allows more", {"--max-entries", "300"});
  EXPECT_EQ(listings, 151u) << "the one that is too many ends it";
}

TEST_F(HostileServerTest, ADirectoryWithoutEndIsCutOff) {
  uint64_t next = 0;
  service_.list = [&](const ListArgs&) {
    Page page{++next, false, {}};
    for (int i = 0; i < 10; ++i)
      page.entries.push_back({std::to_string(next) + "-" + std::to_string(i), kFileAttributes});
    return page;
  };
  ExpectTreeRefused("server lists more than 300 entries; --max-entries allows more", {"--max-entries", "300"});
  const Outcome ls = RunAgainstLiar({"ls", "--max-entries", "300", Url()});
  EXPECT_EQ(ls.code, 1);
  EXPECT_EQ(ls.err, "stagecoach: ls " + Url() + ": server lists more than 300 entries; --max-entries allows more\n");
  EXPECT_EQ(ls.out, "");
}

TEST_F(HostileServerTest, AsManyEntriesAsAreAllowedAreTaken) {
  service_.list = [](const ListArgs& args) {
    if (!args.path.empty()) return Page{1, true, {{"file", kFileAttributes}}};
    return Page{1, true, {{"dir", kDirectoryAttributes}, {"file", kFileAttributes}}};
  };
  const Outcome get = RunAgainstLiar({"get", "-r", "--max-entries", "3", Url(), (local_ / "tree").string()});
  EXPECT_EQ(get.code, 0) << get.err;
  EXPECT_EQ(Tree(local_ / "tree"), (std::set<std::string>{"dir", "dir/file", "file"}));
}

TEST_F(HostileServerTest, DataThatIsNotWhatItsChecksumSaysIsRefused) {
  service_.read = [](const ReadArgs&) { return ReadReply{{kFileAttributes, 1}, AsBytes("hello")}; };
  ExpectFileRefused("checksum");
}

TEST_F(HostileServerTest, DataOfAnotherLengthIsRefused) {
  for (std::string_view data : {"hell", "", "hello, world"}) {
    service_.read = [data](const ReadArgs&) {
      return ReadReply{{kFileAttributes, ComputeCrc32c(AsBytes(data))}, AsBytes(data)};
    };
    ExpectFileRefused(data.size() > 5 ? "more data than was asked for" : "changed on the server");
  }
}

TEST_F(HostileServerTest, AFileThatChangesWhileItIsReadIsRefused) {
  service_.read = [](const ReadArgs&) {
    Attributes later = kFileAttributes;
    later.modified.seconds += 1;
    return ReadReply{{later, ComputeCrc32c(AsBytes("hello"))}, AsBytes("hello")};
  };
  ExpectFileRefused("changed on the server");
}

TEST_F(HostileServerTest, AnImpossibleSizeIsNotBelieved) {
  service_.open = [](const Path&) {
    Attributes huge = kFileAttributes;
    huge.size = UINT64_MAX;
    return Opened{1, huge};
  };
  ExpectFileRefused("changed on the server");
}

TEST_F(HostileServerTest, ADirectoryOpenedAsAFileIsRefused) {
  service_.open = [](const Path&) { return Opened{1, kDirectoryAttributes}; };
  ExpectFileRefused("no regular file");
}

TEST_F(HostileServerTest, LimitsThatAllowNothingAreRefused) {
  service_.limits = [] { return Limits{0, 0, 0, false}; };
  ExpectFileRefused("less than 4096 bytes");
}

TEST_F(HostileServerTest, RepliesThatAreNotXdrAreRefused) {
  // Every reply cut short, too long, or with a status of its own invention.
  for (const std::vector<uint32_t>& words : std::vector<std::vector<uint32_t>>{
           {}, {0}, {0, 1, 2}, {20}, {UINT32_MAX}, {0, 4096, 64, 60, 2}, {0, 4096, 64, 60, 0, 0}}) {
    service_.intercept = [&](Request& request) {
      request.Reply([&](XdrWriter& out) {
        for (uint32_t word : words) out.U32(word);
      });
      return true;
    };
    ExpectFileRefused("bad reply");
  }
}

TEST_F(HostileServerTest, RpcErrorsAreReported) {
  service_.intercept = [](Request& request) {
    request.Fail(AcceptStat::kSystemErr);
    return true;
  };
  ExpectFileRefused("SYSTEM_ERR");
}

TEST_F(HostileServerTest, ACompleteFileIsASuccessWhateverTheServerSaysToItsClosing) {
  bool closed = false;
  service_.intercept = [&](Request& request) {
    if (static_cast<Procedure>(request.procedure()) != Procedure::kClose) return false;
    closed = true;
    request.Fail(AcceptStat::kSystemErr);
    return true;
  };
  const Outcome get = RunAgainstLiar({"get", Url("file"), (local_ / "file").string()});
  EXPECT_TRUE(closed);
  EXPECT_EQ(get.code, 0) << get.err;
  EXPECT_EQ(get.err, "");
  EXPECT_EQ(ReadFile(local_ / "file"), "hello");
}

TEST_F(HostileServerTest, AServerTooBusyForASingleChunkIsGivenUp) {
  service_.intercept = [](Request& request) {
    if (static_cast<Procedure>(request.procedure()) != Procedure::kRead) return false;
    request.Reply([](XdrWriter& out) { Encode(out, Status::kBusy); });
    return true;
  };
  ExpectFileRefused("server says: out of resources, try again; that was one chunk of 5 B with nothing else in flight");
}

TEST_F(HostileServerTest, ChunksABusyServerTakesOutOfOrderMakeOneFile) {
  // The third chunk of sixteen is refused once while others are in flight, so it arrives after later ones.
  constexpr uint32_t kChunk = 4096;
  const std::string content = Pattern(16 * kChunk);
  WriteFile(local_ / "file", content);
  std::string stored(content.size(), '\0');
  std::vector<uint64_t> offsets;
  bool refused = false;
  std::optional<CommitArgs> committed;
  service_.intercept = [&](Request& request) {
    switch (static_cast<Procedure>(request.procedure())) {
      case Procedure::kCreate:
        request.Reply([](XdrWriter& out) { EncodeResult<file::Handle>(out, file::Handle{1}); });
        return true;
      case Procedure::kWrite: {
        WriteRequest write;
        Decode(request.args(), write);
        const bool refuse = write.info.offset == 2 * kChunk && !std::exchange(refused, true);
        if (!refuse) {
          EXPECT_EQ(write.info.crc32c, ComputeCrc32c(write.data));
          offsets.push_back(write.info.offset);
          if (write.info.offset + write.data.size() <= stored.size()) {
            std::memcpy(stored.data() + write.info.offset, write.data.data(), write.data.size());
          }
        }
        request.Reply([&](XdrWriter& out) { Encode(out, refuse ? Status::kBusy : Status::kOk); });
        return true;
      }
      case Procedure::kCommit: {
        committed.emplace();
        Decode(request.args(), *committed);
        const Attributes whole{Type::kRegular, 0644, content.size(), committed->modified};
        request.Reply([&](XdrWriter& out) { EncodeResult<Attributes>(out, whole); });
        return true;
      }
      default:
        return false;
    }
  };
  service_.attributes = [](const Path&) -> Result<Attributes, Status> { return Err(Status::kNoEntry); };
  const Outcome put = RunAgainstLiar({"put", "--chunk", "4096", (local_ / "file").string(), Url("file")});
  EXPECT_EQ(put.code, 0) << put.err;
  EXPECT_TRUE(refused);
  EXPECT_FALSE(std::is_sorted(offsets.begin(), offsets.end())) << "nothing was out of order";
  EXPECT_TRUE(stored == content);
  ASSERT_TRUE(committed);
  EXPECT_EQ(committed->crc32c, ComputeCrc32c(AsBytes(content)));
}

TEST_F(HostileServerTest, AServerThatNeverAnswersIsGivenUp) {
  std::vector<Request> kept;
  service_.intercept = [&](Request& request) {
    kept.push_back(std::move(request));
    return true;
  };
  const Outcome get = RunAgainstLiar({"get", "--timeout", "0.2", Url("file"), (local_ / "file").string()});
  EXPECT_EQ(get.code, 1);
  EXPECT_NE(get.err.find(address_), std::string::npos) << get.err;
  EXPECT_TRUE(fs::is_empty(local_));
}

}  // namespace
}  // namespace stagecoach::tests
