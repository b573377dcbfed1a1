#include "rpcrdma/wire/properties.h"

#include <algorithm>
#include <array>

#include "rpcrdma/wire/v2_numbers.h"

namespace stagecoach::rpcrdma {
namespace {

// rdma_which and the length of rdma_data.
constexpr size_t kPropertySizeMin = 8;

uint32_t WordOf(ConstBytes data) {
  return ByteReader(data).U32();
}

// [v2:6.3+7] rpcrdma2_prop_rbsiz: a word, and one that can be true.
bool IsReceiveBufferSize(ConstBytes data) {
  return data.size() == 4 && WordOf(data) >= kMinReceiveBufferSize;
}
std::string ReceiveBufferSizeText(ConstBytes data) {
  return std::to_string(WordOf(data));
}

// [v2:6.3+7] rpcrdma2_prop_brs: a word, one of three.
bool IsReverseSupport(ConstBytes data) {
  return data.size() == 4 && WordOf(data) <= static_cast<uint32_t>(ReverseSupport::kGeneral);
}
std::string ReverseSupportText(ConstBytes data) {
  return ToString(static_cast<ReverseSupport>(WordOf(data)));
}

// [v2:4#1] [v2:4.1+2] [v2:6.5+1] The properties of the base protocol, as those of an extension would be described.
constexpr std::array kBaseProperties = {
    PropertyRow{kRdma2PropidRbsiz, "receive buffer size", IsReceiveBufferSize, ReceiveBufferSizeText},
    PropertyRow{kRdma2PropidBrs, "reverse requests", IsReverseSupport, ReverseSupportText},
};

const PropertyRow* FindRow(uint32_t id, const Extensions& extensions) {
  for (const PropertyRow& row : kBaseProperties) {
    if (row.id == id) return &row;
  }
  return extensions.FindProperty(id);
}

Property MakeProperty(uint32_t id, uint32_t value) {
  Property property{.id = id, .data = std::vector<std::byte>(4)};
  ByteWriter(property.data).U32(value);
  return property;
}

}  // namespace

const char* ToString(ReverseSupport support) {
  switch (support) {
    case ReverseSupport::kNone:
      return "none";
    case ReverseSupport::kInline:
      return "inline";
    case ReverseSupport::kGeneral:
      return "general";
  }
  return "unknown";
}

std::string ToString(const PropertyFault& fault) {
  const std::string id = std::to_string(fault.id);
  switch (fault.kind) {
    case PropertyFault::Kind::kTruncated:
      return "the properties are cut short";
    case PropertyFault::Kind::kTooMany:
      return "too many properties";
    case PropertyFault::Kind::kBadValue:
      return "the value of property " + id + " is malformed";
    case PropertyFault::Kind::kTwice:
      return "property " + id + " is there twice";
  }
  return "unknown property fault";
}

const Property* FindProperty(const PropertySet& set, uint32_t id) {
  const auto found = std::ranges::find(set, id, &Property::id);
  return found == set.end() ? nullptr : &*found;
}

// [v2:4.1+1] [v2:4.1+3] [v2:4.1+10] Counted pairs of a number and counted bytes with their round-up.
std::optional<PropertyFault> DecodePropertySet(ByteReader& in, PropertySet* out) {
  const uint32_t count = in.U32();
  if (!in.ok()) return PropertyFault{PropertyFault::Kind::kTruncated};
  if (count > kPropertiesMax) return PropertyFault{PropertyFault::Kind::kTooMany};
  if (count * kPropertySizeMin > in.remaining()) return PropertyFault{PropertyFault::Kind::kTruncated};
  out->reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t id = in.U32();
    const uint32_t size = in.U32();
    // [v2:4.1+6] Data that reach beyond the message, of a property that is known or not.
    const ConstBytes data = in.Bytes(size);
    in.Skip(XdrPad(size));
    if (!in.ok()) return PropertyFault{PropertyFault::Kind::kTruncated, id};
    out->push_back({id, std::vector<std::byte>(data.begin(), data.end())});
  }
  return std::nullopt;
}

void EncodePropertySet(const PropertySet& set, ByteWriter& out) {
  out.U32(static_cast<uint32_t>(set.size()));
  for (const Property& property : set) {
    out.U32(property.id);
    out.U32(static_cast<uint32_t>(property.data.size()));
    out.Bytes(property.data);
    out.Zeros(XdrPad(property.data.size()));
  }
}

size_t EncodedSize(const PropertySet& set) {
  size_t size = 4;
  for (const Property& property : set) {
    size += kPropertySizeMin + property.data.size() + XdrPad(property.data.size());
  }
  return size;
}

Result<TransportProperties, PropertyFault> ReadProperties(const PropertySet& set, const Extensions& extensions) {
  TransportProperties properties;
  for (const Property& property : set) {
    const PropertyRow* row = FindRow(property.id, extensions);
    // [v2:4.1+9] [v2:5.3.4+9] Not one that we know, so not ours to judge.
    if (row == nullptr) continue;
    // [v2:4.1+11] In no order neither is the first.
    if (FindProperty(set, property.id) != &property)
      return Err(PropertyFault{PropertyFault::Kind::kTwice, property.id});
    // [v2:4.1+4] Empty data stand for the default.
    if (property.data.empty()) continue;
    // [v2:4.1+5] [v2:4.1+7] [v2:4.1+8] Not of the property's type: too long, wrong, or too short.
    if (!row->valid(property.data)) return Err(PropertyFault{PropertyFault::Kind::kBadValue, property.id});
    if (property.id == kRdma2PropidRbsiz) properties.receive_buffer_size = WordOf(property.data);
    if (property.id == kRdma2PropidBrs) {
      properties.reverse_requests = static_cast<ReverseSupport>(WordOf(property.data));
    }
  }
  return properties;
}

uint32_t FlagsTaken(const PropertySet& set, const Extensions& extensions) {
  uint32_t taken = 0;
  for (uint32_t left = extensions.flags(); left != 0; left &= left - 1) {
    const FlagRow& row = *extensions.FindFlag(left & (~left + 1));
    const Property* const said = row.property ? FindProperty(set, *row.property) : nullptr;
    if (!row.property || (said != nullptr && !said->data.empty() && row.shows(said->data))) taken |= row.flag;
  }
  return taken;
}

// [v2:5.3.4+3]
PropertySet MakePropertySet(const TransportProperties& properties) {
  return {MakeProperty(kRdma2PropidRbsiz, properties.receive_buffer_size),
          MakeProperty(kRdma2PropidBrs, static_cast<uint32_t>(properties.reverse_requests))};
}

std::string ToString(const PropertySet& set, const Extensions& extensions) {
  if (set.empty()) return "no properties";
  std::string text;
  for (const Property& property : set) {
    if (!text.empty()) text += ", ";
    const PropertyRow* row = FindRow(property.id, extensions);
    text += row != nullptr ? row->name : "property " + std::to_string(property.id);
    if (property.data.empty()) {
      text += " default";
    } else if (row != nullptr && row->text != nullptr && row->valid(property.data)) {
      text += " " + row->text(property.data);
    } else {
      text += " [" + ToHex(property.data) + "]";
    }
  }
  return text;
}

}  // namespace stagecoach::rpcrdma
