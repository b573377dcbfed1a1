// Fixture and helpers of the contract tests: two connected ends in one process, driven through the stock API alone.
// They are connected by rdma_cm, or by hand where a device has no connection manager.
//
// Every wait is on a condition and bounded. With no RDMA device (the system's provider on a machine without one) each
// test is skipped and says so; known deviations of other providers are listed, with reasons, in deviations.tsv.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "verbs_shim/cxx/handles.h"
#include "verbs_shim/tests/surroundings.h"

namespace stagecoach::verbs {

class VerbsTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  Surroundings& world() { return TheSurroundings(); }
};

// Memory registered for its lifetime, filled with zeros at first.
class Buffer {
 public:
  Buffer(ibv_pd* pd, size_t size, int access = IBV_ACCESS_LOCAL_WRITE);

  MutableBytes bytes() { return bytes_; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(bytes_.data()); }
  size_t size() const { return bytes_.size(); }
  uint32_t lkey() const { return mr_->lkey; }
  uint32_t rkey() const { return mr_->rkey; }
  ibv_mr* mr() { return mr_.get(); }
  int Deregister() { return mr_.Destroy(); }

  ibv_sge Sge(size_t offset = 0) const { return Sge(offset, size() - offset); }
  ibv_sge Sge(size_t offset, size_t length) const {
    return {address() + offset, static_cast<uint32_t>(length), mr_->lkey};
  }
  void Fill(std::string_view text);
  // Bytes that depend on position and `seed`, for transfers of any size.
  void FillPattern(uint32_t seed);
  std::string Text(size_t length) const { return std::string(AsText(ConstBytes(bytes_).first(length))); }

 private:
  std::vector<std::byte> bytes_;
  MemoryRegion mr_;
};

struct EndpointOptions {
  ibv_qp_cap cap{.max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = 0};
  bool all_signaled = false;
  int cq_entries = 128;
  // Receives come from an SRQ of this size that the end makes itself, or from one that others use too: the QP is then
  // of its PD, unless it is to be of one of its own.
  uint32_t srq_wr = 0;
  ibv_srq* srq = nullptr;
  bool own_domain = false;
  // The QP is made for ibv_wr_* with these operations.
  std::optional<uint64_t> send_ops;
  // The receive CQ is an extended one with these fields and flags.
  std::optional<uint64_t> receive_fields;
  uint32_t receive_cq_flags = 0;
  rdma_conn_param connection{.responder_resources = 8, .initiator_depth = 8, .retry_count = 7, .rnr_retry_count = 7};
};

struct SrqDeleter {
  void operator()(ibv_srq* srq) const { EXPECT_EQ(ibv_destroy_srq(srq), 0); }
};
using SharedQueue = std::unique_ptr<ibv_srq, SrqDeleter>;
// Null and errno on failure.
SharedQueue CreateSrq(ibv_pd* pd, uint32_t max_wr, uint32_t max_sge = 2);

// One end: event channel, id, PD, one CQ per direction (each on a completion channel of its own), QP. Connected by hand
// it has a context and a QP of its own instead of an id.
class Endpoint {
 public:
  Endpoint() = default;
  ~Endpoint();

  // Creates PD, CQs and QP on `id`, which has a device by now; or on this context.
  void Prepare(const EndpointOptions& options);
  void PrepareByHand(const EndpointOptions& options);

  ibv_context* context() const { return id ? id->verbs : hand_context; }
  ibv_qp* qp() const { return id ? id->qp : hand_qp.get(); }
  // IsIwarp of its device.
  bool IsIwarp() const;
  // rdma_disconnect: the QP is in error when this returns. 0 or -1.
  int Disconnect();
  void DestroyQp();
  // The next event; fails the test and returns an empty handle when none comes.
  CmEvent NextEvent();
  // Fetches the next event, expects its kind, and acknowledges it. Returns its status.
  int ExpectEvent(rdma_cm_event_type type);
  bool EventWaiting() const;
  // RDMA_CM_EVENT_DISCONNECTED. Connected by hand there is nobody to say so.
  void ExpectDisconnected();

  EventChannel channel;
  CmId id;
  Context own_context;
  ibv_context* hand_context = nullptr;
  QueuePair hand_qp;
  ProtectionDomain pd;
  SharedQueue srq;
  CompletionChannel send_channel;
  CompletionChannel receive_channel;
  CompletionQueue send_cq;
  CompletionQueue receive_cq;
};

// A listener, and two ends that reach Connect().
class Pair {
 public:
  explicit Pair(EndpointOptions server_options = {}, EndpointOptions client_options = {});
  ~Pair();

  // Single steps, for tests of the connection manager.
  void Listen();
  void Resolve();  // client: address and route; has a device afterwards
  void ResolveTo(sockaddr_storage destination);
  void Request();  // client: rdma_connect; server: the request, as `server.id`, with its parameters
  void Accept();   // server: accept; both: established
  // All of it; by hand where it must be.
  void Connect();
  void ConnectByHand();
  // Both ends ready for traffic in one go, server first as programs do.
  static std::unique_ptr<Pair> Connected(EndpointOptions server_options = {}, EndpointOptions client_options = {});

  sockaddr_storage ListenAddress() const;

  Endpoint server;
  Endpoint client;
  CmId listener;
  EndpointOptions server_options;
  EndpointOptions client_options;
  // What arrived with the connect request and with the established event of the client.
  rdma_conn_param request{};
  std::string request_private_data;
  rdma_conn_param reply{};
  std::string reply_private_data;
};

// --- Work ---

struct SendSpec {
  uint64_t wr_id = 1;
  ibv_wr_opcode opcode = IBV_WR_SEND;
  unsigned flags = IBV_SEND_SIGNALED;
  std::vector<ibv_sge> sges;
  uint64_t remote_address = 0;
  uint32_t rkey = 0;  // of a Write, Read or atomic; what a Send with Invalidate invalidates
  uint32_t immediate = 0;
  uint64_t compare_add = 0;
  uint64_t swap = 0;
  // Of a UD QP.
  ibv_ah* ah = nullptr;
  uint32_t remote_qp = 0;
  uint32_t remote_qkey = 0;
};

// What a post has returned; without its sign where deviations.tsv has it that the device answers with negative errnos
// (QpPostTest.WhatARefusedPostAnswersIsAnErrno).
int ErrnoOf(int answer);
// 0 or the errno the post returned; expects *bad_wr to name the request on failure.
int Post(ibv_qp* qp, const SendSpec& spec);
// Signaled. What the window gives is in `info`.
int PostBind(ibv_qp* qp, uint64_t wr_id, ibv_mw* window, uint32_t rkey, const ibv_mw_bind_info& info);
int PostInvalidate(ibv_qp* qp, uint64_t wr_id, uint32_t rkey);
int PostReceive(ibv_qp* qp, uint64_t wr_id, std::vector<ibv_sge> sges);
int PostReceive(ibv_srq* srq, uint64_t wr_id, std::vector<ibv_sge> sges);

// The next completion; fails the test (and returns status IBV_WC_GENERAL_ERR) when none comes.
ibv_wc NextCompletion(ibv_cq* cq);
// Expects the next completion to be `wr_id` with `status`.
ibv_wc ExpectCompletion(ibv_cq* cq, uint64_t wr_id, ibv_wc_status status = IBV_WC_SUCCESS);
bool NoCompletion(ibv_cq* cq);

ibv_qp_state StateOf(ibv_qp* qp);
// That it is in this state, or comes to it. Holds of any QP where deviations.tsv has it that the device does not tell
// states (QpPostTest.AConnectedQpIsReadyToSend): what else such a test is about can be looked at there, too.
void ExpectState(ibv_qp* qp, ibv_qp_state expected);
void ExpectStateIsReached(ibv_qp* qp, ibv_qp_state expected);

// True once the descriptor is readable; false after the bound.
bool BecomesReadable(int fd);
bool IsReadable(int fd);
void SetNonBlocking(int fd);

// Whether deviations.tsv has it that the device fails this test ("Suite.Test"): what else a test is about can be looked
// at there all the same.
bool IsKnownToDeviate(const std::string& test);

// Takes and acknowledges asynchronous events until one of this type has come, about the object that `about` (if any)
// points to; false, and a failed test, when none comes. Both ends may share the context, so events of the other are
// passed over.
bool ExpectAsyncEvent(ibv_context* context, ibv_event_type type, const void* about = nullptr);
// The same of several, in whatever order they come.
struct AwaitedEvent {
  ibv_context* context = nullptr;
  ibv_event_type type{};
  const void* about = nullptr;
};
bool ExpectAsyncEvents(std::vector<AwaitedEvent> awaited);
// Takes and acknowledges those waiting; how many were of this type, about this object.
int CountAsyncEvents(ibv_context* context, ibv_event_type type, const void* about = nullptr);

// Whether the connection is an iWARP stream. A stream ends with the first fault, and at both ends at once; on
// InfiniBand and RoCE a QP that failed says nothing to the connection manager, and one whose peer has disconnected
// works on: there a program disconnects itself.
bool IsIwarp(const rdma_cm_id* id);

// Runs the call `waits` beside `allows`, which lets it return: expects it not to return before.
void ExpectWaits(const std::function<void()>& waits, const std::function<void()>& allows);

// The device has no connection manager: rdma_create_id answers EOPNOTSUPP.
bool ConnectsByHand();
// Of the server's address where this host has it, so that both ends are on the same one; else the usual choice.
uint8_t ChooseGid(ibv_context* context);

std::string PrivateData(const rdma_conn_param& parameters);

}  // namespace stagecoach::verbs
