// The world of a real process: one host, one NIC over every local address; streams are TCP, records go through shared
// memory where they can.

#include <errno.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

#include "base/fork/fork.h"
#include "emu/backend/shm/shm_fabric.h"
#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/tap/pcapng_writer.h"
#include "emu/world/record_file.h"
#include "emu/world/rule_words.h"
#include "emu/world/world.h"

namespace stagecoach::emu {
namespace {

constexpr const char* kDeviceName = "stagecoach0";

void Say(const std::string& message) {
  std::fprintf(stderr, "stagecoach: %s\n", message.c_str());
}

// Lines appear whole and as they happen, from any thread. What cannot be written, or made for want of memory, is lost.
class FileTrace final : public TraceSink {
 public:
  explicit FileTrace(int fd) : fd_(fd) {}
  ~FileTrace() override { CloseDescriptor(fd_); }
  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override {
    std::string line;
    try {
      line = FormatTraceEvent(now, component, event, facts) + "\n";
    } catch (const std::bad_alloc&) {
      return;  // whoever traces goes on
    }
    std::lock_guard lock(mutex_);
    std::string_view left = line;
    while (!left.empty()) {
      const ssize_t written = write(fd_, left.data(), left.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return;
      left.remove_prefix(static_cast<size_t>(written));
    }
  }

 private:
  std::mutex mutex_;
  const int fd_;
};

// Of this process, for people who look at captures of several: "stagecoach0 of rping (4711)".
std::string InterfaceName(const std::string& device) {
  std::string program = program_invocation_short_name;
  for (char& letter : program) {
    if (letter < ' ' || letter > '~') letter = '?';
  }
  return device + " of " + program + " (" + std::to_string(getpid()) + ")";
}

// "capture file" or "trace file" of that name for this process; what is said is said in words.
Result<RecordFile, std::string> OpenFile(const char* kind, const std::string& name, const RecordFileRules& rules) {
  auto file = OpenRecordFile(name, rules);
  if (!file) return Err(std::string(kind) + " " + name + ": " + file.error());
  if (!file->is_first_choice) {
    Say(std::string(kind) + " " + RecordFileName(name) + ": is of another process; this one writes " + file->path);
  }
  return file;
}

// What there is of the first word of `path`, a number; `otherwise` if it cannot be read.
uint32_t NumberIn(const char* path, uint32_t otherwise) {
  uint32_t number = 0;
  return std::ifstream(path) >> number ? number : otherwise;
}

// The limits of the host and of this process.
WorldOptions Within(const WorldOptions& options) {
  // Streams that have said nothing yet leave as many descriptors to the program and its connections.
  constexpr uint32_t kPart = 2;
  WorldOptions bounded = options;
  bounded.cm.backlog_max = NumberIn("/proc/sys/net/core/somaxconn", options.cm.backlog_max);
  rlimit descriptors{};
  if (getrlimit(RLIMIT_NOFILE, &descriptors) == 0) {
    bounded.cm.half_open_max =
        static_cast<uint32_t>(std::min<rlim_t>(options.cm.half_open_max, descriptors.rlim_cur / kPart));
  }
  return bounded;
}

// Where there is one processor, who polls keeps away what it polls for.
TcpFabric::Options FabricOptions(const WorldOptions& options) {
  return {.busy_poll = sysconf(_SC_NPROCESSORS_ONLN) > 1 ? options.busy_poll : Duration::zero()};
}

// Who forbids all but shared memory hears why there is no connection; who asks for more hears of each.
void TellOfChoice(bool verbose, const IpEndpoint& local, const IpEndpoint& remote, const Carriage& carriage) try {
  const bool is_refused = carriage.by == "nothing";
  if (!is_refused && !verbose) return;
  const std::string between = "from " + local.ToString() + " to " + remote.ToString();
  const std::string why = carriage.why.empty() ? "" : ": " + std::string(carriage.why);
  if (is_refused) {
    Say("no connection " + between + " by shared memory" + why);
  } else {
    Say("connection " + between + " is carried by " + std::string(carriage.by) + why);
  }
} catch (const std::bad_alloc&) {
  // What is said is lost, and nothing else.
}

ShmFabric::Options ChoiceOptions(const WorldOptions& options) {
  return {.backend = options.backend,
          .users = options.shm_users,
          .payload = options.shm_payload,
          .on_choice = [verbose = options.verbose](const IpEndpoint& local, const IpEndpoint& remote,
                                                   const Carriage& carriage) {
            TellOfChoice(verbose, local, remote, carriage);
          }};
}

// The files of a world, if it has any.
struct Records {
  std::unique_ptr<TraceSink> trace;
  std::shared_ptr<CaptureSink> capture;
};

class TcpWorld final : public World {
 public:
  TcpWorld(const WorldOptions& options, Records records)
      : trace_(std::move(records.trace)),
        tcp_(FabricOptions(options)),
        fabric_(tcp_, ChoiceOptions(options)),
        host_(Parts(options, std::move(records.capture)), Within(options)) {}

  Host& current_host() override { return host_; }
  // Every address of this host is the one NIC's; the fabric says which exist.
  Host* FindHost(const IpEndpoint&) override { return &host_; }

 private:
  HostParts Parts(const WorldOptions& options, std::shared_ptr<CaptureSink> capture) {
    HostParts parts;
    parts.name = kDeviceName;
    parts.fabric = &fabric_;
    parts.trace = options.trace != nullptr ? options.trace : trace_.get();
    parts.capture = std::move(capture);
    parts.complain = Say;
    if (!options.rules.empty()) parts.injections = PlanThatSpeaks(options.rules);
    return parts;
  }

  const std::unique_ptr<TraceSink> trace_;
  TcpFabric tcp_;
  ShmFabric fabric_;
  Host host_;
};

}  // namespace

Result<std::unique_ptr<World>, std::string> MakeTcpWorld(const WorldOptions& options) {
  if (std::string why = WhyNoRules(options.profile, options.rules); !why.empty()) return Err(std::move(why));
  Records records;
  if (options.trace == nullptr && !options.trace_path.empty()) {
    const auto file = OpenFile("trace file", options.trace_path, {});
    if (!file) return Err(file.error());
    records.trace = std::make_unique<FileTrace>(file->fd);
  }
  records.capture = options.capture;
  if (records.capture == nullptr && !options.capture_path.empty()) {
    RecordFileRules rules;
    rules.mode = 0600;  // it holds what was transferred
    rules.may_block = false;
    rules.is_blank = PcapNgWriter::HasNoPackets;
    const auto file = OpenFile("capture file", options.capture_path, rules);
    if (!file) return Err(file.error());
    auto writer = PcapNgWriter::Take(file->fd, file->path, InterfaceName(kDeviceName), PcapNgWriter::WallClock, Say);
    if (!writer) return Err(std::move(writer.error().message));
    records.capture = std::move(*writer);
  }
  return std::make_unique<TcpWorld>(options, std::move(records));
}

}  // namespace stagecoach::emu
