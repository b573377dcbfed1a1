#include "rpcrdma/verbs/connection.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "rpcrdma/verbs/address_text.h"
#include "rpcrdma/verbs/taken.h"
#include "rpcrdma/wire/refusal.h"

namespace stagecoach::rpcrdma::internal {
namespace {

using verbs::VerbsError;
using verbs::VerbsResult;

// How long the two stages of closing wait for the peer, and for the device, before going on without.
constexpr Duration kDrainTime = 1s;
// How long a client may take from our acceptance to the end of its handshake.
constexpr Duration kAcceptTime = 10s;
// rdma_cm wants a number for its own timers; ours is the one that counts.
constexpr int kResolveTimeoutMs = 5000;
constexpr uint8_t kRetryCount = 7;
// Of InfiniBand's rejections (specification volume 1, table 103): nobody has the port.
constexpr int kInvalidServiceId = 8;
// The peer's device cannot be reached by this address.
constexpr int kInvalidGid = 12;

VerbsResult<void> Status(int result, const char* call) {
  if (result == 0) return {};
  return Err(VerbsError{.error = errno, .call = call});
}

int AccessOf(MemoryUse use, bool iwarp) {
  switch (use) {
    case MemoryUse::kReadByPeer:
      return IBV_ACCESS_REMOTE_READ;
    case MemoryUse::kWrittenByPeer:
      return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    case MemoryUse::kReadSink:
      // On iWARP the response to a Read is a tagged message to the sink's steering tag: the sink must admit remote
      // writes.
      return IBV_ACCESS_LOCAL_WRITE | (iwarp ? IBV_ACCESS_REMOTE_WRITE : 0);
    case MemoryUse::kWriteSource:
      return 0;
  }
  return 0;
}

void RejectForWantOfResources(rdma_cm_id* id) {
  const auto why = EncodeRefusal({.reason = Refusal::Reason::kDevice});
  rdma_reject(id, why.data(), static_cast<uint8_t>(why.size()));
}

// Nobody listening and a peer that declined are the same event; the status tells: iWARP's is an errno, InfiniBand's a
// reason. A Server says why it declined.
CloseCause CauseOfRejection(const CmEvent& event) {
  const int error = std::abs(event.status);
  if (const auto refusal = DecodeRefusal(event.private_data)) {
    return {.kind = CloseCause::Kind::kRejected, .error = error, .text = ToString(*refusal)};
  }
  if (error == ECONNREFUSED || event.status == kInvalidServiceId) return CauseOfConnectErrno(ECONNREFUSED);
  if (event.status == kInvalidGid) {
    return {.kind = CloseCause::Kind::kRejected,
            .text = "the peer's RDMA device has no GID for this address of its host"};
  }
  return {.kind = CloseCause::Kind::kRejected, .error = error, .text = "the peer rejected the connection"};
}

CloseCause CauseOf(const Disconnect& command) {
  switch (command.why) {
    case Disconnect::Why::kAsked:
      break;
    case Disconnect::Why::kCallTimedOut:
      return {.kind = CloseCause::Kind::kTransport, .error = ETIMEDOUT, .text = "closed because a call timed out"};
    case Disconnect::Why::kNoResources:
      return {.kind = CloseCause::Kind::kDevice,
              .error = ENOMEM,
              .text = "closed because the device could not register memory"};
    case Disconnect::Why::kGrantOverrun:
      return {.kind = CloseCause::Kind::kTransport,
              .error = EPROTO,
              .text = "closed because the client sent more calls than it was granted"};
    case Disconnect::Why::kReplyNotRead:
      return {.kind = CloseCause::Kind::kTransport,
              .error = ETIMEDOUT,
              .text = "closed because the client did not say in time that it had read a reply"};
    case Disconnect::Why::kPeerOverdue:
      return {.kind = CloseCause::Kind::kTransport,
              .error = ETIMEDOUT,
              .text = "closed because the client neither sent promised data nor took a reply in time"};
    case Disconnect::Why::kBadProperties:
      return {.kind = CloseCause::Kind::kBadProperties,
              .error = EPROTO,
              .text = "closed because the peer's transport properties were malformed"};
  }
  return {.kind = CloseCause::Kind::kLocal, .text = "closed by this end"};
}

}  // namespace

CloseCause CauseOfConnectErrno(int error) {
  switch (error) {
    case ECONNREFUSED:
      return {.kind = CloseCause::Kind::kRefused, .error = error, .text = "connection refused"};
    case ECONNRESET:
    case EHOSTDOWN:
    case EHOSTUNREACH:
    case ENETDOWN:
    case ENETUNREACH:
    case ETIMEDOUT:
      return {.kind = CloseCause::Kind::kUnreachable, .error = error, .text = std::strerror(error)};
    default:
      return {.kind = CloseCause::Kind::kDevice,
              .error = error,
              .text = VerbsError{.error = error, .call = "rdma_connect"}.ToString()};
  }
}

Connection::Connection(EventLoop& loop, const Options& options, ConnectionOwner& owner, BlockPool* pool,
                       TraceSink* trace)
    : loop_(loop), options_(options), owner_(owner), pool_(pool), trace_(trace) {}

Connection::~Connection() {
  if (state_ == State::kClosed || state_ == State::kIdle) {
    DestroyResources();
  } else {
    engine_ = nullptr;
    CloseNow();
  }
  for (const uint32_t slot : shared_slots_) {
    if (slot == kNoSlot ||
        STAGECOACH_MUTANT("shared-receive-lost", "shared Receives that hold calls go with their connection")) {
      continue;
    }
    STAGECOACH_MARK("connection.shared_receive_held_to_the_end");
    options_.shared->Return(slot);
  }
}

// --- Making a connection ---

void Connection::Connect(CmChannel& channel, const sockaddr* address, Duration timeout) {
  STAGECOACH_CHECK(state_ == State::kIdle);
  state_ = State::kResolving;
  connect_timer_ = loop_.At(loop_.Now() + timeout, [this] {
    STAGECOACH_MARK("connection.no_answer_in_time");
    connect_timer_ = 0;
    Fail({.kind = CloseCause::Kind::kTimedOut, .error = ETIMEDOUT, .text = "no answer in time"});
  });
  auto id = channel.CreateId(this);
  if (!id) return FailDevice(id.error());
  id_ = std::move(*id);
  // [5666bis:3.1.2+3] [5666bis:8.1.1+1]
  // The stock prototype takes the address without const and does not change it.
  if (rdma_resolve_addr(id_.get(), nullptr, const_cast<sockaddr*>(address), kResolveTimeoutMs) != 0) {
    const int error = errno;
    Fail({.kind = CloseCause::Kind::kUnreachable, .error = error, .text = std::strerror(error)});
  }
}

VerbsResult<void> Connection::Adopt(verbs::CmId id, const CmEvent& request) {
  STAGECOACH_CHECK(state_ == State::kIdle);
  state_ = State::kAccepting;
  id_ = std::move(id);
  id_->context = static_cast<CmHandler*>(this);
  // Their initiator depth is what they may have outstanding towards us, their responder resources what we may.
  outgoing_reads_ = std::min<uint32_t>(options_.outgoing_reads, request.initiator_depth);
  if (outgoing_reads_ < options_.outgoing_reads) STAGECOACH_MARK("connection.outgoing_reads_limited");
  incoming_reads_ = std::min<uint32_t>(options_.incoming_reads, request.responder_resources);
  auto created = CreateResources();
  if (!created) {
    STAGECOACH_MARK("connection.no_resources_to_accept");
    RejectForWantOfResources(id_.get());
    state_ = State::kClosed;
    DestroyResources();
  }
  return created;
}

VerbsResult<void> Connection::Accept(ConstBytes private_data) {
  STAGECOACH_CHECK(engine_ != nullptr);
  if (state_ == State::kClosing) {
    // The device refused the Receives of the engine when that was attached.
    RejectForWantOfResources(id_.get());
    return Err(VerbsError{.error = cause_->error, .call = "ibv_post_recv"});
  }
  STAGECOACH_CHECK(state_ == State::kAccepting);
  rdma_conn_param parameters = {};
  parameters.private_data = private_data.data();
  parameters.private_data_len = static_cast<uint8_t>(private_data.size());
  parameters.responder_resources = static_cast<uint8_t>(incoming_reads_);
  parameters.initiator_depth = static_cast<uint8_t>(outgoing_reads_);
  parameters.rnr_retry_count = kRetryCount;
  connect_timer_ = loop_.At(loop_.Now() + kAcceptTime, [this] {
    STAGECOACH_MARK("connection.handshake_not_completed");
    connect_timer_ = 0;
    Fail({.kind = CloseCause::Kind::kTimedOut,
          .error = ETIMEDOUT,
          .text = "the client did not complete the connection in time"});
  });
  return Status(rdma_accept(id_.get(), &parameters), "rdma_accept");
}

VerbsResult<void> Connection::CreateResources() {
  ibv_context* const context = id_->verbs;
  if (context == nullptr) return Err(VerbsError{.error = ENODEV, .call = "rdma_resolve_addr"});
  ibv_device_attr device = {};
  if (const int error = ibv_query_device(context, &device); error != 0) {
    return Err(VerbsError{.error = error, .call = "ibv_query_device"});
  }
  iwarp_ = context->device->transport_type == IBV_TRANSPORT_IWARP;
  // Devices of no vendor are Linux's rxe, whose windows cannot be used with remote invalidation: it reports an
  // invalidated key by the kernel's flag, which user space reads as IBV_WC_IP_CSUM_OK, so the key is invalidated here
  // once more, and a free window that is invalidated crashes the kernel (6.1). Plain regions do.
  constexpr uint32_t kNoVendor = 0xffffff;  // [IBTA v1.4:A3.3.1]
  windows_ = options_.memory_windows && (device.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0 &&
             device.vendor_id != kNoVendor;
  outgoing_reads_ = std::min<uint32_t>(outgoing_reads_, std::max(device.max_qp_init_rd_atom, 0));
  incoming_reads_ = std::min<uint32_t>(incoming_reads_, std::max(device.max_qp_rd_atom, 0));
  segment_length_max_ = static_cast<uint32_t>(std::min<uint64_t>(device.max_mr_size, segment_length_max_));

  // A completion queue that any number of shared Receives cannot overrun.
  const int shared_receives = options_.shared ? static_cast<int>(options_.shared->slots()) : 0;
  const auto sizes = FitToDevice(options_.queues, device.max_qp_wr, device.max_cqe - shared_receives);
  if (!sizes) return Err(VerbsError{.error = ENOSPC, .call = "queues for one message each way"});
  sizes_ = *sizes;
  ledger_ = SendLedger(sizes_.send_queue);

  if (options_.shared) {
    pd_ = options_.shared->domain();
    regions_ = &options_.shared->regions();
  } else {
    // [5666bis:10.1+1] What is exposed here is exposed to one peer.
    auto domain = verbs::AllocatePd(context);
    if (!domain) return Err(domain.error());
    domain_ = std::move(*domain);
    pd_ = domain_.get();
    own_regions_.Open(pd_, windows_);
    regions_ = &own_regions_;
  }
  if (pool_ != nullptr) pool_->SetDomain(pd_);
  auto channel = verbs::CreateCompletionChannel(context);
  if (!channel) return Err(channel.error());
  channel_ = std::move(*channel);
  if (!MakeNonBlocking(channel_->fd)) return Err(VerbsError{.error = errno, .call = "fcntl"});
  const int completions =
      options_.shared ? static_cast<int>(sizes_.send_queue) + shared_receives : static_cast<int>(sizes_.completions());
  auto queue = verbs::CreateCq(context, completions, nullptr, channel_.get());
  if (!queue) return Err(queue.error());
  queue_ = std::move(*queue);

  ibv_qp_init_attr attributes = {};
  attributes.send_cq = queue_.get();
  attributes.recv_cq = queue_.get();
  // [pvtdata:7+1] [5666bis:3.2.2+1] [5666:2+4] [2004:2+3] [5666bis:3.2.2+3] [5666:2+5] [2004:2+4] [5666bis:3.2.2+5]
  // [5666:2+7] [2004:2+5] What the engines rely on is what this type of queue pair promises.
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = sizes_.send_queue;
  attributes.cap.max_send_sge = 1;
  if (options_.shared) {
    attributes.srq = options_.shared->queue();
  } else {
    attributes.cap.max_recv_wr = sizes_.receives;
    attributes.cap.max_recv_sge = 1;
  }
  if (auto created = verbs::CreateCmQp(id_.get(), pd_, &attributes); !created) return Err(created.error());

  auto arena = CreateArena(sizes_.sends, options_.send_size, 1, &send_buffers_, &send_arena_);
  if (!arena) return arena;
  if (options_.shared) {
    const uint32_t slots = std::min(sizes_.receives, options_.shared->slots()) + 1;
    places_.assign(slots, nullptr);
    shared_slots_.assign(slots, kNoSlot);
    for (uint32_t slot = slots; slot > 0; --slot) free_places_.push_back(slot - 1);
    receive_arena_ = {.slot_size = options_.shared->slot_size(), .slots = slots, .places = places_.data()};
  } else {
    arena =
        CreateArena(sizes_.receives, options_.receive_size, options_.receive_align, &receive_buffers_, &receive_arena_);
    if (!arena) return arena;
  }
  return CheckWatch();
}

VerbsResult<void> Connection::CreateArena(uint32_t slots, uint32_t slot_size, uint32_t align, Buffers* buffers,
                                          BufferArena* arena) {
  slot_size = (slot_size + align - 1) / align * align;
  const size_t used = size_t{slots} * slot_size + kArenaTail;
  const size_t size = used + align - 1;
  Buffers made{.memory = std::unique_ptr<std::byte[]>(new (std::nothrow) std::byte[size]()), .size = size};
  if (made.memory == nullptr) return Err(VerbsError{.error = ENOMEM, .call = "memory for Sends and Receives"});
  // Where the allocator put the block must not show in what is placed where of the region.
  const size_t start = -reinterpret_cast<uintptr_t>(made.memory.get()) & (align - 1);
  const MutableBytes memory(made.memory.get() + start, used);
  // [5666bis:4.6+1] [5666:5+1] [5666:6#2] [2004:5+1] [2004:6#1] [5666bis:5.4+1] [5666:2+1] [5666:7+1] [2004:2#1]
  // [2004:7#1] [5666bis:5.4+2] [5666:7+2] [2004:7+1] Once for the connection.
  auto registered = verbs::RegisterMemory(pd_, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE);
  if (!registered) return Err(registered.error());
  made.region = std::move(*registered);
  *arena = {.memory = memory, .slot_size = slot_size, .slots = slots, .local_key = made.region->lkey};
  *buffers = std::move(made);
  return {};
}

size_t Connection::buffer_bytes() const {
  size_t bytes = send_buffers_.size + receive_buffers_.size;
  for (const Buffers& buffers : replaced_buffers_) bytes += buffers.size;
  return bytes;
}

bool Connection::may_replace_buffers() const {
  return state_ == State::kEstablished && !options_.shared && receives_outstanding_ == 0 && ledger_.empty() && !held_;
}

// [5666:6#2] [2004:6#1]
VerbsResult<void> Connection::ReplaceBuffers(uint32_t send_size, uint32_t receive_size) {
  STAGECOACH_CHECK(may_replace_buffers());
  Buffers send, receive;
  BufferArena send_arena = send_arena_;
  BufferArena receive_arena = receive_arena_;
  if (send_size != send_arena.slot_size) {
    if (auto made = CreateArena(send_arena.slots, send_size, 1, &send, &send_arena); !made) return made;
  }
  if (receive_size != receive_arena.slot_size) {
    auto made = CreateArena(receive_arena.slots, receive_size, options_.receive_align, &receive, &receive_arena);
    if (!made) return made;
  }
  if (send.memory != nullptr) replaced_buffers_.push_back(std::exchange(send_buffers_, std::move(send)));
  if (receive.memory != nullptr) replaced_buffers_.push_back(std::exchange(receive_buffers_, std::move(receive)));
  send_arena_ = send_arena;
  receive_arena_ = receive_arena;
  return {};
}

VerbsResult<void> Connection::CheckWatch() {
  device_work_ = verbs::JoinDeviceWork(loop_);
  watch_ = loop_.WatchReadable(channel_->fd, [this] { OnChannelReadable(); });
  if (watch_ == 0) return Err(VerbsError{.error = errno, .call = "watch of the completion channel"});
  poller_ = loop_.AddPoller(
      {.poll = [this] { return PollAgain(); }, .busy = [this] { return Busy(); }, .arm = [this] { return Arm(); }});
  return {};
}

void Connection::Attach(ConnectionEngine* engine) {
  engine_ = engine;
  Kick();
}

void Connection::OnCmEvent(const CmEvent& event) {
  switch (event.type) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
      if (state_ == State::kResolving && rdma_resolve_route(id_.get(), kResolveTimeoutMs) != 0) {
        const int error = errno;
        Fail({.kind = CloseCause::Kind::kUnreachable, .error = error, .text = std::strerror(error)});
      }
      return;
    case RDMA_CM_EVENT_ROUTE_RESOLVED: {
      if (state_ != State::kResolving) return;
      incoming_reads_ = options_.incoming_reads;
      outgoing_reads_ = options_.outgoing_reads;
      if (auto created = CreateResources(); !created) {
        STAGECOACH_MARK("connection.no_resources_to_connect");
        return FailDevice(created.error());
      }
      state_ = State::kConnecting;
      const std::vector<std::byte> private_data = owner_.OnDeviceReady();
      rdma_conn_param parameters = {};
      parameters.private_data = private_data.data();
      parameters.private_data_len = static_cast<uint8_t>(private_data.size());
      parameters.responder_resources = static_cast<uint8_t>(incoming_reads_);
      parameters.initiator_depth = static_cast<uint8_t>(outgoing_reads_);
      parameters.retry_count = kRetryCount;
      parameters.rnr_retry_count = kRetryCount;
      if (rdma_connect(id_.get(), &parameters) != 0) Fail(CauseOfConnectErrno(errno));
      return;
    }
    case RDMA_CM_EVENT_ESTABLISHED:
      return OnEstablishedEvent(event);
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_DISCONNECTED:
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      return OnPeerGone(event);
    default:
      return;  // TIMEWAIT_EXIT and what only multicast and other roles get
  }
}

void Connection::OnEstablishedEvent(const CmEvent& event) {
  if (state_ != State::kConnecting && state_ != State::kAccepting) return;
  CancelTimers();
  // What the other end takes, which a client hears of only now.
  if (state_ == State::kConnecting) outgoing_reads_ = std::min<uint32_t>(outgoing_reads_, event.initiator_depth);
  state_ = State::kEstablished;
  if (trace_ != nullptr) {
    Trace(trace_, loop_.Now(), options_.name, "established",
          {{"private_data", ToHex(event.private_data)}, {"qp", uint64_t{id_->qp->qp_num}}});
  }
  owner_.OnEstablished(event.private_data);
  if (state_ != State::kEstablished) {
    STAGECOACH_MARK("connection.ended_as_soon_as_established");
    return;
  }
  Poll();  // what came before this event
  Progress();
}

void Connection::OnPeerGone(const CmEvent& event) {
  CloseCause cause{
      .kind = CloseCause::Kind::kPeer, .error = std::abs(event.status), .text = "peer closed the connection"};
  switch (event.type) {
    case RDMA_CM_EVENT_REJECTED:
      cause = CauseOfRejection(event);
      break;
    case RDMA_CM_EVENT_CONNECT_ERROR:
    case RDMA_CM_EVENT_UNREACHABLE:
      if (cause.error == ECONNREFUSED) {
        cause = CauseOfConnectErrno(ECONNREFUSED);
      } else {
        cause.kind = CloseCause::Kind::kUnreachable;
        cause.text = cause.error == EPROTO ? "what answers there does not speak iWARP (MPA)"
                     : cause.error != 0    ? std::strerror(cause.error)
                                           : "unreachable";
      }
      break;
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_ERROR:
      cause.kind = CloseCause::Kind::kUnreachable;
      cause.text = cause.error == ENODEV ? "the RDMA device of this host has no GID for the address"
                   : cause.error != 0    ? std::strerror(cause.error)
                                         : "no RDMA device leads there";
      break;
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      cause.kind = CloseCause::Kind::kDevice;
      cause.text = "the RDMA device was removed";
      break;
    case RDMA_CM_EVENT_DISCONNECTED:
      // Devices that cannot tell say 0 or ECONNRESET.
      if (cause.error == EPROTO) cause.text = "ended by this end's device: the peer sent what the protocol forbids";
      break;
    default:
      break;
  }
  // What arrived before the end is delivered first.
  if (state_ == State::kEstablished) {
    while (state_ == State::kEstablished && Poll()) {
      STAGECOACH_MARK("connection.completions_delivered_before_the_end");
    }
  }
  if (state_ == State::kClosed) return;
  if (state_ == State::kClosing) {
    STAGECOACH_MARK("connection.peer_gone_while_closing");
    EnterError();
    Progress();
    return;
  }
  Fail(std::move(cause));
}

// --- Completions ---

bool Connection::Busy() const {
  return state_ != State::kClosed &&
         (options_.always_busy || state_ == State::kClosing || (engine_ != nullptr && engine_->Waiting()));
}

bool Connection::Poll() {
  // A client's first message may be here before the event that says it is connected; it waits for that.
  if (!queue_ || in_progress_ || state_ == State::kAccepting) return false;
  const int count = ibv_poll_cq(queue_.get(), kBatch, completions_);
  if (count == 0) return false;
  if (count < 0) {
    FailDevice({.error = -count, .call = "ibv_poll_cq"});
    return true;
  }
  // The device whose work this thread does has put the event there as well: to take it now spares two looks for it.
  if (armed_ && device_work_ != nullptr) TakeEvent();
  has_drained_ = count < kBatch;
  for (int i = 0; i < count; ++i) HandleCompletion(completions_[i]);
  Progress();
  return true;
}

// A look that has found everything there was need not be repeated at once: what arrives now is found by the device's
// work (device_work_), or when the loop arms. That spares a system call that would find nothing.
bool Connection::PollAgain() {
  const bool spares = has_drained_ && device_work_ != nullptr;
  has_drained_ = false;
  return !spares && Poll();
}

// Just before the loop sleeps. Anything that completed before arming would not wake us: look once more.
bool Connection::Arm() {
  if (!queue_) return true;
  if (!armed_) {
    if (const int error = ibv_req_notify_cq(queue_.get(), 0); error != 0) {
      FailDevice({.error = error, .call = "ibv_req_notify_cq"});
      return false;
    }
    armed_ = true;
  }
  if (!Poll()) return true;
  STAGECOACH_MARK("connection.completion_around_arming");
  return false;
}

bool Connection::TakeEvent() {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  if (ibv_get_cq_event(channel_.get(), &queue, &context) != 0) return false;
  ibv_ack_cq_events(queue, 1);
  armed_ = false;
  return true;
}

void Connection::OnChannelReadable() {
  if (TakeEvent()) Poll();
}

void Connection::HandleCompletion(const ibv_wc& completion) {
  // The opcode of a completion in error means nothing, so the ids of Sends and Receives differ, those of shared
  // Receives as well: a queue pair with an SRQ has no other.
  if ((completion.wr_id & kReceiveId) == 0) return OnSendCompletion(completion);
  if (options_.shared) return OnSharedReceive(completion);
  STAGECOACH_CHECK(receives_outstanding_ > 0);
  --receives_outstanding_;
  ++receives_completed_;
  if (completion.status != IBV_WC_SUCCESS) return OnFailedCompletion(completion);
  if (engine_ == nullptr) return;
  std::optional<uint32_t> invalidated;
  if ((completion.wc_flags & IBV_WC_WITH_INV) != 0) invalidated = completion.invalidated_rkey;
  engine_->OnReceive(static_cast<uint32_t>(completion.wr_id), completion.byte_len, invalidated, loop_.Now());
}

void Connection::OnSharedReceive(const ibv_wc& completion) {
  const auto shared = static_cast<uint32_t>(completion.wr_id);
  options_.shared->OnTaken(shared);
  // Its own, from the moment it took it.
  ++receives_posted_;
  ++receives_completed_;
  if (completion.status != IBV_WC_SUCCESS || engine_ == nullptr) {
    options_.shared->Return(shared);
    if (completion.status != IBV_WC_SUCCESS) OnFailedCompletion(completion);
    return;
  }
  // The engine gives one back for each call too many, so it is never without.
  STAGECOACH_CHECK(!free_places_.empty());
  const uint32_t slot = free_places_.back();
  free_places_.pop_back();
  shared_slots_[slot] = shared;
  places_[slot] = options_.shared->place(shared);
  engine_->OnReceive(slot, completion.byte_len, std::nullopt, loop_.Now());
}

void Connection::ReturnReceive(uint32_t slot) {
  STAGECOACH_CHECK(options_.shared && shared_slots_[slot] != kNoSlot);
  free_places_.push_back(slot);
  options_.shared->Return(std::exchange(shared_slots_[slot], kNoSlot));
}

// What the queue pair took from the shared queue and nobody has looked at: in the error state it takes no more, and
// what it was filling is flushed.
void Connection::ReturnUndeliveredReceives() {
  EnterError();
  ibv_wc completions[kBatch];
  for (int count = 1; count > 0;) {
    count = ibv_poll_cq(queue_.get(), kBatch, completions);
    for (int i = 0; i < count; ++i) {
      if ((completions[i].wr_id & kReceiveId) == 0) continue;
      const auto shared = static_cast<uint32_t>(completions[i].wr_id);
      STAGECOACH_MARK("connection.shared_receive_taken_and_never_seen");
      options_.shared->OnTaken(shared);
      options_.shared->Return(shared);
    }
  }
}

void Connection::OnSendCompletion(const ibv_wc& completion) {
  const std::optional<SendEntry> entry = ledger_.Complete(completion.wr_id, [this](const SendEntry& earlier) {
    ++sends_completed_;
    FinishEntry(earlier);
  });
  if (!entry) return;
  ++sends_completed_;
  if (completion.status != IBV_WC_SUCCESS) return OnFailedCompletion(completion);
  FinishEntry(*entry);
}

void Connection::FinishEntry(const SendEntry& entry) {
  if (entry.kind == SendEntry::Kind::kLocalInvalidate) {
    if (!ReleaseRegistration(entry.registration)) return;
    TraceInvalidated(entry.registration, "local");
  }
  if (engine_ == nullptr) return;
  switch (entry.kind) {
    case SendEntry::Kind::kSend:
      Trace(trace_, loop_.Now(), options_.name, "send.done", {{"slot", uint64_t{entry.tag}}});
      engine_->OnSendDone(entry.tag, loop_.Now());
      break;
    case SendEntry::Kind::kRead:
      engine_->OnReadDone(entry.tag, loop_.Now());
      break;
    case SendEntry::Kind::kLocalInvalidate:
      engine_->OnInvalidated(entry.tag, loop_.Now());
      break;
    case SendEntry::Kind::kWrite:
    case SendEntry::Kind::kBind:
    case SendEntry::Kind::kMarker:
      break;
  }
}

// The queue pair is in the error state now. A flushed request only says that something else happened, most often that
// the peer is gone.
void Connection::OnFailedCompletion(const ibv_wc& completion) {
  if (state_ == State::kClosing) {
    EnterError();
    return;
  }
  if (completion.status == IBV_WC_WR_FLUSH_ERR) {
    STAGECOACH_MARK("connection.flushed_before_the_event");
    BeginClosing({.kind = CloseCause::Kind::kPeer, .text = "peer closed the connection"});
  } else {
    STAGECOACH_MARK("connection.work_request_failed");
    BeginClosing({.kind = CloseCause::Kind::kTransport,
                  .text = std::string("an RDMA operation failed: ") + ibv_wc_status_str(completion.status)});
  }
}

// --- Commands ---

void Connection::Kick() {
  if (!in_progress_) Flush();
  ArmDeadline();
}

// After anything happened: post what the engine wants, let the owner have its outputs, post what that led to.
void Connection::Progress() {
  if (in_progress_ || state_ == State::kClosed) return;
  in_progress_ = true;
  // Posting may end calls, when what they exposed is invalidated on the spot: the owner hears of them, too.
  do {
    Flush();
    if (engine_ != nullptr) owner_.OnProgress();
    invalidated_now_ = false;
    if (state_ != State::kClosed) Flush();
  } while (invalidated_now_ && state_ != State::kClosed);
  in_progress_ = false;
  if (state_ == State::kClosed) return;
  ArmDeadline();
  if (close_when_idle_ && !held_ && state_ == State::kEstablished) {
    if (ledger_.empty() || (!last_marker_posted_ && !PostLastMarker())) BeginClosing(*cause_);
  }
  if (state_ == State::kClosing && Drained()) FinishClosing();
}

void Connection::Flush() {
  while (FillBatch()) {
    if (!PostBatch()) return;
  }
}

// Takes commands until there are none, or a batch or the send queue is full. True: there is something to post.
bool Connection::FillBatch() {
  sends_ = 0;
  receives_ = 0;
  if (engine_ == nullptr || state_ == State::kClosing || state_ == State::kClosed) return false;
  while (sends_ < kBatch && receives_ < kBatch) {
    if (!held_) {
      held_ = engine_->TakeCommand();
      if (!held_) break;
    }
    // Binds stand ahead of the Send that names what they expose.
    while (!binds_.empty() && sends_ < kBatch && ledger_.room() > kMarkers) AddBind(binds_.pop());
    const Command command = *held_;
    if (!Interpret(command) &&
        !STAGECOACH_MUTANT("held-command-lost", "a command that finds the send queue full is forgotten")) {
      break;
    }
    held_.reset();
    if (state_ == State::kClosing || state_ == State::kClosed) break;
  }
  return sends_ > 0 || receives_ > 0;
}

// False: not now, the send queue is full or not usable yet; hold it.
bool Connection::Interpret(const Command& command) {
  if (const auto* receive = std::get_if<PostReceive>(&command)) {
    ibv_sge& sge = receive_sge_[receives_];
    const MutableBytes slot = receive_arena_.slot(receive->slot);
    sge = {.addr = reinterpret_cast<uintptr_t>(slot.data()),
           .length = static_cast<uint32_t>(slot.size()),
           .lkey = receive_arena_.local_key};
    ibv_recv_wr& request = receive_wr_[receives_];
    request = {.wr_id = kReceiveId | receive->slot, .next = nullptr, .sg_list = &sge, .num_sge = 1};
    if (receives_ > 0) receive_wr_[receives_ - 1].next = &request;
    ++receives_;
    return true;
  }
  if (const auto* disconnect = std::get_if<Disconnect>(&command)) {
    PostBatch();
    BeginClosing(CauseOf(*disconnect));
    return true;
  }
  const auto* invalidate = std::get_if<Invalidate>(&command);
  if (invalidate != nullptr && (invalidate->by_peer || !exposed_[invalidate->registration - 1].window)) {
    InvalidateNow(*invalidate);
    return true;
  }

  if (ledger_.room() <= kMarkers || sends_ == kBatch || !binds_.empty() || state_ != State::kEstablished) {
    if (ledger_.room() <= kMarkers) STAGECOACH_MARK("connection.send_queue_full");
    if (sends_ == kBatch) STAGECOACH_MARK("connection.batch_full");
    if (!binds_.empty()) STAGECOACH_MARK("connection.command_waits_for_window_binds");
    if (state_ != State::kEstablished) STAGECOACH_MARK("connection.command_before_established");
    return false;
  }
  if (const auto* send = std::get_if<PostSend>(&command)) {
    const bool never = STAGECOACH_MUTANT("sends-unsignaled", "no Send asks for a completion, so none is ever reported");
    const bool signaled = (send->prompt || ++unsignaled_ >= sizes_.signal_interval) && !never;
    ibv_send_wr& request =
        NextSend({.kind = SendEntry::Kind::kSend, .tag = send->slot},
                 ConstBytes(send_arena_.slot(send->slot)).first(send->length), send_arena_.local_key, signaled);
    request.opcode = send->invalidate ? IBV_WR_SEND_WITH_INV : IBV_WR_SEND;
    if (send->invalidate) {
      request.invalidate_rkey = *send->invalidate;
      // Where Linux's libsiw looks for it (rdma-core 44); nobody else looks here.
      request.wr.rdma.rkey = *send->invalidate;
    }
  } else if (const auto* read = std::get_if<PostRead>(&command)) {
    ibv_send_wr& request =
        NextSend({.kind = SendEntry::Kind::kRead, .tag = read->tag}, read->sink, read->local_key, true);
    request.opcode = IBV_WR_RDMA_READ;
    request.wr.rdma.remote_addr = read->source.offset;
    request.wr.rdma.rkey = read->source.handle;
  } else if (const auto* write = std::get_if<PostWrite>(&command)) {
    // Many Writes may stand before one Send: see that the queue is emptied meanwhile.
    const bool signaled = ++unsignaled_ >= sizes_.signal_interval;
    ibv_send_wr& request = NextSend({.kind = SendEntry::Kind::kWrite}, write->source, write->local_key, signaled);
    request.opcode = IBV_WR_RDMA_WRITE;
    request.wr.rdma.remote_addr = write->target.offset;
    request.wr.rdma.rkey = write->target.handle;
  } else if (invalidate != nullptr) {
    ibv_send_wr& request = NextSend(
        {.kind = SendEntry::Kind::kLocalInvalidate, .tag = invalidate->tag, .registration = invalidate->registration},
        {}, 0, true);
    request.opcode = IBV_WR_LOCAL_INV;
    request.invalidate_rkey = exposed_[invalidate->registration - 1].window_key;
  }
  return true;
}

ibv_send_wr& Connection::NextSend(const SendEntry& entry, ConstBytes memory, uint32_t local_key, bool signaled) {
  ibv_sge& sge = send_sge_[sends_];
  sge = {.addr = reinterpret_cast<uintptr_t>(memory.data()),
         .length = static_cast<uint32_t>(memory.size()),
         .lkey = local_key};
  ibv_send_wr& request = send_wr_[sends_];
  request = {};
  request.wr_id = ledger_.Push(entry, signaled);
  request.sg_list = &sge;
  request.num_sge = memory.empty() ? 0 : 1;
  request.send_flags = signaled ? IBV_SEND_SIGNALED : 0;
  if (signaled) unsignaled_ = 0;
  if (sends_ > 0) send_wr_[sends_ - 1].next = &request;
  ++sends_;
  return request;
}

void Connection::AddBind(const PendingBind& bind) {
  Exposed& exposed = exposed_[bind.registration - 1];
  const bool signaled = ++unsignaled_ >= sizes_.signal_interval;
  ibv_send_wr& request = NextSend({.kind = SendEntry::Kind::kBind}, {}, 0, signaled);
  request.opcode = IBV_WR_BIND_MW;
  request.bind_mw.mw = exposed.window.get();
  request.bind_mw.rkey = exposed.window_key;
  request.bind_mw.bind_info = {.mr = bind.region,
                               .addr = reinterpret_cast<uintptr_t>(bind.memory.data()),
                               .length = bind.memory.size(),
                               .mw_access_flags = static_cast<unsigned>(bind.access)};
}

bool Connection::PostBatch() {
  if (STAGECOACH_MUTANT("grant-before-posting", "a reply is posted before the Receives it grants")) {
    return PostSends() && PostReceives();
  }
  // Receives first: a reply among the Sends may allow the peer to use them.
  return PostReceives() && PostSends();
}

bool Connection::PostReceives() {
  if (receives_ == 0) return true;
  ibv_recv_wr* bad = nullptr;
  const int count = std::exchange(receives_, 0);
  const int error = ibv_post_recv(id_->qp, receive_wr_, &bad);
  const uint32_t taken = Taken(error, receive_wr_, static_cast<uint32_t>(count), bad);
  receives_outstanding_ += taken;
  receives_posted_ += taken;
  if (error == 0) return true;
  STAGECOACH_MARK("connection.post_receive_refused");
  // The Sends of this batch will not be posted, and closing posts a request of its own.
  ledger_.Unpost(static_cast<size_t>(std::exchange(sends_, 0)));
  FailDevice({.error = std::abs(error), .call = "ibv_post_recv"});  // siw's is negative
  return false;
}

bool Connection::PostSends() {
  if (sends_ == 0) return true;
  ibv_send_wr* bad = nullptr;
  const int count = std::exchange(sends_, 0);
  const int error = ibv_post_send(id_->qp, send_wr_, &bad);
  const uint32_t taken = Taken(error, send_wr_, static_cast<uint32_t>(count), bad);
  sends_posted_ += taken;
  if (trace_ != nullptr) TraceSends(static_cast<int>(taken));
  if (error == 0) return true;
  STAGECOACH_MARK("connection.post_send_refused");
  ledger_.Unpost(static_cast<uint32_t>(count) - taken);
  FailDevice({.error = std::abs(error), .call = "ibv_post_send"});
  return false;
}

// What was posted when these Sends were: the rule of ARCHITECTURE section 7 is about this moment.
void Connection::TraceSends(int count) {
  for (int i = 0; i < count; ++i) {
    const SendEntry& entry = ledger_.at(send_wr_[i].wr_id);
    if (entry.kind != SendEntry::Kind::kSend) continue;
    Trace(trace_, loop_.Now(), options_.name, "send.posted",
          {{"slot", uint64_t{entry.tag}},
           {"bytes", uint64_t{send_sge_[i].length}},
           {"receives_posted", options_.shared ? free_places_.size() : uint64_t{receives_outstanding_}},
           {"received", receives_completed_}});
  }
}

// --- Memory ---

// [5666bis:5.4.3+1] [2004:3.3#7] Tags and offsets are whatever the way of registering gives.
std::optional<Registration> Connection::Register(ConstBytes memory, MemoryUse use, LastingMemory* lasting) {
  if (pd_ == nullptr || memory.empty()) return std::nullopt;
  const bool by_peer = use == MemoryUse::kReadByPeer || use == MemoryUse::kWrittenByPeer;
  // Pooled memory has a registration for local use already; the sink of a Read on iWARP needs more.
  if (!by_peer && pool_ != nullptr && (use == MemoryUse::kWriteSource || !iwarp_)) {
    if (Block* block = pool_->Find(memory.data()); block != nullptr) {
      const std::optional<uint32_t> key = pool_->LocalKey(block);
      if (!key) {
        STAGECOACH_MARK("connection.pooled_registration_refused");
        return std::nullopt;
      }
      return Registration{.local_key = *key};
    }
  }

  const bool window = windows_ && by_peer;
  STAGECOACH_CHECK(lasting == nullptr || lasting->Contains(memory));
  ibv_mr* const known = lasting != nullptr && (window || use == MemoryUse::kWriteSource) ? RegionOf(*lasting) : nullptr;
  if (known != nullptr && !window) return Registration{.local_key = known->lkey, .lasting = true};

  const uint32_t number = free_exposed_.empty() ? static_cast<uint32_t>(exposed_.size()) + 1 : free_exposed_.back();
  if (free_exposed_.empty()) {
    exposed_.emplace_back();
  } else {
    free_exposed_.pop_back();
  }
  Exposed& exposed = exposed_[number - 1];
  exposed.in_use = true;
  const auto give_up = [&]() -> std::optional<Registration> {
    ReleaseRegistration(number);
    return std::nullopt;
  };

  const int access = AccessOf(use, iwarp_);
  if (known == nullptr) {
    const int region_access = window ? (access & IBV_ACCESS_LOCAL_WRITE) | IBV_ACCESS_MW_BIND : access;
    auto region = verbs::RegisterMemory(pd_, const_cast<std::byte*>(memory.data()), memory.size(), region_access);
    if (!region) {
      STAGECOACH_MARK("connection.registration_refused");
      return give_up();
    }
    exposed.region = std::move(*region);
  }
  ibv_mr* const region = known != nullptr ? known : exposed.region.get();
  Registration registration{.id = number,
                            .local_key = region->lkey,
                            .handle = region->rkey,
                            .offset = reinterpret_cast<uintptr_t>(memory.data()),
                            .lasting = known != nullptr};
  const auto done = [&] {
    static constexpr const char* kUses[] = {"read_by_peer", "written_by_peer", "read_sink", "write_source"};
    Trace(trace_, loop_.Now(), options_.name, "stag.registered",
          {{"registration", uint64_t{number}},
           {"use", kUses[static_cast<size_t>(use)]},
           {"bytes", memory.size()},
           {"window", uint64_t{window ? 1u : 0u}}});
    return registration;
  };
  if (!window) return done();

  if (!free_windows_.empty()) {
    exposed.window = std::move(free_windows_.back().first);
    exposed.window_key = free_windows_.back().second;
    free_windows_.pop_back();
  } else {
    auto allocated = verbs::AllocateMw(pd_, IBV_MW_TYPE_2);
    if (!allocated) {
      STAGECOACH_MARK("connection.window_refused");
      return give_up();
    }
    exposed.window = std::move(*allocated);
    exposed.window_key = exposed.window->rkey;
  }
  // The consumer chooses the key of a type 2 window; a fresh one for each use.
  exposed.window_key = ibv_inc_rkey(exposed.window_key);
  binds_.push({number, region, memory, access & ~IBV_ACCESS_LOCAL_WRITE});
  registration.handle = exposed.window_key;
  registration.window = true;
  return done();
}

// Null: the device refuses; then memory is registered for each call.
ibv_mr* Connection::RegionOf(LastingMemory& memory) {
  const DomainRegions::Found found = regions_->Find(memory);
  if (!found.first) return found.region;
  if (found.region != nullptr) {
    ++lasting_registrations_;
    Trace(trace_, loop_.Now(), options_.name, "memory.registered", {{"bytes", memory.bytes().size()}});
  } else {
    Trace(trace_, loop_.Now(), options_.name, "memory.refused",
          {{"bytes", memory.bytes().size()}, {"errno", static_cast<uint64_t>(found.error)}});
  }
  return found.region;
}

void Connection::InvalidateNow(const Invalidate& command) {
  if (!ReleaseRegistration(command.registration)) return;
  TraceInvalidated(command.registration, command.by_peer ? "peer" : "deregistered");
  invalidated_now_ = true;
  engine_->OnInvalidated(command.tag, loop_.Now());
}

// False: the device refuses. Then the memory may be reachable for as long as the queue pair is there, so that goes, and
// with it the connection; the engine hears OnDisconnected instead of OnInvalidated.
bool Connection::ReleaseRegistration(uint32_t number) {
  Exposed& exposed = exposed_[number - 1];
  STAGECOACH_CHECK(exposed.in_use);
  if (const int error = exposed.region.Destroy(); error != 0) {
    STAGECOACH_MARK("connection.deregistration_refused");
    PostBatch();  // what was taken before it
    const VerbsError refusal{.error = error, .call = "ibv_dereg_mr"};
    BeginClosing({.kind = CloseCause::Kind::kDevice, .error = error, .text = refusal.ToString()});
    return false;
  }
  if (exposed.window) free_windows_.emplace_back(std::move(exposed.window), exposed.window_key);
  exposed.window = {};
  exposed.in_use = false;
  free_exposed_.push_back(number);
  return true;
}

void Connection::TraceInvalidated(uint32_t number, std::string_view how) {
  Trace(trace_, loop_.Now(), options_.name, "stag.invalidated", {{"registration", uint64_t{number}}, {"how", how}});
}

std::optional<MutableBytes> Connection::Allocate(size_t bytes) {
  Block* block = pool_ != nullptr ? pool_->AllocateInTurn(bytes) : nullptr;
  if (block == nullptr) return std::nullopt;
  return MutableBytes(block->storage.get(), bytes);
}

void Connection::Free(MutableBytes memory) {
  Block* block = pool_ != nullptr ? pool_->Find(memory.data()) : nullptr;
  STAGECOACH_CHECK(block != nullptr);
  pool_->Free(block);
}

// --- Time ---

void Connection::ArmDeadline() {
  if (engine_ == nullptr || state_ == State::kClosed) return;
  const std::optional<Instant> deadline = engine_->Deadline();
  if (!deadline || (deadline_ && *deadline_ <= *deadline)) return;
  if (deadline_timer_ != 0) loop_.Cancel(deadline_timer_);
  deadline_ = deadline;
  deadline_timer_ = loop_.At(*deadline, [this] {
    deadline_timer_ = 0;
    deadline_.reset();
    if (engine_ == nullptr || state_ == State::kClosed) return;
    engine_->OnDeadline(loop_.Now());
    Progress();
  });
}

void Connection::CancelTimers() {
  for (EventLoop::TimerId* timer : {&connect_timer_, &deadline_timer_, &drain_timer_, &failed_timer_}) {
    if (*timer != 0) loop_.Cancel(std::exchange(*timer, 0));
  }
  deadline_.reset();
}

// --- Closing ---

void Connection::Close(bool gracefully, CloseCause cause, Duration patience) {
  if (state_ == State::kClosing || state_ == State::kClosed) return;
  if (state_ != State::kEstablished) return Fail(std::move(cause));
  if (gracefully) {
    if (close_when_idle_) return;  // under way
    // What the engine has said already comes before the end.
    Flush();
    if (state_ != State::kEstablished) return;
  }
  if (gracefully && (!ledger_.empty() || held_)) {
    STAGECOACH_MARK("connection.orderly_end_waits_for_sends");
    cause_ = std::move(cause);
    // With a full send queue the rest follows when there is room, and then the marker.
    if (held_ || PostLastMarker()) {
      close_when_idle_ = true;
      drain_timer_ = loop_.At(loop_.Now() + patience, [this] {
        STAGECOACH_MARK("connection.orderly_end_not_waited_for");
        drain_timer_ = 0;
        BeginClosing(*cause_);
        Progress();
      });
      return;
    }
    cause = *cause_;
  }
  BeginClosing(std::move(cause));
  Progress();
}

// An empty RDMA Write whose completion says that everything before it is done.
bool Connection::PostLastMarker() {
  ibv_send_wr request = {};
  request.wr_id = ledger_.Push({.kind = SendEntry::Kind::kMarker}, /*signaled=*/true);
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  if (ibv_post_send(id_->qp, &request, &bad) != 0) {
    ledger_.Unpost(1);
    return false;
  }
  ++sends_posted_;
  last_marker_posted_ = true;
  return true;
}

void Connection::Fail(CloseCause cause) {
  if (state_ == State::kEstablished) {
    BeginClosing(std::move(cause));
    EnterError();
    Progress();
    return;
  }
  if (state_ == State::kClosing || state_ == State::kClosed) return;
  cause_ = std::move(cause);
  state_ = State::kClosing;
  // From the loop: the caller of Connect, or an rdma_cm handler, is still on the stack.
  CancelTimers();
  drain_timer_ = loop_.At(loop_.Now(), [this] {
    drain_timer_ = 0;
    FinishClosing();
  });
}

// What was refused may have been posted from inside of a command, whose caller must not be told of its end in there.
void Connection::FailDevice(const VerbsError& error) {
  CloseCause cause{.kind = CloseCause::Kind::kDevice, .error = error.error, .text = error.ToString()};
  if (state_ != State::kEstablished) return Fail(std::move(cause));
  BeginClosing(std::move(cause));
  EnterError();
  if (in_progress_) return;  // it sees to the rest
  failed_timer_ = loop_.At(loop_.Now(), [this] {
    failed_timer_ = 0;
    Progress();
  });
}

void Connection::BeginClosing(CloseCause cause) {
  if (state_ == State::kClosing || state_ == State::kClosed) return;
  const bool was_established = state_ == State::kEstablished;
  cause_ = std::move(cause);
  state_ = State::kClosing;
  held_.reset();
  binds_.clear();
  CancelTimers();
  Trace(trace_, loop_.Now(), options_.name, "closing", {{"why", cause_->text}});
  if (was_established) rdma_disconnect(id_.get());
  if (cause_->kind != CloseCause::Kind::kLocal) EnterError();
  drain_timer_ = loop_.At(loop_.Now() + kDrainTime, [this] { OnDrainTimer(); });
}

// Flushes what is posted. The marker completes after everything on the send queue, which requests that asked for no
// completion would otherwise leave open.
void Connection::EnterError() {
  if (std::exchange(in_error_state_, true) || !id_ || id_->qp == nullptr) return;
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_ERR;
  ibv_modify_qp(id_->qp, &attributes, IBV_QP_STATE);
  ibv_send_wr request = {};
  request.wr_id = ledger_.Push({.kind = SendEntry::Kind::kMarker}, /*signaled=*/true);
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  if (ibv_post_send(id_->qp, &request, &bad) == 0) {
    ++sends_posted_;
  } else {
    STAGECOACH_MARK("connection.marker_refused");
    ledger_.Unpost(1);
    send_queue_drained_ = true;
  }
}

void Connection::OnDrainTimer() {
  drain_timer_ = 0;
  if (state_ != State::kClosing) return;
  if (!in_error_state_) {
    STAGECOACH_MARK("connection.closes_without_the_peer");
    EnterError();
    drain_timer_ = loop_.At(loop_.Now() + kDrainTime, [this] { OnDrainTimer(); });
    Poll();
    Progress();
    return;
  }
  STAGECOACH_MARK("connection.closes_with_work_outstanding");
  FinishClosing();
}

bool Connection::Drained() const {
  return in_error_state_ && receives_outstanding_ == 0 && (ledger_.empty() || send_queue_drained_);
}

void Connection::FinishClosing() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  DestroyResources();
  const CloseCause cause = cause_.value_or(CloseCause{});
  owner_.OnClosing(cause);
  if (engine_ != nullptr) {
    engine_->OnDisconnected(loop_.Now());
    owner_.OnProgress();
  }
  owner_.OnClosed(cause);
}

void Connection::CloseNow() {
  if (state_ == State::kClosed) return;
  const bool established = state_ == State::kEstablished;
  state_ = State::kClosed;
  closed_at_once_ = true;
  if (established) rdma_disconnect(id_.get());
  DestroyResources();
  if (engine_ != nullptr) engine_->OnDisconnected(loop_.Now());
}

// Destroying the queue pair is what ends the device's access; the rest follows in the order of dependencies.
void Connection::DestroyResources() {
  CancelTimers();
  if (watch_ != 0) loop_.Unwatch(std::exchange(watch_, 0));
  if (poller_ != 0) loop_.RemovePoller(std::exchange(poller_, 0));
  if (id_ && id_->qp != nullptr) {
    if (options_.shared && queue_) ReturnUndeliveredReceives();
    rdma_destroy_qp(id_.get());
    if (trace_ != nullptr) TraceClosed();
  }
  ledger_.Clear();
  receives_outstanding_ = 0;
  binds_.clear();
  held_.reset();
  for (Exposed& exposed : exposed_) exposed.window = {};
  free_windows_.clear();
  exposed_.clear();
  free_exposed_.clear();
  if (pool_ != nullptr) pool_->DropRegistrations();
  own_regions_.Close();
  regions_ = nullptr;
  // Their memory stays: calls that somebody holds are read there.
  send_buffers_.region = {};
  receive_buffers_.region = {};
  for (Buffers& buffers : replaced_buffers_) buffers.region = {};
  queue_ = {};
  channel_ = {};
  pd_ = nullptr;
  domain_ = {};
  id_ = {};
}

// What the queue pair took is what it gave back and what it was destroyed with.
void Connection::TraceClosed() {
  const auto stags = std::count_if(exposed_.begin(), exposed_.end(), [](const Exposed& one) { return one.in_use; });
  Trace(trace_, loop_.Now(), options_.name, "connection.closed",
        {{"why", cause_ && !closed_at_once_ ? std::string_view(cause_->text) : "closed at once"},
         {"receives_posted", receives_posted_},
         {"receives_completed", receives_completed_},
         {"receives_destroyed", uint64_t{receives_outstanding_}},
         {"sends_posted", sends_posted_},
         {"sends_completed", sends_completed_},
         {"sends_destroyed", ledger_.size()},
         {"stags_destroyed", static_cast<uint64_t>(stags)}});
}

std::string Connection::DebugString() const {
  static constexpr const char* kStates[] = {"idle",        "resolving", "connecting", "accepting",
                                            "established", "closing",   "closed"};
  std::string text = kStates[static_cast<size_t>(state_)];
  if (cause_) text += " (" + cause_->text + ")";
  text += (options_.shared ? "; shared receives held " + std::to_string(places_.size() - free_places_.size())
                           : "; receives posted " + std::to_string(receives_outstanding_)) +
          "; send queue " + std::to_string(ledger_.size()) + " of " + std::to_string(ledger_.size() + ledger_.room());
  if (!binds_.empty()) text += "; window binds waiting " + std::to_string(binds_.size());
  if (held_) text += "; a command waits";
  if (queue_) text += armed_ ? "; completions armed" : "; completions not armed";
  return text;
}

std::string Connection::PeerAddress() const {
  const sockaddr* const address = id_ ? rdma_get_peer_addr(id_.get()) : nullptr;
  return address != nullptr && address->sa_family != AF_UNSPEC ? FormatAddress(address) : std::string();
}

}  // namespace stagecoach::rpcrdma::internal
