// What Linux siw, xprtrdma and svcrdma put on the wire, against our codecs: every header decodes and encodes to the
// same bytes, every CRC is right, and what siw calls an error we call the same one. Counts were checked against
// Wireshark's dissectors.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/prng.h"
#include "emu/engine/mpa_framing.h"
#include "emu/engine/mpa_handshake.h"
#include "emu/wire/mpa.h"
#include "emu/wire/print.h"
#include "emu/wire/rdmap.h"
#include "tests/golden/iwarp_streams.h"

namespace stagecoach::testing {
namespace {

using namespace emu::wire;

constexpr size_t kOpcodes = 8;

struct Expected {
  const char* name;
  int connections;  // that begin with an MPA Request
  int accepted;
  int with_crc;
  std::array<int, kOpcodes> segments;  // by opcode
  int faults = 0;                      // segments that were meant to be wrong
  uint16_t responder_depth = 128;      // IRD and ORD limit of the responder: siw's, or that of a user-space peer
};

void PrintTo(const Expected& e, std::ostream* out) {
  *out << e.name;
}

const Expected kCaptures[] = {
    {"siw_rping", 1, 1, 0, {3, 3, 3, 12}},
    {"siw_rping_crc", 1, 1, 1, {3, 3, 3, 12}},
    {"siw_rping_p2p", 1, 1, 0, {4, 3, 3, 12}},
    {"siw_rping_crc_p2p", 1, 1, 1, {4, 3, 3, 12}},
    {"siw_rping_gso", 1, 1, 0, {7, 3, 7, 12}},
    {"siw_rping_mtu1500", 1, 1, 0, {45, 3, 45, 12}},
    {"siw_rping_mpa1", 1, 1, 0, {0, 0, 0, 1}},
    {"siw_rping_mpa1_crc", 1, 1, 1, {0, 0, 0, 1}},
    {"siw_nfs3", 1, 1, 0, {76, 13, 31, 183, 25}},
    {"siw_nfs3_inline1024", 1, 1, 0, {27, 8, 12, 165, 13}},
    {"siw_nfs3_mtu1500", 1, 1, 0, {843, 13, 750, 186, 25}},
    {"siw_nfs3_mpa1", 17, 0, 0, {}},
    {"siw_nfs3client_to_host", 3, 3, 0, {0, 0, 0, 18}, 0, 16},
    {"siw_nfsclient_to_host", 1, 1, 0, {0, 0, 0, 4}, 0, 16},
    {"siw_two_vms", 2, 2, 0, {583, 5, 187, 71, 17}},
    {"siw_knfsd_pokes", 103, 97, 3, {23, 3, 2, 153, 3, 1, 0, 13}, 5},
};

TcpCapture Load(const std::string& name) {
  auto capture = ReadTcpCaptureFile("tests/golden/captures/" + name + ".pcap");
  if (!capture.has_value()) {
    ADD_FAILURE() << capture.error();
    return {};
  }
  return std::move(*capture);
}

template <typename T>
std::string Encoded(const T& value) {
  std::vector<std::byte> bytes(value.EncodedSize());
  ByteWriter out(bytes);
  value.Encode(out);
  EXPECT_TRUE(out.ok());
  return ToHex(bytes);
}

class IwarpGolden : public ::testing::TestWithParam<Expected> {
 protected:
  // Calls `visit` for each recorded MPA connection.
  template <typename Visit>
  void ForEachConnection(Visit visit) {
    const TcpCapture capture = Load(GetParam().name);
    EXPECT_EQ(capture.skipped_packets, 0u);
    for (const TcpConnection& connection : capture.connections) {
      SCOPED_TRACE(connection.Name());
      EXPECT_FALSE(connection.from_client.gap || connection.from_server.gap);
      if (const auto iwarp = CutIwarp(connection)) visit(*iwarp);
    }
  }
};

std::string Name(const ::testing::TestParamInfo<Expected>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Captures, IwarpGolden, ::testing::ValuesIn(kCaptures), Name);

TEST_P(IwarpGolden, EveryMpaFrameDecodesAndEncodesToTheSameBytes) {
  int connections = 0, accepted = 0, with_crc = 0;
  ForEachConnection([&](const IwarpConnection& c) {
    ++connections;
    accepted += c.accepted;
    with_crc += c.crc;
    const auto request = MpaFrame::Decode(MpaFrameKind::kRequest, c.request);
    ASSERT_TRUE(request.has_value()) << ToString(request.error());
    EXPECT_EQ(Encoded(*request), ToHex(c.request)) << Describe(*request);
    if (c.reply.empty()) return;
    const auto reply = MpaFrame::Decode(MpaFrameKind::kReply, c.reply);
    ASSERT_TRUE(reply.has_value()) << ToString(reply.error());
    EXPECT_EQ(Encoded(*reply), ToHex(c.reply)) << Describe(*reply);
  });
  EXPECT_EQ(connections, GetParam().connections);
  EXPECT_EQ(accepted, GetParam().accepted);
  EXPECT_EQ(with_crc, GetParam().with_crc);
}

TEST_P(IwarpGolden, EverySegmentHeaderDecodesAndEncodesToTheSameBytes) {
  std::array<int, kOpcodes> seen{};
  int faults = 0;
  ForEachConnection([&](const IwarpConnection& c) {
    for (const auto* direction : {&c.from_client, &c.from_server}) {
      for (const RecordedFpdu& fpdu : *direction) {
        for (std::byte b : fpdu.pad) EXPECT_EQ(b, std::byte{0});
        const auto head = fpdu.ulpdu.first(std::min(fpdu.ulpdu.size(), kMaxSegmentHeaderSize));
        const auto header = DecodeSegment(head, fpdu.ulpdu.size());
        if (!header.has_value()) {
          ++faults;
          EXPECT_EQ(direction, &c.from_client) << "siw is right: " << ToString(header.error());
          continue;
        }
        ++seen[static_cast<size_t>(header->opcode())];
        EXPECT_EQ(Encoded(*header), ToHex(fpdu.ulpdu.first(header->EncodedSize()))) << Describe(*header);
      }
    }
  });
  EXPECT_EQ(seen, GetParam().segments);
  EXPECT_EQ(faults, GetParam().faults);
}

TEST_P(IwarpGolden, EveryCrcIsRightWhereNegotiatedAndZeroElsewhereFromSiw) {
  int wrong = 0;
  ForEachConnection([&](const IwarpConnection& c) {
    for (const auto* direction : {&c.from_client, &c.from_server}) {
      for (const RecordedFpdu& fpdu : *direction) {
        if (!c.crc) {
          EXPECT_EQ(ToHex(fpdu.crc), "00000000");
        } else {
          wrong += ToHex(EncodeFpduCrc(ComputeCrc32c(fpdu.covered))) != ToHex(fpdu.crc);
        }
      }
    }
  });
  // One of the pokes is an FPDU whose CRC was spoilt on purpose.
  EXPECT_EQ(wrong, GetParam().name == std::string("siw_knfsd_pokes") ? 1 : 0);
}

template <typename Engine>
void FeedFrame(Engine& engine, ConstBytes frame) {
  while (engine.NextRx() > 0 && !frame.empty()) {
    const ConstBytes part = frame.first(std::min(engine.NextRx(), frame.size()));
    engine.OnRx(part, {});
    frame = frame.subspan(part.size());
  }
  EXPECT_TRUE(frame.empty());
}

TEST_P(IwarpGolden, OurResponderAnswersAsLinuxDid) {
  const uint16_t depth = GetParam().responder_depth;
  ForEachConnection([&](const IwarpConnection& c) {
    const auto request = MpaFrame::Decode(MpaFrameKind::kRequest, c.request);
    ASSERT_TRUE(request.has_value());
    emu::MpaResponder responder({}, {});
    FeedFrame(responder, c.request);
    if (request->revision == 0 || request->revision > 2) {
      EXPECT_EQ(responder.TakeOutcome()->error().kind, emu::MpaFaultKind::kUnsupportedRevision);
      return;
    }
    // siw answers an offer of a zero-length Send alone with Write, which was not offered. We say that nothing matches
    // (RFC 6581).
    if (request->enhanced.has_value() && request->enhanced->rtr_send && !request->enhanced->rtr_write &&
        !request->enhanced->rtr_read) {
      EXPECT_EQ(responder.TakeOutcome()->error().kind, emu::MpaFaultKind::kNoMatchingRtr);
      return;
    }
    const auto asked = responder.TakeRequest();
    ASSERT_TRUE(asked.has_value()) << Describe(*request);
    EXPECT_EQ(ToHex(asked->private_data), ToHex(request->private_data));
    if (c.reply.empty()) return;
    const auto reply = MpaFrame::Decode(MpaFrameKind::kReply, c.reply);
    ASSERT_TRUE(reply.has_value());
    if (c.accepted) {
      ASSERT_TRUE(responder.Accept({.ird = depth, .ord = depth}, reply->private_data, {}).has_value());
      EXPECT_EQ(ToHex(responder.PendingTx()), ToHex(WithoutSegmentationFlag(c.reply))) << Describe(*request);
    } else if (!reply->enhanced.has_value() || *reply->enhanced == MpaEnhanced{}) {
      ASSERT_TRUE(responder.Reject(reply->private_data, {}).has_value());
      EXPECT_EQ(ToHex(responder.PendingTx()), ToHex(c.reply)) << Describe(*request);
    }
  });
}

TEST_P(IwarpGolden, OurInitiatorUnderstandsWhatLinuxReplied) {
  ForEachConnection([&](const IwarpConnection& c) {
    const auto request = MpaFrame::Decode(MpaFrameKind::kRequest, c.request);
    ASSERT_TRUE(request.has_value());
    const bool enhanced = request->enhanced.has_value();
    emu::MpaInitiatorOptions options{.revision = request->revision, .enhanced = enhanced, .crc = request->crc()};
    if (enhanced) {
      options.ird = request->enhanced->ird;
      options.ord = request->enhanced->ord;
      options.peer_to_peer = request->enhanced->peer_to_peer;
    }
    emu::MpaInitiator initiator;
    if (!initiator.Start(options, request->private_data, {}).has_value()) {
      EXPECT_TRUE(request->revision == 0 || request->revision > 2);
      return;
    }
    // The pokes also ask for markers and for odd RTRs, which we never do.
    if (GetParam().name != std::string("siw_knfsd_pokes")) {
      EXPECT_EQ(ToHex(initiator.PendingTx()), ToHex(WithoutSegmentationFlag(c.request)));
    }
    if (c.reply.empty()) return;
    FeedFrame(initiator, c.reply);
    const auto outcome = initiator.TakeOutcome();
    ASSERT_TRUE(outcome.has_value());
    ASSERT_TRUE(outcome->has_value()) << ToString(outcome->error());
    EXPECT_EQ((*outcome)->accepted, c.accepted);
    EXPECT_EQ((*outcome)->crc, c.crc);
    if (options.peer_to_peer && c.accepted) {
      const bool read = !request->enhanced->rtr_write && request->enhanced->rtr_read;
      EXPECT_EQ((*outcome)->rtr, read ? emu::MpaRtr::kRead : emu::MpaRtr::kWrite);
    }
  });
}

// The records our receiver takes from `stream`, read in pieces of random size.
std::vector<std::string> Received(bool crc, ConstBytes stream, size_t head_limit, Prng prng) {
  emu::MpaReceiver receiver(crc);
  std::vector<std::string> records;
  emu::RecordHead record;
  while (true) {
    emu::MpaReceiver::Step step;
    const auto read_more = [&] {
      size_t left = prng.OneIn(3) ? prng.Between(1, 40) : prng.Between(1, 4000);
      size_t taken = 0;
      for (const MutableBytes& part : receiver.NextRx()) {
        const size_t n = CopyBytes(part.first(std::min(part.size(), left)), stream);
        stream = stream.subspan(n);
        left -= n;
        taken += n;
      }
      receiver.OnRx(taken);
    };
    while ((step = receiver.NextRecord(&record)) == emu::MpaReceiver::Step::kNeedBytes && !stream.empty()) read_more();
    if (step != emu::MpaReceiver::Step::kReady) return records;
    const size_t head_size = std::min(record.length, head_limit);
    std::vector<std::byte> ulpdu(record.length);
    CopyBytes(ulpdu, record.head.first(head_size));
    const std::array<MutableBytes, 1> destination = {MutableBytes(ulpdu).subspan(head_size)};
    while ((step = receiver.Place(head_size, destination)) == emu::MpaReceiver::Step::kNeedBytes && !stream.empty()) {
      read_more();
    }
    if (step != emu::MpaReceiver::Step::kReady) return records;
    records.push_back(ToHex(ulpdu));
  }
}

TEST_P(IwarpGolden, OurReceiverCutsTheSameRecordsHoweverTheStreamIsSplit) {
  const TcpCapture capture = Load(GetParam().name);
  uint64_t seed = 0;
  for (const TcpConnection& connection : capture.connections) {
    SCOPED_TRACE(connection.Name());
    const auto iwarp = CutIwarp(connection);
    if (!iwarp.has_value() || !iwarp->accepted) continue;
    for (const bool client : {true, false}) {
      std::vector<std::string> expected;
      for (const RecordedFpdu& fpdu : client ? iwarp->from_client : iwarp->from_server) {
        // The spoilt CRC ends its stream.
        if (iwarp->crc && ToHex(EncodeFpduCrc(ComputeCrc32c(fpdu.covered))) != ToHex(fpdu.crc)) break;
        expected.push_back(ToHex(fpdu.ulpdu));
      }
      const ConstBytes stream = client ? ConstBytes(connection.from_client.bytes).subspan(iwarp->request.size())
                                       : ConstBytes(connection.from_server.bytes).subspan(iwarp->reply.size());
      const size_t head_limit = client ? kDdpTaggedHeaderSize : kMaxSegmentHeaderSize;
      EXPECT_TRUE(Received(iwarp->crc, stream, head_limit, Prng(++seed)) == expected);
    }
  }
}

// --- The faults that were provoked, and siw's Terminates ---

struct Poke {
  const char* control;  // as siw wrote it
  TerminateCode meaning;
  bool ambiguous;
};

TEST(SiwTerminates, DecodeThroughTheQuirkWithTheMeaningOfWhatProvokedThem) {
  const Poke kExpected[] = {
      {"11000300", terminate::kDdpInvalidStag, false},         // Write to an unknown STag
      {"10000700", terminate::kRdmapInvalidStag, false},       // Read of an unknown STag
      {"21020300", terminate::kDdpNoBuffer, false},            // Send longer than the Receive
      {"20060000", terminate::kRdmapOpcode, true},             // opcode 12
      {"21060000", terminate::kDdpUntaggedVersion, false},     // DDP version 2
      {"20050000", terminate::kRdmapVersion, true},            // RDMAP version 2
      {"21030300", terminate::kDdpMsnRange, false},            // MSN 7 for 1
      {"21010300", terminate::kDdpQueueNumber, false},         // QN 5
      {"01000300", terminate::kDdpLocalCatastrophic, false},   // a Read Response nobody asked for
      {"20090300", terminate::kRdmapCannotInvalidate, false},  // Send with Invalidate of an unknown STag
      {"02020000", terminate::kMpaCrc, false},                 // a spoilt CRC
      {"11000300", terminate::kDdpInvalidStag, false},         // Write to an unknown STag, with CRC
      {"11000300", terminate::kDdpInvalidStag, false},
  };
  size_t seen = 0;
  for (const TcpConnection& connection : Load("siw_knfsd_pokes").connections) {
    const auto iwarp = CutIwarp(connection);
    ASSERT_TRUE(iwarp.has_value());
    for (const RecordedFpdu& fpdu : iwarp->from_server) {
      const auto header = DecodeSegment(fpdu.ulpdu, fpdu.ulpdu.size());
      ASSERT_TRUE(header.has_value());
      if (header->opcode() != RdmapOpcode::kTerminate) continue;
      const ConstBytes payload = fpdu.ulpdu.subspan(header->EncodedSize());
      SCOPED_TRACE(ToHex(payload));
      const auto reading = DecodeTerminate(payload);
      ASSERT_TRUE(reading.has_value());
      ASSERT_LT(seen, std::size(kExpected));
      const Poke& expected = kExpected[seen++];
      EXPECT_EQ(ToHex(payload.first(4)), expected.control);
      EXPECT_EQ(reading->order, expected.ambiguous ? TerminateBitOrder::kAmbiguous : TerminateBitOrder::kSiw);
      EXPECT_EQ(reading->as_siw.has_value(), expected.ambiguous);
      const TerminateHeader& as_siw = expected.ambiguous ? *reading->as_siw : reading->header;
      EXPECT_EQ(as_siw.code, expected.meaning) << Describe(*reading);
      std::vector<std::byte> again(payload.size());
      ByteWriter out(again);
      as_siw.EncodeAsSiw(out);
      EXPECT_EQ(ToHex(again), ToHex(payload));
    }
  }
  EXPECT_EQ(seen, std::size(kExpected));
}

TEST(SiwTerminates, WeWouldHaveSentTheSameCodeForEachBadHeader) {
  int compared = 0;
  for (const TcpConnection& connection : Load("siw_knfsd_pokes").connections) {
    const auto iwarp = CutIwarp(connection);
    ASSERT_TRUE(iwarp.has_value());
    for (const RecordedFpdu& bad : iwarp->from_client) {
      const auto ours = DecodeSegment(bad.ulpdu, bad.ulpdu.size());
      if (ours.has_value()) continue;
      if (iwarp->from_server.empty()) {
        // The one it does not answer: ten bytes, for which it waits until there are sixteen.
        EXPECT_EQ(ours.error().kind, WireFaultKind::kTruncated);
        EXPECT_EQ(bad.ulpdu.size(), 10u);
        continue;
      }
      const auto reading = DecodeTerminate(iwarp->from_server.back().ulpdu.subspan(kDdpUntaggedHeaderSize));
      ASSERT_TRUE(reading.has_value());
      EXPECT_EQ(ours.error().terminate, reading->as_siw.value_or(reading->header).code) << ToString(ours.error());
      ++compared;
    }
  }
  EXPECT_EQ(compared, 4);
}

}  // namespace
}  // namespace stagecoach::testing
