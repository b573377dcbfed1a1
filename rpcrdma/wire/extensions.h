// What other documents add to version 2: header types, transport properties, error codes and header flags.
//
// draft-cel-nfsv4-rpcrdma-version-two-09 section 9. An extension is a constant of its author's, a Feature of tables; an
// end that knows it adds it to the Extensions that it hands to the codec and the engines. Nothing is global: two
// connections of one process may know different ones, and what is linked in has no say in it.
//
// The tables say what the transport has to know: what can be parsed, where a header ends, what things are called. What
// an extension does is its author's, who finds what came in Header::body and in the PropertySet.
//
// The document sets no numbers apart for experiments (its section 9.2 names a range that it does not give). Ours begin
// at kExperimentalNumbers, for header types, properties and error codes alike; flags are taken from the highest bit
// down.
//
// Values; thread-compatible. The functions in the tables are handed bytes from a peer: they must be pure, bounded and
// total.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace stagecoach::rpcrdma {

inline constexpr uint32_t kExperimentalNumbers = 0x80000000;

// A transport header type [v2:9#4]. A peer that does not know it answers RDMA2_ERR_INVAL_HTYPE [v2:5.2#3].
struct HeaderTypeRow {
  uint32_t type = 0;  // rdma_htype
  const char* name = "";
  // Whether a whole or partial RPC message follows the header.
  bool has_message = false;
  // The size in bytes of the header that `rest`, what follows the prefix, begins with; at most rest.size(). nullopt: it
  // cannot be parsed (RDMA2_ERR_BAD_XDR).
  std::optional<size_t> (*size)(ConstBytes rest) = nullptr;
  // The fields of such a header, for people, in one line; may be null.
  std::string (*text)(ConstBytes body) = nullptr;
};

// A transport property [v2:9#5].
struct PropertyRow {
  uint32_t id = 0;  // rpcrdma2_propid: any number, not only small ones [v2:9.2+2]
  const char* name = "";
  // Whether `data` is the XDR of the property's type, no more and no less. Never asked of empty data, which stand for
  // the default value.
  bool (*valid)(ConstBytes data) = nullptr;
  // Its value, for people; may be null.
  std::string (*text)(ConstBytes data) = nullptr;
};

// An error code that needs no more than its number [v2:9+3]; one that does is a header type.
struct ErrorRow {
  uint32_t code = 0;  // rdma_err
  const char* name = "";
};

// Whether a flag may stand in headers of a type [v2:9.4+3]. A header where it must and does not, or must not and does,
// is malformed.
enum class FlagUse : uint8_t { kMay, kMust, kMustNot };

// A flag of the flags word [v2:9+4] [v2:9.4+1].
struct FlagRow {
  uint32_t flag = 0;  // one bit, and not RPCRDMA2_F_RESPONSE
  const char* name = "";
  FlagUse (*use)(uint32_t header_type) = nullptr;
  // The property, of the same Feature, by which a peer shows that it takes the flag, and whether `data`, which its row
  // has found valid, say so. To a peer that has not said it, or has said its default, no header goes with the flag
  // [v2:3.2#1] [v2:9.4+3]. Absent, both of them: the document has another way to find out, such as a header type whose
  // receivers all take the flag, and whoever sets it goes by that.
  std::optional<uint32_t> property = std::nullopt;
  bool (*shows)(ConstBytes data) = nullptr;
};

// The elements of one document. The tables must outlive whatever is told of them: constants.
struct Feature {
  const char* name = "";
  std::span<const HeaderTypeRow> header_types;
  std::span<const PropertyRow> properties;
  std::span<const ErrorRow> errors;
  std::span<const FlagRow> flags;
};

// Why a Feature cannot be added: which number of it.
struct FeatureConflict {
  enum class Kind : uint8_t {
    kTaken,       // defined by the base protocol, by another feature, or twice by this one
    kNotOneFlag,  // a flag that is no bit or several
    kIncomplete,  // a row without the function it needs
    kNoProperty   // a flag whose property is none of this feature
  };
  Kind kind = Kind::kTaken;
  uint32_t number = 0;  // header type, property, error code or flag

  friend bool operator==(const FeatureConflict&, const FeatureConflict&) = default;
};
std::string ToString(const FeatureConflict& conflict);

class Extensions {
 public:
  // All elements of the feature, or none of them [v2:9#2]: nullopt, or why not.
  [[nodiscard]] std::optional<FeatureConflict> Add(const Feature& feature);

  // Null: not known.
  const HeaderTypeRow* FindHeaderType(uint32_t type) const;
  const PropertyRow* FindProperty(uint32_t id) const;
  const ErrorRow* FindError(uint32_t code) const;
  const FlagRow* FindFlag(uint32_t flag) const;
  // The flags added, RPCRDMA2_F_RESPONSE not among them.
  uint32_t flags() const { return flags_; }

 private:
  std::vector<Feature> features_;
  uint32_t flags_ = 0;
};

}  // namespace stagecoach::rpcrdma
