// Two QPs that are connected by hand, as programs do that tell each other number and GID over a socket of their own:
// ibv_modify_qp to INIT, RTR and RTS, without rdma_cm.
#pragma once

#include <cstdint>
#include <memory>

#include "verbs_shim/tests/harness.h"

namespace stagecoach::verbs {

inline constexpr uint8_t kPatientTimeout = 18;  // 1.07 s
inline constexpr uint8_t kPatientCount = 7;

struct HandOptions {
  ibv_qp_type type = IBV_QPT_RC;
  ibv_qp_cap cap{.max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  int cq_entries = 128;
  uint32_t srq_wr = 0;  // Receives come from an SRQ of this size that the end makes itself
  unsigned access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  ibv_mtu mtu = IBV_MTU_1024;
  uint32_t psn = 0x123456;  // that this end begins with
  uint8_t rd_atomic = 1;    // both directions
  uint8_t min_rnr_timer = 12;
  // Of this end's patience with a silent peer. What is less than this is asked for only once packets have been seen to
  // pass both ways (HandPair::Connect): a set-up that is short of processors is not what tests of silence are about.
  uint8_t timeout = kPatientTimeout;
  uint8_t retry_count = kPatientCount;
  uint8_t rnr_retry = 7;
  uint32_t qkey = 0x11111111;  // UD
};

struct AhDeleter {
  void operator()(ibv_ah* ah) const { EXPECT_EQ(ibv_destroy_ah(ah), 0); }
};
using AddressHandle = std::unique_ptr<ibv_ah, AhDeleter>;

// What programs tell each other.
struct HandAddress {
  uint32_t qp_number = 0;
  uint32_t psn = 0;
  ibv_gid gid{};
};

// One end. Steps fail the test that takes them.
class HandEnd {
 public:
  HandEnd(bool is_server, const HandOptions& options);

  // What a program would do between one step and the next, each with its errno.
  int ToInit();
  int ToRtr(const HandAddress& peer);
  int ToRts();
  int ToRts(uint8_t timeout, uint8_t retry_count);
  // All three.
  void Connect(const HandAddress& peer);
  // RTS to RTS by way of SQD, where alone these may change.
  void SetPatience(uint8_t timeout, uint8_t retry_count);
  // All three; nobody need be told of a UD QP.
  void Ready(const HandAddress& peer = {});
  int To(ibv_qp_state state, int mask = IBV_QP_STATE);
  // What ToRtr would ask for.
  ibv_qp_attr RtrAttributes(const HandAddress& peer) const;
  int RtrMask() const;

  // The way to `peer`; null and errno on failure.
  ibv_ah_attr AddressOf(const HandAddress& peer) const;
  AddressHandle CreateAh(const HandAddress& peer) const;

  void Act() const;
  ibv_qp_state State() const;
  // In SQD, and what had begun is not yet complete: attributes cannot be changed yet.
  bool IsDraining() const;
  HandAddress Address() const;

  const bool is_server;
  HandOptions options;
  Context context;
  ProtectionDomain pd;
  CompletionChannel receive_channel;
  CompletionQueue send_cq;
  CompletionQueue receive_cq;
  SharedQueue srq;
  QueuePair qp;
  uint8_t gid_index = 0;
};

struct HandPair {
  explicit HandPair(const HandOptions& server_options = {}, const HandOptions& client_options = {})
      : server(true, server_options), client(false, client_options) {}
  // Both to RTS, server first.
  void Connect();
  // Packets pass: an empty Write each way has been acknowledged; of UC a message has arrived at the server, and none is
  // on its way any more.
  void ExpectPassage();
  static std::unique_ptr<HandPair> Connected(const HandOptions& server_options = {},
                                             const HandOptions& client_options = {});

  HandEnd server;
  HandEnd client;

 private:
  void ExpectUnreliablePassage();
};

// Skips where QPs cannot be connected by hand.
class HandTest : public VerbsTest {
 protected:
  void SetUp() override;
};

}  // namespace stagecoach::verbs
