// InfiniBand packets: the codec, and an engine that gets them in any order.
//
// Input: one byte of choices, then records: a length byte, a byte of choices, so many bytes of packet. The choices of a
// record make it likely to be for this QP and near the numbers that are expected.
#include <algorithm>
#include <array>
#include <vector>

#include "emu/engine/ib_transport.h"
#include "emu/wire/ib.h"
#include "tests/fuzz/input.h"
#include "tests/support/fake_memory.h"

namespace stagecoach {
namespace {

using namespace emu;

constexpr uint32_t kQp = 0x11;
constexpr uint32_t kRegion = 1024;
constexpr size_t kWorks = 8;
constexpr size_t kReceives = 6;
constexpr size_t kMostRecords = 64;

// Choices of a record.
constexpr uint8_t kForUs = 1;
constexpr uint8_t kNearPsn = 2;
constexpr uint8_t kPadded = 4;
constexpr uint8_t kFlap = 8;
constexpr uint8_t kTime = 16;
constexpr uint8_t kBroken = 32;  // the carrier ends within it

void CheckCodec(ConstBytes record) {
  const auto header = wire::DecodeIb(record, record.size());
  const auto from_head = wire::DecodeIb(record.first(std::min(record.size(), wire::kMaxIbHeaderSize)), record.size());
  FUZZ_PROPERTY(header.has_value() == from_head.has_value());
  if (!header.has_value()) {
    FUZZ_PROPERTY(header.error() == from_head.error() && header.error().offset <= record.size());
    FUZZ_PROPERTY(!wire::ToString(header.error()).empty());
    return;
  }
  FUZZ_PROPERTY(*header == *from_head && header->EncodedSize() <= record.size());
  FUZZ_PROPERTY(!wire::Describe(*header).empty());
  std::vector<std::byte> again(record.begin(), record.end());
  ByteWriter out(again);
  header->Encode(out);
  FUZZ_PROPERTY(out.ok() && out.position() == header->EncodedSize());
  const auto twice = wire::DecodeIb(again, again.size());
  FUZZ_PROPERTY(twice.has_value() && *twice == *header);
}

class Receives final : public ReceiveSource {
 public:
  const ReceiveWork* TakeReceive() override { return next < works.size() ? &works[next++] : nullptr; }
  std::vector<ReceiveWork> works;
  size_t next = 0;
};

// Everything leaves at once.
class Sink final : public RecordSink {
 public:
  size_t MaxUlpdu() const override { return 4096 + wire::kMaxIbHeaderSize; }
  bool CanQueue() const override { return cookies.size() < 100; }
  void QueueRecord(ConstBytes header, std::span<const TxPart> payload, uint64_t cookie) override {
    std::vector<std::byte> record(header.begin(), header.end());
    for (const TxPart& part : payload) record.resize(record.size() + part.size());
    FUZZ_PROPERTY(wire::DecodeIb(record, record.size()).has_value());
    cookies.push_back(cookie);
  }
  std::vector<uint64_t> cookies;
};

class Engine {
 public:
  explicit Engine(uint8_t choices) : transport_(Options(choices), memory_, receives_, nullptr, "fuzz") {
    key_ = memory_.Add(kRegion);
    hidden_ = memory_.Add(kRegion, FakeMemory::kNone, 0x77);
    const uint64_t base = FakeMemory::Address(key_);
    for (size_t i = 0; i < kReceives; ++i) {
      receive_sges_[i] = {.address = base, .length = static_cast<uint32_t>(i * 200), .lkey = key_};
      receives_.works.push_back({.wr_id = i, .sges = {&receive_sges_[i], 1}});
    }
    transport_.OnCarrier(true, now_);
    transport_.StartSending();
    for (size_t i = 0; i < kWorks; ++i) {
      const auto opcode = static_cast<SendOpcode>(((choices >> 3) + i) & 7);
      send_sges_[i] = {.address = base, .length = IsAtomic(opcode) ? 8 : static_cast<uint32_t>(i * 150), .lkey = key_};
      works_[i] = {.opcode = opcode, .sges = {&send_sges_[i], 1}, .remote_stag = 1};
      transport_.Submit(&works_[i]);
    }
    Send();
  }

  void Feed(std::vector<std::byte> record, uint8_t choices) {
    if ((choices & kTime) != 0) {
      now_ = std::max(now_, transport_.Deadline().value_or(now_));
      transport_.OnDeadline(now_);
    }
    if ((choices & kFlap) != 0) {
      transport_.OnCarrier(false, now_);
      transport_.OnCarrier(true, now_);
    }
    if (record.size() >= wire::kIbBthSize) {
      if ((choices & kForUs) != 0) {
        record[1] &= std::byte{0xf0};
        record[2] = record[3] = std::byte{0xff};
        record[5] = record[6] = std::byte{0};
        record[7] = std::byte{kQp};
      }
      if ((choices & kNearPsn) != 0) {
        record[9] = record[10] = std::byte{0};
        record[11] &= std::byte{0x0f};
      }
      if ((choices & kPadded) != 0) Pad(record);
    }
    CheckCodec(record);
    Receive(record, (choices & kBroken) != 0);
    Send();
    Check();
  }

  void Finish() {
    transport_.Flush();
    transport_.OnCarrier(false, now_);
    // A NAK may wait for a carrier, not for ever: the owner gives up.
    Drain();
    FUZZ_PROPERTY(receives_done_ <= receives_.next);
    if (transport_.Finished()) {
      FUZZ_PROPERTY(sends_done_ == kWorks && receives_done_ == receives_.next);
    }
    FUZZ_PROPERTY(memory_.pins() == 0);
  }

 private:
  static IbOptions Options(uint8_t choices) {
    return {.service = (choices & 1) != 0 ? wire::IbService::kUc : wire::IbService::kRc,
            .qp_number = kQp,
            .destination_qp = 0x22,
            .mtu = 256,
            .access = ib_access::kRemoteWrite | ib_access::kRemoteRead | ib_access::kRemoteAtomic,
            .max_rd_atomic = 3,
            .max_dest_rd_atomic = 2,
            .rnr_retry = static_cast<uint8_t>((choices & 2) != 0 ? 7 : 1),
            .window_packets = (choices & 4) != 0 ? 2u : 256u};
  }

  static void Pad(std::vector<std::byte>& record) {
    for (uint8_t pad = 0; pad < 4; ++pad) {
      record[1] = (record[1] & std::byte{0xcf}) | static_cast<std::byte>(pad << 4);
      if (wire::DecodeIb(record, record.size()).has_value()) return;
    }
  }

  void Receive(ConstBytes record, bool broken) {
    const RecordHead head{.head = record.first(std::min(record.size(), kMaxRecordHead)), .length = record.size()};
    const auto at = transport_.OnRecord(head, now_);
    if (!at) return;
    FUZZ_PROPERTY(*at <= head.head.size());
    const auto destination = transport_.PinDestination();
    FUZZ_PROPERTY(destination.has_value());
    const size_t total = TotalSize(*destination);
    FUZZ_PROPERTY(total == 0 || total == record.size() - *at);
    ConstBytes payload = record.subspan(*at);
    for (const MutableBytes& part : *destination) payload = payload.subspan(CopyBytes(part, payload));
    transport_.UnpinDestination();
    if (broken) {
      transport_.OnLlpFault(2);
      transport_.OnCarrier(true, now_);
    } else {
      transport_.OnPlaced(now_);
    }
  }

  void Send() {
    transport_.BeginTurn(now_);
    transport_.FillTx(sink_, 50);
    for (const uint64_t cookie : sink_.cookies) transport_.OnSent(cookie);
    sink_.cookies.clear();
    Drain();
  }

  void Drain() {
    for (SendCompletion c; transport_.TakeSendCompletion(&c);) {
      FUZZ_PROPERTY(c.work == &works_[sends_done_]);  // in order, each once
      ++sends_done_;
    }
    for (ReceiveCompletion c; transport_.TakeReceiveCompletion(&c);) {
      FUZZ_PROPERTY(c.work == &receives_.works[receives_done_]);
      ++receives_done_;
    }
    if (const auto fault = transport_.TakeFault()) FUZZ_PROPERTY(!fault->description.empty());
  }

  void Check() {
    FUZZ_PROPERTY(memory_.pins() == 0 && memory_.GuardsIntact());
    const ConstBytes kept = memory_.Bytes(hidden_);
    FUZZ_PROPERTY(std::all_of(kept.begin(), kept.end(), [](std::byte b) { return b == std::byte{0x77}; }));
  }

  FakeMemory memory_;
  Receives receives_;
  Sink sink_;
  Instant now_{};
  uint32_t key_ = 0;
  uint32_t hidden_ = 0;
  std::array<ScatterGather, kReceives> receive_sges_;
  std::array<ScatterGather, kWorks> send_sges_;
  std::array<SendWork, kWorks> works_;
  size_t sends_done_ = 0;
  size_t receives_done_ = 0;
  IbTransport transport_;
};

void Run(const uint8_t* data, size_t size) {
  testing::FuzzInput input(data, size);
  Engine engine(input.Byte());
  for (size_t n = 0; n < kMostRecords && !input.Rest().empty(); ++n) {
    const size_t length = input.Byte();
    const uint8_t choices = input.Byte();
    std::vector<std::byte> record;
    // 255 stands for a full packet, so that messages of several occur.
    const size_t bytes = length == 255 ? wire::kIbBthSize + 256 : length;
    for (size_t i = 0; i < bytes && !input.Rest().empty(); ++i) record.push_back(static_cast<std::byte>(input.Byte()));
    if (length == 255) record.resize(bytes);
    engine.Feed(std::move(record), choices);
  }
  engine.Finish();
}

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::Run(data, size);
  return 0;
}
