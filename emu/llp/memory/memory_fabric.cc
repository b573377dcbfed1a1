#include "emu/llp/memory/memory_fabric.h"

#include <array>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "emu/fabric/stream.h"
#include "emu/llp/llp_over.h"
#include "emu/llp/memory/memory_llp.h"

namespace stagecoach::emu {
namespace {

struct Meetings {
  std::mutex mutex;
  // Channels whose first end waits for the second, by how that one names the two: its own address first.
  std::map<std::pair<std::string, std::string>, std::weak_ptr<MemoryChannel>> waiting;
  std::vector<std::weak_ptr<MemoryChannel>> all;
};

Meetings& TheMeetings() {
  static Meetings meetings;
  return meetings;
}

// The end that was there first. It keeps the stream of the handshake, but for one thing: to learn that the second end
// will never come. Where it has come, the end of the stream means nothing.
class FirstEnd final : public LlpOver, private ReadyWatcher {
 public:
  FirstEnd(std::shared_ptr<MemoryChannel> channel, std::unique_ptr<Stream> stream, Reactor& loop,
           const RecordOptions& options)
      : LlpOver(std::make_unique<MemoryLlp>(channel, /*first=*/true, loop, options)),
        channel_(std::move(channel)),
        stream_(std::move(stream)) {
    stream_->SetWatcher(this);
    stream_->Arm(true, false);
  }
  ~FirstEnd() override { stream_->SetWatcher(nullptr); }

 private:
  void OnReady() override {
    if (!MemoryLlp::AwaitsSecondEnd(*channel_)) return;
    std::array<std::byte, 4096> nobody_looks_at;
    const MutableBytes into(nobody_looks_at);
    const IoStatus status = stream_->Read({&into, 1}).status;
    if (status == IoStatus::kEof || status == IoStatus::kError) return MemoryLlp::GiveUpSecondEnd(*channel_);
    stream_->Arm(true, false);
  }

  const std::shared_ptr<MemoryChannel> channel_;
  const std::unique_ptr<Stream> stream_;
};

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
  auto llp = std::make_unique<FirstEnd>(channel, std::move(stream), loop(), options);
  meetings.waiting[{remote, local}] = channel;
  std::erase_if(meetings.all, [](const auto& each) { return each.expired(); });
  meetings.all.push_back(channel);
  return llp;
}

void MemoryFabric::ResetAll() {
  Meetings& meetings = TheMeetings();
  std::lock_guard lock(meetings.mutex);
  for (const auto& each : meetings.all) {
    if (const auto channel = each.lock()) MemoryLlp::Reset(*channel);
  }
}

}  // namespace stagecoach::emu
