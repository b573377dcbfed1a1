// The world of a real process: one host, one NIC over every local address.

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "emu/backend/tcp/tcp_fabric.h"
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

std::unique_ptr<TraceSink> OpenTrace(const std::string& path) {
  if (path.empty()) return nullptr;
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr) {
    std::fprintf(stderr, "stagecoach: trace file %s: %s; no trace\n", path.c_str(), std::strerror(errno));
    return nullptr;
  }
  return std::make_unique<FileTrace>(file);
}

class TcpWorld final : public World {
 public:
  explicit TcpWorld(const WorldOptions& options)
      : trace_file_(options.trace != nullptr ? nullptr : OpenTrace(options.trace_path)),
        host_(Parts(options), options) {}

  Host& current_host() override { return host_; }
  Host* FindHost(const IpEndpoint&) override { return &host_; }

 private:
  HostParts Parts(const WorldOptions& options) {
    HostParts parts;
    parts.name = "stagecoach0";
    parts.fabric = &fabric_;
    parts.trace = options.trace != nullptr ? options.trace : trace_file_.get();
    return parts;
  }

  const std::unique_ptr<TraceSink> trace_file_;
  TcpFabric fabric_;
  Host host_;
};

}  // namespace

std::unique_ptr<World> MakeTcpWorld(const WorldOptions& options) { return std::make_unique<TcpWorld>(options); }

}  // namespace stagecoach::emu
