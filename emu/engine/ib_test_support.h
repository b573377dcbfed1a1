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
#include "emu/engine/ib_transport.h"
#include "emu/engine/transport_test_support.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {

inline TestBytes Pattern(size_t size, uint32_t seed) {
  TestBytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed * 37 + i * 11 + (i >> 8) * 3);
  return bytes;
}

inline wire::IbHeader HeaderOf(ConstBytes record) {
  const auto header = wire::DecodeIb(record, record.size());
  EXPECT_TRUE(header.has_value());
  return header.value_or(wire::IbHeader{});
}

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
class IbEnd final : public TransportEnd {
 public:
  IbEnd(IbOptions options, uint32_t own_qp, uint32_t peer_qp, std::string name)
      : TransportEnd(4096 + wire::kMaxIbHeaderSize),
        transport(Numbered(options, own_qp, peer_qp), memory, receives, &trace, std::move(name)) {}

  static uint64_t At(uint32_t key, uint64_t offset = 0) { return FakeMemory::Address(key) + offset; }
  uint32_t AddPattern(size_t size, uint32_t seed, uint8_t rights = FakeMemory::kAll) {
    const uint32_t key = memory.Add(size, rights);
    CopyBytes(memory.Bytes(key), Pattern(size, seed));
    return key;
  }

  bool Fill(Instant now, size_t budget = 1000) {
    transport.BeginTurn(now);
    return transport.FillTx(out, budget);
  }
  using TransportEnd::Arrive;
  bool Arrive(wire::IbHeader header, Instant now, ConstBytes payload = {}) {
    header.pad = wire::IbPad(payload.size());
    TestBytes record(header.EncodedSize() + payload.size());
    ByteWriter writer(record);
    header.Encode(writer);
    writer.Bytes(payload);
    return Arrive(record, now);
  }

  IbTransport transport;

 private:
  QpTransport& engine() override { return transport; }
  static IbOptions Numbered(IbOptions options, uint32_t own_qp, uint32_t peer_qp) {
    options.qp_number = own_qp;
    options.destination_qp = peer_qp;
    return options;
  }
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
