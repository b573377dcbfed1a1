// One end of a connection, whichever transport engine it has, over records in memory; for tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "emu/engine/qp_transport.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {

using TestBytes = std::vector<std::byte>;

inline bool SameBytes(ConstBytes a, ConstBytes b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Keeps queued records until the test takes them. By-key payload is read when the record leaves, as a real lower layer
// does.
class RecordQueue final : public RecordSink {
 public:
  struct Record {
    TestBytes header;
    std::vector<TxPart> parts;
    uint64_t cookie = 0;
  };

  explicit RecordQueue(size_t longest) : max_ulpdu(longest) {}

  size_t MaxUlpdu() const override { return max_ulpdu; }
  bool CanQueue() const override { return records.size() < capacity; }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    ASSERT_LE(header.size(), kMaxTxHeader);
    Record record{.header = TestBytes(header.begin(), header.end()),
                  .parts = std::vector<TxPart>(payload.begin(), payload.end()),
                  .cookie = cookie};
    size_t size = header.size();
    for (const TxPart& part : payload) size += part.size();
    ASSERT_LE(size, max_ulpdu);
    records.push_back(std::move(record));
  }

  size_t max_ulpdu;
  size_t capacity = 64;
  std::deque<Record> records;
};

class ReceiveQueue final : public ReceiveSource {
 public:
  const ReceiveWork* TakeReceive() override {
    if (posted.empty()) return nullptr;
    const ReceiveWork* work = posted.front();
    posted.pop_front();
    return work;
  }
  std::deque<const ReceiveWork*> posted;
};

// Everything that an engine needs, and the work given to it. The engine is the derived class's.
class TransportEnd {
 public:
  static ScatterGather Sge(uint32_t key, uint64_t offset, uint32_t length) {
    return {.address = FakeMemory::Address(key) + offset, .length = length, .lkey = key};
  }

  // Work requests live as long as the test.
  const SendWork* Post(SendWork work, std::vector<ScatterGather> sges = {}) {
    lists_.push_back(std::move(sges));
    work.sges = lists_.back();
    work.wr_id = next_wr_id_++;
    work.signaled = true;
    works_.push_back(work);
    engine().Submit(&works_.back());
    return &works_.back();
  }
  const SendWork* PostSend(uint32_t key, uint32_t length) {
    return Post({.opcode = SendOpcode::kSend}, {Sge(key, 0, length)});
  }
  const ReceiveWork* PostReceive(std::vector<ScatterGather> sges) {
    lists_.push_back(std::move(sges));
    receive_works_.push_back({.wr_id = next_wr_id_++, .sges = lists_.back()});
    receives.posted.push_back(&receive_works_.back());
    return &receive_works_.back();
  }
  // A Receive of `size` bytes in a region of its own; returns the key.
  uint32_t PostReceive(uint32_t size) {
    const uint32_t key = memory.Add(size, FakeMemory::kLocalWrite);
    PostReceive({Sge(key, 0, size)});
    return key;
  }

  std::vector<SendCompletion> TakeSends() {
    std::vector<SendCompletion> all;
    for (SendCompletion c; engine().TakeSendCompletion(&c);) all.push_back(c);
    return all;
  }
  std::vector<WorkStatus> TakeSendStatuses() {
    std::vector<WorkStatus> all;
    for (const SendCompletion& c : TakeSends()) all.push_back(c.status);
    return all;
  }
  std::vector<ReceiveCompletion> TakeReceives() {
    std::vector<ReceiveCompletion> all;
    for (ReceiveCompletion c; engine().TakeReceiveCompletion(&c);) all.push_back(c);
    return all;
  }
  std::vector<WorkStatus> TakeReceiveStatuses() {
    std::vector<WorkStatus> all;
    for (const ReceiveCompletion& c : TakeReceives()) all.push_back(c.status);
    return all;
  }

  // The oldest queued record as bytes; tells the engine that it has left. Empty when its memory is gone.
  TestBytes Leave() {
    const RecordQueue::Record record = out.records.front();
    out.records.pop_front();
    TestBytes bytes = record.header;
    for (const TxPart& part : record.parts) {
      if (!part.by_key) {
        bytes.insert(bytes.end(), part.bytes.begin(), part.bytes.end());
        continue;
      }
      const auto pin = memory.Pin(part.key, part.address, part.length, part.access);
      if (!pin) {
        engine().OnTxMemoryFault(record.cookie, pin.error());
        return {};
      }
      bytes.insert(bytes.end(), pin->bytes().begin(), pin->bytes().end());
    }
    engine().OnSent(record.cookie);
    return bytes;
  }
  // Takes a record as the lower layer hands it up, or half of its payload and then no more. False when the record is at
  // fault, or nothing is received any more.
  bool Arrive(ConstBytes record, Instant now, bool whole = true) {
    const RecordHead head{.head = record.first(std::min(record.size(), kMaxRecordHead)), .length = record.size()};
    const auto payload_at = engine().OnRecord(head, now);
    if (!payload_at) return false;
    EXPECT_LE(*payload_at, head.head.size());
    const auto destination = engine().PinDestination();
    if (!destination) return false;
    const size_t total = TotalSize(*destination);
    EXPECT_TRUE(total == 0 || total == record.size() - *payload_at);
    ConstBytes payload = record.subspan(*payload_at);
    if (!whole) payload = payload.first(payload.size() / 2);
    for (const MutableBytes& part : *destination) payload = payload.subspan(CopyBytes(part, payload));
    engine().UnpinDestination();
    EXPECT_EQ(memory.pins(), 0);
    if (whole) engine().OnPlaced(now);
    return true;
  }

  FakeMemory memory;
  ReceiveQueue receives;
  RecordQueue out;
  TraceLog trace;

 protected:
  explicit TransportEnd(size_t max_ulpdu) : out(max_ulpdu) {}
  ~TransportEnd() = default;
  TransportEnd(const TransportEnd&) = delete;
  TransportEnd& operator=(const TransportEnd&) = delete;

  virtual QpTransport& engine() = 0;

 private:
  uint64_t next_wr_id_ = 1;
  std::deque<std::vector<ScatterGather>> lists_;
  std::deque<SendWork> works_;
  std::deque<ReceiveWork> receive_works_;
};

}  // namespace stagecoach::emu
