// Two IbTransports back to back over records in memory, in virtual time, with a fate for each record; for tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/cursor.h"
#include "base/trace.h"
#include "emu/engine/ib_transport.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {

using TestBytes = std::vector<std::byte>;

inline TestBytes Pattern(size_t size, uint32_t seed) {
  TestBytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed * 37 + i * 11 + (i >> 8) * 3);
  return bytes;
}

inline bool SameBytes(ConstBytes a, ConstBytes b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

inline wire::IbHeader HeaderOf(ConstBytes record) {
  const auto header = wire::DecodeIb(record, record.size());
  EXPECT_TRUE(header.has_value());
  return header.value_or(wire::IbHeader{});
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

  size_t MaxUlpdu() const override { return 4096 + wire::kMaxIbHeaderSize; }
  bool CanQueue() const override { return records.size() < capacity; }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    ASSERT_LE(header.size(), kMaxTxHeader);
    records.push_back({.header = TestBytes(header.begin(), header.end()),
                       .parts = std::vector<TxPart>(payload.begin(), payload.end()),
                       .cookie = cookie});
  }

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

constexpr uint32_t kAllAccess = ib_access::kRemoteWrite | ib_access::kRemoteRead | ib_access::kRemoteAtomic;

inline IbOptions TestOptions() {
  return {.receive_psn = 100,
          .mtu = 256,
          .send_psn = 100,
          .access = kAllAccess,
          .max_rd_atomic = 4,
          .max_dest_rd_atomic = 4,
          .min_rnr_timer = 12};
}

// One end with everything it needs.
class IbEnd {
 public:
  IbEnd(IbOptions options, uint32_t own_qp, uint32_t peer_qp, std::string name)
      : transport(Numbered(options, own_qp, peer_qp), memory, receives, &trace, std::move(name)) {}

  ScatterGather Sge(uint32_t key, uint64_t offset, uint32_t length) {
    return {.address = FakeMemory::Address(key) + offset, .length = length, .lkey = key};
  }
  static uint64_t At(uint32_t key, uint64_t offset = 0) { return FakeMemory::Address(key) + offset; }
  uint32_t AddPattern(size_t size, uint32_t seed, uint8_t rights = FakeMemory::kAll) {
    const uint32_t key = memory.Add(size, rights);
    CopyBytes(memory.Bytes(key), Pattern(size, seed));
    return key;
  }

  // Work requests live as long as the test.
  const SendWork* Post(SendWork work, std::vector<ScatterGather> sges = {}) {
    lists_.push_back(std::move(sges));
    work.sges = lists_.back();
    work.wr_id = next_wr_id_++;
    work.signaled = true;
    works_.push_back(work);
    transport.Submit(&works_.back());
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
    for (SendCompletion c; transport.TakeSendCompletion(&c);) all.push_back(c);
    return all;
  }
  std::vector<WorkStatus> TakeSendStatuses() {
    std::vector<WorkStatus> all;
    for (const SendCompletion& c : TakeSends()) all.push_back(c.status);
    return all;
  }
  std::vector<ReceiveCompletion> TakeReceives() {
    std::vector<ReceiveCompletion> all;
    for (ReceiveCompletion c; transport.TakeReceiveCompletion(&c);) all.push_back(c);
    return all;
  }
  std::vector<WorkStatus> TakeReceiveStatuses() {
    std::vector<WorkStatus> all;
    for (const ReceiveCompletion& c : TakeReceives()) all.push_back(c.status);
    return all;
  }

  bool Fill(Instant now, size_t budget = 1000) {
    transport.BeginTurn(now);
    return transport.FillTx(out, budget);
  }
  // The oldest queued record as bytes; tells the transport that it has left. Empty when its memory is gone.
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
        transport.OnTxMemoryFault(record.cookie, pin.error());
        return {};
      }
      bytes.insert(bytes.end(), pin->bytes().begin(), pin->bytes().end());
    }
    transport.OnSent(record.cookie);
    return bytes;
  }
  // Takes a record as the lower layer hands it up. False when nothing is received any more.
  bool Arrive(ConstBytes record, Instant now, bool whole = true) {
    const RecordHead head{.head = record.first(std::min(record.size(), kMaxRecordHead)), .length = record.size()};
    const auto payload_at = transport.OnRecord(head, now);
    if (!payload_at) return false;
    EXPECT_LE(*payload_at, head.head.size());
    const auto destination = transport.PinDestination();
    if (!destination) return false;
    const size_t total = TotalSize(*destination);
    EXPECT_TRUE(total == 0 || total == record.size() - *payload_at);
    ConstBytes payload = record.subspan(*payload_at);
    if (!whole) payload = payload.first(payload.size() / 2);
    for (const MutableBytes& part : *destination) payload = payload.subspan(CopyBytes(part, payload));
    transport.UnpinDestination();
    EXPECT_EQ(memory.pins(), 0);
    if (whole) transport.OnPlaced(now);
    return true;
  }
  bool Arrive(wire::IbHeader header, Instant now, ConstBytes payload = {}) {
    header.pad = wire::IbPad(payload.size());
    TestBytes record(header.EncodedSize() + payload.size());
    ByteWriter writer(record);
    header.Encode(writer);
    writer.Bytes(payload);
    return Arrive(record, now);
  }

  FakeMemory memory;
  ReceiveQueue receives;
  RecordQueue out;
  TraceLog trace;
  IbTransport transport;

 private:
  static IbOptions Numbered(IbOptions options, uint32_t own_qp, uint32_t peer_qp) {
    options.qp_number = own_qp;
    options.destination_qp = peer_qp;
    return options;
  }
  uint64_t next_wr_id_ = 1;
  std::deque<std::vector<ScatterGather>> lists_;
  std::deque<SendWork> works_;
  std::deque<ReceiveWork> receive_works_;
};

enum class Fate : uint8_t {
  kDeliver,
  kDrop,
  kDuplicate,  // twice in a row
  kRepeat,     // and once more after the next record
  kHold,       // only after the next record
  kCut,        // the carrier ends within this record, and another takes its place
};

// What a transport sends, in one direction.
struct IbLink {
  std::function<Fate(size_t number, ConstBytes record)> fate;
  size_t sent = 0;
  std::deque<TestBytes> held;
  std::vector<TestBytes> log;  // every record that was sent
};

class IbPair {
 public:
  static constexpr uint32_t kQpA = 0x11;
  static constexpr uint32_t kQpB = 0x000022;

  explicit IbPair(IbOptions of_a = TestOptions(), IbOptions of_b = TestOptions())
      : a(of_a, kQpA, kQpB, "a"), b(of_b, kQpB, kQpA, "b") {
    Carrier(true);
    a.transport.StartSending();
    b.transport.StartSending();
  }

  void Carrier(bool up) {
    if (!up) {
      for (IbEnd* end : {&a, &b}) end->out.records.clear();
      for (IbLink* link : {&from_a, &from_b}) link->held.clear();
    }
    a.transport.OnCarrier(up, now);
    b.transport.OnCarrier(up, now);
  }

  // Moves records both ways, and time on when nothing moves, until nothing will. False: `steps` did not suffice.
  bool Run(int steps = 100000) {
    while (steps-- > 0) {
      if (Turn()) continue;
      const std::optional<Instant> next = NextDeadline();
      if (!next) return true;
      now = std::max(now, *next);
      a.transport.OnDeadline(now);
      b.transport.OnDeadline(now);
    }
    return false;
  }
  // The same without letting time pass.
  void Exchange() {
    while (Turn()) {
    }
  }
  bool Turn() {
    const bool filled_a = a.Fill(now);
    const bool filled_b = b.Fill(now);
    const bool moved_to_b = Deliver(a, from_a, b);
    const bool moved_to_a = Deliver(b, from_b, a);
    return filled_a || filled_b || moved_to_b || moved_to_a;
  }
  std::optional<Instant> NextDeadline() const {
    std::optional<Instant> next;
    for (const IbTransport* transport : {&a.transport, &b.transport}) {
      const auto due = transport->Deadline();
      if (due) next = std::min(next.value_or(Instant::max()), *due);
    }
    return next;
  }

  Instant now{};
  IbEnd a;
  IbEnd b;
  IbLink from_a;
  IbLink from_b;

 private:
  bool Deliver(IbEnd& from, IbLink& link, IbEnd& to) {
    bool any = false;
    while (!from.out.records.empty()) {
      const TestBytes record = from.Leave();
      any = true;
      if (record.empty()) {
        // A record that cannot be finished ends its carrier.
        Carrier(false);
        Carrier(true);
        return true;
      }
      link.log.push_back(record);
      std::deque<TestBytes> late;
      late.swap(link.held);
      const size_t number = link.sent++;
      switch (link.fate ? link.fate(number, record) : Fate::kDeliver) {
        case Fate::kDeliver:
          to.Arrive(record, now);
          break;
        case Fate::kDrop:
          break;
        case Fate::kDuplicate:
          to.Arrive(record, now);
          to.Arrive(record, now);
          break;
        case Fate::kRepeat:
          to.Arrive(record, now);
          link.held.push_back(record);
          break;
        case Fate::kHold:
          link.held.push_back(record);
          break;
        case Fate::kCut:
          to.Arrive(record, now, /*whole=*/false);
          Carrier(false);
          Carrier(true);
          return true;
      }
      for (const TestBytes& each : late) to.Arrive(each, now);
    }
    // Nothing comes that it could be overtaken by.
    if (!any) {
      std::deque<TestBytes> late;
      late.swap(link.held);
      for (const TestBytes& each : late) to.Arrive(each, now);
      any = !late.empty();
    }
    return any;
  }
};

}  // namespace stagecoach::emu
