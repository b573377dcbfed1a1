#include "emu/llp/memory/memory_llp.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/safe_copy/safe_copy.h"

namespace stagecoach::emu {
namespace {

// What one turn may throw away, however quickly the peer gives more.
constexpr int kDrainRecords = 64;

}  // namespace

class MemoryChannel : public std::enable_shared_from_this<MemoryChannel> {
 public:
  using Record = std::vector<std::byte>;

  void Join(size_t end, Reactor& loop) {
    std::lock_guard lock(mutex_);
    STAGECOACH_CHECK(!ends_[end].joined);
    ends_[end].joined = true;
    ends_[end].loop = &loop;
  }
  bool AwaitsSecondEnd() const {
    std::lock_guard lock(mutex_);
    return ends_[0].joined && !ends_[0].gone && !ends_[1].joined && !ends_[1].gone;
  }

  // False: there is no room, or nobody any more (IsReset).
  bool Give(size_t from, Record record) {
    std::lock_guard lock(mutex_);
    End& to = ends_[1 - from];
    if (reset_ || to.gone || to.bytes >= MemoryLlp::kRoom) return false;
    to.bytes += record.size();
    to.records.push_back(std::move(record));
    Tell(1 - from);
    return true;
  }
  // What NextRecord says of it.
  RxResult Take(size_t end, Record* record) {
    std::lock_guard lock(mutex_);
    End& own = ends_[end];
    if (own.records.empty()) {
      if (reset_) return {.status = RxStatus::kReset, .error = ECONNRESET};
      return {.status = own.finished ? RxStatus::kEof : RxStatus::kWouldBlock};
    }
    *record = std::move(own.records.front());
    own.records.pop_front();
    own.bytes -= record->size();
    Tell(1 - end);
    return {.status = RxStatus::kReady};
  }
  // Nobody is there to send to.
  bool IsReset(size_t end) const {
    std::lock_guard lock(mutex_);
    return reset_ || ends_[1 - end].gone;
  }

  void Finish(size_t end) {
    std::lock_guard lock(mutex_);
    ends_[1 - end].finished = true;
    Tell(1 - end);
  }
  void Reset() {
    std::lock_guard lock(mutex_);
    reset_ = true;
    Tell(0);
    Tell(1);
  }
  void Leave(size_t end) {
    std::lock_guard lock(mutex_);
    ends_[end].gone = true;
    ends_[1 - end].finished = true;
    Tell(1 - end);
  }

  void Arm(size_t end, bool readable, bool writable) {
    std::lock_guard lock(mutex_);
    ends_[end].want_read = readable;
    ends_[end].want_write = writable;
    Tell(end);
  }
  void SetWatcher(size_t end, ReadyWatcher* watcher) {
    std::unique_lock lock(mutex_);
    End& own = ends_[end];
    own.watcher = watcher;
    if (watcher != nullptr) return;
    own.want_read = own.want_write = false;
    called_.wait(lock, [&] { return !own.caller || *own.caller == std::this_thread::get_id(); });
  }

 private:
  struct End {
    bool joined = false;
    bool gone = false;
    Reactor* loop = nullptr;
    std::deque<Record> records;  // for it
    size_t bytes = 0;            // of them
    bool finished = false;       // there will be no more
    ReadyWatcher* watcher = nullptr;
    bool want_read = false;
    bool want_write = false;
    bool told = false;  // a call of its watcher is on its way
    std::optional<std::thread::id> caller;
  };

  // With mutex_ held, as Tell.
  bool IsReady(size_t end) const {
    const End& own = ends_[end];
    const End& other = ends_[1 - end];
    const bool readable = !own.records.empty() || own.finished || reset_;
    const bool writable = other.bytes < MemoryLlp::kRoom || other.gone || reset_;
    return own.watcher != nullptr && ((own.want_read && readable) || (own.want_write && writable));
  }
  void Tell(size_t end) {
    if (!IsReady(end) || std::exchange(ends_[end].told, true)) return;
    ends_[end].loop->Post([weak = weak_from_this(), end] {
      if (const auto self = weak.lock()) self->Call(end);
    });
  }
  void Call(size_t end) {
    std::unique_lock lock(mutex_);
    End& own = ends_[end];
    own.told = false;
    if (!IsReady(end)) return;
    own.want_read = own.want_write = false;
    own.caller = std::this_thread::get_id();
    ReadyWatcher* const watcher = own.watcher;
    lock.unlock();
    watcher->OnReady();
    lock.lock();
    own.caller.reset();
    called_.notify_all();
  }

  mutable std::mutex mutex_;  // a leaf but for that of a loop
  std::condition_variable called_;
  std::array<End, 2> ends_;
  bool reset_ = false;
};

std::shared_ptr<MemoryChannel> MemoryLlp::NewChannel() {
  return std::make_shared<MemoryChannel>();
}

bool MemoryLlp::AwaitsSecondEnd(const MemoryChannel& channel) {
  return channel.AwaitsSecondEnd();
}

void MemoryLlp::GiveUpSecondEnd(MemoryChannel& channel) {
  channel.Leave(1);
}

void MemoryLlp::Reset(MemoryChannel& channel) {
  channel.Reset();
}

MemoryLlp::MemoryLlp(std::shared_ptr<MemoryChannel> channel, bool first, Reactor& loop, const RecordOptions& options)
    : channel_(std::move(channel)),
      end_(first ? 0 : 1),
      max_record_(options.max_record != 0 ? options.max_record : kLargestRecord) {
  channel_->Join(end_, loop);
}

MemoryLlp::~MemoryLlp() {
  channel_->Leave(end_);
}

// --- Receiving ---

RxResult MemoryLlp::NextRecord(RecordHead* record) {
  if (!has_record_) {
    const RxResult result = channel_->Take(end_, &record_);
    if (result.status != RxStatus::kReady) return result;
    has_record_ = true;
  }
  *record = {ConstBytes(record_).first(std::min(record_.size(), kMaxRecordHead)), record_.size()};
  return {.status = RxStatus::kReady};
}

RxResult MemoryLlp::Place(size_t head_size, std::span<const MutableBytes> destination) {
  ConstBytes from = ConstBytes(record_).subspan(head_size);
  for (const MutableBytes& part : destination) {
    const size_t size = std::min(part.size(), from.size());
    if (!SafeCopy(part.first(size), from.first(size))) return {.status = RxStatus::kMemoryFault};
    from = from.subspan(size);
  }
  ++counters_.rx_records;
  counters_.rx_payload_bytes += record_.size() - head_size;
  counters_.rx_copied_bytes += record_.size() - head_size;
  has_record_ = false;
  return {.status = RxStatus::kReady};
}

Llp::Drained MemoryLlp::Drain() {
  Drained drained;
  for (int i = 0; i < kDrainRecords; ++i) {
    const RxResult result = channel_->Take(end_, &record_);
    if (result.status == RxStatus::kWouldBlock) return drained;
    if (result.status != RxStatus::kReady) {
      drained.end = result;
      return drained;
    }
    drained.any = true;
  }
  drained.more = true;
  return drained;
}

// --- Sending ---

void MemoryLlp::QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) {
  STAGECOACH_CHECK(CanQueue());
  queued_.push_back({{header.begin(), header.end()}, {payload.begin(), payload.end()}, cookie});
}

TxResult MemoryLlp::Flush(MemoryPort& memory) {
  for (; !queued_.empty(); queued_.pop_front()) {
    const Queued& next = queued_.front();
    std::vector<std::byte> record = next.header;
    for (const TxPart& part : next.payload) {
      const size_t at = record.size();
      record.resize(at + part.size());
      const MutableBytes into = MutableBytes(record).subspan(at);
      if (!part.by_key) {
        if (!SafeCopy(into, part.bytes)) {
          return {.status = TxStatus::kMemoryFault, .memory_fault = MemoryFault::kUnmapped, .cookie = next.cookie};
        }
        continue;
      }
      const auto pin = memory.Pin(part.key, part.address, part.length, part.access);
      if (!pin) return {.status = TxStatus::kMemoryFault, .memory_fault = pin.error(), .cookie = next.cookie};
      if (!SafeCopy(into, pin->bytes())) {
        return {.status = TxStatus::kMemoryFault, .memory_fault = MemoryFault::kUnmapped, .cookie = next.cookie};
      }
    }
    const size_t size = record.size();
    if (!channel_->Give(end_, std::move(record))) {
      if (channel_->IsReset(end_)) return {.status = TxStatus::kReset, .error = ECONNRESET};
      return {.status = TxStatus::kWouldBlock};
    }
    sent_.push_back(uint64_t{next.cookie});
    sent_bytes_ += size;
    ++counters_.tx_records;
    counters_.tx_payload_bytes += size - next.header.size();
    counters_.tx_copied_bytes += size - next.header.size();
  }
  return {};
}

bool MemoryLlp::TakeSent(uint64_t* cookie) {
  if (sent_.empty()) return false;
  *cookie = sent_.front();
  sent_.pop_front();
  return true;
}

// --- Waiting and ending ---

void MemoryLlp::Arm(bool readable, bool writable) {
  channel_->Arm(end_, readable, writable);
}

void MemoryLlp::SetWatcher(ReadyWatcher* watcher) {
  channel_->SetWatcher(end_, watcher);
}

void MemoryLlp::Shutdown() {
  channel_->Finish(end_);
}

void MemoryLlp::Abort() {
  channel_->Reset();
}

}  // namespace stagecoach::emu
