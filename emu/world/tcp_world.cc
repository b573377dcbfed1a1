// The world of a real process: one host, one NIC over every local address.

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/tap/pcapng_writer.h"
#include "emu/world/world.h"

namespace stagecoach::emu {
namespace {

// Lines appear as they happen, from any thread.
class FileTrace final : public TraceSink {
 public:
  explicit FileTrace(std::FILE* file) : file_(file) {}
  ~FileTrace() override { std::fclose(file_); }
  void OnEvent(Instant now, std::string_view component, std::string_view event,
               std::initializer_list<TraceFact> facts) override {
    const std::string line = FormatTraceEvent(now, component, event, facts);
    std::lock_guard lock(mutex_);
    std::fprintf(file_, "%s\n", line.c_str());
    std::fflush(file_);
  }

 private:
  std::mutex mutex_;
  std::FILE* const file_;
};

// The files of a world, if it has any.
struct Records {
  std::unique_ptr<TraceSink> trace;
  std::shared_ptr<CaptureSink> capture;
};

class TcpWorld final : public World {
 public:
  TcpWorld(const WorldOptions& options, Records records)
      : trace_(std::move(records.trace)), host_(Parts(options, std::move(records.capture)), options) {}

  Host& current_host() override { return host_; }
  // Every address of this host is the one NIC's; the fabric says which exist.
  Host* FindHost(const IpEndpoint&) override { return &host_; }

 private:
  HostParts Parts(const WorldOptions& options, std::shared_ptr<CaptureSink> capture) {
    HostParts parts;
    parts.name = "stagecoach0";
    parts.fabric = &fabric_;
    parts.trace = options.trace != nullptr ? options.trace : trace_.get();
    parts.capture = std::move(capture);
    return parts;
  }

  const std::unique_ptr<TraceSink> trace_;
  TcpFabric fabric_;
  Host host_;
};

}  // namespace

Result<std::unique_ptr<World>, std::string> MakeTcpWorld(const WorldOptions& options) {
  Records records;
  if (options.trace == nullptr && !options.trace_path.empty()) {
    std::FILE* file = std::fopen(options.trace_path.c_str(), "we");
    if (file == nullptr) return Err("trace file " + options.trace_path + ": " + std::strerror(errno));
    records.trace = std::make_unique<FileTrace>(file);
  }
  records.capture = options.capture;
  if (records.capture == nullptr && !options.capture_path.empty()) {
    auto writer = PcapNgWriter::Create(options.capture_path, PcapNgWriter::WallClock, [](const std::string& message) {
      std::fprintf(stderr, "stagecoach: %s\n", message.c_str());
    });
    if (!writer) return Err(std::move(writer.error().message));
    records.capture = std::move(*writer);
  }
  return std::make_unique<TcpWorld>(options, std::move(records));
}

}  // namespace stagecoach::emu
