// Transport properties of version 2: what an end tells its peer of itself, in RDMA2_CONNPROP.
//
// draft-cel-nfsv4-rpcrdma-version-two-09 sections 4 and 5.3.4. A set of properties is decoded to ids and bytes; the
// properties of the base protocol, and those of Extensions, are then checked, and read as values.
//
// Pure functions over values; thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/cursor.h"
#include "base/result.h"
#include "rpcrdma/wire/extensions.h"

namespace stagecoach::rpcrdma {

// rpcrdma2_propval
struct Property {
  uint32_t id = 0;              // rdma_which
  std::vector<std::byte> data;  // rdma_data: XDR; empty: the default value

  friend bool operator==(const Property&, const Property&) = default;
};
// rpcrdma2_propset, in no particular order. Decoded ones have at most kPropertiesMax elements and, together, no more
// bytes than the message they came in.
using PropertySet = std::vector<Property>;
inline constexpr uint32_t kPropertiesMax = 256;

// Null when there is none.
const Property* FindProperty(const PropertySet& set, uint32_t id);

struct PropertyFault {
  enum class Kind : uint8_t {
    kTruncated,  // the message ends inside the set, or inside the data of property `id`
    kTooMany,    // more than kPropertiesMax
    kBadValue,   // the data of a property that is known are not what its type says
    kTwice       // a property that is known stands there twice: which of the two holds?
  };
  Kind kind = Kind::kTruncated;
  uint32_t id = 0;

  friend bool operator==(const PropertyFault&, const PropertyFault&) = default;
};
std::string ToString(const PropertyFault& fault);

// Decodes a set, of whatever properties; `in` then stands behind it. nullopt means success. On error `out` is
// unspecified.
[[nodiscard]] std::optional<PropertyFault> DecodePropertySet(ByteReader& in, PropertySet* out);
void EncodePropertySet(const PropertySet& set, ByteWriter& out);
size_t EncodedSize(const PropertySet& set);

// How far an end follows calls in the reverse direction [v2:4.2.2+2].
enum class ReverseSupport : uint32_t {
  kNone = 0,
  kInline = 1,  // without chunks
  kGeneral = 2  // as in the forward direction
};
const char* ToString(ReverseSupport support);

// Bytes of a Receive of an end that has said nothing else [v2:4.2+1] [v2:4.2+3].
inline constexpr uint32_t kDefaultReceiveBufferSize = 4096;
// Less than this is malformed: it is what every end takes before anything is agreed on.
inline constexpr uint32_t kMinReceiveBufferSize = 1024;

// The properties of the base protocol, as values. Those of an end that has said nothing are the defaults.
struct TransportProperties {
  // Bytes that each of its Receives can take, at least: what its peer may send [v2:4.2.1+1]. 1024 to 2^32 - 1.
  uint32_t receive_buffer_size = kDefaultReceiveBufferSize;
  ReverseSupport reverse_requests = ReverseSupport::kInline;

  friend bool operator==(const TransportProperties&, const TransportProperties&) = default;
};

// Reads the base protocol's properties of a set, and checks those of `extensions` beside them: the fault of the first
// one that does not hold. What is not known is passed over [v2:4.1+9]; what is not there, or empty, has its default.
Result<TransportProperties, PropertyFault> ReadProperties(const PropertySet& set, const Extensions& extensions = {});
// The flags of `extensions` that a peer takes which has said this: those whose property shows it, and those that go by
// none (FlagRow::property). `set` is one that ReadProperties has nothing against [v2:9.4+3].
uint32_t FlagsTaken(const PropertySet& set, const Extensions& extensions);
// What to tell a peer: every property of the base protocol. The caller adds those of its extensions [v2:9.2+1].
PropertySet MakePropertySet(const TransportProperties& properties);

// "receive buffer size 4096, reverse requests inline, property 77 [00000001]", one line; "no properties" when empty.
// What is malformed is shown in hexadecimal.
std::string ToString(const PropertySet& set, const Extensions& extensions = {});

}  // namespace stagecoach::rpcrdma
