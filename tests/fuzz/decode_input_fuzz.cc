// Files, as `stagecoach decode` reads them: captures and hex dumps, of packets and messages. Input: a file.
#include <sstream>
#include <string>

#include "rpcrdma/wire/profile.h"
#include "tests/fuzz/input.h"
#include "tools/decode/decoder.h"
#include "tools/decode/report.h"

namespace stagecoach {
namespace {

using namespace decode;

void Run(ConstBytes file) {
  for (const rpcrdma::ProtocolProfile* profile : {&rpcrdma::kDraft2004, &rpcrdma::kRfc5666bis}) {
    uint64_t number = 0;
    const Sinks sinks = {
        .message =
            [&](const Event& event) {
              FUZZ_PROPERTY(event.bytes.size() <= kMessageMax);
              const std::string text = FormatText(++number, event);
              const std::string json = FormatJson(number, event, *profile);
              // One line, and nothing in either that a terminal would take for more than text.
              FUZZ_PROPERTY(json.find('\n') == json.size() - 1);
              for (const char c : text + json) FUZZ_PROPERTY(c == '\n' || (c >= ' ' && c <= '~'));
            },
        .trouble = [](const Origin&, const std::string& text) { FUZZ_PROPERTY(!text.empty()); },
    };
    std::istringstream in{std::string(AsText(file))};
    const auto totals = DecodeInput(in, *profile, sinks);
    FUZZ_PROPERTY(totals ? totals->messages == number && totals->illegal <= number : !totals.error().empty());
    if (!totals) continue;
    // Each packet is counted once, and what is counted is said.
    FUZZ_PROPERTY(totals->not_understood <= totals->packets);
    FUZZ_PROPERTY(totals->not_understood == 0 || !totals->sentences.empty());
    FUZZ_PROPERTY(totals->sentences.size() <= NotUnderstoodCounts::kKindsMax + 2);
  }
}

}  // namespace
}  // namespace stagecoach

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::Run(stagecoach::AsBytes(data, size));
  return 0;
}
