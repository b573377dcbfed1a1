// Datagrams of InfiniBand's communication management, and what their private data and additional information say.
// Input: one datagram.
#include <span>

#include "emu/wire/cm_mad.h"
#include "tests/fuzz/input.h"

namespace stagecoach {
namespace {

using namespace emu::wire;

void CheckIpHeader(ConstBytes private_data) {
  const auto header = DecodeCmIpHeader(private_data.first<kCmIpHeaderSize>());
  if (!header.has_value()) return;
  std::array<std::byte, kCmIpHeaderSize> again;
  header->Encode(again);
  FUZZ_PROPERTY(DecodeCmIpHeader(again) == header);
}

void Run(ConstBytes input) {
  const auto mad = DecodeCmMad(input);
  if (!mad.has_value()) {
    FUZZ_PROPERTY(ToString(mad.error())[0] != '?');
    return;
  }
  const CmMadBytes again = EncodeCmMad(*mad);
  FUZZ_PROPERTY(DecodeCmMad(again) == mad);
  if (const auto* req = std::get_if<CmReq>(&mad->message)) CheckIpHeader(req->private_data);
  if (const auto* req = std::get_if<CmSidrReq>(&mad->message)) CheckIpHeader(req->private_data);
  if (const auto* rej = std::get_if<CmRej>(&mad->message)) {
    FUZZ_PROPERTY(rej->information_length <= CmRej::kInformationSize);
    const CmRedirect redirect = CmRedirect::Decode(rej->information);
    std::array<std::byte, CmRej::kInformationSize> bytes;
    redirect.Encode(bytes);
    FUZZ_PROPERTY(CmRedirect::Decode(bytes) == redirect);
  }
}

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::Run(stagecoach::AsBytes(data, size));
  return 0;
}
