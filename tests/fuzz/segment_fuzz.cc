// DDP and RDMAP headers and the Terminate they may carry. Input: one record (ULPDU).
#include <algorithm>
#include <vector>

#include "emu/wire/print.h"
#include "emu/wire/rdmap.h"
#include "tests/fuzz/input.h"

namespace stagecoach {
namespace {

using namespace emu::wire;

void CheckTerminate(ConstBytes payload) {
  const auto reading = DecodeTerminate(payload);
  if (!reading.has_value()) return;
  FUZZ_PROPERTY(!Describe(*reading).empty());
  std::vector<std::byte> again(payload.size());
  ByteWriter out(again);
  if (reading->order == TerminateBitOrder::kSiw) {
    reading->header.EncodeAsSiw(out);
  } else {
    reading->header.Encode(out);
  }
  FUZZ_PROPERTY(out.ok() && out.remaining() == 0);
  FUZZ_PROPERTY(ToHex(again) == ToHex(payload));
}

// What has decoded encodes to the bytes it was read from.
template <typename Message>
void CheckMessage(ConstBytes payload) {
  const auto message = Message::Decode(payload);
  FUZZ_PROPERTY(message.has_value() && payload.size() == Message::EncodedSize());
  std::vector<std::byte> again(payload.size());
  ByteWriter out(again);
  message->Encode(out);
  FUZZ_PROPERTY(out.ok() && ToHex(again) == ToHex(payload));
}

void Run(ConstBytes record, RdmapExtensions extensions) {
  const ConstBytes head = record.first(std::min(record.size(), kMaxSegmentHeaderSize));
  const auto header = DecodeSegment(head, record.size(), extensions);
  // The head is all that is needed: the payload behind it changes nothing.
  const auto from_all = DecodeSegment(record, record.size(), extensions);
  FUZZ_PROPERTY(header.has_value() == from_all.has_value());
  if (!header.has_value()) {
    FUZZ_PROPERTY(header.error() == from_all.error());
    FUZZ_PROPERTY(IsAssigned(header.error().terminate));
    FUZZ_PROPERTY(header.error().offset <= record.size());
    FUZZ_PROPERTY(!ToString(header.error()).empty());
    // What answers it quotes no more than there is.
    const TerminateHeader answer = TerminateHeader::For(header.error().terminate, head, record.size());
    std::vector<std::byte> bytes(answer.EncodedSize());
    ByteWriter out(bytes);
    answer.Encode(out);
    FUZZ_PROPERTY(out.ok() && bytes.size() <= kMaxTerminateSize);
    CheckTerminate(bytes);
    return;
  }
  FUZZ_PROPERTY(*header == *from_all);
  FUZZ_PROPERTY(header->EncodedSize() <= record.size());
  FUZZ_PROPERTY(!Describe(*header).empty());
  std::vector<std::byte> again(header->EncodedSize());
  ByteWriter out(again);
  header->Encode(out);
  FUZZ_PROPERTY(out.ok() && out.remaining() == 0);
  FUZZ_PROPERTY(ToHex(again) == ToHex(record.first(again.size())));
  FUZZ_PROPERTY(extensions == RdmapExtensions::kRfc7306 || header->opcode() <= RdmapOpcode::kTerminate);
  const ConstBytes payload = record.subspan(header->EncodedSize());
  if (header->opcode() == RdmapOpcode::kTerminate) CheckTerminate(payload);
  if (IsImmediate(header->opcode())) CheckMessage<ImmediateData>(payload);
  if (header->opcode() == RdmapOpcode::kAtomicRequest) CheckMessage<AtomicRequest>(payload);
  if (header->opcode() == RdmapOpcode::kAtomicResponse) CheckMessage<AtomicResponse>(payload);
}

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  for (const auto extensions :
       {stagecoach::emu::wire::RdmapExtensions::kNone, stagecoach::emu::wire::RdmapExtensions::kRfc7306}) {
    stagecoach::Run(stagecoach::AsBytes(data, size), extensions);
  }
  return 0;
}
