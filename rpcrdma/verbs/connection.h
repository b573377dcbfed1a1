// Connection: one RPC-over-RDMA connection over the stock verbs and rdma_cm API, and the only interpreter of the
// engines' commands.
//
// Owns the rdma_cm id, a protection domain of its own (what is exposed here is reachable from this connection alone
// [5666bis:10.1#1] [5666:11#3]),
// one completion queue with its channel, the queue pair, and the registered buffers for Sends and Receives. Drives one
// ConnectionEngine: completions and time go in, commands come out and are posted, as many as possible with one
// doorbell.
//
//   Connect: resolve address -> resolve route -> create resources -> connect -> established ------+
//   Accept:                                      create resources -> accept -> established -------+-> closing -> closed
//
// Closing. Whoever starts it, the order is: rdma_disconnect; the queue pair to the error state; every work request
// completes (flushed); the queue pair, registrations, completion queue and protection domain are destroyed; the engine
// is told OnDisconnected. A peer that does not react cannot hold this up: a timer goes on without it, and destroying
// the queue pair ends every access anyway.
//
// Never blocks, but for what the device needs to create and destroy objects. Polls completions in batches: from the
// loop's poll phase, or when the completion channel's descriptor becomes readable after arming.
//
// Memory windows: on request, and where the device has type 2B windows, memory is exposed by binding a window, ahead of
// the Send and in the same post; then the peer may invalidate it with its reply. Otherwise by ibv_reg_mr with exactly
// the rights of its use.
//
// Memory of the program that lasts (LastingMemory) is registered when the connection uses it first, open to no peer.
// RDMA Writes have it for a source, and windows are bound on it, for each call the bytes of that call alone: as without
// it, steering tags are a call's own, and invalid when it is over. Without windows the registration itself would have
// to be open to the peer for as long as it lasts; then what is exposed is registered for each call, as any memory is.
//
// Not thread-safe: everything on the loop's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "base/trace.h"
#include "rpcrdma/core/engine.h"
#include "rpcrdma/core/ring.h"
#include "rpcrdma/verbs/block_pool.h"
#include "rpcrdma/verbs/cm_channel.h"
#include "rpcrdma/verbs/lasting_memory.h"
#include "rpcrdma/verbs/queue_sizes.h"
#include "rpcrdma/verbs/send_ledger.h"
#include "rpcrdma/verbs/shared_receives.h"
#include "verbs_shim/cxx/device_work.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach::rpcrdma::internal {

// Why a connection was not made, or ended. `text` is a clause: "connection refused".
struct CloseCause {
  enum class Kind : uint8_t {
    kLocal,  // this end asked for it
    kPeer,   // the peer disconnected, or died
    kRefused,
    kRejected,
    kUnreachable,
    kTimedOut,       // connecting
    kDevice,         // a verbs call failed
    kTransport,      // a work request failed
    kBadProperties,  // Disconnect::Why::kBadProperties
  };
  Kind kind = Kind::kLocal;
  int error = 0;  // errno, or 0
  std::string text;
};

// What an errno of rdma_connect means. Some drivers connect within the call (Linux's siw): what others say by an event
// comes here, too.
CloseCause CauseOfConnectErrno(int error);

class ConnectionOwner {
 public:
  virtual ~ConnectionOwner() = default;

  // Client: resources exist; returns the private data to connect with (kept until the call returns).
  virtual std::vector<std::byte> OnDeviceReady() = 0;
  // The peer accepted, with `private_data`. A client attaches its engine now.
  virtual void OnEstablished(ConstBytes private_data) = 0;
  // The engine may have outputs. Posts nothing itself: commands are taken afterwards.
  virtual void OnProgress() = 0;
  // The connection is over, or was never made, and `cause` says why; the engine is told next, and its last outputs
  // follow by OnProgress.
  virtual void OnClosing(const CloseCause& cause) = 0;
  // The connection is over. Last call; memory is safe. The owner may destroy the Connection later, not now.
  virtual void OnClosed(const CloseCause& cause) = 0;
};

class Connection final : public CmHandler, public ConnectionMemory {
 public:
  // What is wanted; queues are cut to what the device has (queue_sizes.h), and the arenas say how it came out.
  struct Options {
    QueueSizes queues = SizesForCredits(64, 64);  // as the device allows
    uint32_t send_size = 4096;                    // bytes of each Send buffer
    uint32_t receive_size = 4096;                 // bytes of each Receive buffer
    uint32_t receive_align = 1;                   // of where each begins: a power of two
    uint8_t incoming_reads = 0;                   // IRD
    uint8_t outgoing_reads = 0;                   // ORD
    bool memory_windows = false;
    bool always_busy =
        false;  // poll in the poll phase even when nothing of ours is outstanding: a server expects calls
    // Receives that it shares with others; null: its own. Then the protection domain is theirs, too, the receive arena
    // has one buffer more than there are credits, so that one call too many is seen, and the engine gives buffers back
    // instead of posting them (ReturnReceive).
    std::shared_ptr<SharedReceives> shared;
    std::string name = "connection";  // in traces
  };

  Connection(EventLoop& loop, const Options& options, ConnectionOwner& owner, BlockPool* pool, TraceSink* trace);
  // Ends everything at once, without telling the owner.
  ~Connection() override;

  // Client side. OnClosed tells of failure, from the loop.
  void Connect(CmChannel& channel, const sockaddr* address, Duration timeout);

  // Server side: takes an id that came with CONNECT_REQUEST. Creates the resources; then the owner attaches an engine
  // and calls Accept. On error the id is rejected; after Accept's the owner calls CloseNow.
  verbs::VerbsResult<void> Adopt(verbs::CmId id, const CmEvent& request);
  verbs::VerbsResult<void> Accept(ConstBytes private_data);

  // Starts driving. The engine outlives the connection's closing.
  void Attach(ConnectionEngine* engine);
  // To be called after commands were given to the engine outside of OnProgress. Tells the owner nothing: when the
  // device refuses what is posted, it hears of that from the loop.
  void Kick();

  // Ends the connection; OnClosed follows. Gracefully: after all that the engine has said was posted, and has been
  // handed over, or `patience` is over; once more does not hurry it.
  void Close(bool gracefully, CloseCause cause, Duration patience = 1s);
  // Ends the connection before this returns: no memory is reachable or used any more, the engine has been told,
  // OnClosed is not called.
  void CloseNow();

  // --- Buffers of another size, for an engine that can do with them ---

  // Whether the device is at work for none of the buffers, and they are this connection's own.
  bool may_replace_buffers() const;
  // Gives it others, as many as before, of these sizes in bytes; the arenas then say so. What those before hold stays
  // readable until DropReplacedBuffers. On error all is as it was.
  verbs::VerbsResult<void> ReplaceBuffers(uint32_t send_size, uint32_t receive_size);
  void DropReplacedBuffers() { replaced_buffers_.clear(); }

  // --- What the device offers; after resources exist ---
  BufferArena send_arena() const { return send_arena_; }
  BufferArena receive_arena() const { return receive_arena_; }
  bool uses_windows() const { return windows_; }
  uint32_t outgoing_reads() const { return outgoing_reads_; }
  uint32_t incoming_reads() const { return incoming_reads_; }
  uint32_t segment_length_max() const { return segment_length_max_; }

  // Bytes of Sends and Receives of its own, replaced ones that are still there included.
  size_t buffer_bytes() const;
  // Entries of the table of registrations, free ones included.
  size_t registration_records() const { return exposed_.size(); }
  // LastingMemory registered now, in a domain of its own, and registered ever by this connection.
  size_t lasting_regions() const { return own_regions_.size(); }
  uint64_t lasting_registrations() const { return lasting_registrations_; }

  bool established() const { return state_ == State::kEstablished; }
  bool closed() const { return state_ == State::kClosed; }
  // Why it is over or ending; null before.
  const CloseCause* cause() const { return cause_ ? &*cause_ : nullptr; }
  // "127.0.0.1:53422"; empty before the id has a route.
  std::string PeerAddress() const;
  // "established; receives posted 6; send queue 2 of 98": what the device has, in one line.
  std::string DebugString() const;

  // --- ConnectionMemory ---
  std::optional<Registration> Register(ConstBytes memory, MemoryUse use, LastingMemory* lasting) override;
  std::optional<MutableBytes> Allocate(size_t bytes) override;
  void Free(MutableBytes memory) override;
  void ReturnReceive(uint32_t slot) override;

  // --- CmHandler ---
  void OnCmEvent(const CmEvent& event) override;

 private:
  enum class State : uint8_t { kIdle, kResolving, kConnecting, kAccepting, kEstablished, kClosing, kClosed };

  struct Exposed {
    verbs::MemoryRegion region;
    verbs::MemoryWindow window;
    uint32_t window_key = 0;
    bool in_use = false;
  };
  // What an arena is made of.
  struct Buffers {
    std::unique_ptr<std::byte[]> memory;
    size_t size = 0;
    verbs::MemoryRegion region;
  };
  // A window bind waiting to be posted ahead of the Send that names it.
  struct PendingBind {
    uint32_t registration = 0;
    ibv_mr* region = nullptr;
    ConstBytes memory;
    int access = 0;
  };

  static constexpr int kBatch = 32;
  static constexpr uint64_t kReceiveId = SharedReceives::kReceiveId;  // in wr_id
  static constexpr uint32_t kNoSlot = UINT32_MAX;

  verbs::VerbsResult<void> CreateResources();
  verbs::VerbsResult<void> CreateArena(uint32_t slots, uint32_t slot_size, uint32_t align, Buffers* buffers,
                                       BufferArena* arena);
  verbs::VerbsResult<void> CheckWatch();
  void OnEstablishedEvent(const CmEvent& event);
  void OnPeerGone(const CmEvent& event);

  bool Poll();
  bool PollAgain();
  bool Arm();
  bool Busy() const;
  void OnChannelReadable();
  // Of the completion channel. False: there was none.
  bool TakeEvent();
  void HandleCompletion(const ibv_wc& completion);
  void OnSharedReceive(const ibv_wc& completion);
  void ReturnUndeliveredReceives();
  void OnSendCompletion(const ibv_wc& completion);
  void FinishEntry(const SendEntry& entry);
  void OnFailedCompletion(const ibv_wc& completion);
  void Progress();
  void Flush();
  bool FillBatch();
  bool Interpret(const Command& command);
  ibv_send_wr& NextSend(const SendEntry& entry, ConstBytes memory, uint32_t local_key, bool signaled);
  void AddBind(const PendingBind& bind);
  void InvalidateNow(const Invalidate& command);
  ibv_mr* RegionOf(LastingMemory& memory);
  bool ReleaseRegistration(uint32_t id);
  void TraceInvalidated(uint32_t id, std::string_view how);
  bool PostBatch();
  bool PostReceives();
  bool PostSends();
  void TraceSends(int count);
  void ArmDeadline();

  bool PostLastMarker();
  void BeginClosing(CloseCause cause);
  void EnterError();
  void OnDrainTimer();
  bool Drained() const;
  void FinishClosing();
  void DestroyResources();
  void TraceClosed();
  void CancelTimers();
  void Fail(CloseCause cause);
  void FailDevice(const verbs::VerbsError& error);

  EventLoop& loop_;
  const Options options_;
  ConnectionOwner& owner_;
  BlockPool* const pool_;
  TraceSink* const trace_;
  ConnectionEngine* engine_ = nullptr;
  State state_ = State::kIdle;
  std::optional<CloseCause> cause_;

  // In the order of their dependencies: destroyed from the last to the first.
  verbs::CmId id_;
  verbs::ProtectionDomain domain_;  // unless it is shared
  ibv_pd* pd_ = nullptr;            // either of them
  verbs::CompletionChannel channel_;
  verbs::CompletionQueue queue_;
  Buffers send_buffers_;
  Buffers receive_buffers_;
  std::vector<Buffers> replaced_buffers_;
  DomainRegions own_regions_;         // unless the domain is shared
  DomainRegions* regions_ = nullptr;  // either domain's
  std::vector<Exposed> exposed_;
  std::vector<uint32_t> free_exposed_;
  std::vector<std::pair<verbs::MemoryWindow, uint32_t>> free_windows_;  // with the key to count on from

  BufferArena send_arena_;
  BufferArena receive_arena_;
  // With shared Receives: where the buffers of the receive arena are at the moment, and which those of the shared queue
  // these are.
  std::vector<std::byte*> places_;
  std::vector<uint32_t> shared_slots_;
  std::vector<uint32_t> free_places_;
  bool iwarp_ = false;
  bool windows_ = false;
  uint32_t outgoing_reads_ = 0;
  uint32_t incoming_reads_ = 0;
  uint32_t segment_length_max_ = 1u << 30;

  std::shared_ptr<verbs::DeviceWork> device_work_;
  EventLoop::WatchId watch_ = 0;
  EventLoop::PollerId poller_ = 0;
  EventLoop::TimerId connect_timer_ = 0;
  EventLoop::TimerId deadline_timer_ = 0;
  std::optional<Instant> deadline_;
  EventLoop::TimerId drain_timer_ = 0;
  EventLoop::TimerId failed_timer_ = 0;  // tells the owner what came of a verbs call that failed
  bool armed_ = false;
  bool has_drained_ = false;  // the last look at the queue has left nothing there

  QueueSizes sizes_;
  SendLedger ledger_;
  uint32_t unsignaled_ = 0;
  uint32_t receives_outstanding_ = 0;
  // What the device took and gave back, over the life of the connection. Counted where it happens, for traces: the
  // engine's own numbers say what it wants.
  uint64_t receives_posted_ = 0;
  uint64_t receives_completed_ = 0;
  uint64_t sends_posted_ = 0;     // work requests of the send queue, of any kind
  uint64_t sends_completed_ = 0;  // those that a later completion reported with it included
  uint64_t lasting_registrations_ = 0;
  Ring<PendingBind> binds_;
  std::optional<Command> held_;  // taken and not yet posted: the send queue was full
  bool in_progress_ = false;
  bool invalidated_now_ = false;  // the engine may have outputs that OnProgress has not seen
  bool close_when_idle_ = false;
  bool last_marker_posted_ = false;
  bool in_error_state_ = false;
  bool closed_at_once_ = false;  // by CloseNow, maybe while it was closing already
  bool send_queue_drained_ = false;

  // The batch being built.
  int sends_ = 0;
  int receives_ = 0;
  ibv_send_wr send_wr_[kBatch];
  ibv_sge send_sge_[kBatch];
  ibv_recv_wr receive_wr_[kBatch];
  ibv_sge receive_sge_[kBatch];
  ibv_wc completions_[kBatch];
};

}  // namespace stagecoach::rpcrdma::internal
