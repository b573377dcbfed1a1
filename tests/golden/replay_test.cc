// What Linux did, our engines do: each end of every recorded connection is played by them, and places, completes and
// sends what was recorded. docs/captures.md has the figures; the tests here hold the page to them.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/prng.h"
#include "emu/wire/mpa.h"
#include "emu/wire/rdmap.h"
#include "tests/golden/iwarp_streams.h"
#include "tests/golden/recording.h"
#include "tests/golden/replay.h"

namespace stagecoach::testing {
namespace {

using namespace emu::wire;
using emu::WorkStatus;

struct Capture {
  const char* name;
  uint16_t depth = 128;  // the responder's IRD and ORD limit: siw's, or that of a user-space peer
};

void PrintTo(const Capture& capture, std::ostream* out) {
  *out << capture.name;
}

const Capture kCaptures[] = {
    {"siw_rping"},
    {"siw_rping_crc"},
    {"siw_rping_p2p"},
    {"siw_rping_crc_p2p"},
    {"siw_rping_gso"},
    {"siw_rping_mtu1500"},
    {"siw_rping_mpa1"},
    {"siw_rping_mpa1_crc"},
    {"siw_nfs3"},
    {"siw_nfs3_inline1024"},
    {"siw_nfs3_mtu1500"},
    {"siw_nfs3_mpa1"},
    {"siw_nfs3client_to_host", 16},
    {"siw_nfsclient_to_host", 16},
    {"siw_two_vms"},
    {"siw_knfsd_pokes"},
};

const char* ToString(End end) {
  return end == End::kClient ? "client" : "server";
}

TcpCapture Load(const std::string& name) {
  auto capture = ReadTcpCaptureFile("tests/golden/captures/" + name + ".pcap");
  if (!capture.has_value()) {
    ADD_FAILURE() << capture.error();
    return {};
  }
  return std::move(*capture);
}

const std::string& Page() {
  static const std::string page = [] {
    std::ifstream file("docs/captures.md");
    return std::string{std::istreambuf_iterator<char>(file), {}};
  }();
  return page;
}

void ExpectOnPage(const std::string& row) {
  EXPECT_NE(Page().find("\n" + row + "\n"), std::string::npos) << "docs/captures.md lacks\n" << row;
}

size_t Sends(const RecordedStream& stream) {
  return static_cast<size_t>(std::count_if(stream.messages.begin(), stream.messages.end(),
                                           [](const RecordedMessage& m) { return IsSend(m.opcode()); }));
}

// Something was refused, or should have been.
bool IsPoked(const Recording& recording) {
  const RecordedStream& client = recording.stream(End::kClient);
  const RecordedStream& server = recording.stream(End::kServer);
  return client.terminate || server.terminate || client.odd_at || server.odd_at;
}

// Siw answers an offer of a zero-length Send alone with Write, which was not offered; ours says that nothing matches.
bool OffersNoRtrOfOurs(ConstBytes request) {
  const auto frame = MpaFrame::Decode(MpaFrameKind::kRequest, request);
  return frame.has_value() && frame->enhanced && frame->enhanced->rtr_send && !frame->enhanced->rtr_write &&
         !frame->enhanced->rtr_read;
}

class Replays : public ::testing::TestWithParam<Capture> {
 protected:
  template <typename Visit>
  void ForEachRecording(bool with_crc, Visit visit) {
    const TcpCapture capture = Load(GetParam().name);
    for (const TcpConnection& connection : capture.connections) {
      SCOPED_TRACE(connection.Name());
      ASSERT_FALSE(connection.from_client.gap || connection.from_server.gap);
      if (const auto recording = Recording::Of(connection, with_crc)) visit(*recording);
    }
  }
  template <typename Visit>
  void ForEachEnd(bool with_crc, Visit visit) {
    ForEachRecording(with_crc, [&](const Recording& recording) {
      for (const End end : {End::kClient, End::kServer}) {
        SCOPED_TRACE(ToString(end));
        visit(recording, end);
      }
    });
  }
  ReplayResult Play(const Recording& recording, End end, ReplayOptions options = {}) {
    options.depth = GetParam().depth;
    return ReplayRecording(recording, end, options);
  }
};

std::string Name(const ::testing::TestParamInfo<Capture>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Captures, Replays, ::testing::ValuesIn(kCaptures), Name);

Ending RecordedEnding(const Recording& recording, End end) {
  const RecordedStream& own = recording.stream(end);
  const RecordedStream& peer = recording.stream(Other(end));
  if (!recording.iwarp().accepted) return Ending::kNotConnected;
  if (end == End::kServer && OffersNoRtrOfOurs(recording.frame(End::kClient))) return Ending::kNotConnected;
  if (own.terminate || peer.odd_at) return Ending::kTerminatedHere;
  if (peer.terminate) return Ending::kTerminatedByPeer;
  for (const RecordedStep& step : recording.Steps(end)) {
    if (step.end_received) return Ending::kPeerClosed;
    if (step.closed) return Ending::kClosedHere;
  }
  return Ending::kOpen;
}

void ExpectWhatWasRecorded(const Recording& recording, End end, const ReplayResult& result) {
  const RecordedStream& own = recording.stream(end);
  const RecordedStream& peer = recording.stream(Other(end));
  EXPECT_EQ(result.counts.records, peer.segments.size());
  EXPECT_EQ(result.counts.writes, peer.Count(RdmapOpcode::kWrite));
  EXPECT_EQ(result.counts.read_responses, peer.Count(RdmapOpcode::kReadResponse));
  EXPECT_EQ(result.counts.receives, Sends(peer));
  EXPECT_EQ(result.unused_receives, 0u);
  EXPECT_EQ(result.counts.sends, Sends(own));
  EXPECT_EQ(result.counts.reads, peer.Count(RdmapOpcode::kReadResponse));
  // Reads that were never answered.
  const size_t unanswered = own.Count(RdmapOpcode::kReadRequest) - peer.Count(RdmapOpcode::kReadResponse);
  EXPECT_EQ(result.failed_work, std::vector<WorkStatus>(unanswered, WorkStatus::kFlushed));
  EXPECT_FALSE(result.fault.has_value()) << result.fault->description;
}

// Our bytes behind the handshake, message by message, where the sizes of segments follow no rule.
void ExpectSameMessages(ConstBytes sent, size_t from, const RecordedStream& recorded, bool crc) {
  ConstBytes rest = sent.subspan(from);
  const std::vector<RecordedFpdu> fpdus = CutFpdus(rest);
  const RecordedStream ours = ReadMessages(sent, fpdus, rest, crc);
  ASSERT_EQ(ours.messages.size(), recorded.messages.size());
  for (size_t i = 0; i < ours.messages.size(); ++i) {
    SegmentHeader first = ours.messages[i].first;
    first.last = recorded.messages[i].first.last;
    EXPECT_EQ(first, recorded.messages[i].first);
    EXPECT_EQ(ours.messages[i].payload, recorded.messages[i].payload);
  }
}

// Returns how many FPDUs are the same, byte for byte.
size_t ExpectSentAlike(const Recording& recording, End end, const ReplayResult& result) {
  const RecordedStream& own = recording.stream(end);
  const size_t from = recording.frame(end).size();
  const ConstBytes sent = result.sent;
  if (std::ranges::any_of(own.messages, [](const RecordedMessage& m) { return !m.regular; })) {
    ExpectSameMessages(sent, from, own, recording.iwarp().crc);
    return 0;
  }
  size_t until = own.odd_at.value_or(recording.bytes(end).size());
  size_t alike = own.segments.size();
  if (own.terminate) {
    until = own.messages.back().begin;
    --alike;
  }
  // It was cut off, and so are we, where the connection ended.
  if (own.Partial()) until = std::min(until, sent.size());
  EXPECT_GE(sent.size(), until);
  if (sent.size() < until || until < from) return 0;
  EXPECT_TRUE(std::ranges::equal(sent.subspan(from, until - from), recording.bytes(end).subspan(from, until - from)));
  // Behind it comes nothing but a Terminate.
  if (result.ending != Ending::kTerminatedHere) {
    EXPECT_EQ(sent.size(), until);
  }
  return alike;
}

TEST_P(Replays, EachEndPlacesCompletesAndSendsWhatWasRecorded) {
  ReplayCounts counts;
  size_t connections = 0, refused = 0, alike = 0, frames = 0, frames_alike = 0;
  std::map<Ending, int> endings;
  ForEachEnd(false, [&](const Recording& recording, End end) {
    const ReplayResult result = Play(recording, end);
    EXPECT_EQ(result.wrong, std::vector<std::string>{});
    EXPECT_EQ(result.ending, RecordedEnding(recording, end)) << ToString(result.ending);
    if (!IsPoked(recording) && result.ending != Ending::kNotConnected) ExpectWhatWasRecorded(recording, end, result);
    if (result.ending != Ending::kNotConnected) alike += ExpectSentAlike(recording, end, result);
    // Every Request and Reply of a kernel, and those of the user-space peers that ours would send.
    const auto frame = WithoutSegmentationFlag(recording.frame(end));
    if (!frame.empty() && result.could_ask) {
      ++frames;
      frames_alike += result.sent.size() >= frame.size() && std::equal(frame.begin(), frame.end(), result.sent.begin());
    }
    counts.Add(result.counts);
    ++endings[result.ending];
    if (end == End::kClient) ++(recording.iwarp().accepted ? connections : refused);
  });
  std::string ends;
  for (const auto& [ending, count] : endings) {
    ends += (ends.empty() ? "" : ", ") + std::string(ToString(ending)) + " " + std::to_string(count);
  }
  std::string row = "| " + std::string(GetParam().name);
  for (const uint64_t value :
       {connections, refused, counts.records, counts.writes, counts.read_responses, counts.placed_bytes,
        counts.receives, counts.sends, counts.write_works, counts.reads, alike}) {
    row += " | " + std::to_string(value);
  }
  ExpectOnPage(row + " | " + std::to_string(frames_alike) + "/" + std::to_string(frames) + " | " + ends + " |");
}

TEST_P(Replays, HandshakesAreUnderstood) {
  ForEachEnd(false, [&](const Recording& recording, End end) {
    const ReplayResult result = Play(recording, end);
    const auto request = MpaFrame::Decode(MpaFrameKind::kRequest, recording.frame(End::kClient));
    ASSERT_TRUE(request.has_value());
    const auto reply = MpaFrame::Decode(MpaFrameKind::kReply, recording.frame(End::kServer));
    if (request->revision == 0 || request->revision > kMpaRevision2) {
      if (end == End::kClient) {
        EXPECT_FALSE(result.could_ask);
      } else {
        ASSERT_TRUE(result.handshake_fault.has_value());
        EXPECT_EQ(result.handshake_fault->kind, emu::MpaFaultKind::kUnsupportedRevision);
        EXPECT_TRUE(result.sent.empty());  // as siw: closed without a word
      }
      return;
    }
    if (end == End::kServer && OffersNoRtrOfOurs(recording.frame(End::kClient))) {
      ASSERT_TRUE(result.handshake_fault.has_value());
      EXPECT_EQ(result.handshake_fault->kind, emu::MpaFaultKind::kNoMatchingRtr);
      return;
    }
    ASSERT_TRUE(reply.has_value());
    ASSERT_TRUE(result.handshake.has_value());
    const emu::MpaOutcome& outcome = *result.handshake;
    EXPECT_EQ(outcome.accepted, recording.iwarp().accepted);
    EXPECT_EQ(outcome.revision, reply->revision);
    EXPECT_EQ(outcome.enhanced, reply->enhanced.has_value());
    if (end == End::kServer) {
      const ConstBytes ours = ConstBytes(result.sent).first(std::min(result.sent.size(), recording.frame(end).size()));
      EXPECT_EQ(ToHex(ours), ToHex(WithoutSegmentationFlag(recording.frame(end))));
    }
    if (!outcome.accepted) return;
    EXPECT_EQ(outcome.crc, reply->crc());
    EXPECT_FALSE(outcome.send_markers);
    const ConstBytes told = end == End::kClient ? reply->private_data : ConstBytes{};
    EXPECT_TRUE(std::ranges::equal(outcome.private_data, told));
    if (!outcome.enhanced) return;
    // What one end sends the other holds.
    const MpaEnhanced& agreed = *reply->enhanced;
    EXPECT_EQ(outcome.ird, end == End::kServer ? agreed.ird : agreed.ord);
    EXPECT_EQ(outcome.ord, end == End::kServer ? agreed.ord : agreed.ird);
  });
}

TEST_P(Replays, CuttingTheStreamsOtherwiseChangesNothing) {
  ForEachEnd(false, [&](const Recording& recording, End end) {
    const ReplayResult whole = Play(recording, end);
    for (const ReplayOptions& options :
         {ReplayOptions{.cut = Cut::kByByte}, ReplayOptions{.cut = Cut::kRandom, .seed = 1},
          ReplayOptions{.cut = Cut::kRandom, .seed = 2}, ReplayOptions{.cut = Cut::kRandom, .seed = 3}}) {
      const ReplayResult result = Play(recording, end, options);
      EXPECT_EQ(result.wrong, std::vector<std::string>{});
      EXPECT_EQ(result.log, whole.log);
      EXPECT_TRUE(result.sent == whole.sent);
      EXPECT_EQ(result.ending, whole.ending);
      EXPECT_EQ(result.memory, whole.memory);
    }
  });
}

TEST_P(Replays, TheSameWithACrc) {
  ForEachEnd(true, [&](const Recording& recording, End end) {
    // What did not come whole is not judged where its CRC has to be right first.
    if (!recording.iwarp().accepted || recording.stream(End::kClient).Partial()) return;
    EXPECT_TRUE(recording.iwarp().crc);
    for (const Cut cut : {Cut::kWhole, Cut::kRandom}) {
      const ReplayResult result = Play(recording, end, {.cut = cut, .seed = 4});
      EXPECT_EQ(result.wrong, std::vector<std::string>{});
      EXPECT_EQ(result.ending, RecordedEnding(recording, end)) << ToString(result.ending);
      if (result.ending == Ending::kNotConnected) continue;
      if (!IsPoked(recording)) ExpectWhatWasRecorded(recording, end, result);
      ExpectSentAlike(recording, end, result);
    }
  });
}

// Placements and Receives alone: of what was sent in between less may have left.
std::vector<std::string> Received(const ReplayResult& result) {
  std::vector<std::string> received;
  for (const std::string& line : result.log) {
    const bool flushed = line.find("bytes, CRC") == std::string::npos;
    if (!flushed) received.push_back(line);
  }
  return received;
}

bool IsPrefix(const std::vector<std::string>& part, const std::vector<std::string>& all) {
  return part.size() <= all.size() && std::equal(part.begin(), part.end(), all.begin());
}

TEST_P(Replays, AFlippedBitIsCaughtByTheCrcAndNothingBehindItIsDelivered) {
  Prng prng(5);
  size_t caught = 0, incomplete = 0;
  ForEachEnd(true, [&](const Recording& recording, End end) {
    if (IsPoked(recording) || RecordedEnding(recording, end) == Ending::kNotConnected) return;
    const std::vector<RecordedSegment>& segments = recording.stream(Other(end)).segments;
    const ReplayResult intact = Play(recording, end);
    for (int i = 0; i < 12 && !segments.empty(); ++i) {
      const size_t victim = prng.Below(segments.size());
      const size_t size = segments[victim].end - segments[victim].begin;
      const uint64_t bit = prng.Below(size * 8);
      SCOPED_TRACE("bit " + std::to_string(bit) + " of FPDU " + std::to_string(victim));
      const ReplayResult result = Play(recording, end,
                                       {.cut = i % 2 == 0 ? Cut::kWhole : Cut::kRandom,
                                        .seed = prng.Next(),
                                        .flipped_bit = segments[victim].begin * 8 + bit});
      EXPECT_EQ(result.wrong, std::vector<std::string>{});
      EXPECT_EQ(result.counts.records, victim);
      EXPECT_TRUE(IsPrefix(Received(result), Received(intact)));
      if (result.ending != Ending::kTerminatedHere) {
        // In the length field: the FPDU that it announces never came whole.
        EXPECT_LT(bit, kMpaLengthSize * 8);
        EXPECT_FALSE(result.fault.has_value());
        EXPECT_TRUE(result.ending == Ending::kStreamFailed || result.ending == Ending::kClosedHere);
        ++incomplete;
        continue;
      }
      ++caught;
      ASSERT_TRUE(result.fault.has_value());
      const TerminateCode code{result.fault->layer, result.fault->error_type, result.fault->error_code};
      EXPECT_EQ(code, terminate::kMpaCrc) << result.fault->description;
      // And the peer is told.
      ConstBytes rest = ConstBytes(result.sent).subspan(recording.frame(end).size());
      const std::vector<RecordedFpdu> fpdus = CutFpdus(rest);
      const RecordedStream ours = ReadMessages(result.sent, fpdus, rest, true);
      ASSERT_TRUE(ours.terminate.has_value());
      EXPECT_EQ(ours.terminate->header.code, terminate::kMpaCrc);
    }
  });
  const bool any = caught + incomplete > 0;
  EXPECT_EQ(any, GetParam().name != std::string("siw_nfs3_mpa1"));
  EXPECT_GE(caught, incomplete);
}

TEST_P(Replays, AStreamThatEndsEarlyDeliversWhatCameWholeAndSaysHowItEnded) {
  Prng prng(6);
  const auto end_early = [&](const Recording& recording, End end) {
    if (IsPoked(recording) || RecordedEnding(recording, end) == Ending::kNotConnected) return;
    const std::vector<RecordedSegment>& segments = recording.stream(Other(end)).segments;
    const ReplayResult intact = Play(recording, end);
    for (int i = 0; i < 12 && !segments.empty(); ++i) {
      const bool between = i % 3 == 0;
      const RecordedSegment& cut = segments[prng.Below(segments.size())];
      const size_t at = between ? cut.end : prng.Between(cut.begin + 1, cut.end - 1);
      const bool reset = i % 2 == 0;
      SCOPED_TRACE("ends at byte " + std::to_string(at) + (reset ? " by a reset" : ""));
      const ReplayResult result =
          Play(recording, end,
               {.cut = Cut::kRandom, .seed = prng.Next(), .flipped_bit = std::nullopt, .ends_at = at, .reset = reset});
      EXPECT_EQ(result.wrong, std::vector<std::string>{});
      const auto whole = std::ranges::count_if(segments, [&](const RecordedSegment& s) { return s.end <= at; });
      EXPECT_EQ(result.counts.records, static_cast<uint64_t>(whole));
      EXPECT_TRUE(IsPrefix(Received(result), Received(intact)));
      EXPECT_EQ(result.ending, between && !reset ? Ending::kPeerClosed : Ending::kStreamFailed)
          << ToString(result.ending);
      EXPECT_FALSE(result.fault.has_value());
      for (const WorkStatus status : result.failed_work) EXPECT_EQ(status, WorkStatus::kFlushed);
    }
  };
  ForEachEnd(false, end_early);
  ForEachEnd(true, end_early);
}

// --- What was refused ---

struct Poke {
  const char* what;
  std::optional<TerminateCode> siw;  // nullopt: it said nothing
  TerminateCode ours;
  // The poking end's: what becomes of its work that the Terminate is about.
  std::vector<WorkStatus> work;
};

// In the order of the capture.
const Poke kPokes[] = {
    {"Write to an unknown STag", terminate::kDdpInvalidStag, terminate::kDdpInvalidStag, {}},
    {"Read of an unknown STag",
     terminate::kRdmapInvalidStag,
     terminate::kRdmapInvalidStag,
     {WorkStatus::kRemoteAccessError}},
    {"Send longer than the Receive",
     terminate::kDdpNoBuffer,
     terminate::kDdpTooLong,
     {WorkStatus::kRemoteOperationError}},
    {"opcode 12", terminate::kRdmapOpcode, terminate::kRdmapOpcode, {}},
    {"DDP version 2", terminate::kDdpUntaggedVersion, terminate::kDdpUntaggedVersion, {}},
    {"RDMAP version 2", terminate::kRdmapVersion, terminate::kRdmapVersion, {}},
    {"MSN 7 instead of 1", terminate::kDdpMsnRange, terminate::kDdpMsnRange, {}},
    {"queue number 5", terminate::kDdpQueueNumber, terminate::kDdpQueueNumber, {}},
    {"record of ten bytes", std::nullopt, terminate::kMpaMarkerOrLength, {}},
    {"Read Response nobody asked for", terminate::kDdpLocalCatastrophic, terminate::kRdmapOpcode, {}},
    {"Send with Invalidate of an unknown STag",
     terminate::kRdmapCannotInvalidate,
     terminate::kRdmapCannotInvalidate,
     {}},
    {"wrong CRC", terminate::kMpaCrc, terminate::kMpaCrc, {}},
    {"Write to an unknown STag, with CRC", terminate::kDdpInvalidStag, terminate::kDdpInvalidStag, {}},
    {"Write to an unknown STag, to rping", terminate::kDdpInvalidStag, terminate::kDdpInvalidStag, {}},
};

TerminateCode CodeOf(const emu::TransportFault& fault) {
  return {fault.layer, fault.error_type, fault.error_code};
}

TEST(Pokes, WhatSiwRefusesWeRefuseAndUnderstandItsTerminate) {
  size_t seen = 0;
  for (const TcpConnection& connection : Load("siw_knfsd_pokes").connections) {
    const auto recording = Recording::Of(connection);
    ASSERT_TRUE(recording.has_value());
    if (!IsPoked(*recording)) continue;
    ASSERT_LT(seen, std::size(kPokes));
    const Poke& poke = kPokes[seen++];
    SCOPED_TRACE(poke.what);
    const auto& siw = recording->stream(End::kServer).terminate;
    ASSERT_EQ(siw.has_value(), poke.siw.has_value());

    // As the end that was poked: our Terminate, in the bit order of the RFC, and the connection is over.
    const ReplayResult poked = ReplayRecording(*recording, End::kServer, {});
    EXPECT_EQ(poked.wrong, std::vector<std::string>{});
    EXPECT_EQ(poked.ending, Ending::kTerminatedHere) << ToString(poked.ending);
    ASSERT_TRUE(poked.fault.has_value());
    EXPECT_EQ(CodeOf(*poked.fault), poke.ours) << poked.fault->description;
    EXPECT_FALSE(poked.fault->from_peer);
    ConstBytes rest = ConstBytes(poked.sent).subspan(recording->frame(End::kServer).size());
    const std::vector<RecordedFpdu> fpdus = CutFpdus(rest);
    EXPECT_TRUE(rest.empty());
    const RecordedStream ours = ReadMessages(poked.sent, fpdus, rest, recording->iwarp().crc);
    ASSERT_TRUE(ours.terminate.has_value());
    EXPECT_EQ(ours.terminate->header.code, poke.ours);
    EXPECT_EQ(poked.counts.receives, 0u);
    EXPECT_EQ(poked.counts.placed_bytes, 0u);

    // As the poking end: siw's Terminate, through its bit order.
    const ReplayResult poking = ReplayRecording(*recording, End::kClient, {});
    EXPECT_EQ(poking.wrong, std::vector<std::string>{});
    EXPECT_EQ(poking.failed_work, poke.work);
    std::string page_siw = "no answer";
    if (siw) {
      EXPECT_EQ(poking.ending, Ending::kTerminatedByPeer) << ToString(poking.ending);
      ASSERT_TRUE(poking.fault.has_value());
      EXPECT_TRUE(poking.fault->from_peer);
      EXPECT_EQ(siw->as_siw.value_or(siw->header).code, *poke.siw);
      // Both readings are possible of two of them, and told.
      EXPECT_EQ(CodeOf(*poking.fault), siw->header.code);
      page_siw = ToString(*poke.siw);
      EXPECT_NE(poking.fault->description.find(page_siw), std::string::npos) << poking.fault->description;
    } else {
      EXPECT_EQ(poking.ending, Ending::kClosedHere) << ToString(poking.ending);
    }
    ExpectOnPage("| " + std::string(poke.what) + " | " + page_siw + " | " +
                 (poke.siw == poke.ours ? "the same" : ToString(poke.ours)) + " |");
  }
  EXPECT_EQ(seen, std::size(kPokes));
}

}  // namespace
}  // namespace stagecoach::testing
