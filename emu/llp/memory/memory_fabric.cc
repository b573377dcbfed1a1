#include "emu/llp/memory/memory_fabric.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "emu/llp/memory/memory_llp.h"

namespace stagecoach::emu {
namespace {

// Channels whose first end waits for the second, by how that one names the two: its own address first.
struct Meetings {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, std::weak_ptr<MemoryChannel>> waiting;
};

Meetings& TheMeetings() {
  static Meetings meetings;
  return meetings;
}

}  // namespace

std::unique_ptr<Llp> MemoryFabric::RecordsOver(std::unique_ptr<Stream> stream, const RecordOptions& options) {
  const std::string local = stream->local().ToString();
  const std::string remote = stream->remote().ToString();
  if (local == remote) return FabricOver::RecordsOver(std::move(stream), options);
  Meetings& meetings = TheMeetings();
  std::lock_guard lock(meetings.mutex);
  const auto found = meetings.waiting.find({local, remote});
  if (found != meetings.waiting.end()) {
    std::shared_ptr<MemoryChannel> channel = found->second.lock();
    meetings.waiting.erase(found);
    if (channel != nullptr && MemoryLlp::AwaitsSecondEnd(*channel)) {
      return std::make_unique<MemoryLlp>(std::move(channel), /*first=*/false, loop(), options);
    }
  }
  std::shared_ptr<MemoryChannel> channel = MemoryLlp::NewChannel();
  auto llp = std::make_unique<MemoryLlp>(channel, /*first=*/true, loop(), options);
  meetings.waiting[{remote, local}] = channel;
  return llp;
}

}  // namespace stagecoach::emu
