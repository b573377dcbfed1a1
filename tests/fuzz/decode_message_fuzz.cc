// Messages, as `stagecoach decode` judges them: one after another on one connection, by each of the documents; and each
// behind the one before it, beside what the codecs and the engines say (tools/decode/agreement.h). Input: a byte for
// who sends and by which document, two for the length of the message, the message; and so on.
#include <string>

#include "rpcrdma/wire/private_data.h"
#include "tests/fuzz/input.h"
#include "tools/decode/agreement.h"
#include "tools/decode/message_decoder.h"

namespace stagecoach::decode {
namespace {

// Each field stands where the one before it ends, from the first byte to the last.
void CheckFields(const DecodedMessage& decoded, size_t size) {
  size_t end = 0;
  for (const Field& field : decoded.fields) {
    FUZZ_PROPERTY(field.offset == end);
    end += field.size;
  }
  FUZZ_PROPERTY(end == size);
}

void Run(const uint8_t* data, size_t size) {
  stagecoach::testing::FuzzInput input(data, size);
  MessageDecoder decoders[] = {MessageDecoder(rpcrdma::kDraft2004), MessageDecoder(rpcrdma::kRfc5666),
                               MessageDecoder(rpcrdma::kRfc5666bis)};
  for (MessageDecoder& each : decoders) each.OnBeginning();
  ConstBytes before;
  while (!input.empty()) {
    const uint8_t choices = input.Byte();
    const size_t length = size_t{input.Byte()} << 8 | input.Byte();
    const ConstBytes message = input.Bytes(length);
    const auto sender = static_cast<End>(choices % 3);
    const size_t profile = choices / 3 % 3;
    MessageDecoder& decoder = decoders[profile];
    if ((choices & 0x40) != 0) decoder.OnGap();
    if ((choices & 0x80) != 0) {
      const auto decoded = decoder.OnPrivateData(sender, message);
      FUZZ_PROPERTY((decoded && decoded->well_formed) == rpcrdma::FindPrivateData(message).has_value());
      if (decoded) CheckFields(*decoded, message.size());
      continue;
    }
    const DecodedMessage decoded = decoder.OnMessage(sender, message);
    CheckFields(decoded, message.size());
    FUZZ_PROPERTY(decoded.header_size <= message.size() && !decoded.summary.empty());
    FUZZ_PROPERTY(testing::Disagreement(rpcrdma::AllProfiles()[profile], before, message).empty());
    before = message;
  }
}

}  // namespace
}  // namespace stagecoach::decode

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::decode::Run(data, size);
  return 0;
}
