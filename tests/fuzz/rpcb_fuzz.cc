// What rpcbind answers: the records of a stream, replies to SET and DUMP, universal addresses. Input: a byte that says
// how the stream is cut, then the stream; all of it is taken as an address, too.
#include <algorithm>

#include "rpcrdma/bind/rpcb.h"
#include "rpcrdma/bind/universal_address.h"
#include "tests/fuzz/input.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr size_t kRecordMax = 4096;
constexpr uint32_t kXid = 1;

void ReadAddress(std::string_view text) {
  const std::string quoted = Quoted(text);
  FUZZ_PROPERTY(std::all_of(quoted.begin(), quoted.end(), [](char c) { return c >= 0x20 && c < 0x7f; }));
  for (const Netid netid : {Netid::kRdma, Netid::kRdma6}) {
    const auto address = ParseUniversalAddress(netid, text);
    if (!address) {
      FUZZ_PROPERTY(ToString(address.error()) != nullptr);
      continue;
    }
    const std::string canonical = ToString(*address);
    FUZZ_PROPERTY(canonical.size() <= kUniversalAddressMax);
    FUZZ_PROPERTY(ParseUniversalAddress(netid, canonical) == *address);
    const sockaddr_storage storage = ToSockaddr(*address);
    const auto again = ToUniversalAddress(reinterpret_cast<const sockaddr*>(&storage));
    // Except for mapped addresses, which become those of IPv4.
    FUZZ_PROPERTY(again.has_value() && again->port == address->port && (again->netid != netid || *again == *address));
  }
}

void ReadAnswer(ConstBytes record) {
  if (const auto done = DecodeRpcbDone(record, kXid); !done) FUZZ_PROPERTY(!done.error().text.empty());
  const uint32_t program = 0x20000099;
  const auto mappings = DecodeRpcbDump(record, kXid, program);
  if (!mappings) {
    FUZZ_PROPERTY(!mappings.error().text.empty());
    return;
  }
  for (const RpcbMapping& mapping : *mappings) {
    FUZZ_PROPERTY(mapping.program == program && mapping.netid.size() <= kRpcbStringMax);
    ReadAddress(mapping.address);
  }
}

void ReadStream(size_t step, ConstBytes stream) {
  RecordAssembler assembler(kRecordMax);
  while (!stream.empty()) {
    const size_t size = std::min(step, stream.size());
    const auto whole = assembler.Take(stream.first(size));
    FUZZ_PROPERTY(assembler.record().size() <= kRecordMax);
    if (!whole) {
      FUZZ_PROPERTY(ToString(whole.error()) != nullptr);
      return;
    }
    if (*whole) return ReadAnswer(assembler.record());
    stream = stream.subspan(size);
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace rpcrdma = stagecoach::rpcrdma;
  rpcrdma::ReadAddress(stagecoach::AsText(stagecoach::AsBytes(data, size)));
  stagecoach::testing::FuzzInput in(data, size);
  const size_t step = in.Byte() + size_t{1};
  rpcrdma::ReadStream(step, in.Rest());
  // Without the marks, for more of the inputs to get as far.
  rpcrdma::ReadAnswer(in.Rest());
  return 0;
}
