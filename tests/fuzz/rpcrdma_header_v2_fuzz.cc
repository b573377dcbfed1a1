// The version 2 RPC-over-RDMA header, for who knows an extension and who does not; its flag beside the message; its
// validation as a call and as a reply; and the same bytes as the answer to a probe, in the layout of either version.
// Input: one message as it came in a Receive.
#include <vector>

#include "base/cursor.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/wire/probe_answer.h"
#include "rpcrdma/wire/validate.h"
#include "tests/fuzz/input.h"

namespace stagecoach::rpcrdma {
namespace {

// An extension with one of each kind of element. The size of its headers is their first word, whatever a peer puts
// there.
std::optional<size_t> Size(ConstBytes rest) {
  ByteReader in(rest);
  const uint32_t size = in.U32();
  return size >= 4 ? std::optional<size_t>(size) : std::nullopt;
}
bool IsWord(ConstBytes data) {
  return data.size() == 4;
}
FlagUse Use(uint32_t header_type) {
  return static_cast<FlagUse>(header_type % 3);
}
constexpr HeaderTypeRow kHeaderTypes[] = {{.type = 6, .name = "six", .has_message = true, .size = Size},
                                          {.type = 7, .name = "seven", .size = Size}};
constexpr PropertyRow kProperties[] = {{.id = 3, .name = "three", .valid = IsWord}};
constexpr ErrorRow kErrors[] = {{10, "ten"}};
constexpr FlagRow kFlags[] = {{2, "two", Use}};
constexpr Feature kFeature{"feature", kHeaderTypes, kProperties, kErrors, kFlags};

const Extensions& Known() {
  static const Extensions* const known = [] {
    auto* extensions = new Extensions;
    FUZZ_PROPERTY(!extensions->Add(kFeature).has_value());
    return extensions;
  }();
  return *known;
}

void CheckFault(const HeaderFault& fault, size_t size) {
  FUZZ_PROPERTY(fault.offset <= size && fault.expected == 2);
  FUZZ_PROPERTY(!ToString(fault).empty());
  // A requester sends no errors, and an error is not answered.
  const bool response = fault.flags.has_value() && (*fault.flags & kFlagResponse) != 0;
  const bool silent = fault.action == FaultAction::kDrop;
  if (response || fault.type == kRdma2Error || size < kHeaderLayoutV2.prefix_size) {
    FUZZ_PROPERTY(silent || (size >= 16 && fault.kind == HeaderFault::Kind::kVersion));
  }
  FUZZ_PROPERTY(fault.action != FaultAction::kDisconnect);
  FUZZ_PROPERTY((fault.action == FaultAction::kAnswerInvalHtype) ==
                (fault.kind == HeaderFault::Kind::kUnknownType && !silent));
}

std::vector<std::byte> Encoded(const Header& header, const Extensions& extensions) {
  std::vector<std::byte> bytes(EncodedSizeV2(header));
  ByteWriter out(bytes);
  EncodeHeaderV2(header, out, extensions);
  FUZZ_PROPERTY(out.ok() && out.remaining() == 0);
  return bytes;
}

void AsHeader(ConstBytes message, const Extensions& extensions) {
  ByteReader in(message);
  const auto header = DecodeHeaderV2(in, {}, extensions);
  if (!header.has_value()) return CheckFault(header.error(), message.size());
  FUZZ_PROPERTY(header->version == 2 && header->flags.has_value());
  FUZZ_PROPERTY(!ToString(*header, extensions).empty());

  // What is sent again is the same, reserved flags and the content of round-up apart.
  const auto bytes = Encoded(*header, extensions);
  FUZZ_PROPERTY(bytes.size() == in.position());
  Header expected = *header;
  expected.flags = *header->flags & ~UnknownFlags(*header, extensions);
  ByteReader again{ConstBytes(bytes)};
  const auto decoded = DecodeHeaderV2(again, {}, extensions);
  FUZZ_PROPERTY(decoded.has_value() && *decoded == expected && again.remaining() == 0);
  if (header->type() != MessageType::kConnProp && expected.flags == header->flags) {
    FUZZ_PROPERTY(ToHex(bytes) == ToHex(message.first(in.position())));
  }
  if (const auto* connprop = std::get_if<ConnProp>(&header->body)) {
    FUZZ_PROPERTY(in.remaining() == 0 && ReadProperties(connprop->properties, extensions).has_value());
  }

  const auto direction = CheckDirection(*header, in.Rest());
  if (header->type() == MessageType::kError) FUZZ_PROPERTY(direction.has_value() != header->is_response());

  const auto call = ValidateCall(*header, in.Rest());
  FUZZ_PROPERTY(!call.has_value() || header->chunks() != nullptr);
  if (call.has_value() && header->inv_handle() != 0) FUZZ_PROPERTY(!header->chunks()->empty());
  if (const ChunkLists* lists = header->chunks()) {
    static_cast<void>(ValidateReply(*header, in.Rest(), *lists));
    static_cast<void>(ValidateReply(*header, in.Rest(), {}));
  }
}

void AsProbeAnswer(ConstBytes message) {
  const auto answer = DecodeProbeAnswer(message);
  if (!answer.has_value()) {
    FUZZ_PROPERTY(!ToString(answer.error()).empty());
    return;
  }
  const Header& header = answer->header;
  FUZZ_PROPERTY(answer->header_size <= message.size());
  if (header.flags.has_value()) {
    ByteReader in(message);
    FUZZ_PROPERTY(*DecodeHeaderV2(in) == header && in.position() == answer->header_size);
    return;
  }
  std::vector<std::byte> bytes(EncodedSizeV1(header));
  ByteWriter out(bytes);
  EncodeHeaderV1(header, out);
  FUZZ_PROPERTY(out.ok() && ToHex(bytes) == ToHex(message.first(answer->header_size)));
}

}  // namespace
}  // namespace stagecoach::rpcrdma

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const stagecoach::ConstBytes message = stagecoach::AsBytes(data, size);
  stagecoach::rpcrdma::AsHeader(message, {});
  stagecoach::rpcrdma::AsHeader(message, stagecoach::rpcrdma::Known());
  stagecoach::rpcrdma::AsProbeAnswer(message);
  return 0;
}
