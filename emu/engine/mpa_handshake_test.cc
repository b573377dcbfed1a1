#include "emu/engine/mpa_handshake.h"

#include <gtest/gtest.h>

#include <string>

#include "base/prng.h"
#include "tests/support/hex.h"

namespace stagecoach::emu {
namespace {

using wire::MpaEnhanced;
using wire::MpaFrame;
using wire::MpaFrameKind;
using Bytes = std::vector<std::byte>;

constexpr Instant kStart = Instant(100s);

Bytes Text(std::string_view text) {
  const ConstBytes bytes = AsBytes(text);
  return {bytes.begin(), bytes.end()};
}

// A frame as siw sends it: key, then flags, revision, length and private data in hexadecimal.
Bytes SiwFrame(MpaFrameKind kind, std::string_view hex) {
  Bytes bytes = Text(wire::MpaKey(kind));
  const Bytes rest = FromHex(hex);
  bytes.insert(bytes.end(), rest.begin(), rest.end());
  return bytes;
}
Bytes SiwRequest(std::string_view hex) {
  return SiwFrame(MpaFrameKind::kRequest, hex);
}
Bytes SiwReply(std::string_view hex) {
  return SiwFrame(MpaFrameKind::kReply, hex);
}

// Feeds a stream through the door NextRx() leaves open, at most `piece` bytes at a time; returns what the engine did
// not want.
template <typename Engine>
Bytes Feed(Engine& engine, Bytes stream, size_t piece = 1000, Instant now = kStart) {
  size_t at = 0;
  while (at < stream.size() && engine.NextRx() > 0) {
    const size_t n = std::min({piece, engine.NextRx(), stream.size() - at});
    engine.OnRx(ConstBytes(stream).subspan(at, n), now);
    at += n;
  }
  return {stream.begin() + static_cast<ptrdiff_t>(at), stream.end()};
}

template <typename Engine>
Bytes Drain(Engine& engine, size_t piece = 1000) {
  Bytes out;
  while (!engine.PendingTx().empty()) {
    const ConstBytes part = engine.PendingTx().first(std::min(piece, engine.PendingTx().size()));
    out.insert(out.end(), part.begin(), part.end());
    engine.OnTx(part.size());
  }
  return out;
}

MpaInitiator Started(const MpaInitiatorOptions& options, std::string_view private_data = "") {
  MpaInitiator initiator;
  EXPECT_TRUE(initiator.Start(options, AsBytes(private_data), kStart).has_value());
  return initiator;
}

MpaFaultKind FaultOf(std::optional<Result<MpaOutcome, MpaFault>> outcome) {
  EXPECT_TRUE(outcome.has_value());
  EXPECT_FALSE(outcome->has_value());
  return outcome->error().kind;
}

MpaOutcome OutcomeOf(std::optional<Result<MpaOutcome, MpaFault>> outcome) {
  EXPECT_TRUE(outcome.has_value());
  if (!outcome->has_value()) {
    ADD_FAILURE() << ToString(outcome->error());
    return {};
  }
  return **outcome;
}

struct Both {
  MpaRequest request;
  MpaOutcome initiator, responder;
};

// One whole exchange between our two ends, in pieces of `piece` bytes.
Both Exchange(const MpaInitiatorOptions& ask, const MpaAcceptOptions& answer, size_t piece = 1000) {
  MpaInitiator initiator = Started(ask, "ping");
  MpaResponder responder({}, kStart);
  EXPECT_TRUE(Feed(responder, Drain(initiator, piece), piece).empty());
  Both both;
  both.request = responder.TakeRequest().value();
  EXPECT_TRUE(responder.Accept(answer, AsBytes(std::string_view("pong")), kStart).has_value());
  EXPECT_TRUE(Feed(initiator, Drain(responder, piece), piece).empty());
  both.responder = OutcomeOf(responder.TakeOutcome());
  both.initiator = OutcomeOf(initiator.TakeOutcome());
  return both;
}

TEST(MpaHandshake, BothEndsAgreeOnEverything) {
  const Both both = Exchange({.crc = true, .ird = 16, .ord = 8, .peer_to_peer = true}, {.ird = 4, .ord = 128});
  EXPECT_EQ(both.request.ird, 16);
  EXPECT_EQ(both.request.ord, 8);
  EXPECT_TRUE(both.request.crc);
  EXPECT_TRUE(both.request.peer_to_peer);
  EXPECT_EQ(AsText(both.request.private_data), "ping");
  EXPECT_EQ(AsText(both.initiator.private_data), "pong");
  for (const MpaOutcome* side : {&both.initiator, &both.responder}) {
    EXPECT_TRUE(side->accepted);
    EXPECT_TRUE(side->crc);
    EXPECT_TRUE(side->enhanced);
    EXPECT_FALSE(side->send_markers);
    EXPECT_EQ(side->revision, 2);
    EXPECT_EQ(side->rtr, MpaRtr::kWrite);
  }
  EXPECT_EQ(both.responder.ird, 4);
  EXPECT_EQ(both.initiator.ord, 4);
  EXPECT_EQ(both.responder.ord, 16);
  EXPECT_EQ(both.initiator.ird, 16);
}

TEST(MpaHandshake, ExtensionsAreUsedWhereBothEndsWantThem) {
  for (const bool asked : {false, true}) {
    for (const bool known : {false, true}) {
      const Both both = Exchange({.extensions = asked}, {.extensions = known});
      EXPECT_EQ(both.request.extensions, asked);
      EXPECT_EQ(both.initiator.extensions, asked && known);
      EXPECT_EQ(both.responder.extensions, asked && known);
    }
  }
  EXPECT_FALSE(Exchange({.enhanced = false, .extensions = true}, {.extensions = true}).responder.extensions);
  EXPECT_FALSE(Exchange({.revision = 1, .extensions = true}, {.extensions = true}).responder.extensions);
}

TEST(MpaHandshake, SiwsEchoOfTheRequestsFlagsIsNoAgreement) {
  // What asks comes back as it was sent; only another bit agrees.
  const struct {
    const char* flags;
    bool agreed;
  } kReplies[] = {{"14", false}, {"16", false}, {"10", false}, {"12", true}};
  for (const auto& [flags, agreed] : kReplies) {
    MpaInitiator initiator = Started({.extensions = true});
    EXPECT_EQ(std::to_integer<int>(Drain(initiator)[16]), 0x14);
    EXPECT_TRUE(Feed(initiator, SiwReply(std::string(flags) + "02 0004 0000 0000")).empty());
    EXPECT_EQ(OutcomeOf(initiator.TakeOutcome()).extensions, agreed) << flags;
  }
  MpaInitiator unwilling = Started({});
  Drain(unwilling);
  EXPECT_TRUE(Feed(unwilling, SiwReply("1202 0004 0000 0000")).empty());
  EXPECT_FALSE(OutcomeOf(unwilling.TakeOutcome()).extensions) << "agrees to what was not asked";
}

TEST(MpaHandshake, AnySplitOfTheStreamsYieldsTheSameOutcome) {
  for (size_t piece = 1; piece <= 40; ++piece) {
    const Both both = Exchange({.ird = 3, .ord = 5}, {.ird = 9, .ord = 9}, piece);
    EXPECT_EQ(both.initiator.ird, 3);
    EXPECT_EQ(both.initiator.ord, 5);
    EXPECT_EQ(AsText(both.initiator.private_data), "pong");
  }
}

TEST(MpaHandshake, NeitherEndHasMoreReadsOutstandingThanTheOtherHolds) {
  Prng prng(1);
  for (int i = 0; i < 2000; ++i) {
    const auto depth = [&] { return static_cast<uint16_t>(prng.OneIn(4) ? prng.Below(4) : prng.Below(0x3fff)); };
    const Both both = Exchange({.ird = depth(), .ord = depth()}, {.ird = depth(), .ord = depth()});
    EXPECT_LE(both.initiator.ord, both.responder.ird);
    EXPECT_LE(both.responder.ord, both.initiator.ird);
  }
}

TEST(MpaHandshake, NothingBeyondTheFrameIsTaken) {
  MpaResponder responder({}, kStart);
  Bytes stream = SiwRequest("1002 0004 0001 0001");
  const Bytes fpdu = FromHex("000ec140");
  stream.insert(stream.end(), fpdu.begin(), fpdu.end());
  EXPECT_EQ(Feed(responder, stream), fpdu);
  EXPECT_EQ(responder.NextRx(), 0u);
}

TEST(MpaHandshake, RevisionOneLeavesDepthsToTheUlps) {
  const Both both =
      Exchange({.revision = 1, .crc = true, .ird = 7, .ord = 6, .peer_to_peer = true}, {.ird = 5, .ord = 4});
  EXPECT_FALSE(both.request.enhanced);
  EXPECT_FALSE(both.request.peer_to_peer);
  EXPECT_EQ(both.initiator.revision, 1);
  EXPECT_EQ(both.initiator.ird, 7);
  EXPECT_EQ(both.initiator.ord, 6);
  EXPECT_EQ(both.responder.ird, 5);
  EXPECT_EQ(both.responder.ord, 4);
  EXPECT_EQ(both.initiator.rtr, MpaRtr::kNone);
  EXPECT_TRUE(both.responder.crc);
}

TEST(MpaHandshake, RevisionTwoWithoutTheEnhancedWordWorks) {
  const Both both = Exchange({.enhanced = false, .ird = 7, .ord = 6}, {.ird = 5, .ord = 4});
  EXPECT_EQ(both.initiator.revision, 2);
  EXPECT_FALSE(both.initiator.enhanced);
  EXPECT_FALSE(both.responder.enhanced);
}

TEST(MpaHandshake, CrcIsUsedExactlyWhenTheReplySaysSo) {
  EXPECT_FALSE(Exchange({}, {}).initiator.crc);
  EXPECT_TRUE(Exchange({.crc = true}, {}).initiator.crc);
  EXPECT_TRUE(Exchange({}, {.crc = true}).initiator.crc);
}

TEST(MpaHandshake, ARejectionCarriesPrivateData) {
  for (const bool enhanced : {true, false}) {
    MpaInitiator initiator = Started({.enhanced = enhanced});
    MpaResponder responder({}, kStart);
    Feed(responder, Drain(initiator));
    ASSERT_TRUE(responder.TakeRequest().has_value());
    ASSERT_TRUE(responder.Reject(AsBytes(std::string_view("busy")), kStart).has_value());
    Feed(initiator, Drain(responder));
    const MpaOutcome outcome = OutcomeOf(initiator.TakeOutcome());
    EXPECT_FALSE(outcome.accepted);
    EXPECT_EQ(AsText(outcome.private_data), "busy");
    EXPECT_FALSE(OutcomeOf(responder.TakeOutcome()).accepted);
  }
}

// --- Against the frames of Linux siw ---

TEST(MpaHandshake, TheStockRequestOfSiwIsWhatWeSendToo) {
  MpaInitiator initiator = Started({.ird = 1, .ord = 1});
  EXPECT_EQ(Drain(initiator), SiwRequest("1002 0004 0001 0001"));
  MpaInitiator peer_to_peer = Started({.ird = 1, .ord = 1, .peer_to_peer = true});
  EXPECT_EQ(Drain(peer_to_peer), SiwRequest("1002 0004 8001 c001"));
}

TEST(MpaHandshake, TheLinuxNfsClientIsAnsweredAsKnfsdDoes) {
  MpaResponder responder({}, kStart);
  Feed(responder, SiwRequest("1002 000c 0080 0000 f6ab0e18 01 01 03 03"));
  const MpaRequest request = responder.TakeRequest().value();
  EXPECT_EQ(request.ird, 128);
  EXPECT_EQ(request.ord, 0);
  EXPECT_EQ(ToHex(request.private_data), "f6ab0e1801010303");
  const Bytes private_data = FromHex("f6ab0e18 01 00 03 03");
  ASSERT_TRUE(responder.Accept({.ird = 128, .ord = 128}, private_data, kStart).has_value());
  EXPECT_EQ(Drain(responder), SiwReply("1002 000c 0000 0080 f6ab0e18 01 00 03 03"));
}

TEST(MpaHandshake, KnfsdsReplyIsUnderstood) {
  MpaInitiator initiator = Started({.ird = 128, .ord = 0});
  Feed(initiator, SiwReply("1002 000c 0000 0080 f6ab0e18 01 00 03 03"));
  const MpaOutcome outcome = OutcomeOf(initiator.TakeOutcome());
  EXPECT_EQ(outcome.ird, 128);
  EXPECT_EQ(outcome.ord, 0);
  EXPECT_EQ(outcome.private_data.size(), 8u);
}

TEST(MpaHandshake, SiwsPeerToPeerReplySelectsTheWrite) {
  MpaInitiator initiator = Started({.ird = 1, .ord = 1, .peer_to_peer = true});
  Feed(initiator, SiwReply("1002 0004 8001 8001"));
  EXPECT_EQ(OutcomeOf(initiator.TakeOutcome()).rtr, MpaRtr::kWrite);
}

TEST(MpaHandshake, SiwsSegmentationFlagDoesNotDisturb) {
  MpaResponder responder({}, kStart);
  Feed(responder, SiwRequest("1802 0004 0001 0001"));
  EXPECT_TRUE(responder.TakeRequest().has_value());
}

TEST(MpaHandshake, SiwsRejectionsAreRejections) {
  for (const char* reply : {"2001 0000", "2002 0000", "3002 0004 0000 0000", "3002 0004 0010 0000"}) {
    MpaInitiator initiator = Started({.ird = 1});
    Feed(initiator, SiwReply(reply));
    EXPECT_FALSE(OutcomeOf(initiator.TakeOutcome()).accepted) << reply;
  }
}

TEST(MpaHandshake, RejectionsLookLikeSiws) {
  for (const auto& [request, reply] : {std::pair{"0001 0000", "2001 0000"},
                                       {"0002 0000", "2002 0000"},
                                       {"1002 0004 0001 0001", "3002 0004 0000 0000"}}) {
    MpaResponder responder({}, kStart);
    Feed(responder, SiwRequest(request));
    ASSERT_TRUE(responder.Reject({}, kStart).has_value());
    EXPECT_EQ(Drain(responder), SiwReply(reply));
  }
}

// --- Choices ---

TEST(MpaHandshake, TheResponderPicksTheReadyToReceiveMessage) {
  const struct {
    const char* request;
    MpaRtr rtr;
    const char* reply;
  } kCases[] = {{"1002 0004 8001 c001", MpaRtr::kWrite, "1002 0004 8001 8001"},
                {"1002 0004 8001 8001", MpaRtr::kWrite, "1002 0004 8001 8001"},
                {"1002 0004 8001 4001", MpaRtr::kRead, "1002 0004 8001 4001"},
                {"1002 0004 8001 0001", MpaRtr::kWrite, "1002 0004 8001 8001"},
                {"1002 0004 0001 c001", MpaRtr::kNone, "1002 0004 0001 0001"}};
  for (const auto& c : kCases) {
    MpaResponder responder({}, kStart);
    Feed(responder, SiwRequest(c.request));
    ASSERT_TRUE(responder.Accept({.ird = 1, .ord = 1}, {}, kStart).has_value());
    EXPECT_EQ(Drain(responder), SiwReply(c.reply)) << c.request;
    EXPECT_EQ(OutcomeOf(responder.TakeOutcome()).rtr, c.rtr) << c.request;
  }
}

TEST(MpaHandshake, AnOfferOfAZeroLengthSendAloneIsRejectedOnTheWire) {
  MpaResponder responder({}, kStart);
  Feed(responder, SiwRequest("1002 0004 c001 0001"));
  EXPECT_FALSE(responder.TakeRequest().has_value());
  EXPECT_EQ(Drain(responder), SiwReply("3002 0004 0000 0000"));
  EXPECT_EQ(FaultOf(responder.TakeOutcome()), MpaFaultKind::kNoMatchingRtr);
}

TEST(MpaHandshake, APeerThatAsksForMarkersGetsThemPromised) {
  MpaResponder responder({}, kStart);
  Feed(responder, SiwRequest("9002 0004 0001 0001"));
  EXPECT_TRUE(responder.TakeRequest()->markers);
  ASSERT_TRUE(responder.Accept({}, {}, kStart).has_value());
  EXPECT_EQ(Drain(responder)[16], std::byte{0x10}) << "we never want markers ourselves";
  EXPECT_TRUE(OutcomeOf(responder.TakeOutcome()).send_markers);

  MpaInitiator initiator = Started({});
  Feed(initiator, SiwReply("9002 0004 0000 0000"));
  EXPECT_TRUE(OutcomeOf(initiator.TakeOutcome()).send_markers);
}

TEST(MpaHandshake, UnspecifiedDepthsAreNoLimit) {
  MpaResponder responder({}, kStart);
  Feed(responder, SiwRequest("1002 0004 3fff 3fff"));
  ASSERT_TRUE(responder.Accept({.ird = 11, .ord = 12}, {}, kStart).has_value());
  EXPECT_EQ(Drain(responder), SiwReply("1002 0004 000b 000c"));
  MpaInitiator initiator = Started({.ird = 3, .ord = 4});
  Feed(initiator, SiwReply("1002 0004 3fff 3fff"));
  const MpaOutcome outcome = OutcomeOf(initiator.TakeOutcome());
  EXPECT_EQ(outcome.ird, 3);
  EXPECT_EQ(outcome.ord, 4);
}

TEST(MpaHandshake, AResponderOfTheClientServerModelNeedsNoReadyToReceive) {
  MpaInitiator initiator = Started({.ird = 1, .peer_to_peer = true});
  Feed(initiator, SiwReply("1002 0004 0000 0001"));
  EXPECT_EQ(OutcomeOf(initiator.TakeOutcome()).rtr, MpaRtr::kNone);
}

// --- Faults ---

TEST(MpaHandshake, RepliesThatBreakTheAgreementAreFaults) {
  const struct {
    const char* reply;
    MpaFaultKind fault;
  } kCases[] = {{"0003 0000", MpaFaultKind::kUnsupportedRevision},
                {"0000 0000", MpaFaultKind::kUnsupportedRevision},
                {"4001 0000", MpaFaultKind::kRevisionMismatch},
                {"4002 0000", MpaFaultKind::kEnhancedMismatch},
                {"1002 0004 8001 8001", MpaFaultKind::kCrcRefused},
                {"5002 0004 8001 8002", MpaFaultKind::kInsufficientIrd},
                {"5002 0004 c001 0001", MpaFaultKind::kNoMatchingRtr},
                {"5002 0002 8001", MpaFaultKind::kMalformed},
                {"5002 0201", MpaFaultKind::kMalformed},
                {"5002 ffff", MpaFaultKind::kMalformed}};
  for (const auto& c : kCases) {
    MpaInitiator initiator = Started({.crc = true, .ird = 1, .ord = 1, .peer_to_peer = true});
    Feed(initiator, SiwReply(c.reply));
    EXPECT_EQ(FaultOf(initiator.TakeOutcome()), c.fault) << c.reply;
    EXPECT_EQ(initiator.NextRx(), 0u);
  }
}

TEST(MpaHandshake, ARevisionOneInitiatorRefusesWhatItDidNotAskFor) {
  MpaInitiator later = Started({.revision = 1});
  Feed(later, SiwReply("0002 0000"));
  EXPECT_EQ(FaultOf(later.TakeOutcome()), MpaFaultKind::kRevisionMismatch);
  MpaInitiator plain = Started({.enhanced = false});
  Feed(plain, SiwReply("1002 0004 0000 0000"));
  EXPECT_EQ(FaultOf(plain.TakeOutcome()), MpaFaultKind::kEnhancedMismatch);
}

TEST(MpaHandshake, RequestsOfUnknownRevisionsAreClosedWithoutReply) {
  for (const char* request : {"0000 0000", "0003 0000", "1003 0004 0001 0001", "00ff 0000"}) {
    MpaResponder responder({}, kStart);
    Feed(responder, SiwRequest(request));
    EXPECT_FALSE(responder.TakeRequest().has_value());
    EXPECT_TRUE(responder.PendingTx().empty());
    EXPECT_EQ(FaultOf(responder.TakeOutcome()), MpaFaultKind::kUnsupportedRevision) << request;
  }
}

TEST(MpaHandshake, AnEnhancedRequestWithoutRoomForTheWordIsRejectedOnTheWire) {
  MpaResponder responder({}, kStart);
  Feed(responder, SiwRequest("1002 0003 010203"));
  EXPECT_EQ(Drain(responder), SiwReply("3002 0004 0000 0000"));
  EXPECT_EQ(FaultOf(responder.TakeOutcome()), MpaFaultKind::kMalformed);
}

TEST(MpaHandshake, AStrangerIsKnownByItsFirstBytes) {
  MpaResponder responder({}, kStart);
  Feed(responder, Text("GET /"), 1);
  const auto outcome = responder.TakeOutcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_EQ(outcome->error().kind, MpaFaultKind::kMalformed);
  EXPECT_EQ(outcome->error().bytes_received, 1u);
  EXPECT_EQ(ToString(outcome->error()), "malformed MPA Request: not the key of an MPA frame (0) at byte 0");

  MpaInitiator initiator = Started({});
  Feed(initiator, SiwRequest("0002 0000"), 1);
  EXPECT_EQ(FaultOf(initiator.TakeOutcome()), MpaFaultKind::kMalformed) << "a Request is no Reply";
}

TEST(MpaHandshake, AHostileLengthIsRefusedBeforeItsBytesAreAwaited) {
  MpaResponder responder({}, kStart);
  Feed(responder, SiwRequest("0001 0201"));
  EXPECT_EQ(FaultOf(responder.TakeOutcome()), MpaFaultKind::kMalformed);
  MpaResponder longest({}, kStart);
  Feed(longest, SiwRequest("0001 0200"));
  EXPECT_EQ(longest.NextRx(), 512u);
  Feed(longest, Bytes(512, std::byte{7}));
  EXPECT_EQ(longest.TakeRequest()->private_data.size(), 512u);
}

TEST(MpaHandshake, AStreamThatEndsAtAnyByteIsAFaultThatSaysWhere) {
  const Bytes request = SiwRequest("1002 000c 0080 0000 f6ab0e18 01 01 03 03");
  for (size_t cut = 0; cut < request.size(); ++cut) {
    MpaResponder responder({}, kStart);
    Feed(responder, Bytes(request.begin(), request.begin() + static_cast<ptrdiff_t>(cut)));
    EXPECT_FALSE(responder.TakeRequest().has_value());
    EXPECT_FALSE(responder.TakeOutcome().has_value());
    responder.OnLost(kStart);
    const auto outcome = responder.TakeOutcome();
    ASSERT_TRUE(outcome.has_value());
    EXPECT_EQ(outcome->error().kind, MpaFaultKind::kStreamLost);
    EXPECT_EQ(outcome->error().bytes_received, cut);
  }
  const Bytes reply = SiwReply("1002 0004 0001 0001");
  for (size_t cut = 0; cut < reply.size(); ++cut) {
    MpaInitiator initiator = Started({.ird = 1, .ord = 1});
    Feed(initiator, Bytes(reply.begin(), reply.begin() + static_cast<ptrdiff_t>(cut)));
    EXPECT_FALSE(initiator.TakeOutcome().has_value());
    initiator.OnLost(kStart);
    EXPECT_EQ(FaultOf(initiator.TakeOutcome()), MpaFaultKind::kStreamLost);
  }
}

TEST(MpaHandshake, TheUlpMayLoseItsPeerWhileItDecides) {
  MpaResponder responder({}, kStart);
  Feed(responder, SiwRequest("1002 0004 0001 0001"));
  ASSERT_TRUE(responder.TakeRequest().has_value());
  responder.OnLost(kStart);
  EXPECT_EQ(FaultOf(responder.TakeOutcome()), MpaFaultKind::kStreamLost);
  const auto late = responder.Accept({}, {}, kStart);
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error(), MpaCommandError::kNotNow);
  EXPECT_TRUE(responder.PendingTx().empty());
}

// --- Time ---

TEST(MpaHandshake, TheInitiatorWaitsTenSecondsForTheReply) {
  MpaInitiator initiator = Started({});
  EXPECT_EQ(initiator.Deadline(), kStart + 10s);
  initiator.OnDeadline(kStart + 10s - 1ns);
  EXPECT_FALSE(initiator.TakeOutcome().has_value());
  initiator.OnDeadline(kStart + 10s);
  const auto outcome = initiator.TakeOutcome();
  ASSERT_TRUE(outcome.has_value());
  EXPECT_EQ(ToString(outcome->error()), "no MPA Reply in time (0 bytes received)");
  EXPECT_FALSE(initiator.Deadline().has_value());
  EXPECT_TRUE(initiator.PendingTx().empty());
}

TEST(MpaHandshake, TheResponderWaitsFiveSecondsForTheRequestHoweverSlowlyItComes) {
  MpaResponder responder({}, kStart);
  EXPECT_EQ(responder.Deadline(), kStart + 5s);
  Feed(responder, Text("MPA ID"), 1, kStart + 4s);
  EXPECT_EQ(responder.Deadline(), kStart + 5s) << "bytes do not buy time";
  responder.OnDeadline(kStart + 5s);
  EXPECT_EQ(FaultOf(responder.TakeOutcome()), MpaFaultKind::kTimeout);
}

TEST(MpaHandshake, TheUlpMayThinkAsLongAsItLikesButTheReplyMustLeave) {
  MpaResponder responder({.timeout = 2s}, kStart);
  Feed(responder, SiwRequest("1002 0004 0001 0001"));
  EXPECT_FALSE(responder.Deadline().has_value());
  responder.OnDeadline(kStart + 1000s);
  ASSERT_TRUE(responder.TakeRequest().has_value());
  ASSERT_TRUE(responder.Accept({}, {}, kStart + 1000s).has_value());
  EXPECT_EQ(responder.Deadline(), kStart + 1002s);
  responder.OnTx(5);
  EXPECT_FALSE(responder.TakeOutcome().has_value()) << "not established before the Reply has left";
  responder.OnDeadline(kStart + 1002s);
  EXPECT_EQ(FaultOf(responder.TakeOutcome()), MpaFaultKind::kReplyTimeout);
  EXPECT_TRUE(responder.PendingTx().empty());
}

// --- The caller's errors ---

TEST(MpaHandshake, WhatTheCallerCannotMeanIsRefusedAndChangesNothing) {
  MpaInitiator initiator;
  const Bytes longest(508), too_long(509);
  EXPECT_EQ(initiator.Start({}, too_long, kStart).error(), MpaCommandError::kPrivateDataTooLong);
  EXPECT_EQ(initiator.Start({.revision = 3}, {}, kStart).error(), MpaCommandError::kBadOption);
  EXPECT_EQ(initiator.Start({.ird = 0x3fff}, {}, kStart).error(), MpaCommandError::kBadOption);
  EXPECT_FALSE(initiator.Deadline().has_value());
  EXPECT_EQ(initiator.NextRx(), 0u);
  ASSERT_TRUE(initiator.Start({}, longest, kStart).has_value());
  EXPECT_EQ(initiator.Start({}, {}, kStart).error(), MpaCommandError::kNotNow);

  MpaResponder responder({}, kStart);
  EXPECT_EQ(responder.Accept({}, {}, kStart).error(), MpaCommandError::kNotNow);
  EXPECT_EQ(responder.Reject({}, kStart).error(), MpaCommandError::kNotNow);
  Feed(responder, Drain(initiator));
  EXPECT_EQ(responder.Accept({}, too_long, kStart).error(), MpaCommandError::kPrivateDataTooLong);
  EXPECT_EQ(responder.Accept({.ord = 0x4000}, {}, kStart).error(), MpaCommandError::kBadOption);
  EXPECT_EQ(responder.Reject(too_long, kStart).error(), MpaCommandError::kPrivateDataTooLong);
  ASSERT_TRUE(responder.Accept({}, longest, kStart).has_value());
  EXPECT_EQ(responder.Reject({}, kStart).error(), MpaCommandError::kNotNow);
  Feed(initiator, Drain(responder));
  EXPECT_EQ(OutcomeOf(initiator.TakeOutcome()).private_data.size(), 508u);
}

}  // namespace
}  // namespace stagecoach::emu
