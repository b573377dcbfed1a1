// nfs3_check NFS MOUNT EXPORT FOLDER: our NFSv3 client against somebody else's server (Linux knfsd in ./dev interop).
//
// NFS and MOUNT are HOST:PORT, the first for RPC-over-RDMA, the second for the MOUNT service on TCP. EXPORT is what the
// server exports; its folder `made` is expected to be as tests/interop/guest/nfs3.sh makes it. What is written goes
// into new folder "NAME" of the export, and a copy of it into FOLDER/NAME, for somebody at the server to compare.
//
// Every procedure, and data and paths at sizes that make each kind of chunk; what was asked for is compared with what
// came, and with how it travelled. With --restart the server is restarted under load, by somebody who waits for that.
// One line for each step, of which nfs3_table.py makes a table; exit status 0 when all passed.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <asio/connect.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "base/cursor.h"
#include "base/prng.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/session.h"
#include "rpcrdma/ulb/nfs3/mount.h"
#include "rpcrdma/ulb/nfs3/nfs3_client.h"

namespace {

using namespace stagecoach;                 // NOLINT(google-build-using-namespace): a program, not a header
using namespace stagecoach::rpcrdma;        // NOLINT(google-build-using-namespace)
using namespace stagecoach::rpcrdma::nfs3;  // NOLINT(google-build-using-namespace)

struct HostPort {
  std::string host;
  std::string port;
};

std::optional<HostPort> ParseHostPort(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == text.size()) return std::nullopt;
  return HostPort{text.substr(0, colon), text.substr(colon + 1)};
}

// One call of MOUNT over TCP: one record of one fragment each way (RFC 5531 section 11).
Result<FileHandle, std::string> Mount(const HostPort& server, const std::string& path, const OpaqueAuth& credentials) {
  constexpr uint32_t kLastFragment = 0x80000000;
  constexpr uint32_t kReplyMax = 65536;
  std::vector<std::byte> call(2048);
  XdrWriter out(MutableBytes(call).subspan(4));
  EncodeCall({.xid = 1, .prog = kMountProgram, .vers = kMountVersion, .proc = kMountMnt, .cred = credentials}, out);
  EncodeMountArgs(out, path);
  if (!out.ok()) return Err<std::string>("the path is too long");
  const auto size = static_cast<uint32_t>(out.written().size());
  ByteWriter(call).U32(kLastFragment | size);
  call.resize(4 + size);

  asio::io_context context;
  asio::ip::tcp::socket socket(context);
  asio::error_code error;
  const auto addresses = asio::ip::tcp::resolver(context).resolve(server.host, server.port, error);
  if (!error) asio::connect(socket, addresses, error);
  if (!error) asio::write(socket, asio::buffer(call), error);
  std::vector<std::byte> reply(4);
  if (!error) asio::read(socket, asio::buffer(reply), error);
  if (error) return Err(error.message());
  const uint32_t mark = ByteReader(reply).U32();
  if ((mark & kLastFragment) == 0 || (mark & ~kLastFragment) > kReplyMax) {
    return Err<std::string>("a reply of several fragments, or too long");
  }
  reply.resize(mark & ~kLastFragment);
  asio::read(socket, asio::buffer(reply), error);
  if (error) return Err(error.message());

  XdrReader in{ConstBytes(reply)};
  const auto header = DecodeReply(in);
  if (!header) return Err(ToString(header.error()));
  if (!header->success()) return Err(ToString(*header));
  const auto mounted = DecodeMountResult(in);
  if (const auto end = in.Finish(); !end) return Err(ToString(end.error()));
  if (!mounted) return Err(ToString(mounted.error()));
  return mounted->root;
}

// Bytes that say which file and which place in it they are of.
std::vector<std::byte> Pattern(uint64_t seed, size_t size) {
  Prng prng(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(prng.Below(256));
  return bytes;
}

// The content of made/numbers: `seq 1 100000`.
std::string Numbers() {
  std::string text;
  for (int i = 1; i <= 100000; ++i) text += std::to_string(i) + "\n";
  return text;
}

// Calls as they are sent: which connections each XID went by, and how many were without a reply at a time.
class SentCalls final : public TraceSink {
 public:
  void OnEvent(Instant, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override {
    if (event != "call.sent") return;
    if (const auto* xid = FindFact<uint64_t>(facts, "xid")) connections_[*xid].emplace(component);
    if (const auto* count = FindFact<uint64_t>(facts, "in_flight")) most_at_a_time_ = std::max(most_at_a_time_, *count);
  }

  uint64_t most_at_a_time() const { return most_at_a_time_; }
  size_t xids() const { return connections_.size(); }
  size_t xids_sent_again() const {
    return static_cast<size_t>(
        std::ranges::count_if(connections_, [](const auto& sent) { return sent.second.size() > 1; }));
  }

 private:
  std::map<uint64_t, std::set<std::string, std::less<>>> connections_;
  uint64_t most_at_a_time_ = 0;
};

class Check {
 public:
  struct Options {
    HostPort nfs;
    HostPort mount;
    std::string export_path;
    std::filesystem::path folder;
    std::string name;
    std::filesystem::path restart;  // empty: no such step
    uint32_t inline_threshold = 4096;
    bool memory_windows = true;
  };

  explicit Check(Options options)
      : options_(std::move(options)),
        credentials_(*MakeAuthSys({.machine_name = "nfs3_check"})),
        client_(loop_, MakeOptions(&sent_)),
        files_(client_, credentials_) {}

  bool Run() {
    Step("mount", [&] {
      export_ = Unwrap(Mount(options_.mount, options_.export_path, credentials_), "MOUNT");
      return fmt::format("handle of {} bytes by MOUNT over TCP", export_.size());
    });
    if (failed_ > 0) return false;
    Step("connect", [&] {
      Connect(client_);
      Unwrap(Await<void>([&](auto done) { files_.Null(std::move(done)); }), "NULL");
      return fmt::format("{} credits", client_.stats().credits_granted);
    });
    if (failed_ > 0) return false;
    Step("file system", [&] { return FileSystem(); });
    Step("tree", [&] { return Tree(); });
    if (failed_ > 0) return false;
    // None so near to an inline threshold that the rest of a message matters.
    constexpr size_t kFiles[] = {0, 1, 3, 100, 3000, 3999, 4096, 5001, 65535, 131072, 300001};
    for (const size_t size : kFiles) {
      Step(fmt::format("file of {}", size), [&] { return File(size); });
    }
    Step("read what was there", [&] { return ReadMade(); });
    Step("end of file", [&] { return EndOfFile(); });
    Step("list 500 entries", [&] { return ListMade(); });
    constexpr size_t kPaths[] = {1, 7, 500, 1023, 4000};
    for (const size_t size : kPaths) {
      Step(fmt::format("link to {} bytes", size), [&] { return SymbolicLink(size); });
    }
    Step("access control list", [&] { return AccessControlList(); });
    Step("64 at a time", [&] { return ManyAtATime(); });
    Step("without a binding", [&] { return WithoutBinding(); });
    Step("errors", [&] { return Errors(); });
    Step("invalidation", [&] { return Invalidation(); });
    // Ends the connection of all the others.
    if (!options_.restart.empty()) {
      Step("restart under load", [&] { return RestartUnderLoad(); });
    }
    return failed_ == 0;
  }

 private:
  // What Linux's server grants.
  static constexpr size_t kAtATime = 64;

  ClientOptions MakeOptions(TraceSink* trace = nullptr) const {
    ClientOptions options;
    options.trace = trace;
    options.inline_threshold = options_.inline_threshold;
    options.memory_windows = options_.memory_windows;
    return options;
  }

  void Step(const std::string& name, const std::function<std::string()>& run) {
    wrong_.clear();
    const std::string detail = run();
    if (!ok()) ++failed_;
    fmt::print("{:<22} {:<7} {}\n", name, ok() ? "passed" : "FAILED", ok() ? detail : wrong_);
    std::fflush(stdout);
  }

  // Of a step, the first thing that is wrong is kept; what comes after it means nothing.
  bool ok() const { return wrong_.empty(); }
  void Require(bool condition, const std::string& what) {
    if (!condition && ok()) wrong_ = what;
  }
  template <typename T, typename E>
  T Unwrap(Result<T, E> result, const std::string& what) {
    if (result) {
      if constexpr (!std::is_void_v<T>) return std::move(*result);
    } else if constexpr (std::is_same_v<E, std::string>) {
      Require(false, what + ": " + result.error());
    } else {
      Require(false, what + ": " + result.error().message);
    }
    return T();
  }

  void Connect(Client& client) {
    std::optional<Result<void, CallError>> outcome;
    client.Connect(options_.nfs.host, Port(),
                   [&](Result<void, CallError> result) { outcome.emplace(std::move(result)); });
    while (!outcome) loop_.RunOnce();
    Unwrap(std::move(*outcome), "connect");
  }

  // Every call ends, at the latest with its timeout. `look` sees the result while its views are valid.
  template <typename T>
  Result<T, Failure> Await(const std::function<void(Nfs3Client::Handler<T>)>& start,
                           const std::function<void(const std::conditional_t<std::is_void_v<T>, int, T>&)>& look = {}) {
    std::optional<Result<T, Failure>> outcome;
    start([&](Result<T, Failure> result) {
      if constexpr (!std::is_void_v<T>) {
        if (look && result) look(*result);
      }
      outcome.emplace(std::move(result));
    });
    while (!outcome) loop_.RunOnce();
    return std::move(*outcome);
  }

  FileHandle Find(const FileHandle& directory, const std::string& name) {
    return Unwrap(Await<Found>([&](auto done) {
                    files_.Lookup({directory, name}, std::move(done));
                  }),
                  "LOOKUP " + name)
        .object;
  }
  FileHandle MakeDirectory(const FileHandle& where, const std::string& name) {
    const auto made = Unwrap(Await<Created>([&](auto done) {
                               files_.MakeDirectory({{where, name}, {.mode = 0755}}, std::move(done));
                             }),
                             "MKDIR " + name);
    return made.object ? *made.object : Find(where, name);
  }
  FileHandle CreateFile(const FileHandle& where, const std::string& name) {
    const auto made =
        Unwrap(Await<Created>([&](auto done) {
                 files_.Create({.where = {where, name}, .how = CreateArgs::How::kGuarded, .attributes = {.mode = 0644}},
                               std::move(done));
               }),
               "CREATE " + name);
    return made.object ? *made.object : Find(where, name);
  }
  Attributes AttributesOf(const FileHandle& object) {
    return Unwrap(Await<Attributes>([&](auto done) { files_.GetAttributes(object, std::move(done)); }), "GETATTR");
  }
  // Reads `size` bytes from `offset`, in one call; what came, and whether it was said to be the end.
  std::pair<std::vector<std::byte>, bool> ReadOnce(Nfs3Client& files, const FileHandle& file, uint64_t offset,
                                                   size_t size) {
    // With a guard behind it.
    std::vector<std::byte> into(size + 16, std::byte{0x77});
    std::vector<std::byte> data;
    const auto read = Unwrap(
        Await<ReadData>([&](auto done) { files.Read(file, offset, MutableBytes(into).first(size), std::move(done)); },
                        [&](const ReadData& result) { data.assign(result.data.begin(), result.data.end()); }),
        "READ");
    for (size_t i = size; i < into.size(); ++i) Require(into[i] == std::byte{0x77}, "READ wrote behind its buffer");
    return {std::move(data), read.end};
  }
  std::vector<std::byte> ReadAll(Nfs3Client& files, const FileHandle& file, size_t step) {
    std::vector<std::byte> whole;
    while (ok()) {
      const auto [data, end] = ReadOnce(files, file, whole.size(), step);
      whole.insert(whole.end(), data.begin(), data.end());
      if (end) break;
      Require(!data.empty(), "READ of nothing, and not the end");
    }
    return whole;
  }
  void WriteAll(const FileHandle& file, ConstBytes data, size_t step) {
    std::optional<Verifier> verifier;
    for (size_t done = 0; done < data.size() && ok();) {
      const size_t size = std::min(step, data.size() - done);
      const auto written =
          Unwrap(Await<Written>([&](auto handler) {
                   files_.Write({file, done, Stable::kUnstable, data.subspan(done, size)}, std::move(handler));
                 }),
                 "WRITE");
      Require(written.count > 0, "WRITE of nothing");
      Require(!verifier || *verifier == written.verifier, "the server lost what was written");
      verifier = written.verifier;
      done += written.count;
    }
    const auto committed = Unwrap(Await<Committed>([&](auto done) {
                                    files_.Commit({file, 0, 0}, std::move(done));
                                  }),
                                  "COMMIT");
    Require(!verifier || *verifier == committed.verifier, "the server lost what was written");
  }
  void Expect(const std::string& name, ConstBytes content) {
    std::ofstream(options_.folder / options_.name / name, std::ios::binary)
        << std::string_view(reinterpret_cast<const char*>(content.data()), content.size());
  }

  std::string FileSystem() {
    const auto info = Unwrap(Await<FsInfo>([&](auto done) { files_.GetFsInfo(export_, std::move(done)); }), "FSINFO");
    Require(info.read_max > 0 && info.write_max > 0, "FSINFO allows no data");
    transfer_max_ = std::min({info.read_max, info.write_max, 131072u});
    const auto conf =
        Unwrap(Await<PathConf>([&](auto done) { files_.GetPathConf(export_, std::move(done)); }), "PATHCONF");
    Require(conf.name_max == 255, "names are not of 255 bytes");
    const auto stat = Unwrap(Await<FsStat>([&](auto done) { files_.GetFsStat(export_, std::move(done)); }), "FSSTAT");
    Require(stat.bytes_total >= stat.bytes_free, "more free than there is");
    const auto access = Unwrap(Await<Access>([&](auto done) {
                                 files_.CheckAccess({export_, 0x3f}, std::move(done));
                               }),
                               "ACCESS");
    Require((access.access & 1) != 0, "the export is not readable");
    Require(AttributesOf(export_).type == Type::kDirectory, "the export is no directory");
    return fmt::format("rtmax {} wtmax {}", info.read_max, info.write_max);
  }

  // Names: made, changed, linked, renamed and removed.
  std::string Tree() {
    std::filesystem::create_directories(options_.folder / options_.name);
    root_ = MakeDirectory(export_, options_.name);
    const FileHandle below = MakeDirectory(root_, "below");
    const FileHandle file = CreateFile(root_, "first");
    Unwrap(Await<Changed>([&](auto done) {
             files_.SetAttributes(
                 {.object = file, .attributes = {.mode = 0600, .size = 5000, .modified = SetTime{.time = {86400, 0}}}},
                 std::move(done));
           }),
           "SETATTR");
    const Attributes changed = AttributesOf(file);
    Require(changed.mode == 0600 && changed.size == 5000 && changed.modified == Time{86400, 0}, "SETATTR did not");
    Unwrap(Await<Linked>([&](auto done) { files_.Link({file, {below, "second"}}, std::move(done)); }), "LINK");
    Require(AttributesOf(file).links == 2, "LINK did not");
    Unwrap(Await<Renamed>([&](auto done) {
             files_.Rename({{root_, "first"}, {below, "third"}}, std::move(done));
           }),
           "RENAME");
    Require(Find(below, "third") == Find(below, "second") || AttributesOf(Find(below, "third")).file == changed.file,
            "RENAME moved something else");
    Unwrap(Await<Created>([&](auto done) {
             files_.MakeNode({{below, "pipe"}, Type::kFifo, {}, {}}, std::move(done));
           }),
           "MKNOD");
    Require(AttributesOf(Find(below, "pipe")).type == Type::kFifo, "MKNOD made something else");
    for (const char* name : {"second", "third", "pipe"}) {
      Unwrap(Await<Changed>([&](auto done) { files_.Remove({below, name}, std::move(done)); }), "REMOVE");
    }
    Unwrap(Await<Changed>([&](auto done) { files_.RemoveDirectory({root_, "below"}, std::move(done)); }), "RMDIR");
    Require(client_.stats().calls_inline == client_.stats().calls, "a small call took a chunk");
    return fmt::format("{} calls, all inline", client_.stats().calls);
  }

  std::string File(size_t size) {
    const std::string name = fmt::format("file-{}", size);
    const auto data = Pattern(size, size);
    const FileHandle file = CreateFile(root_, name);
    const auto before = client_.stats();
    WriteAll(file, data, transfer_max_);
    const auto between = client_.stats();
    Require(AttributesOf(file).size == size, "the file has another size");
    Require(ReadAll(files_, file, transfer_max_) == data, "what was read is not what was written");
    const auto after = client_.stats();
    Expect(name, data);
    const uint64_t read_chunks = between.calls_by_read_chunk - before.calls_by_read_chunk;
    const bool by_chunk = size + 200 > options_.inline_threshold;
    Require((read_chunks > 0) == by_chunk, "WRITE travelled otherwise");
    Require(between.calls_long == before.calls_long, "a WRITE went by Position-Zero Read chunk");
    Require(!by_chunk || between.bytes_placed_by_read - before.bytes_placed_by_read == size, "not all data was placed");
    Require(after.bytes_placed_by_write - between.bytes_placed_by_write == size, "READ was not placed");
    Require(after.replies_long == before.replies_long, "a reply came by Reply chunk");
    return fmt::format("WRITE {}, READ by Write chunk", by_chunk ? "by Read chunk" : "inline");
  }

  std::string ReadMade() {
    const std::string expected = Numbers();
    const FileHandle file = Find(Find(export_, "made"), "numbers");
    const auto whole = ReadAll(files_, file, 65533);
    Require(AsText(whole) == expected, "the content is another");
    // A small one comes inline, as no Write chunk is offered for it.
    const uint64_t offered = client_.stats().calls_by_write_chunk;
    const auto [few, end] = ReadOnce(files_, file, 1001, 99);
    Require(AsText(few) == std::string_view(expected).substr(1001, 99) && !end, "99 bytes are others");
    Require(client_.stats().calls_by_write_chunk == offered, "a chunk for 99 bytes");
    return fmt::format("{} bytes", whole.size());
  }

  std::string EndOfFile() {
    const std::string expected = Numbers();
    const FileHandle file = Find(Find(export_, "made"), "numbers");
    const auto [tail, tail_end] = ReadOnce(files_, file, expected.size() - 1237, 70001);
    Require(AsText(tail) == std::string_view(expected).substr(expected.size() - 1237) && tail_end,
            "the tail is another");
    const auto [nothing, nothing_end] = ReadOnce(files_, file, expected.size(), 70001);
    Require(nothing.empty() && nothing_end, "something lies behind the end");
    const auto [beyond, beyond_end] = ReadOnce(files_, file, uint64_t{1} << 40, 5);
    Require(beyond.empty() && beyond_end, "something lies far behind the end");
    return "short, empty, and far beyond";
  }

  std::string ListMade() {
    const FileHandle many = Find(Find(export_, "made"), "many");
    std::set<std::string> expected = {".", ".."};
    for (int i = 1; i <= 500; ++i) expected.insert(fmt::format("entry-{}", i));
    const auto list = [&](uint32_t size, bool plus) {
      std::set<std::string> names;
      DirectoryPage page;
      int pages = 0;
      uint64_t cookie = 0;
      Verifier verifier{};
      do {
        page = plus ? Unwrap(Await<DirectoryPage>([&](auto done) {
                               files_.ReadDirectoryPlus({many, cookie, verifier, size, size}, std::move(done));
                             }),
                             "READDIRPLUS")
                    : Unwrap(Await<DirectoryPage>([&](auto done) {
                               files_.ReadDirectory({many, cookie, verifier, size}, std::move(done));
                             }),
                             "READDIR");
        for (const Entry& entry : page.entries) {
          Require(names.insert(entry.name).second, "an entry came twice: " + entry.name);
          cookie = entry.cookie;
          if (!plus || entry.name[0] == '.') continue;
          Require(entry.attributes && entry.attributes->type == Type::kRegular, "no attributes: " + entry.name);
          Require(entry.handle.has_value(), "no handle: " + entry.name);
        }
        verifier = page.verifier;
        ++pages;
        Require(page.end || !page.entries.empty(), "a page of nothing");
      } while (!page.end && ok());
      Require(names == expected, "the entries are others");
      return pages;
    };
    const auto before = client_.stats();
    const int inline_pages = list(options_.inline_threshold > 2000 ? 2000 : 400, false);
    Require(client_.stats().replies_long == before.replies_long, "a short page took a Reply chunk");
    const int plain = list(32768, false);
    const int plus = list(131072, true);
    Require(client_.stats().replies_long - before.replies_long == static_cast<uint64_t>(plain + plus),
            "a long page took no Reply chunk");
    return fmt::format("READDIR in {} and {} pages, READDIRPLUS in {} by Reply chunk", inline_pages, plain, plus);
  }

  std::string SymbolicLink(size_t size) {
    const std::string name = fmt::format("link-{}", size);
    const std::string path(size, 'l');
    const auto before = client_.stats();
    const auto made = Unwrap(Await<Created>([&](auto done) {
                               files_.MakeSymlink({{root_, name}, {.mode = 0777}, path}, std::move(done));
                             }),
                             "SYMLINK");
    const FileHandle link = made.object ? *made.object : Find(root_, name);
    std::vector<std::byte> into(kPathMax);
    std::string text;
    Unwrap(Await<LinkText>([&](auto done) { files_.ReadLink(link, into, std::move(done)); },
                           [&](const LinkText& result) { text = AsText(result.path); }),
           "READLINK");
    Require(text == path, "the path is another");
    const auto after = client_.stats();
    const bool by_chunk = size + 200 > options_.inline_threshold;
    Require((after.calls_by_read_chunk > before.calls_by_read_chunk) == by_chunk, "SYMLINK travelled otherwise");
    Require(after.calls_by_write_chunk == before.calls_by_write_chunk + 1, "READLINK travelled otherwise");
    Require(after.bytes_placed_by_write == before.bytes_placed_by_write + size, "the path was not placed");
    return fmt::format("SYMLINK {}, READLINK by Write chunk", by_chunk ? "by Read chunk" : "inline");
  }

  // A call and a reply of more than 4096 bytes that nothing may be taken out of: as many entries as Linux's server
  // takes from a client (it refuses 340), with credentials that are as long as it takes them.
  std::string AccessControlList() {
    const FileHandle file = CreateFile(root_, "acl");
    SetAclArgs set{.object = file};
    set.entries.push_back({1, 0, 6});
    for (uint32_t i = 0; i < 320; ++i) set.entries.push_back({2, 1000 + i, i % 8});
    set.entries.push_back({4, 0, 4});
    set.entries.push_back({16, 0, 7});
    set.entries.push_back({32, 0, 4});
    const auto before = client_.stats();
    AuthSys wordy{.machine_name = std::string(64, 'm')};
    for (uint32_t gid = 1; gid <= kAuthSysGidsMax; ++gid) wordy.gids.push_back(gid);
    Nfs3Client files(client_, *MakeAuthSys(wordy));
    Unwrap(Await<AclSet>([&](auto done) { files.SetAcl(set, std::move(done)); }), "SETACL");
    const auto acl = Unwrap(Await<Acl>([&](auto done) { files_.GetAcl({file}, std::move(done)); }), "GETACL");
    const auto named = [](const std::vector<AclEntry>& entries) {
      std::map<uint32_t, uint32_t> users;
      for (const AclEntry& entry : entries) {
        if (entry.tag == 2) users[entry.id] = entry.permissions;
      }
      return users;
    };
    Require(acl.entries.size() == set.entries.size() && named(acl.entries) == named(set.entries),
            "the list is another");
    const auto after = client_.stats();
    Require(after.calls_long == before.calls_long + 1, "SETACL went without Position-Zero Read chunk");
    Require(after.replies_long == before.replies_long + 1, "GETACL came without Reply chunk");
    return "SETACL by Position-Zero Read chunk, GETACL by Reply chunk";
  }

  // 256 READs at once, as many under way as the server grants.
  std::string ManyAtATime() {
    const FileHandle file = CreateFile(root_, "shared");
    const auto data = Pattern(99, 256 * 5000);
    WriteAll(file, data, transfer_max_);
    Expect("shared", data);
    std::vector<std::vector<std::byte>> into(256, std::vector<std::byte>(5000));
    size_t over = 0;
    std::string wrong;
    for (size_t i = 0; i < into.size(); ++i) {
      files_.Read(file, i * 5000, into[i], [&, i](Result<ReadData, Failure> read) {
        ++over;
        if (!read) {
          wrong = read.error().message;
        } else if (!std::ranges::equal(read->data, ConstBytes(data).subspan(i * 5000, 5000))) {
          wrong = fmt::format("READ {} brought other bytes", i);
        }
      });
    }
    Require(client_.outstanding() == into.size(), "not all calls are under way");
    while (over < into.size()) loop_.RunOnce();
    Require(wrong.empty(), wrong);
    Require(sent_.most_at_a_time() == kAtATime, fmt::format("{} calls at a time", sent_.most_at_a_time()));
    return fmt::format("256 READs, {} of them without a reply at a time", sent_.most_at_a_time());
  }

  // A client that does not know the program: everything stays in the messages.
  std::string WithoutBinding() {
    Client client(loop_, MakeOptions());
    Connect(client);
    const FileHandle file = CreateFile(root_, "unbound");
    const auto data = Pattern(7, 60001);
    Expect("unbound", data);
    CallOptions options;
    options.credentials = &credentials_;
    const auto call = [&](Procedure procedure, const std::function<void(XdrWriter&)>& args,
                          const std::function<void(const Reply&)>& look) {
      std::optional<std::string> outcome;
      client.Call({kProgram, kVersion, static_cast<uint32_t>(procedure)}, args, options,
                  [&](Result<Reply, CallError> reply) {
                    if (reply) look(*reply);
                    outcome = reply ? "" : reply.error().ToString();
                  });
      while (!outcome) loop_.RunOnce();
      Require(outcome->empty(), *outcome);
    };
    options.reply_bytes_max = 600;  // of WRITE, and of READ without its data: less than any inline threshold
    call(
        Procedure::kWrite,
        [&](XdrWriter& out) {
          Encode(out, WriteArgs{file, 0, Stable::kFileSync, data});
        },
        [&](const Reply& reply) {
          XdrReader in = reply.results();
          const auto written = DecodeResult<Written>(in);
          Require(in.Finish().has_value() && written && written->count == data.size(), "WRITE failed");
        });
    std::vector<std::byte> into(data.size());
    options.result_buffers = {into};
    call(
        Procedure::kRead,
        [&](XdrWriter& out) {
          Encode(out, ReadArgs{file, 0, static_cast<uint32_t>(into.size())});
        },
        [&](const Reply& reply) {
          XdrReader in = reply.results();
          const auto read = DecodeResult<ReadData>(in);
          Require(in.Finish().has_value() && read && reply.placed_bytes(0) == 0, "READ failed");
          Require(std::ranges::equal(reply.Settle(read->data, 0), data), "other bytes were read");
        });
    const auto stats = client.stats();
    Require(stats.calls_by_read_chunk == 0 && stats.calls_by_write_chunk == 0, "something was placed directly");
    Require(stats.calls_long == 1 && stats.replies_long == 1, "the messages travelled otherwise");
    return "WRITE by Position-Zero Read chunk, READ by Reply chunk";
  }

  std::string Errors() {
    const auto status = [](const auto& result) { return result ? Status::kOk : result.error().status; };
    Require(status(Await<Found>([&](auto done) {
              files_.Lookup({root_, "nobody"}, std::move(done));
            })) == Status::kNoEntry,
            "LOOKUP of nobody");
    Require(status(Await<Created>([&](auto done) {
              files_.Create({.where = {export_, options_.name}, .how = CreateArgs::How::kGuarded}, std::move(done));
            })) == Status::kExists,
            "CREATE of what exists");
    Require(status(Await<Changed>([&](auto done) {
              files_.RemoveDirectory({export_, "made"}, std::move(done));
            })) == Status::kNotEmpty,
            "RMDIR of what is not empty");
    std::vector<std::byte> into(100000);
    Require(status(Await<ReadData>([&](auto done) { files_.Read(root_, 0, into, std::move(done)); })) != Status::kOk,
            "READ of a directory");
    FileHandle broken = root_;
    for (std::byte& byte : broken) byte ^= std::byte{0xff};
    Require(status(Await<Attributes>([&](auto done) { files_.GetAttributes(broken, std::move(done)); })) != Status::kOk,
            "GETATTR of no handle");
    const auto stats = client_.stats();
    Require(stats.errors == 0 && stats.malformed == 0 && stats.unknown_xids == 0, "the connection had errors");
    return fmt::format("typed; {} calls over one connection", stats.calls);
  }

  // Each call of ours exposes memory by one STag, so the server may invalidate them all, if we let it.
  std::string Invalidation() {
    const auto stats = client_.stats();
    Require(stats.registrations > 0, "no memory was exposed");
    Require(
        stats.invalidations_remote == (options_.memory_windows ? stats.registrations : 0),
        fmt::format("{} of {} STags were invalidated by the server", stats.invalidations_remote, stats.registrations));
    return fmt::format("{} of {} STags by the server", stats.invalidations_remote, stats.registrations);
  }

  // A Session has kAtATime calls under way, each followed by another, while the server is restarted, which makes it
  // forget its connections and its replies. All are READs and stable WRITEs: what may be done twice.
  std::string RestartUnderLoad() {
    constexpr size_t kPieces = 100;
    constexpr size_t kPieceSize = 5001;
    constexpr size_t kReplies = 3 * kPieces;  // before the restart, and after it: more than all pieces, twice
    constexpr Duration kRestartMax = 60s;
    const auto data = Pattern(4711, kPieces * kPieceSize);
    const FileHandle source = CreateFile(root_, "restart-source");
    const FileHandle sink = CreateFile(root_, "restart-sink");
    WriteAll(source, data, transfer_max_);
    if (!ok()) return "";
    Expect("restart-source", data);
    Expect("restart-sink", data);

    SentCalls sent;
    SessionOptions options;
    options.client = MakeOptions(&sent);
    options.reconnect.delay_max = 500ms;
    Session session(loop_, options_.nfs.host, Port(), options);
    Nfs3Client files(session, credentials_);

    std::vector<std::vector<std::byte>> into(kAtATime, std::vector<std::byte>(kPieceSize));
    size_t started = 0;
    size_t over = 0;
    bool stop = false;
    std::string wrong;
    std::function<void(size_t)> start;
    const auto end = [&](size_t slot, const std::string& fault) {
      ++over;
      if (wrong.empty()) wrong = fault;
      stop |= !fault.empty();
      if (!stop) start(slot);
    };
    // Each piece is read, then written, then the next; over and over.
    start = [&](size_t slot) {
      const size_t offset = started / 2 % kPieces * kPieceSize;
      const ConstBytes piece = ConstBytes(data).subspan(offset, kPieceSize);
      if (started++ % 2 == 0) {
        std::ranges::fill(into[slot], std::byte{});
        files.Read(source, offset, into[slot], [&end, slot, piece](Result<ReadData, Failure> read) {
          if (!read) return end(slot, "READ: " + read.error().message);
          end(slot, std::ranges::equal(read->data, piece) ? "" : "READ brought other bytes");
        });
      } else {
        files.Write({sink, offset, Stable::kFileSync, piece}, [&end, slot, piece](Result<Written, Failure> written) {
          if (!written) return end(slot, "WRITE: " + written.error().message);
          end(slot, written->count == piece.size() && written->committed == Stable::kFileSync ? "" : "WRITE did less");
        });
      }
    };
    const auto run_until = [&](const std::function<bool()>& condition) {
      while (!stop && !condition()) loop_.RunOnce(20ms);
    };

    for (size_t slot = 0; slot < kAtATime; ++slot) start(slot);
    run_until([&] { return over >= kReplies; });
    std::ofstream(options_.restart).flush();
    const Instant bound = loop_.Now() + kRestartMax;
    run_until([&] { return !std::filesystem::exists(options_.restart) || loop_.Now() >= bound; });
    const size_t over_before = over;
    run_until([&] { return over >= over_before + kReplies; });
    stop = true;
    while (over < started) loop_.RunOnce();  // each ends, at the latest with its timeout

    Require(wrong.empty(), wrong);
    Require(!std::filesystem::exists(options_.restart), "the server was not restarted");
    const SessionStats stats = session.stats();
    Require(stats.lost > 0, "the connection outlived the server");
    Require(sent.xids_sent_again() > 0 && sent.xids_sent_again() <= stats.retransmissions,
            fmt::format("{} retransmissions, of {} XIDs", stats.retransmissions, sent.xids_sent_again()));
    Require(sent.xids() == stats.calls, fmt::format("{} XIDs of {} calls", sent.xids(), stats.calls));
    Require(sent.most_at_a_time() == kAtATime, fmt::format("{} calls at a time", sent.most_at_a_time()));
    Require(ReadAll(files, sink, transfer_max_) == data, "what was written is not there");
    return fmt::format("{} READs and WRITEs of a Session, 64 at a time, {} of them sent again with their XIDs",
                       stats.calls, sent.xids_sent_again());
  }

  uint16_t Port() const { return static_cast<uint16_t>(std::stoi(options_.nfs.port)); }

  const Options options_;
  const OpaqueAuth credentials_;
  AsioLoop loop_;
  SentCalls sent_;
  Client client_;
  Nfs3Client files_;
  FileHandle export_;
  FileHandle root_;
  uint32_t transfer_max_ = 0;
  std::string wrong_;
  int failed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("our NFSv3 client against another server");
  Check::Options options;
  std::string nfs;
  std::string mount;
  bool plain_regions = false;
  app.add_option("NFS", nfs, "host:port of the RPC-over-RDMA service")->required();
  app.add_option("MOUNT", mount, "host:port of the MOUNT service on TCP")->required();
  app.add_option("EXPORT", options.export_path, "what is exported")->required();
  app.add_option("FOLDER", options.folder, "where copies of what was written go")->required();
  app.add_option("--name", options.name, "of the new folder in the export")->required();
  app.add_option("--restart", options.restart, "file to make to have the server restarted; gone when that is done");
  app.add_option("--inline", options.inline_threshold, "inline threshold in bytes");
  app.add_flag("--no-windows", plain_regions, "expose memory by plain regions, which are not invalidated remotely");
  CLI11_PARSE(app, argc, argv);
  options.memory_windows = !plain_regions;
  const auto nfs_address = ParseHostPort(nfs);
  const auto mount_address = ParseHostPort(mount);
  if (!nfs_address || !mount_address) {
    fmt::print(stderr, "nfs3_check: not HOST:PORT: {}\n", nfs_address ? mount : nfs);
    return 2;
  }
  options.nfs = *nfs_address;
  options.mount = *mount_address;
  return Check(options).Run() ? 0 : 1;
}
