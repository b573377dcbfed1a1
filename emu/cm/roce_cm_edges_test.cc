// The outer edges of what two ends of a connection tell each other with the messages of InfiniBand's connection
// managers: each field at every value it can have, from the program that says it to the QP or the program that it is
// for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "emu/cm/roce_cm_test_support.h"

namespace stagecoach::emu {
namespace {

// A world for one connection.
struct Ends {
  // The server's program has the request.
  void Ask(const CmParameters& asked, const std::function<void(const std::shared_ptr<CmId>&)>& prepare = {}) {
    listener = server.Listening();
    initiator = client.Routed();
    if (prepare) prepare(initiator);
    client.qp = client.NewQp();
    ASSERT_EQ(client.cm().SetQp(initiator, client.qp->qp_number()), 0);
    ASSERT_EQ(client.cm().Connect(initiator, asked), 0);
    responder = server.Request();
    ASSERT_NE(responder, nullptr);
  }
  void Accept(const CmParameters& given) {
    ASSERT_EQ(server.Accept(responder, given), 0);
    ASSERT_EQ(client.Next(), CmEventType::kEstablished);
  }

  SimWorld world{3};
  Machine server{&world, "server", kServerAddress};
  Machine client{&world, "client", Address("10.0.0.2")};
  std::shared_ptr<CmId> listener;
  std::shared_ptr<CmId> initiator;
  std::shared_ptr<CmId> responder;
};

std::vector<std::byte> Bytes(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i + 1);
  return bytes;
}

// What arrives has the length of its field, zeros behind what was said.
void ExpectArrived(const std::vector<std::byte>& arrived, const std::vector<std::byte>& said, size_t field) {
  std::vector<std::byte> expected = said;
  expected.resize(field);
  EXPECT_EQ(arrived, expected) << said.size();
}

TEST(RoceCmEdges, CountsOfRetriesReachBothQpsAtEveryValue) {
  for (uint8_t count = 0; count <= 7; ++count) {
    SCOPED_TRACE(int{count});
    Ends ends;
    CmParameters asked;
    asked.retry_count = count;
    asked.rnr_retry_count = count;
    ASSERT_NO_FATAL_FAILURE(ends.Ask(asked));
    EXPECT_EQ(ends.server.last_parameters.retry_count, count);
    EXPECT_EQ(ends.server.last_parameters.rnr_retry_count, count);
    CmParameters given;
    given.rnr_retry_count = static_cast<uint8_t>(7 - count);
    ASSERT_NO_FATAL_FAILURE(ends.Accept(given));
    EXPECT_EQ(ends.client.qp->Query().retry_count, count);
    EXPECT_EQ(ends.server.qp->Query().retry_count, count);
    EXPECT_EQ(ends.client.qp->Query().rnr_retry, 7 - count);
    EXPECT_EQ(ends.server.qp->Query().rnr_retry, count);
  }
}

TEST(RoceCmEdges, TimesForAcknowledgementsReachBothQpsAtEveryValue) {
  for (unsigned code = 0; code <= UINT8_MAX; ++code) {
    SCOPED_TRACE(code);
    const auto timeout = static_cast<uint8_t>(code);
    Ends ends;
    int refused = 0;
    ASSERT_NO_FATAL_FAILURE(
        ends.Ask({}, [&](const std::shared_ptr<CmId>& id) { refused = ends.client.cm().SetAckTimeout(id, timeout); }));
    EXPECT_EQ(refused, code <= 31 ? 0 : EINVAL);
    if (code > 31) continue;
    ASSERT_NO_FATAL_FAILURE(ends.Accept({}));
    EXPECT_EQ(ends.client.qp->Query().timeout, timeout);
    EXPECT_EQ(ends.server.qp->Query().timeout, timeout);
  }
}

TEST(RoceCmEdges, DepthsReachTheQpsUpToWhatTheDeviceHas) {
  const auto most = static_cast<uint8_t>(RoceProfile().max_ird);
  for (unsigned depth = 0; depth <= UINT8_MAX; depth = depth == most + 1u ? UINT8_MAX - 1 : depth + 1) {
    SCOPED_TRACE(depth);
    const uint8_t expected = depth > most ? most : static_cast<uint8_t>(depth);
    Ends ends;
    CmParameters all;
    all.responder_resources = all.initiator_depth = kCmDepthMax;
    CmParameters asked;
    asked.responder_resources = asked.initiator_depth = static_cast<uint8_t>(depth);
    ASSERT_NO_FATAL_FAILURE(ends.Ask(asked));
    EXPECT_EQ(ends.server.last_parameters.responder_resources, expected);
    EXPECT_EQ(ends.server.last_parameters.initiator_depth, expected);
    ASSERT_NO_FATAL_FAILURE(ends.Accept(all));
    for (QueuePair* const qp : {ends.client.qp, ends.server.qp}) {
      EXPECT_EQ(qp->Query().max_rd_atomic, expected);
      EXPECT_EQ(qp->Query().max_dest_rd_atomic, expected);
    }
  }
}

TEST(RoceCmEdges, PrivateDataOfEveryLengthArrives) {
  constexpr size_t kRequest = 56;
  constexpr size_t kReply = 196;
  for (size_t size = 0; size <= kReply; ++size) {
    Ends ends;
    CmParameters asked;
    asked.private_data = Bytes(std::min(size, kRequest));
    ASSERT_NO_FATAL_FAILURE(ends.Ask(asked));
    ExpectArrived(ends.server.last_parameters.private_data, asked.private_data, kRequest);
    CmParameters given;
    given.private_data = Bytes(size);
    ASSERT_NO_FATAL_FAILURE(ends.Accept(given));
    ExpectArrived(ends.client.last_parameters.private_data, given.private_data, kReply);
  }
}

TEST(RoceCmEdges, PrivateDataOfARejectionArrivesWhateverItsLength) {
  constexpr size_t kRejection = 148;
  for (size_t size = 0; size <= UINT8_MAX; ++size) {
    Ends ends;
    ASSERT_NO_FATAL_FAILURE(ends.Ask({}));
    const int refused = ends.server.cm().Reject(ends.responder, Bytes(size));
    EXPECT_EQ(refused, size <= kRejection ? 0 : EINVAL) << size;
    if (refused != 0) continue;
    ASSERT_EQ(ends.client.Next(), CmEventType::kRejected);
    ExpectArrived(ends.client.last_parameters.private_data, Bytes(size), kRejection);
  }
}

}  // namespace
}  // namespace stagecoach::emu
