// A set of transport properties against a model of it: words read one after the other, and the last word on each
// property looked up by going through all of them. Input: a set of properties as it stands in RDMA2_CONNPROP.
#include <optional>
#include <vector>

#include "base/cursor.h"
#include "rpcrdma/wire/properties.h"
#include "tests/fuzz/input.h"

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kOfExtension = 77;  // a property of two words, the first of which is the smaller

bool IsAscending(ConstBytes data) {
  ByteReader in(data);
  const uint32_t first = in.U32();
  const uint32_t second = in.U32();
  return in.ok() && in.remaining() == 0 && first < second;
}
constexpr PropertyRow kRows[] = {{.id = kOfExtension, .name = "ascending", .valid = IsAscending}};

// nullopt: the bytes hold no set.
std::optional<PropertySet> ModelOfSet(ConstBytes bytes, size_t* used) {
  size_t at = 0;
  const auto word = [&]() -> std::optional<uint32_t> {
    if (bytes.size() - at < 4) return std::nullopt;
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value = value << 8 | std::to_integer<uint32_t>(bytes[at++]);
    return value;
  };
  const auto count = word();
  if (!count || *count > 256) return std::nullopt;
  PropertySet set;
  for (uint32_t i = 0; i < *count; ++i) {
    const auto id = word();
    const auto size = id ? word() : std::nullopt;
    if (!size) return std::nullopt;
    const uint64_t padded = (uint64_t{*size} + 3) / 4 * 4;
    if (padded > bytes.size() - at) return std::nullopt;
    const ConstBytes data = bytes.subspan(at, *size);
    set.push_back({*id, std::vector<std::byte>(data.begin(), data.end())});
    at += padded;
  }
  *used = at;
  return set;
}

uint32_t ModelOfWord(const Property& property) {
  uint32_t value = 0;
  for (const std::byte byte : property.data) value = value << 8 | std::to_integer<uint32_t>(byte);
  return value;
}

// nullopt: not to be taken.
std::optional<TransportProperties> ModelOfValues(const PropertySet& set, bool with_extension) {
  TransportProperties values;
  int seen[3] = {};
  for (const Property& property : set) {
    const size_t size = property.data.size();
    if (property.id == 1) {
      if (++seen[0] > 1 || (size != 0 && size != 4)) return std::nullopt;
      if (size == 4 && ModelOfWord(property) < 1024) return std::nullopt;
      if (size == 4) values.receive_buffer_size = ModelOfWord(property);
    } else if (property.id == 2) {
      if (++seen[1] > 1 || (size != 0 && size != 4)) return std::nullopt;
      if (size == 4 && ModelOfWord(property) > 2) return std::nullopt;
      if (size == 4) values.reverse_requests = static_cast<ReverseSupport>(ModelOfWord(property));
    } else if (property.id == kOfExtension && with_extension) {
      if (++seen[2] > 1 || (size != 0 && !IsAscending(property.data))) return std::nullopt;
    }
  }
  return values;
}

void Run(ConstBytes bytes) {
  size_t used = 0;
  const auto model = ModelOfSet(bytes, &used);
  ByteReader in(bytes);
  PropertySet set;
  const auto fault = DecodePropertySet(in, &set);
  FUZZ_PROPERTY(fault.has_value() != model.has_value());
  if (fault.has_value()) {
    FUZZ_PROPERTY(!ToString(*fault).empty());
    return;
  }
  FUZZ_PROPERTY(set == *model && in.position() == used);

  std::vector<std::byte> encoded(EncodedSize(set));
  ByteWriter out(encoded);
  EncodePropertySet(set, out);
  FUZZ_PROPERTY(out.ok() && out.remaining() == 0 && encoded.size() == used);

  Extensions extensions;
  FUZZ_PROPERTY(!extensions.Add({.name = "model", .properties = kRows}).has_value());
  for (const bool with_extension : {false, true}) {
    const Extensions& known = with_extension ? extensions : Extensions();
    const auto values = ReadProperties(set, known);
    const auto expected = ModelOfValues(set, with_extension);
    FUZZ_PROPERTY(values.has_value() == expected.has_value());
    FUZZ_PROPERTY(!ToString(set, known).empty());
    if (!values.has_value()) continue;
    FUZZ_PROPERTY(*values == *expected);
    FUZZ_PROPERTY(ReadProperties(MakePropertySet(*values)) == *values);
  }
}

}  // namespace
}  // namespace stagecoach::rpcrdma

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  stagecoach::rpcrdma::Run(stagecoach::AsBytes(data, size));
  return 0;
}
