// ConnectionTerms: what the two ends of one connection have settled, or know of each other: the version they speak and,
// in version 2, what each has said of itself.
//
// draft-cel-nfsv4-rpcrdma-version-two-09 sections 4, 5.3.4 and 7. The engines of a connection and their owner share
// one. They read and write headers through it, so that none of them has to ask which version it is.
//
// The version. A server that speaks several waits for the first message that it can take, whose version holds from then
// on. A client that speaks version 2 begins with it; the answer to its first message, the probe, says what to go on
// with (wire/probe_answer.h), and the owner settles it by SetVersion. Once settled a version stays [v2:7.3#2].
//
// The properties. The first well-formed RDMA2_CONNPROP of the peer holds; later ones change nothing
// (docs/decisions/0048). Until then, and for what it does not name, the defaults hold.
//
// Not thread-safe: owned by one connection, used on its loop.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/result.h"
#include "rpcrdma/wire/header.h"
#include "rpcrdma/wire/profile.h"
#include "rpcrdma/wire/properties.h"

namespace stagecoach::rpcrdma {

// Bytes of the probe at most, and of whatever a client sends before it is answered [v2:7#1].
inline constexpr uint32_t kProbeSizeMax = 1024;
// Bytes of RDMA2_CONNPROP of this end at most, header included: what every peer takes before it has said anything.
inline constexpr uint32_t kConnPropSizeMax = 1024;

// Why an end cannot say of itself what it was told to say.
struct OwnPropertiesFault {
  enum class Kind : uint8_t {
    kUnknown,    // `id` is no property of an extension that was given
    kMalformed,  // `property`: a value that is none of its type, or a property that is there twice
    kTooLong     // `size` bytes of RDMA2_CONNPROP, more than kConnPropSizeMax
  };
  Kind kind = Kind::kUnknown;
  uint32_t id = 0;
  PropertyFault property;
  size_t size = 0;

  friend bool operator==(const OwnPropertiesFault&, const OwnPropertiesFault&) = default;
};
std::string ToString(const OwnPropertiesFault& fault);
// Whether an end can say `own`, and `more` of these extensions beside it: nullopt, or why not.
std::optional<OwnPropertiesFault> CheckOwnProperties(const TransportProperties& own, const PropertySet& more,
                                                     const Extensions& extensions = {});

class ConnectionTerms {
 public:
  enum class End : uint8_t { kClient, kServer };
  struct Config {
    End end = End::kServer;
    TransportVersions versions;
    // Version 1: which document.
    ProtocolProfile profile = kRfc5666bis;
    ChunkListLimits list_limits;
    // Version 2, all of it.
    std::shared_ptr<const Extensions> extensions;  // may be null
    // What this end says of itself. receive_buffer_size: bytes that each of its Receives takes.
    TransportProperties own;
    PropertySet more;  // of extensions; CheckOwnProperties has nothing against it
    // Bytes of the largest Send of this end; at least kDefaultReceiveBufferSize where version 2 is spoken.
    uint32_t send_max = kDefaultReceiveBufferSize;
  };
  explicit ConnectionTerms(Config config);

  // --- The version ---

  // Of what is sent. Unsettled: at a client the highest of its own, at a server the lowest.
  uint32_t version() const { return version_; }
  bool settled() const { return settled_; }
  bool is_v2() const { return version_ == kRpcRdmaVersion2; }
  // A client's: the probe is out, or will be.
  bool probing() const { return !settled_ && config_.end == End::kClient; }
  // Settles it. One of this end's own; not when it is settled.
  void SetVersion(uint32_t version);
  const TransportVersions& versions() const { return config_.versions; }

  // --- Headers ---

  const HeaderLayout& layout() const;
  // The header of what came in one Receive; `in` then stands at the RPC message, if one follows. A server settles the
  // version by the first header that is no error and no response.
  //   unsettled, client   as DecodeProbeAnswer
  //   otherwise           as the codec of the version, at an unsettled server that of the message; another version is
  //                       kVersion
  // Malformed properties are kDisconnect at a client, and at a server where they come as an answer; otherwise a server
  // answers them with BAD_XDR (docs/decisions/0048).
  Result<Header, HeaderFault> Decode(ByteReader& in);
  // Into the layout that header.flags ask for: version 2's when they are there.
  void Encode(const Header& header, ByteWriter& out) const;
  size_t EncodedSize(const Header& header) const;
  // A header of the settled version without body: xid, version, credits and, in version 2, `flags`.
  Header MakeHeader(uint32_t xid, uint32_t credits, uint32_t flags, Header::Body body) const;
  // RDMA_ERROR in answer to a message that had this fault, whose XID and action to answer it has; without credits.
  // ERR_VERS is laid out as the version that it refuses, where that is 2, and otherwise as version 1's
  // (docs/decisions/0049): it says which versions this end takes now.
  Header MakeRefusal(const HeaderFault& fault) const;

  // How messages are read and made: version 1 by its document, version 2, which has the chunks of the last of these, by
  // that one.
  const ProtocolProfile& profile() const { return is_v2() ? kRfc5666bis : config_.profile; }
  const ChunkListLimits& list_limits() const { return config_.list_limits; }
  const Extensions& extensions() const;

  // --- Version 2: what the ends take ---

  const TransportProperties& own() const { return config_.own; }
  // What RDMA2_CONNPROP of this end says.
  PropertySet own_set() const;
  // RDMA2_CONNPROP has come, well-formed. Whether it is the first, which holds.
  bool OnPeerProperties(const PropertySet& set);
  // Those that hold: what the peer has said, or the defaults.
  const TransportProperties& peer() const { return peer_; }
  bool peer_has_spoken() const { return peer_set_.has_value(); }
  // What it said, extensions' among it; null: nothing yet.
  const PropertySet* peer_set() const { return peer_set_ ? &*peer_set_ : nullptr; }

  // Flags of extensions that the peer takes, as far as properties show it: none of those that go by one before it has
  // spoken.
  uint32_t flags_taken() const { return flags_taken_; }

  // Bytes of the longest Send to the peer [v2:4.2.1+1]: kProbeSizeMax while probing; later what its Receives take, as
  // far as this end can send it.
  uint32_t send_inline() const;
  // Bytes of the longest Send that the peer may be expected to make: no more than 4096 until it has answered this end's
  // properties by naming the size of its own Receives, which shows that it follows them (docs/decisions/0048).
  uint32_t receive_inline() const;

 private:
  bool Settles(const Header& header) const;
  bool IsResponseOfVersion2(ConstBytes message, const HeaderFault& fault) const;
  HeaderFault Judged(HeaderFault fault) const;

  const Config config_;
  uint32_t version_;
  bool settled_;
  TransportProperties peer_;
  std::optional<PropertySet> peer_set_;
  uint32_t flags_taken_;
};

}  // namespace stagecoach::rpcrdma
