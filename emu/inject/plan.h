// InjectionPlan: the one evaluator of injection rules. It is shown each segment of each connection, numbers messages,
// and says what is to be done to it. What carries that out are taps (emu/tap/injection_tap.h).
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
// ORDER. Rules are asked in the order of the table. The first that disconnects, stalls or drops ends that; delays add
// up. After a disconnect or a stall no rule is asked on that connection any more.
//
// The same segments in the same order have the same done to them: what is drawn comes from the rule's seed and the
// connection's number. Only `times`, which counts on all connections together, depends on how connections meet.
//
// Sans-IO. Threading: InjectionPlan from any thread; ConnectionInjections is serialised by its connection's lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/prng.h"
#include "base/time.h"
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

// A rule has fired.
struct InjectionFiring {
  const InjectionRule* rule = nullptr;
  size_t index = 0;    // in the table
  uint64_t count = 0;  // how many times it has now
  uint64_t connection = 0;
  InjectionDirection direction = InjectionDirection::kSent;
  MessageKind kind = MessageKind::kSend;
  uint64_t message = 0;  // as the rule counts
  uint64_t segment = 0;
  uint64_t attempt = 0;
};
// "rule 'disconnect message=10' fired: connection 1, message 10 sent (send)", with segment and attempt where these are
// not the first.
std::string ToString(const InjectionFiring& firing);

// What is to become of a segment.
struct InjectionVerdict {
  std::optional<InjectionAction> action;  // kDisconnect, kStall or kDrop
  Duration delay{};
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

class ConnectionInjections;

class InjectionPlan : public std::enable_shared_from_this<InjectionPlan> {
 public:
  // Hears of each firing, on whatever thread moves the connection and with its lock: not to block, nor to call back.
  using Listener = std::function<void(const InjectionFiring&)>;
  static std::shared_ptr<InjectionPlan> Make(std::vector<InjectionRule> rules, Listener listener = {});

  const std::vector<InjectionRule>& rules() const { return rules_; }
  // The next connection of the device; null if no rule is about it. Keeps the plan.
  std::unique_ptr<ConnectionInjections> NewConnection();

  struct RuleCounters {
    uint64_t matched = 0;  // segments that all of its addresses match
    uint64_t fired = 0;
  };
  RuleCounters counters(size_t rule) const;
  // What there was to match, of the connections that rules are about and the kinds that rules are about by default.
  struct Seen {
    uint64_t connections = 0;  // all of them
    uint64_t sent = 0;         // messages
    uint64_t received = 0;
  };
  Seen seen() const;

 private:
  friend class ConnectionInjections;
  struct Counters {
    std::atomic<uint64_t> matched{0};
    std::atomic<uint64_t> fired{0};
  };

  InjectionPlan(std::vector<InjectionRule> rules, Listener listener);
  // Counts a firing, unless there were as many as there may be: then nothing.
  std::optional<uint64_t> CountFiring(size_t rule);

  const std::vector<InjectionRule> rules_;
  const Listener listener_;
  std::vector<Counters> counters_;
  std::atomic<uint64_t> connections_{0};
  std::array<std::atomic<uint64_t>, 2> messages_{};  // by direction
};

// The rules' view of one connection. Outlives the streams that carry it, where these come and go.
class ConnectionInjections {
 public:
  ConnectionInjections(std::shared_ptr<InjectionPlan> plan, uint64_t number);

  uint64_t number() const { return number_; }
  // For each segment once, in order. What of the table has fired for it is in fired() until the next call.
  InjectionVerdict Judge(InjectionDirection direction, const SegmentFacts& facts);
  const std::vector<InjectionFiring>& fired() const { return fired_; }
  // The disconnect or stall that has fired.
  std::optional<InjectionAction> end() const { return end_; }

 private:
  struct RuleState {
    uint64_t matched = 0;
    Prng luck;
  };
  bool Fires(size_t rule);

  const std::shared_ptr<InjectionPlan> plan_;
  const uint64_t number_;
  std::array<MessageCounter, 2> counters_;  // by direction
  std::vector<RuleState> states_;           // of the plan's rules
  std::vector<InjectionFiring> fired_;
  std::optional<InjectionAction> end_;
};

}  // namespace stagecoach::emu
