// MPA Request and Reply frames: the codec, and both engines driven by a hostile peer.
//
// Input: one byte of choices, then what the peer sends.
#include <optional>
#include <vector>

#include "emu/engine/mpa_handshake.h"
#include "emu/wire/mpa.h"
#include "emu/wire/print.h"
#include "tests/fuzz/input.h"

namespace stagecoach {
namespace {

using emu::wire::MpaFrame;
using emu::wire::MpaFrameKind;
using testing::FuzzInput;

constexpr uint16_t kDepth = 16;

std::vector<std::byte> Encoded(const MpaFrame& frame) {
  std::vector<std::byte> bytes(frame.EncodedSize());
  ByteWriter out(bytes);
  frame.Encode(out);
  FUZZ_PROPERTY(out.ok() && out.remaining() == 0);
  return bytes;
}

void CheckCodec(MpaFrameKind kind, ConstBytes bytes) {
  const auto frame = MpaFrame::Decode(kind, bytes);
  if (!frame.has_value()) {
    FUZZ_PROPERTY(!ToString(frame.error()).empty());
    return;
  }
  FUZZ_PROPERTY(ToHex(Encoded(*frame)) == ToHex(bytes));
  FUZZ_PROPERTY(!Describe(*frame).empty());
}

// Feeds what the engine asks for, at most `piece` bytes at a time. Returns how much it took.
template <typename Engine>
size_t Feed(Engine& engine, ConstBytes stream, size_t piece) {
  size_t taken = 0;
  while (engine.NextRx() > 0 && taken < stream.size()) {
    FUZZ_PROPERTY(engine.NextRx() <= emu::wire::kMpaFrameSizeMax);
    const size_t n = std::min({piece, engine.NextRx(), stream.size() - taken});
    engine.OnRx(stream.subspan(taken, n), {});
    taken += n;
  }
  FUZZ_PROPERTY(taken <= emu::wire::kMpaFrameSizeMax);
  return taken;
}

// What one run came to, for comparing runs that differ in how the stream was cut.
struct Trace {
  std::string reply, outcome;
  friend bool operator==(const Trace&, const Trace&) = default;
};

std::string Print(const std::optional<Result<emu::MpaOutcome, emu::MpaFault>>& outcome) {
  if (!outcome.has_value()) return "none";
  if (!outcome->has_value()) return "fault " + std::to_string(static_cast<int>(outcome->error().kind));
  const emu::MpaOutcome& o = **outcome;
  FUZZ_PROPERTY(o.ird <= kDepth && o.ord <= kDepth);
  return std::to_string(o.accepted) + " " + std::to_string(o.crc) + " " + std::to_string(o.send_markers) + " " +
         std::to_string(o.ird) + " " + std::to_string(o.ord) + " " + ToString(o.rtr) + " " + ToHex(o.private_data);
}

Trace RunResponder(uint8_t choices, ConstBytes stream, size_t piece) {
  emu::MpaResponder responder({}, {});
  Feed(responder, stream, piece);
  if (const auto request = responder.TakeRequest()) {
    const ConstBytes echo =
        ConstBytes(request->private_data).first(std::min<size_t>(request->private_data.size(), 100));
    if ((choices & 2) != 0) {
      FUZZ_PROPERTY(responder.Accept({.crc = (choices & 4) != 0, .ird = kDepth, .ord = kDepth}, echo, {}).has_value());
    } else {
      FUZZ_PROPERTY(responder.Reject(echo, {}).has_value());
    }
  }
  const ConstBytes reply = responder.PendingTx();
  FUZZ_PROPERTY(reply.empty() || MpaFrame::Decode(MpaFrameKind::kReply, reply).has_value());
  Trace trace{.reply = ToHex(reply), .outcome = ""};
  if (!reply.empty()) responder.OnTx(reply.size());
  if (responder.Deadline().has_value()) responder.OnLost({});
  trace.outcome = Print(responder.TakeOutcome());
  FUZZ_PROPERTY(trace.outcome != "none");
  FUZZ_PROPERTY(!responder.TakeOutcome().has_value());
  return trace;
}

Trace RunInitiator(uint8_t choices, ConstBytes stream, size_t piece) {
  emu::MpaInitiator initiator;
  const emu::MpaInitiatorOptions options{.revision = static_cast<uint8_t>((choices & 2) != 0 ? 2 : 1),
                                         .enhanced = (choices & 4) != 0,
                                         .crc = (choices & 8) != 0,
                                         .ird = kDepth,
                                         .ord = kDepth,
                                         .peer_to_peer = (choices & 16) != 0};
  FUZZ_PROPERTY(initiator.Start(options, {}, {}).has_value());
  FUZZ_PROPERTY(MpaFrame::Decode(MpaFrameKind::kRequest, initiator.PendingTx()).has_value());
  Feed(initiator, stream, piece);
  if (initiator.Deadline().has_value()) initiator.OnLost({});
  Trace trace{.reply = "", .outcome = Print(initiator.TakeOutcome())};
  FUZZ_PROPERTY(trace.outcome != "none" && initiator.NextRx() == 0);
  return trace;
}

void Run(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const uint8_t choices = input.Byte();
  const ConstBytes stream = input.Rest();
  CheckCodec(MpaFrameKind::kRequest, stream);
  CheckCodec(MpaFrameKind::kReply, stream);
  const auto run = (choices & 1) != 0 ? RunInitiator : RunResponder;
  const Trace whole = run(choices, stream, stream.size() + 1);
  FUZZ_PROPERTY(run(choices, stream, 1) == whole);
  FUZZ_PROPERTY(run(choices, stream, 1u + (choices >> 5)) == whole);
}

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::Run(data, size);
  return 0;
}
