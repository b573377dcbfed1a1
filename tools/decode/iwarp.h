// RPC-over-RDMA messages in captured iWARP: TCP streams put together from their segments, cut into FPDUs (RFC 5044,
// with markers and CRC), whose DDP segments make Sends again (RFC 5041, 5040).
//
// Connections whose beginning was not captured, and streams that lack bytes, are gone on with where a TCP segment
// begins with what can be an FPDU; CRC is not checked then, and markers are not expected.
//
// Bounded: kConnectionsMax connections; for each direction of one kWaitingMax bytes that came early (with what it takes
// to keep them), an FPDU and a message; for all of them kHeldMax such bytes. Where that does not do, the oldest
// connection is given up, one of something else first. Single-threaded.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "emu/wire/rdmap.h"
#include "tools/decode/event.h"

namespace stagecoach::decode {

// Cuts the FPDUs out of a stream.
class FpduCutter {
 public:
  FpduCutter(bool crc, bool markers) : crc_(crc), markers_(markers) {}

  // Takes bytes up to the end of one FPDU; returns how many.
  size_t Feed(ConstBytes bytes);
  // Whether a whole one is there, until the next Feed().
  bool whole() const { return whole_; }
  ConstBytes ulpdu() const;
  bool crc_matches() const { return crc_matches_; }
  // Bytes of memory.
  size_t held() const { return fpdu_.capacity() + covered_.capacity(); }

 private:
  bool crc_;
  bool markers_;
  bool whole_ = false;
  bool crc_matches_ = true;
  uint64_t position_ = 0;           // in the stream, from the first FPDU
  std::vector<std::byte> fpdu_;     // without markers
  std::vector<std::byte> covered_;  // by the CRC, with them
};

class Iwarp {
 public:
  static constexpr size_t kConnectionsMax = 256;
  static constexpr size_t kWaitingMax = 512 * 1024;
  static constexpr size_t kHeldMax = 64 * 1024 * 1024;

  Iwarp(const rpcrdma::ProtocolProfile& profile, const Sinks* sinks) : profile_(profile), sinks_(*sinks) {}

  void OnSegment(const Datagram& segment, const Origin& origin);
  // No packets follow.
  void Finish();

  // Messages that were left out because nothing says that they are of RPC-over-RDMA.
  uint64_t others() const { return others_; }

 private:
  enum class State : uint8_t {
    kFrame,    // before the Request or Reply
    kFpdus,    // behind it
    kLost,     // somewhere; a segment may begin with an FPDU
    kIgnored,  // not iWARP, or rejected
  };
  // One direction.
  struct Side {
    Address source;
    Address destination;
    bool started = false;
    uint32_t next = 0;                                  // sequence number
    std::map<int64_t, std::vector<std::byte>> waiting;  // by position
    size_t waiting_bytes = 0;
    int64_t position = 0;  // of `next`, from where the capture has it
    State state = State::kFrame;
    std::vector<std::byte> frame;
    std::optional<FpduCutter> cutter;
    bool wants_markers = false;  // what it receives is to have them
    // The Send at hand.
    std::vector<std::byte> message;
    uint32_t msn = 0;
    bool skipping = false;
  };
  struct Connection {
    explicit Connection(const rpcrdma::ProtocolProfile& profile) : decoder(profile) {}
    std::array<Side, 2> sides;
    std::optional<size_t> client;  // which side's source it is
    bool iwarp = false;            // an MPA frame was seen
    bool crc = false;
    bool rpc_rdma = false;
    size_t held = 0;  // as it was counted last
    MessageDecoder decoder;
  };
  using Key = std::pair<Address, Address>;

  void Erase(const Key& key);
  void Evict(const Connection* keep, const Origin& origin);
  void Count(Connection& connection, const Origin& origin);
  Connection& ConnectionOf(const Datagram& segment, const Origin& origin, size_t* side);
  void OnSegmentOf(Connection& connection, size_t side, const Datagram& segment, const Origin& origin);
  void Take(Connection& connection, size_t side, ConstBytes payload, size_t missing, const Origin& origin);
  void TakeWaiting(Connection& connection, size_t side, const Origin& origin, bool over_gaps);
  void Lose(Connection& connection, size_t side, uint64_t bytes, const Origin& origin);
  void Deliver(Connection& connection, size_t side, ConstBytes bytes, const Origin& origin);
  ConstBytes TakeFrame(Connection& connection, size_t side, ConstBytes bytes, const Origin& origin);
  void TakeFpdus(Connection& connection, size_t side, ConstBytes bytes, const Origin& origin);
  void OnUlpdu(Connection& connection, size_t side, ConstBytes ulpdu, const Origin& origin);
  void OnSend(Connection& connection, size_t side, const emu::wire::SegmentHeader& last, const Origin& origin);

  const rpcrdma::ProtocolProfile& profile_;
  const Sinks& sinks_;
  std::map<Key, std::unique_ptr<Connection>> connections_;
  std::deque<Key> order_;  // of their beginnings
  Origin last_;
  size_t held_ = 0;  // by all connections
  uint64_t others_ = 0;
};

}  // namespace stagecoach::decode
