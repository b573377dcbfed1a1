// Why packets of a capture were not understood, and how many of them: counted while a file is read, and said in words
// when it has ended.
//
// Bounded by kKindsMax kinds, whatever the packets say. Single-threaded.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace stagecoach::decode {

struct NotUnderstood {
  enum class Reason : uint8_t {
    kSomethingElse,  // understood: it carries neither TCP nor UDP, as ARP and ICMP do
    kLinkType,       // `number` is the link type
    kEtherType,      // `number` is the type
    kProtocol,       // `number` is IP's
    kFragment,       // of an IP packet
    kNotIp,          // neither version 4 nor 6 where IP is to be
    kCut,            // there was more of the packet than was captured
    kContradiction,  // lengths in its headers contradict each other, or pass its end
    kNoInterface,    // pcapng: of an interface that the file does not describe
    kBlockLength,    // pcapng: the block's lengths contradict each other
    kBlockTooLong,   // pcapng
    kBlockType,      // pcapng: `number` is the type of a block that may hold anything
    kOther,          // of kinds beyond kKindsMax
    kOtherBlock,     // the same of blocks that may hold anything
  };
  Reason reason = Reason::kSomethingElse;
  uint32_t number = 0;

  friend auto operator<=>(const NotUnderstood&, const NotUnderstood&) = default;
};

class NotUnderstoodCounts {
 public:
  static constexpr size_t kKindsMax = 32;

  // What is something else is understood, and not counted.
  void Add(NotUnderstood kind);

  // How many packets; blocks that are not known to be packets are not among them.
  uint64_t packets() const;
  // A sentence for each kind, "12 packets of link type 147 were not understood", in the order of reasons.
  std::vector<std::string> Sentences() const;

 private:
  std::map<NotUnderstood, uint64_t> counts_;
};

// "1 packet", "12 packets".
std::string Counted(uint64_t count, const std::string& what);

}  // namespace stagecoach::decode
