// The bulk file service under honest and hostile clients: a Server, and Clients that speak the program well
// (FileClient) or say whatever they like (raw calls), in one process over the device that is linked in.
#include "rpcrdma/ulb/file/file_service.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "base/crc32c.h"
#include "base/prng.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "rpcrdma/ulb/file/codec.h"
#include "rpcrdma/ulb/file/file_client.h"

namespace stagecoach::rpcrdma::file {
namespace {

// A disk that does nothing of a kind between Begin() and End(), while it is waited for.
class SlowDisk {
 public:
  void Begin() {
    const std::lock_guard lock(mutex_);
    slow_ = true;
  }
  void End() {
    const std::lock_guard lock(mutex_);
    slow_ = false;
    changed_.notify_all();
  }
  size_t waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [this] { return !slow_; });
    --waiting_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool slow_ = false;
  size_t waiting_ = 0;
};
SlowDisk slow_syncs;
SlowDisk slow_locks;  // as those of a network file system are

}  // namespace
}  // namespace stagecoach::rpcrdma::file

// Before the C library's.
extern "C" int fsync(int fd) {
  stagecoach::rpcrdma::file::slow_syncs.Pass();
  return reinterpret_cast<int (*)(int)>(::dlsym(RTLD_NEXT, "fsync"))(fd);
}
extern "C" int flock(int fd, int operation) noexcept {
  stagecoach::rpcrdma::file::slow_locks.Pass();
  return reinterpret_cast<int (*)(int, int)>(::dlsym(RTLD_NEXT, "flock"))(fd, operation);
}

namespace stagecoach::rpcrdma::file {
namespace {

namespace fs = std::filesystem;

constexpr uint32_t kDataLimit = 64 * 1024;

class FileServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/file_service.XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    root_ = base_ / "root";
    fs::create_directory(root_);
    std::ofstream(base_ / "secret") << "secret";
    Start({}, {kDataLimit, 4, 60s});
  }
  void TearDown() override {
    slow_syncs.End();
    slow_locks.End();
    clients_.clear();
    server_.reset();
    service_.reset();
    executor_.reset();
    fs::remove_all(base_);
  }

  void Start(FileStore::Options store_options, FileService::Options options) {
    clients_.clear();
    server_.reset();
    service_.reset();
    executor_.reset();
    auto store = FileStore::Open(root_.string(), store_options);
    ASSERT_TRUE(store);
    store_ = std::move(*store);
    executor_ = std::move(*WorkerPool::Make(loop_));
    service_ = std::make_unique<FileService>(loop_, *store_, *executor_, options);
    server_ = std::make_unique<Server>(loop_, ServerOptions{});
    server_->Register(service_.get());
    const auto listening = server_->Listen("127.0.0.1", 0);
    ASSERT_TRUE(listening) << listening.error().ToString();
  }

  template <typename Condition>
  bool RunUntil(Condition condition) {
    const Instant bound = loop_.Now() + 20s;
    while (!condition() && loop_.Now() < bound) loop_.RunOnce(50ms);
    return condition();
  }

  Client& Connect() {
    clients_.push_back(std::make_unique<Client>(loop_, ClientOptions{}));
    clients_.back()->Register(kBinding);  // for raw calls
    Client& client = *clients_.back();
    std::optional<Result<void, CallError>> outcome;
    client.Connect("127.0.0.1", server_->port(), [&](Result<void, CallError> done) { outcome = std::move(done); });
    EXPECT_TRUE(RunUntil([&] { return outcome.has_value(); }));
    EXPECT_TRUE(outcome->has_value()) << outcome->error().ToString();
    return client;
  }

  // Waits for one typed call.
  template <typename T, typename Start>
  Result<T, Failure> Await(Start start) {
    const auto outcome = std::make_shared<std::optional<Result<T, Failure>>>();
    start([outcome](Result<T, Failure> done) { outcome->emplace(std::move(done)); });
    if (!RunUntil([&] { return outcome->has_value(); })) {
      ADD_FAILURE() << "no answer";
      return Err(Failure{});
    }
    return std::move(**outcome);
  }
  Result<Opened, Failure> Open(Client& client, const Path& path) {
    return Await<Opened>([&](auto handler) { FileClient(client).Open(path, std::move(handler)); });
  }
  Result<file::Handle, Failure> Create(Client& client, const Path& path) {
    return Await<file::Handle>([&](auto handler) { FileClient(client).Create({path, 0644}, std::move(handler)); });
  }
  Result<void, Failure> Write(Client& client, file::Handle handle, uint64_t offset, std::string_view data) {
    return Await<void>([&](auto handler) {
      FileClient(client).Write({handle, offset, ComputeCrc32c(AsBytes(data))}, AsBytes(data), std::move(handler));
    });
  }
  Result<Attributes, Failure> Commit(Client& client, file::Handle handle, std::string_view whole) {
    return Await<Attributes>([&](auto handler) {
      FileClient(client).Commit({handle, whole.size(), ComputeCrc32c(AsBytes(whole)), {1'500'000'000, 7}},
                                std::move(handler));
    });
  }
  Result<void, Failure> Close(Client& client, file::Handle handle) {
    return Await<void>([&](auto handler) { FileClient(client).Close(handle, std::move(handler)); });
  }

  // Any call with any bytes. The reply's results as bytes, or why there are none.
  Result<std::vector<std::byte>, CallError> Raw(Client& client, uint32_t procedure, ConstBytes arguments,
                                                MutableBytes room = {}) {
    struct Outcome {
      std::optional<CallError> error;
      std::optional<std::vector<std::byte>> results;
    };
    const auto outcome = std::make_shared<Outcome>();
    CallOptions options;
    options.reply_bytes_max = 100'000;
    if (!room.empty()) options.result_buffers = {room};
    client.Call(
        {kProgram, kVersion, procedure}, [&](XdrWriter& out) { FixedBytes(out, arguments); }, options,
        [outcome](Result<Reply, CallError> reply) {
          if (!reply) {
            outcome->error = reply.error();
            return;
          }
          XdrReader in = reply->results();
          const ConstBytes rest = in.FixedOpaque("rest", in.base_remaining());
          outcome->results.emplace(rest.begin(), rest.end());
        });
    if (!RunUntil([&] { return outcome->error || outcome->results; })) {
      ADD_FAILURE() << "no answer to procedure " << procedure;
      return Err(CallError{});
    }
    if (outcome->error) return Err(*outcome->error);
    return std::move(*outcome->results);
  }
  // Bytes as they are, without round-up: arguments of the test need not be XDR.
  static void FixedBytes(XdrWriter& out, ConstBytes bytes) {
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
      ByteReader word(bytes.subspan(i, 4));
      out.U32(word.U32());
    }
  }
  static Status StatusOf(const Result<std::vector<std::byte>, CallError>& results) {
    EXPECT_TRUE(results) << results.error().ToString();
    if (!results || results->size() < 4) return Status::kOk;
    return static_cast<Status>(ByteReader(*results).U32());
  }
  static std::vector<std::byte> Words(std::initializer_list<uint32_t> words) {
    std::vector<std::byte> bytes(4 * words.size());
    ByteWriter out(bytes);
    for (uint32_t word : words) out.U32(word);
    return bytes;
  }
  // The encoding of `args`, eligible data included.
  template <typename Args>
  static std::vector<std::byte> Encoded(const Args& args) {
    std::vector<std::byte> buffer(200'000);
    XdrWriter out(buffer);
    Encode(out, args);
    EXPECT_TRUE(out.ok());
    std::vector<std::byte> flat(out.written().begin(), out.written().end());
    for (const EligibleItem& item : out.eligible()) {
      flat.insert(flat.end(), item.data.begin(), item.data.end());
      flat.resize(XdrRoundUp(flat.size()));
    }
    return flat;
  }
  static uint32_t Number(Procedure procedure) { return static_cast<uint32_t>(procedure); }

  std::set<std::string> NamesOnDisk() {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_)) names.insert(entry.path().filename());
    return names;
  }
  static std::string ReadText(const fs::path& file) {
    std::ifstream in(file);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  static std::string Pattern(size_t size) {
    Prng prng(size);
    std::string text(size, '\0');
    for (char& c : text) c = static_cast<char>(prng.Below(256));
    return text;
  }

  AsioLoop loop_;
  fs::path base_;
  fs::path root_;
  std::unique_ptr<FileStore> store_;
  std::unique_ptr<WorkerPool> executor_;
  std::unique_ptr<FileService> service_;
  std::unique_ptr<Server> server_;
  std::vector<std::unique_ptr<Client>> clients_;
};

TEST_F(FileServiceTest, AFileGoesThereAndBackWhateverItsSize) {
  Client& client = Connect();
  for (size_t size : {size_t{0}, size_t{1}, size_t{3}, size_t{500}, size_t{4095}, size_t{20'000}, size_t{kDataLimit}}) {
    const std::string text = Pattern(size);
    const auto handle = Create(client, {"file"});
    ASSERT_TRUE(handle) << handle.error().message;
    if (size > 0) {
      ASSERT_TRUE(Write(client, *handle, 0, text));
    }
    const auto committed = Commit(client, *handle, text);
    ASSERT_TRUE(committed) << committed.error().message;
    EXPECT_EQ(committed->size, size);
    EXPECT_EQ(ReadText(root_ / "file"), text);

    const auto opened = Open(client, {"file"});
    ASSERT_TRUE(opened) << opened.error().message;
    EXPECT_EQ(opened->attributes.size, size);
    EXPECT_EQ(opened->attributes.modified, (Time{1'500'000'000, 7}));
    std::vector<std::byte> into(kDataLimit);
    const auto read = Await<ReadReply>(
        [&](auto handler) { FileClient(client).Read(opened->handle, 0, kDataLimit, into, std::move(handler)); });
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(AsText(read->data), text);
    if (size > 0) {
      EXPECT_EQ(read->data.data(), into.data()) << "data lies in the caller's memory";
    }
    EXPECT_EQ(read->info.crc32c, ComputeCrc32c(AsBytes(text)));
    EXPECT_TRUE(Close(client, opened->handle));
  }
  EXPECT_EQ(service_->open_handles(), 0u);
}

TEST_F(FileServiceTest, LargeDataTravelsByChunksAndSmallDataInline) {
  Client& client = Connect();
  const std::string small = Pattern(100);
  const std::string large = Pattern(kDataLimit);
  const auto handle = Create(client, {"file"});
  ASSERT_TRUE(handle);
  ConnectionStats before = client.stats();
  ASSERT_TRUE(Write(client, *handle, 0, small));
  EXPECT_EQ(client.stats().calls_by_read_chunk, before.calls_by_read_chunk);
  EXPECT_EQ(client.stats().bytes_placed_by_read, before.bytes_placed_by_read);
  ASSERT_TRUE(Write(client, *handle, small.size(), large));
  EXPECT_EQ(client.stats().calls_by_read_chunk, before.calls_by_read_chunk + 1);
  EXPECT_EQ(server_->stats().connections.bytes_placed_by_read, kDataLimit);
  ASSERT_TRUE(Commit(client, *handle, small + large));

  const auto opened = Open(client, {"file"});
  ASSERT_TRUE(opened);
  std::vector<std::byte> into(kDataLimit);
  before = client.stats();
  ASSERT_TRUE(Await<ReadReply>(
      [&](auto handler) { FileClient(client).Read(opened->handle, 0, 100, into, std::move(handler)); }));
  EXPECT_EQ(client.stats().calls_by_write_chunk, before.calls_by_write_chunk);
  ASSERT_TRUE(Await<ReadReply>(
      [&](auto handler) { FileClient(client).Read(opened->handle, 0, kDataLimit, into, std::move(handler)); }));
  EXPECT_EQ(client.stats().calls_by_write_chunk, before.calls_by_write_chunk + 1);
  EXPECT_EQ(server_->stats().connections.bytes_placed_by_write, kDataLimit);
}

TEST_F(FileServiceTest, ManyWritesInFlightMayArriveInAnyOrder) {
  Client& client = Connect();
  const std::string text = Pattern(20 * 4096);
  const auto handle = Create(client, {"file"});
  ASSERT_TRUE(handle);
  FileClient files(client);
  int written = 0;
  for (size_t i = 20; i-- > 0;) {
    const ConstBytes piece = AsBytes(text).subspan(i * 4096, 4096);
    files.Write({*handle, i * 4096, ComputeCrc32c(piece)}, piece, [&](Result<void, Failure> done) {
      EXPECT_TRUE(done) << done.error().message;
      ++written;
    });
  }
  ASSERT_TRUE(RunUntil([&] { return written == 20; }));
  const auto committed = Commit(client, *handle, text);
  ASSERT_TRUE(committed) << committed.error().message;
  EXPECT_EQ(ReadText(root_ / "file"), text);
}

TEST_F(FileServiceTest, HandlesMeanNothingOnAnotherConnection) {
  std::ofstream(root_ / "file") << "hello";
  Client& owner = Connect();
  Client& thief = Connect();
  const auto reading = Open(owner, {"file"});
  const auto writing = Create(owner, {"new"});
  ASSERT_TRUE(reading);
  ASSERT_TRUE(writing);
  std::vector<std::byte> into(16);
  const auto read =
      Await<ReadReply>([&](auto handler) { FileClient(thief).Read(reading->handle, 0, 16, into, std::move(handler)); });
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().status, Status::kStale);
  EXPECT_EQ(Write(thief, *writing, 0, "x").error().status, Status::kStale);
  EXPECT_EQ(Commit(thief, *writing, "").error().status, Status::kStale);
  EXPECT_EQ(Close(thief, *writing).error().status, Status::kStale);
  EXPECT_TRUE(Close(owner, *writing)) << "and the owner's are as they were";
}

TEST_F(FileServiceTest, HandlesAreOfTheKindTheyWereMadeAndEndOnce) {
  std::ofstream(root_ / "file") << "hello";
  Client& client = Connect();
  const auto reading = Open(client, {"file"});
  const auto writing = Create(client, {"new"});
  ASSERT_TRUE(reading);
  ASSERT_TRUE(writing);
  std::vector<std::byte> into(16);
  EXPECT_EQ(Write(client, reading->handle, 0, "x").error().status, Status::kInvalid);
  EXPECT_EQ(Commit(client, reading->handle, "").error().status, Status::kInvalid);
  const auto read =
      Await<ReadReply>([&](auto handler) { FileClient(client).Read(*writing, 0, 16, into, std::move(handler)); });
  EXPECT_EQ(read.error().status, Status::kInvalid);
  EXPECT_TRUE(Close(client, reading->handle));
  EXPECT_EQ(Close(client, reading->handle).error().status, Status::kStale);
  EXPECT_EQ(Commit(client, *writing, "not written").error().status, Status::kIncomplete);
  EXPECT_EQ(Commit(client, *writing, "").error().status, Status::kStale) << "a COMMIT that failed ends the handle too";
  EXPECT_EQ(NamesOnDisk(), (std::set<std::string>{"file"}));
}

TEST_F(FileServiceTest, EachClientHasItsOwnLimitOfHandles) {
  Client& greedy = Connect();
  Client& modest = Connect();
  std::vector<file::Handle> handles;
  for (int i = 0; i < 4; ++i) {
    const auto handle = Create(greedy, {"f" + std::to_string(i)});
    ASSERT_TRUE(handle);
    handles.push_back(*handle);
  }
  EXPECT_EQ(Create(greedy, {"f5"}).error().status, Status::kLimit);
  EXPECT_EQ(Open(greedy, {"f5"}).error().status, Status::kLimit);
  EXPECT_TRUE(Create(modest, {"g"}));
  EXPECT_TRUE(Close(greedy, handles[0]));
  EXPECT_EQ(Open(greedy, {"missing"}).error().status, Status::kNoEntry) << "a failed open gives its room back";
  EXPECT_TRUE(Create(greedy, {"f5"}));
}

TEST_F(FileServiceTest, OpensInFlightCountAgainstTheLimit) {
  Client& client = Connect();
  std::ofstream(root_ / "file") << "x";
  FileClient files(client);
  int good = 0;
  int limited = 0;
  for (int i = 0; i < 30; ++i) {
    files.Open({"file"}, [&](Result<Opened, Failure> opened) {
      if (opened) {
        ++good;
      } else {
        EXPECT_EQ(opened.error().status, Status::kLimit);
        ++limited;
      }
    });
  }
  ASSERT_TRUE(RunUntil([&] { return good + limited == 30; }));
  EXPECT_EQ(good, 4);
  EXPECT_EQ(service_->open_handles(), 4u);
}

TEST_F(FileServiceTest, AClientThatGoesLeavesNoHandleAndNoHiddenFile) {
  Client& client = Connect();
  const auto handle = Create(client, {"file"});
  ASSERT_TRUE(handle);
  ASSERT_TRUE(Write(client, *handle, 0, "half of it"));
  EXPECT_EQ(NamesOnDisk().size(), 1u);
  clients_.clear();
  EXPECT_TRUE(RunUntil([&] { return service_->open_handles() == 0 && NamesOnDisk().empty(); }));
  EXPECT_EQ(service_->counters().files_abandoned, 1u);
}

TEST_F(FileServiceTest, AHandleLeftIdleIsClosedAndItsHiddenFileGoes) {
  Start({}, {kDataLimit, 4, 40ms});
  Client& client = Connect();
  const auto handle = Create(client, {"file"});
  ASSERT_TRUE(handle);
  EXPECT_TRUE(RunUntil([&] { return service_->counters().handles_expired == 1 && NamesOnDisk().empty(); }));
  EXPECT_EQ(Write(client, *handle, 0, "x").error().status, Status::kStale);
  EXPECT_TRUE(client.connected());
}

TEST_F(FileServiceTest, AClosedUnfinishedFileIsGoneWhenTheClientHearsOfIt) {
  Client& client = Connect();
  const auto handle = Create(client, {"file"});
  ASSERT_TRUE(handle);
  ASSERT_TRUE(Close(client, *handle));
  EXPECT_TRUE(NamesOnDisk().empty());
}

TEST_F(FileServiceTest, LimitsSayWhatHolds) {
  Start({.read_only = true}, {kDataLimit, 4, 60s});
  Client& client = Connect();
  const auto limits = Await<file::Limits>([&](auto handler) { FileClient(client).GetLimits(std::move(handler)); });
  ASSERT_TRUE(limits);
  EXPECT_EQ(*limits, (file::Limits{kDataLimit, 4, 60, true}));
  EXPECT_EQ(Create(client, {"x"}).error().status, Status::kReadOnly);
}

TEST_F(FileServiceTest, ListingsComeInPagesThatFitTheMessage) {
  for (int i = 0; i < 100; ++i) std::ofstream(root_ / ("file-" + std::to_string(i)));
  Client& client = Connect();
  for (uint32_t bytes_max : {300u, 3072u, 1u << 20}) {
    std::set<std::string> names;
    ListArgs args{{}, 0, bytes_max};
    for (int pages = 0; pages < 200; ++pages) {
      const auto page = Await<Page>([&](auto handler) { FileClient(client).List(args, std::move(handler)); });
      ASSERT_TRUE(page) << page.error().message;
      for (const Entry& entry : page->entries) EXPECT_TRUE(names.insert(entry.name).second);
      args.cookie = page->cookie;
      if (page->end) break;
    }
    EXPECT_EQ(names.size(), 100u) << bytes_max;
  }
}

// --- A disk that is slow ---

// While one COMMIT waits for the disk, everything else goes on, for its client as for others.
TEST_F(FileServiceTest, ADiskThatTakesItsTimeOverOneFileHoldsUpNobodyElse) {
  std::ofstream(root_ / "file") << "hello";
  Client& slow = Connect();
  Client& other = Connect();
  const auto handle = Create(slow, {"slow"});
  ASSERT_TRUE(handle);
  slow_syncs.Begin();
  std::optional<bool> committed;
  FileClient(slow).Commit({*handle, 0, 0, {}}, [&](Result<Attributes, Failure> done) { committed = done.has_value(); });
  ASSERT_TRUE(RunUntil([&] { return slow_syncs.waiting() == 1; }));
  for (int i = 0; i < 3; ++i) {
    const auto page = Await<Page>([&](auto handler) { FileClient(other).List({{}, 0, 4096}, std::move(handler)); });
    ASSERT_TRUE(page);
    EXPECT_EQ(page->entries.size(), 1u);
    EXPECT_TRUE(Open(slow, {"file"})) << "nor its own client";
    const auto written = Create(other, {"other"});
    ASSERT_TRUE(written);
    EXPECT_TRUE(Write(other, *written, 0, "data"));
    EXPECT_TRUE(Close(other, *written));
  }
  EXPECT_FALSE(committed.has_value());
  slow_syncs.End();
  ASSERT_TRUE(RunUntil([&] { return committed.has_value(); }));
  EXPECT_TRUE(*committed);
}

// As many COMMITs and CREATEs as there are files leave room for names and attributes, and for the end of a READ.
TEST_F(FileServiceTest, ADiskThatTakesItsTimeOverEveryFileHoldsUpNoListing) {
  std::ofstream(root_ / "file") << "hello";
  Start({}, {kDataLimit, 64, 60s});
  Client& slow = Connect();
  Client& other = Connect();
  FileClient files(slow);
  std::vector<file::Handle> handles;
  for (int i = 0; i < 30; ++i) {
    const auto handle = Create(slow, {"slow-" + std::to_string(i)});
    ASSERT_TRUE(handle);
    handles.push_back(*handle);
  }
  for (SlowDisk* disk : {&slow_syncs, &slow_locks}) {
    SCOPED_TRACE(disk == &slow_syncs ? "COMMIT" : "CREATE");
    disk->Begin();
    size_t ended = 0;
    for (size_t i = 0; i < handles.size(); ++i) {
      if (disk == &slow_syncs) {
        files.Commit({handles[i], 0, 0, {}}, [&](Result<Attributes, Failure> done) { ended += done ? 1 : 0; });
      } else {
        files.Create({{"new-" + std::to_string(i)}, 0644},
                     [&](Result<file::Handle, Failure> done) { ended += done ? 1 : 0; });
      }
    }
    EXPECT_TRUE(RunUntil([&] { return disk->waiting() >= WorkerPool::kWorkers - WorkerPool::kBriefOnly; }));
    for (int i = 0; i < 10; ++i) {
      ASSERT_TRUE(Await<Page>([&](auto handler) { FileClient(other).List({{}, 0, 4096}, std::move(handler)); }));
      const auto opened = Open(other, {"file"});
      ASSERT_TRUE(opened);
      ASSERT_TRUE(Close(other, opened->handle));
    }
    EXPECT_EQ(disk->waiting(), WorkerPool::kWorkers - WorkerPool::kBriefOnly);
    EXPECT_EQ(ended, 0u);
    disk->End();
    EXPECT_TRUE(RunUntil([&] { return ended == handles.size(); }));
  }
}

// --- Raw requests: what no honest client sends ---

TEST_F(FileServiceTest, RawNullAndUnknownProcedures) {
  Client& client = Connect();
  EXPECT_TRUE(Raw(client, 0, {}));
  const auto unknown = Raw(client, 11, {});
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().accept_stat, AcceptStat::kProcUnavail);
  EXPECT_EQ(Raw(client, UINT32_MAX, {}).error().accept_stat, AcceptStat::kProcUnavail);
}

TEST_F(FileServiceTest, RawArgumentsThatAreTruncatedOrTooManyAreGarbage) {
  Client& client = Connect();
  const Path path = {"abc"};
  const std::vector<std::pair<Procedure, std::vector<std::byte>>> calls = {
      {Procedure::kGetAttributes, Encoded(path)},
      {Procedure::kList, Encoded(ListArgs{path, 0, 4096})},
      {Procedure::kOpen, Encoded(path)},
      {Procedure::kRead, Encoded(ReadArgs{1, 0, 1})},
      {Procedure::kClose, Encoded(file::Handle{1})},
      {Procedure::kCreate, Encoded(CreateArgs{path, 0644})},
      {Procedure::kWrite, Encoded(WriteRequest{{1, 0, 0}, AsBytes("data")})},
      {Procedure::kCommit, Encoded(CommitArgs{1, 0, 0, {}})},
      {Procedure::kMakeDirectory, Encoded(MakeDirectoryArgs{path, 0755})},
  };
  for (const auto& [procedure, whole] : calls) {
    for (size_t size = 0; size < whole.size(); size += 4) {
      const auto reply = Raw(client, Number(procedure), ConstBytes(whole).first(size));
      ASSERT_FALSE(reply) << Number(procedure) << " cut to " << size;
      EXPECT_EQ(reply.error().accept_stat, AcceptStat::kGarbageArgs);
    }
    std::vector<std::byte> longer = whole;
    longer.resize(whole.size() + 4);
    const auto reply = Raw(client, Number(procedure), longer);
    ASSERT_FALSE(reply) << Number(procedure);
    EXPECT_EQ(reply.error().accept_stat, AcceptStat::kGarbageArgs);
  }
  for (uint32_t procedure : {0u, 1u}) {
    EXPECT_EQ(Raw(client, procedure, Words({1})).error().accept_stat, AcceptStat::kGarbageArgs);
  }
  EXPECT_TRUE(NamesOnDisk().empty());
}

TEST_F(FileServiceTest, RawHostileNamesAreRefused) {
  Client& client = Connect();
  for (const Path& path : {Path{".."}, Path{"..", "secret"}, Path{"."}, Path{""}, Path{"/etc/passwd"},
                           Path{"a/../../secret"}, Path{std::string("secret\0x", 8)},
                           Path{".stagecoach.0123456789abcdef.part"}, Path(20, std::string(250, 'x'))}) {
    EXPECT_EQ(StatusOf(Raw(client, Number(Procedure::kGetAttributes), Encoded(path))), Status::kBadName);
    EXPECT_EQ(StatusOf(Raw(client, Number(Procedure::kOpen), Encoded(path))), Status::kBadName);
    EXPECT_EQ(StatusOf(Raw(client, Number(Procedure::kList), Encoded(ListArgs{path, 0, 4096}))), Status::kBadName);
    EXPECT_EQ(StatusOf(Raw(client, Number(Procedure::kCreate), Encoded(CreateArgs{path, 0644}))), Status::kBadName);
    EXPECT_EQ(StatusOf(Raw(client, Number(Procedure::kMakeDirectory), Encoded(MakeDirectoryArgs{path, 0755}))),
              Status::kBadName);
  }
  // Too deep for the program's XDR: not even a path.
  EXPECT_EQ(Raw(client, Number(Procedure::kOpen), Encoded(Path(65, "d"))).error().accept_stat,
            AcceptStat::kGarbageArgs);
  EXPECT_EQ(Raw(client, Number(Procedure::kOpen), Encoded(Path{std::string(256, 'x')})).error().accept_stat,
            AcceptStat::kGarbageArgs);
  EXPECT_EQ(Raw(client, Number(Procedure::kOpen), Words({UINT32_MAX})).error().accept_stat, AcceptStat::kGarbageArgs);
}

TEST_F(FileServiceTest, RawLinksPlantedInTheTreeLeadNowhere) {
  fs::create_symlink("../secret", root_ / "out");
  fs::create_symlink("..", root_ / "up");
  Client& client = Connect();
  EXPECT_EQ(StatusOf(Raw(client, Number(Procedure::kOpen), Encoded(Path{"out"}))), Status::kOutside);
  EXPECT_EQ(StatusOf(Raw(client, Number(Procedure::kOpen), Encoded(Path{"up", "secret"}))), Status::kOutside);
  EXPECT_EQ(StatusOf(Raw(client, Number(Procedure::kCreate), Encoded(CreateArgs{{"up", "planted"}, 0644}))),
            Status::kOutside);
  EXPECT_FALSE(fs::exists(base_ / "planted"));
}

TEST_F(FileServiceTest, RawReadsAndWritesOutOfBoundsAreRefused) {
  std::ofstream(root_ / "file") << "hello";
  Client& client = Connect();
  const auto reading = Open(client, {"file"});
  const auto writing = Create(client, {"new"});
  ASSERT_TRUE(reading);
  ASSERT_TRUE(writing);
  const auto read = [&](uint64_t offset, uint32_t count) {
    return StatusOf(Raw(client, Number(Procedure::kRead), Encoded(ReadArgs{reading->handle, offset, count})));
  };
  EXPECT_EQ(read(0, kDataLimit + 1), Status::kLimit);
  EXPECT_EQ(read(0, UINT32_MAX), Status::kLimit);
  EXPECT_EQ(read(UINT64_MAX, 1), Status::kInvalid);
  EXPECT_EQ(read(INT64_MAX, 1), Status::kInvalid);
  EXPECT_EQ(read(5, 100), Status::kOk);
  EXPECT_EQ(read(0, 0), Status::kOk);
  const auto write = [&](uint64_t offset, uint32_t crc, std::string_view data) {
    return StatusOf(
        Raw(client, Number(Procedure::kWrite), Encoded(WriteRequest{{*writing, offset, crc}, AsBytes(data)})));
  };
  EXPECT_EQ(write(0, 1, "data"), Status::kBadChecksum);
  EXPECT_EQ(write(UINT64_MAX, ComputeCrc32c(AsBytes("data")), "data"), Status::kInvalid);
  const std::string large(kDataLimit + 4, 'x');
  EXPECT_EQ(write(0, ComputeCrc32c(AsBytes(large)), large), Status::kLimit);
  EXPECT_EQ(write(0, 0, ""), Status::kOk);
}

TEST_F(FileServiceTest, RawReadWithLessRoomThanAskedForGetsLess) {
  const std::string text = Pattern(kDataLimit);
  std::ofstream(root_ / "file") << text;
  Client& client = Connect();
  const auto reading = Open(client, {"file"});
  ASSERT_TRUE(reading);
  // The Write chunk holds half of what the arguments ask for.
  std::vector<std::byte> room(kDataLimit / 2);
  const auto results = Raw(client, Number(Procedure::kRead), Encoded(ReadArgs{reading->handle, 0, kDataLimit}), room);
  EXPECT_EQ(StatusOf(results), Status::kOk);
  EXPECT_EQ(AsText(room), text.substr(0, room.size()));
  EXPECT_TRUE(client.connected());
}

TEST_F(FileServiceTest, RawReadWithoutAWriteChunkTravelsInTheReply) {
  const std::string text = Pattern(30'000);
  std::ofstream(root_ / "file") << text;
  Client& client = Connect();
  const auto reading = Open(client, {"file"});
  ASSERT_TRUE(reading);
  const auto results = Raw(client, Number(Procedure::kRead), Encoded(ReadArgs{reading->handle, 0, 30'000}));
  ASSERT_EQ(StatusOf(results), Status::kOk);
  XdrReader in{ConstBytes(*results)};
  const auto read = DecodeResult<ReadReply>(in);
  ASSERT_TRUE(in.Finish());
  EXPECT_EQ(AsText(read->data), text);
}

TEST_F(FileServiceTest, RawRandomArgumentsNeverHurt) {
  std::ofstream(root_ / "file") << "hello";
  Prng prng(11);
  Client& client = Connect();
  ASSERT_TRUE(Open(client, {"file"}));
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::byte> arguments(4 * prng.Below(24));
    for (size_t i = 0; i < arguments.size(); ++i) {
      arguments[i] = static_cast<std::byte>(i % 4 == 3 && prng.OneIn(2) ? prng.Below(8)
                                            : prng.OneIn(3)             ? prng.Below(256)
                                                                        : 0);
    }
    const auto reply = Raw(client, static_cast<uint32_t>(prng.Below(12)), arguments);
    if (!reply) {
      ASSERT_EQ(reply.error().kind, CallError::Kind::kRpc) << reply.error().ToString();
    }
  }
  EXPECT_TRUE(client.connected());
  EXPECT_EQ(ReadText(base_ / "secret"), "secret");
  EXPECT_LE(service_->open_handles(), 4u);
}

}  // namespace
}  // namespace stagecoach::rpcrdma::file
