// Cutting a hostile byte stream into FPDUs: however the stream is split, the same records come out, and the same end.
//
// Input: one byte of choices (CRC, head size, piece size), then the stream after the Reply.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "emu/engine/mpa_framing.h"
#include "tests/fuzz/input.h"

namespace stagecoach {
namespace {

using emu::MpaReceiver;

std::string RunOnce(bool crc, size_t head_limit, ConstBytes stream, size_t piece) {
  MpaReceiver receiver(crc);
  std::string trace;
  emu::RecordHead record;
  std::vector<std::byte> ulpdu;
  size_t head_size = 0;
  bool placing = false;
  while (true) {
    MpaReceiver::Step step;
    if (!placing) {
      step = receiver.NextRecord(&record);
      if (step == MpaReceiver::Step::kReady) {
        FUZZ_PROPERTY(record.head.size() == std::min(record.length, emu::kMaxRecordHead));
        head_size = std::min(record.length, head_limit);
        ulpdu.assign(record.length, std::byte{0});
        CopyBytes(ulpdu, record.head.first(head_size));
        placing = true;
        continue;
      }
    } else {
      const std::array<MutableBytes, 1> destination = {MutableBytes(ulpdu).subspan(head_size)};
      step = receiver.Place(head_size, destination);
      if (step == MpaReceiver::Step::kReady) {
        trace += ToHex(ulpdu) + "\n";
        placing = false;
        continue;
      }
    }
    if (step == MpaReceiver::Step::kBadCrc) return trace + "bad crc";
    if (stream.empty()) return trace + (receiver.BetweenRecords() ? "end" : "cut");
    size_t taken = 0;
    for (const MutableBytes& part : receiver.NextRx()) {
      const size_t n = CopyBytes(part.first(std::min(part.size(), piece - taken)), stream);
      stream = stream.subspan(n);
      taken += n;
    }
    FUZZ_PROPERTY(taken > 0);
    receiver.OnRx(taken);
  }
}

void Run(const uint8_t* data, size_t size) {
  testing::FuzzInput input(data, size);
  const uint8_t choices = input.Byte();
  const bool crc = (choices & 1) != 0;
  const size_t head_limit = (choices & 2) != 0 ? 14 : 46;
  const std::string whole = RunOnce(crc, head_limit, input.Rest(), SIZE_MAX);
  FUZZ_PROPERTY(RunOnce(crc, head_limit, input.Rest(), 1) == whole);
  FUZZ_PROPERTY(RunOnce(crc, head_limit, input.Rest(), 2u + (choices >> 2)) == whole);
}

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::Run(data, size);
  return 0;
}
