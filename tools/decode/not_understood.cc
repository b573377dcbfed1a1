#include "tools/decode/not_understood.h"

#include <fmt/format.h>

namespace stagecoach::decode {
namespace {

using Reason = NotUnderstood::Reason;

struct Name {
  uint32_t number;
  const char* name;
};

// Types and protocols that somebody may miss RDMA in.
constexpr Name kEtherTypes[] = {
    {0x8847, "MPLS"}, {0x8864, "PPPoE"}, {0x88e5, "MACsec"}, {0x8906, "FCoE"}, {0x8915, "RoCE version 1"},
};
constexpr Name kProtocols[] = {
    {4, "IPv4 in IP"}, {41, "IPv6 in IP"}, {47, "GRE"}, {50, "ESP"}, {132, "SCTP"},
};

template <size_t kSize>
std::string Named(const Name (&names)[kSize], uint32_t number) {
  for (const Name& each : names) {
    if (each.number == number) return fmt::format(" ({})", each.name);
  }
  return {};
}

std::string Sentence(const NotUnderstood& kind, uint64_t count) {
  const bool one = count == 1;
  const std::string packets = Counted(count, "packet");
  const char* were = one ? "was" : "were";
  switch (kind.reason) {
    case Reason::kLinkType:
      return fmt::format("{} of link type {} {} not understood", packets, kind.number, were);
    case Reason::kEtherType:
      return fmt::format("{} of Ethernet type 0x{:04x}{} {} not understood", packets, kind.number,
                         Named(kEtherTypes, kind.number), were);
    case Reason::kProtocol:
      return fmt::format("{} of IP protocol {}{} {} not understood", packets, kind.number,
                         Named(kProtocols, kind.number), were);
    case Reason::kFragment:
      return fmt::format("{} {} not put together", Counted(count, "IP fragment"), were);
    case Reason::kNotIp:
      return fmt::format("{} {} neither IPv4 nor IPv6 where IP is to be", packets, one ? "has" : "have");
    case Reason::kCut:
      return fmt::format("{} {} cut by the snap length", packets, were);
    case Reason::kContradiction:
      return fmt::format("{} {} lengths that contradict each other", packets, one ? "has" : "have");
    case Reason::kNoInterface:
      return fmt::format("{} {} captured on an interface that the file does not describe", packets, were);
    case Reason::kBlockLength:
      return fmt::format("{} {} lengths that contradict each other", Counted(count, "packet block"),
                         one ? "has" : "have");
    case Reason::kBlockTooLong:
      return fmt::format("{} {} too long to be read", Counted(count, "packet block"), one ? "is" : "are");
    case Reason::kBlockType:
      return fmt::format("{} of type 0x{:08x} {} not read", Counted(count, "block"), kind.number, were);
    case Reason::kOther:
      return fmt::format("{} of further kinds {} not understood", packets, were);
    case Reason::kOtherBlock:
      return fmt::format("{} of further types {} not read", Counted(count, "block"), were);
    case Reason::kSomethingElse:
      break;
  }
  return {};
}

}  // namespace

void NotUnderstoodCounts::Add(NotUnderstood kind) {
  if (kind.reason == Reason::kSomethingElse) return;
  if (counts_.size() >= kKindsMax && !counts_.contains(kind)) {
    kind = {kind.reason == Reason::kBlockType ? Reason::kOtherBlock : Reason::kOther};
  }
  ++counts_[kind];
}

uint64_t NotUnderstoodCounts::packets() const {
  uint64_t packets = 0;
  for (const auto& [kind, count] : counts_) {
    if (kind.reason != Reason::kBlockType && kind.reason != Reason::kOtherBlock) packets += count;
  }
  return packets;
}

std::vector<std::string> NotUnderstoodCounts::Sentences() const {
  std::vector<std::string> sentences;
  for (const auto& [kind, count] : counts_) sentences.push_back(Sentence(kind, count));
  return sentences;
}

std::string Counted(uint64_t count, const std::string& what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

}  // namespace stagecoach::decode
