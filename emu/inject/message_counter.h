// MessageCounter: numbers the messages of one direction of a connection, and says of each segment which part of which
// message it is.
//
// COUNTING. Connections of a device are numbered from 1. On each, each direction counts its messages from 1; a rule
// that names kinds counts those alone. An RDMA Write, Read or Read response of no bytes is no message here: devices
// send such for themselves (RFC 6581's ready-to-receive). InfiniBand sends packets again: what has been seen, by its
// packet number, is the same segment in another attempt, and no new message. Each packet number has its own attempts:
// those that a message has for the first time behind others that come again are at their first.
//
// What arrives may have been preceded by packets that were lost on their way. A message of which the first packet is
// missing counts from the first one that comes, taken for its second until it turns out how many were before it; the
// missing ones belong to it when they come. Where the end of one message and the beginning of the next are missing,
// both count as one until either comes.
//
// Sans-IO; serialised by its owner.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "emu/inject/rule.h"

namespace stagecoach::emu {

// What a segment says of its place in a message.
struct SegmentFacts {
  MessageKind kind = MessageKind::kSend;
  bool ends = true;    // its message
  bool empty = false;  // a Write, Read or Read response of no bytes
  // InfiniBand, but for acknowledgements: the packet number, 24 bits, and how many numbers it stands for (a Read
  // request: as many as the answer has packets). Where there is none, segments come once and in order.
  struct Packet {
    uint32_t psn = 0;
    uint32_t count = 1;
    bool begins = true;  // a message
  };
  std::optional<Packet> packet;
};

// How many times each packet number has been seen. Numbers are counted on beyond 24 bits.
class PacketAttempts {
 public:
  // The numbers from `first` on, `count` of them, are seen once more. Returns how many times that is; of several
  // numbers, those of the one that was seen most.
  uint64_t Note(uint64_t first, uint64_t count);

 private:
  // More than there are in what a requester may have unacknowledged, unless a peer takes pains. Beyond it the oldest
  // become one, with the attempts of the one that has most: what comes again is never at its first.
  static constexpr size_t kMostRuns = 256;

  // Of numbers that were seen equally often; `end` is the first one behind them.
  struct Run {
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t attempts = 0;
  };
  std::vector<Run> runs_;  // in order, without overlap
};

// Numbers the messages of one direction of a connection.
class MessageCounter {
 public:
  struct Position {
    std::array<uint64_t, kMessageKinds> counts{};  // messages of each kind up to this one
    uint64_t segment = 0;
    uint64_t attempt = 1;
    bool is_new = false;  // its message was not seen before

    // Its number among messages of these kinds.
    uint64_t NumberAmong(uint16_t kinds) const;
  };

  // Nothing for what is no message, or so old that nobody knows it.
  std::optional<Position> Next(const SegmentFacts& facts);

 private:
  using Counts = std::array<uint64_t, kMessageKinds>;
  // One that has packet numbers, which are counted on beyond 24 bits here.
  struct Message {
    Counts counts{};
    MessageKind kind = MessageKind::kSend;
    uint64_t first = 0;     // packet number
    uint64_t end = 0;       // the first number behind the packets that were seen
    bool open = true;       // its last packet was not seen
    bool headless = false;  // nor was its first; `first` is a guess
  };
  using Messages = std::deque<Message>;
  // Requests and answers have packet numbers of their own.
  struct Sequence {
    std::optional<uint64_t> next;  // behind the highest number that was seen
    Messages recent;               // by packet number
    bool forgotten = false;        // there were more
    PacketAttempts attempts;

    uint64_t Extend(uint32_t psn) const;
  };

  // Counts one more.
  Counts Begin(MessageKind kind);
  std::optional<Position> NextPacket(const SegmentFacts& facts, const SegmentFacts::Packet& packet);
  // The message that the packet is part of, which may be a new one, told by `is_new`.
  Messages::iterator MessageOf(Messages& recent, Messages::iterator after, const SegmentFacts& facts,
                               const SegmentFacts::Packet& packet, uint64_t psn, bool* is_new);

  Counts counts_{};
  std::array<std::optional<Position>, kMessageKinds> current_;  // of the last segment, without packet numbers
  Sequence requests_;
  Sequence answers_;
};

}  // namespace stagecoach::emu
