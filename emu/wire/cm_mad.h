// Datagrams of InfiniBand's communication management: how two ends agree on a connection, or on a service for
// datagrams, and how they end it.
//
// Source: InfiniBand Architecture Specification, volume 1, release 1.5, chapter 12 (communication management), section
// 13.4.3 (the header that all management datagrams share), annex A11 (what private data begins with where ports are
// those of IP). Each is 256 bytes, in a UD Send to QP 1 of a port.
//
// Not here: alternate paths (LAP, APR, and their half of REQ), Reliable Datagram, ClassPortInfo but for the one use it
// has in redirection. What the specification reserves is written as zeros and not looked at. Plain values and pure
// functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <variant>

#include "base/bytes.h"
#include "base/result.h"
#include "base/time.h"
#include "emu/wire/carrier_hello.h"

namespace stagecoach::emu::wire {

inline constexpr size_t kCmMadSize = 256;

// AttributeID (table 99).
enum class CmAttribute : uint16_t {
  kReq = 0x10,
  kMra = 0x11,
  kRej = 0x12,
  kRep = 0x13,
  kRtu = 0x14,
  kDreq = 0x15,
  kDrep = 0x16,
  kSidrReq = 0x17,
  kSidrRep = 0x18,
};
const char* ToString(CmAttribute attribute);

// Which message an MRA or a REJ is about.
enum class CmAbout : uint8_t { kReq = 0, kRep = 1, kOther = 2, kNone = 3 };

// Reasons of a REJ that are sent or understood here (table 103).
enum class CmReason : uint16_t {
  kNoQp = 1,
  kNoResources = 3,
  kTimeout = 4,
  kUnsupported = 5,
  kInvalidCommunicationId = 6,
  kInvalidServiceId = 8,
  kInvalidTransportType = 9,
  kStaleConnection = 10,
  kInvalidGid = 12,
  kRedirected = 24,
  kInvalidMtu = 26,
  kConsumer = 28,
};

// Request for communication: from the initiator. Times are codes: 4.096 us * 2^code (section 12.7.8).
struct CmReq {
  static constexpr CmAttribute kAttribute = CmAttribute::kReq;
  static constexpr size_t kPrivateDataSize = 92;
  uint32_t local_id = 0;
  uint64_t service_id = 0;
  uint64_t ca_guid = 0;
  uint32_t qkey = 0;
  uint32_t qp_number = 0;           // 24 bits
  uint8_t responder_resources = 0;  // Reads the sender answers at once
  uint8_t initiator_depth = 0;      // Reads it will have outstanding
  uint8_t remote_response_timeout = 0;
  uint8_t transport = 0;  // 0 is RC, 1 is UC
  bool flow_control = false;
  uint32_t starting_psn = 0;  // 24 bits
  uint8_t local_response_timeout = 0;
  uint8_t retry_count = 0;
  uint16_t pkey = 0xffff;
  uint8_t path_mtu = 0;  // as ibv_mtu
  uint8_t rnr_retry_count = 0;
  uint8_t max_cm_retries = 0;
  bool srq = false;
  // The primary path.
  uint16_t local_lid = 0;
  uint16_t remote_lid = 0;
  Gid local_gid{};
  Gid remote_gid{};
  uint32_t flow_label = 0;  // 20 bits
  uint8_t packet_rate = 0;  // 6 bits
  uint8_t traffic_class = 0;
  uint8_t hop_limit = 0;
  uint8_t service_level = 0;
  bool subnet_local = false;
  uint8_t ack_timeout = 0;
  std::array<std::byte, kPrivateDataSize> private_data{};
  friend bool operator==(const CmReq&, const CmReq&) = default;
};

// Message receipt acknowledgement: the answer takes longer.
struct CmMra {
  static constexpr CmAttribute kAttribute = CmAttribute::kMra;
  static constexpr size_t kPrivateDataSize = 222;
  uint32_t local_id = 0;
  uint32_t remote_id = 0;
  CmAbout about = CmAbout::kReq;
  uint8_t service_timeout = 0;  // a code, as in CmReq
  std::array<std::byte, kPrivateDataSize> private_data{};
  friend bool operator==(const CmMra&, const CmMra&) = default;
};

// Reject.
struct CmRej {
  static constexpr CmAttribute kAttribute = CmAttribute::kRej;
  static constexpr size_t kPrivateDataSize = 148;
  static constexpr size_t kInformationSize = 72;
  uint32_t local_id = 0;
  uint32_t remote_id = 0;
  CmAbout about = CmAbout::kReq;
  uint8_t information_length = 0;  // of what follows, at most kInformationSize
  CmReason reason = CmReason::kConsumer;
  std::array<std::byte, kInformationSize> information{};
  std::array<std::byte, kPrivateDataSize> private_data{};
  friend bool operator==(const CmRej&, const CmRej&) = default;
};

// Reply to request for communication.
struct CmRep {
  static constexpr CmAttribute kAttribute = CmAttribute::kRep;
  static constexpr size_t kPrivateDataSize = 196;
  uint32_t local_id = 0;
  uint32_t remote_id = 0;
  uint32_t qkey = 0;
  uint32_t qp_number = 0;     // 24 bits
  uint32_t starting_psn = 0;  // 24 bits
  uint8_t responder_resources = 0;
  uint8_t initiator_depth = 0;
  uint8_t target_ack_delay = 0;
  uint8_t failover_accepted = 0;
  bool flow_control = false;
  uint8_t rnr_retry_count = 0;
  bool srq = false;
  uint64_t ca_guid = 0;
  std::array<std::byte, kPrivateDataSize> private_data{};
  friend bool operator==(const CmRep&, const CmRep&) = default;
};

// Ready to use.
struct CmRtu {
  static constexpr CmAttribute kAttribute = CmAttribute::kRtu;
  static constexpr size_t kPrivateDataSize = 224;
  uint32_t local_id = 0;
  uint32_t remote_id = 0;
  std::array<std::byte, kPrivateDataSize> private_data{};
  friend bool operator==(const CmRtu&, const CmRtu&) = default;
};

// Request for communication release.
struct CmDreq {
  static constexpr CmAttribute kAttribute = CmAttribute::kDreq;
  static constexpr size_t kPrivateDataSize = 220;
  uint32_t local_id = 0;
  uint32_t remote_id = 0;
  uint32_t remote_qp_number = 0;  // 24 bits: of the end that hears this
  std::array<std::byte, kPrivateDataSize> private_data{};
  friend bool operator==(const CmDreq&, const CmDreq&) = default;
};

// Reply to request for communication release.
struct CmDrep {
  static constexpr CmAttribute kAttribute = CmAttribute::kDrep;
  static constexpr size_t kPrivateDataSize = 224;
  uint32_t local_id = 0;
  uint32_t remote_id = 0;
  std::array<std::byte, kPrivateDataSize> private_data{};
  friend bool operator==(const CmDrep&, const CmDrep&) = default;
};

// Service ID resolution request: who takes datagrams for this service?
struct CmSidrReq {
  static constexpr CmAttribute kAttribute = CmAttribute::kSidrReq;
  static constexpr size_t kPrivateDataSize = 216;
  uint32_t request_id = 0;
  uint16_t pkey = 0xffff;
  uint64_t service_id = 0;
  std::array<std::byte, kPrivateDataSize> private_data{};
  friend bool operator==(const CmSidrReq&, const CmSidrReq&) = default;
};

// Service ID resolution response.
enum class CmSidrStatus : uint8_t {
  kValid = 0,
  kUnsupported = 1,  // no such service
  kRejected = 2,     // by its program
  kNoQp = 3,
  kRedirected = 4,
  kUnsupportedVersion = 5,
};
struct CmSidrRep {
  static constexpr CmAttribute kAttribute = CmAttribute::kSidrRep;
  static constexpr size_t kPrivateDataSize = 136;
  static constexpr size_t kInformationSize = 72;
  uint32_t request_id = 0;
  CmSidrStatus status = CmSidrStatus::kValid;
  uint8_t information_length = 0;
  uint32_t qp_number = 0;  // 24 bits
  uint64_t service_id = 0;
  uint32_t qkey = 0;
  std::array<std::byte, kInformationSize> information{};
  std::array<std::byte, kPrivateDataSize> private_data{};
  friend bool operator==(const CmSidrRep&, const CmSidrRep&) = default;
};

using CmMessage = std::variant<CmReq, CmMra, CmRej, CmRep, CmRtu, CmDreq, CmDrep, CmSidrReq, CmSidrRep>;

struct CmMad {
  uint64_t transaction_id = 0;  // a message that is repeated keeps its own
  CmMessage message;
  friend bool operator==(const CmMad&, const CmMad&) = default;
};

CmAttribute AttributeOf(const CmMessage& message);

using CmMadBytes = std::array<std::byte, kCmMadSize>;
CmMadBytes EncodeCmMad(const CmMad& mad);

enum class CmMadFault : uint8_t {
  kBadSize,       // not 256 bytes
  kBadVersion,    // base version 1 and class version 2 are known
  kBadClass,      // another management class than that of connections
  kBadMethod,     // Send is the only one
  kBadAttribute,  // none of the messages above
  kBadLength,     // of additional information beyond its field
};
const char* ToString(CmMadFault fault);

Result<CmMad, CmMadFault> DecodeCmMad(ConstBytes bytes);

// --- Ports of IP in service IDs and private data (annex A11) ---

// A service ID of IP's: 01 PP pppp, where PP is the protocol. The port spaces of rdma_cm have their own protocols, with
// which Linux fills bytes 5 and 6.
enum class CmPortSpace : uint16_t { kTcp = 0x0106, kUdp = 0x0111 };
constexpr uint64_t ServiceIdOf(CmPortSpace space, uint16_t port) {
  return (static_cast<uint64_t>(space) << 16) | port;
}
struct CmServicePort {
  CmPortSpace space = CmPortSpace::kTcp;
  uint16_t port = 0;
  friend bool operator==(const CmServicePort&, const CmServicePort&) = default;
};
enum class CmServiceFault : uint8_t { kOtherService };
// Err: a service ID of somebody else's.
Result<CmServicePort, CmServiceFault> ServicePortOf(uint64_t service_id);

inline constexpr size_t kCmIpHeaderSize = 36;
// What the private data of REQ and SIDR_REQ begins with: who asks whom, in IP's terms.
struct CmIpHeader {
  bool ipv6 = false;
  uint16_t source_port = 0;
  std::array<uint8_t, 16> source{};  // IPv4 in the first four bytes
  std::array<uint8_t, 16> destination{};

  void Encode(std::span<std::byte, kCmIpHeaderSize> out) const;
  friend bool operator==(const CmIpHeader&, const CmIpHeader&) = default;
};
enum class CmIpFault : uint8_t {
  kBadVersion,    // of the header
  kBadIpVersion,  // neither 4 nor 6
};
Result<CmIpHeader, CmIpFault> DecodeCmIpHeader(std::span<const std::byte, kCmIpHeaderSize> bytes);

// --- Redirection ---

// Where a service is to be asked for instead: ClassPortInfo as the additional information of REJ and SIDR_REP has it.
struct CmRedirect {
  Gid gid{};
  uint32_t qp_number = 0;  // 24 bits

  void Encode(std::span<std::byte, CmRej::kInformationSize> out) const;
  static CmRedirect Decode(std::span<const std::byte, CmRej::kInformationSize> bytes);
  friend bool operator==(const CmRedirect&, const CmRedirect&) = default;
};

// 4.096 us * 2^code.
Duration CmTime(uint8_t code);

}  // namespace stagecoach::emu::wire
