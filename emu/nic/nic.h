// Nic: one RDMA device: its objects, their limits and dependencies, and the way a connection is put under a QP.
//
// Programs reach it through an open device (NicContext, ibv_context). Control operations name objects by handle, as the
// kernel does, and answer with an errno: ENOENT for a handle that names nothing, EINVAL for an argument that names
// nothing of the context or an attribute out of bounds, ENOMEM at a limit, EBUSY while something depends on the object,
// EIO when the device has failed. Data-path operations are on the objects.
//
// Threading: every member from any thread. The control lock comes before all others but handler_mutex_, and nothing on
// the data path takes it. Locks, the lost-wakeup argument and the lease: docs/locks_and_leases.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/trace.h"
#include "emu/fabric/fabric.h"
#include "emu/inject/plan.h"
#include "emu/llp/llp.h"
#include "emu/nic/datagram/address_handles.h"
#include "emu/nic/datagram/datagram_port.h"
#include "emu/nic/device_profile.h"
#include "emu/nic/infiniband/roce_port.h"
#include "emu/nic/loop/nic_loop.h"
#include "emu/nic/objects/completion_channel.h"
#include "emu/nic/objects/completion_queue.h"
#include "emu/nic/objects/memory_registry.h"
#include "emu/nic/objects/shared_receive_queue.h"
#include "emu/nic/objects/stag_source.h"
#include "emu/nic/queue/late_placement.h"
#include "emu/nic/queue/queue_pair.h"
#include "emu/wire/carrier_proof.h"

namespace stagecoach::emu {

// An open device. Objects belong to the context they were made in; closing it destroys what is left of them.
class NicContext {
 public:
  explicit NicContext(Fabric& fabric, uint32_t id)
      : id_(id), async_events_(std::make_shared<AsyncEventQueue>(fabric)) {}
  uint32_t id() const { return id_; }
  AsyncEventQueue& async_events() { return *async_events_; }

 private:
  const uint32_t id_;
  const std::shared_ptr<AsyncEventQueue> async_events_;  // kept also by who waits for an event
};

// What programs name by handle. Completion channels they name by their descriptors.
enum class ObjectKind : uint8_t { kPd, kRegion, kWindow, kAh, kCq, kSrq, kQp };

struct NicOptions {
  std::string name = "stagecoach0";
  std::unique_ptr<StagSource> stags;  // and of other secrets; null: SystemStagSource()
  TraceSink* trace = nullptr;
  // Hears what programs learn of as an errno alone, and people should read. Any thread, under locks of the NIC. Null:
  // nobody.
  std::function<void(const std::string& words)> complain;
  // What is done to the device and its connections, to these above what captures show (emu/tap/injection_tap.h). Of one
  // NIC. Null: nothing but what the profile's habits are.
  std::shared_ptr<InjectionPlan> injections;
};

// What the handshake has agreed on.
struct ConnectionSetup {
  std::unique_ptr<Llp> llp;  // reliable; no watcher set
  bool initiator = false;
  uint32_t ird = 0;         // Reads of the peer we answer at once
  uint32_t ord = 0;         // Reads of ours outstanding at once
  bool extensions = false;  // both ends speak RFC 7306
  // RFC 6581 section 4: with a peer-to-peer agreement the initiator's first record is the RTR, and the responder may
  // send when it has come. Without one the same holds for whatever the initiator sends first (RFC 5044 section 7.1.2).
  enum class Rtr : uint8_t { kNone, kWrite, kRead } rtr = Rtr::kNone;
  std::shared_ptr<ConnectionObserver> observer;  // held until OnClosed has returned or the QP is destroyed
};

class Nic {
 public:
  Nic(Fabric& fabric, DeviceProfile profile, NicOptions options);
  ~Nic();
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  Fabric& fabric() { return fabric_; }
  const DeviceProfile& profile() const { return profile_; }
  const std::string& name() const { return options_.name; }
  TraceSink* trace() const { return options_.trace; }
  void Complain(const std::string& words) const {
    if (options_.complain) options_.complain(words);
  }
  MemoryRegistry& registry() { return registry_; }
  bool is_infiniband() const { return roce_ != nullptr; }
  // Packets of connections between InfiniBand QPs are lost here now and then, or late, as habits or rules have it.
  bool LosesPackets() const { return injections_->Has(kLosingActions, kKindsOfConnections); }
  // Of an InfiniBand device.
  RocePort& roce() { return *roce_; }
  DatagramPort& datagrams() { return *datagrams_; }
  // What peers must not guess, for a purpose of this name: from the system or, in simulation, from the world's seed.
  std::unique_ptr<StagSource> Secrets(std::string_view purpose) const { return secrets_->Fork(purpose); }

  // --- The port, and the end of the device ---
  // A port that goes down says so in each context (IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE) and in ibv_query_port;
  // streams may well outlive it. From when a program has opened the device the port goes down with the last address of
  // the host that leads to others, and comes up with the next. A host that never had one works by its loopback
  // addresses, and its port is active. Of an InfiniBand device contexts hear of GIDs that come and go, too
  // (IBV_EVENT_GID_CHANGE).
  void SetPortState(bool active);
  // As a code of ibv_mtu: of an InfiniBand device RocePort::ActiveMtu, else the profile's.
  uint8_t active_mtu();
  bool port_active() const { return port_active_.load(std::memory_order_acquire) && !failed(); }
  // The device fails for good: IBV_EVENT_DEVICE_FATAL in each context, every QP goes to ERROR with its event, and what
  // would make or attach something answers EIO. Objects are destroyed as ever.
  void Fail();
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // --- What is done to the device ---
  // The options' rules, and behind them the profile's habits.
  const std::shared_ptr<InjectionPlan>& injections() const { return injections_; }
  LatePlacements& late_placements() { return late_placements_; }
  // Writes that are to be placed late are placed now: memory that nothing can reach any more is to be the program's, or
  // another window's.
  void SettlePlacements();

  // --- What there is, for tests and reports ---
  struct Objects {
    size_t contexts = 0;
    size_t pds = 0;
    size_t regions = 0;
    size_t windows = 0;
    size_t channels = 0;
    size_t cqs = 0;
    size_t qps = 0;
    size_t srqs = 0;
    size_t ahs = 0;
  };
  Objects objects() const;
  // Counts, and a line for each QP.
  std::string Describe();

  Result<NicContext*, int> OpenContext();
  int CloseContext(NicContext* context);
  // Handles are a context's own: who has opened the device twice names by either what it made there, and nothing else.
  // To be asked before a handle of a program's is given to a call that takes no context; a handle never comes to mean
  // another object.
  bool Has(const NicContext& context, ObjectKind kind, uint32_t handle) const;

  // --- Protection domains ---
  Result<uint32_t, int> AllocatePd(NicContext& context);
  int DeallocatePd(uint32_t pd);

  // --- Memory; a region's or window's handle is its own number, apart from its STag ---
  struct Region {
    uint32_t handle = 0;
    uint32_t stag = 0;  // lkey and rkey
  };
  Result<Region, int> RegisterRegion(NicContext& context, const RegionRequest& request);
  int DeregisterRegion(uint32_t handle);
  // The handle stays, the STag unless the range changes. EINVAL also for a PD that is none of the context's.
  Result<Region, int> ReregisterRegion(NicContext& context, uint32_t handle, const RegionChange& change);
  Result<Region, int> AllocateWindow(NicContext& context, uint32_t pd, WindowType type = WindowType::kType2);
  int DeallocateWindow(uint32_t handle);

  // --- Address handles ---
  // EOPNOTSUPP on iWARP, and for a multicast GID; EINVAL without a GID; what PathTo says of the vector; EINVAL for an
  // unknown PD. The handle
  // stays until DestroyAh.
  Result<const AddressHandle*, int> CreateAh(NicContext& context, uint32_t pd, const AddressVector& vector);
  int DestroyAh(uint32_t handle);
  // The way back to the sender of a datagram whose Receive begins with `grh`. EINVAL if that is no route to one of this
  // host's addresses.
  Result<AddressVector, int> VectorOf(ConstBytes grh);

  // --- Completion channels and queues ---
  Result<CompletionChannel*, int> CreateChannel(NicContext& context);
  int DestroyChannel(CompletionChannel* channel);
  // `capacity` at least 1 and at most the profile's max_cqe. `channel` may be null; EBADF: it is another context's.
  Result<CompletionQueue*, int> CreateCq(NicContext& context, uint32_t capacity, CompletionChannel* channel,
                                         void* cookie, CompletionQueueFlags flags = {});
  int ResizeCq(uint32_t handle, uint32_t capacity);
  // Waits until the program has acknowledged the events it got.
  int DestroyCq(uint32_t handle);
  CompletionQueue* FindCq(uint32_t handle);

  // --- Shared receive queues ---
  // EINVAL beyond the profile's sizes, and for a limit above the capacity.
  Result<SharedReceiveQueue*, int> CreateSrq(NicContext& context, uint32_t pd, const SrqAttributes& attributes,
                                             void* cookie);
  // As SharedReceiveQueue::Modify; EINVAL also for a capacity beyond the profile's.
  int ModifySrq(uint32_t handle, std::optional<uint32_t> max_wr, std::optional<uint32_t> limit);
  // EBUSY while a QP uses it; waits until the program has acknowledged the events it got.
  int DestroySrq(uint32_t handle);
  SharedReceiveQueue* FindSrq(uint32_t handle);

  // --- Queue pairs ---
  // With an SRQ, which must be of the same context and PD, the QP has no room for Receives of its own. EOPNOTSUPP: the
  // device has no QPs of the type; EAGAIN: an InfiniBand device finds no port for this process (RocePort::Slot);
  // ENOMEM: there are max_qp of them, or as many as there are numbers, which is two less where QP 0 and QP 1 have
  // theirs among them.
  Result<QueuePair*, int> CreateQp(NicContext& context, const QpCreate& create);
  int DestroyQp(uint32_t handle);
  // For whoever made the QP, and so knows that it is not being destroyed. Others name it by its number, below.
  QueuePair* FindQp(uint32_t handle);

  // QueuePair::ExpectConnection and ForgoConnection, of the QP of this number if there is one.
  void ExpectConnection(uint32_t qp_number, bool extensions);
  void ForgoConnection(uint32_t qp_number);
  // Puts a connection under a QP in INIT, or one that expects it, and brings it to RTS. EINVAL: another state, or an
  // unknown QP; EISCONN: it has one. On failure the stream goes with `setup.llp`.
  int AttachConnection(uint32_t qp_number, ConnectionSetup setup);
  // A stream that carries packets of an InfiniBand QP in its life `generation`, known to the port as `serial`. False,
  // and the stream goes, if there is no such QP any more.
  bool TakeCarrier(uint32_t qp_number, uint64_t generation, uint64_t serial, std::unique_ptr<Llp> llp);
  // nullopt: there is none of this number.
  std::optional<QpState> StateOf(uint32_t qp_number);
  // QueuePair::Modify. ENOENT: no QP has this number, or no longer.
  int ModifyQp(uint32_t qp_number, const QpAttributes& attributes, uint32_t mask);
  // QueuePair::ShareSecret, of the QP of this number if there is one.
  void ShareSecret(uint32_t qp_number, uint32_t remote_qp, const wire::Gid& remote, const wire::CarrierSecret& secret);
  // QueuePair::Disconnect. ENOENT: no QP has this number, or no longer.
  int Disconnect(uint32_t qp_number);

  struct Counters {
    uint64_t connections = 0;  // ever attached
    QueuePair::Counters work;  // of all QPs, past ones included
    MemoryRegistry::Counters memory;
  };
  Counters counters() const;

  // NicLoop::HoldsTimerForNobody.
  bool HoldsTimerForNobody() const { return loop_.HoldsTimerForNobody(); }

 private:
  friend class IwarpConnection;
  friend class DatagramConnection;
  friend class IbConnection;
  friend class QueuePair;

  struct Pd {
    uint32_t context = 0;
    uint32_t users = 0;  // regions, windows, address handles, SRQs and QPs
  };
  // With mutex_ held: null, if the context has no such domain.
  Pd* FindPd(const NicContext& context, uint32_t handle);
  struct RegionEntry {
    uint32_t context = 0;
    uint32_t pd = 0;
    uint32_t stag = 0;
    uint64_t length = 0;  // of a region
    uint32_t access = 0;  // of a region
  };
  struct Channel {
    uint32_t context = 0;
    std::shared_ptr<CompletionChannel> channel;
    uint32_t users = 0;  // CQs
  };
  struct Cq {
    uint32_t context = 0;
    std::unique_ptr<CompletionQueue> cq;
    uint32_t users = 0;  // QPs; one that uses it for both queues counts twice
  };

  struct Srq {
    uint32_t context = 0;
    std::unique_ptr<SharedReceiveQueue> srq;
    uint32_t users = 0;  // QPs
  };
  // What a CQ that has overrun means for the other QPs that use it is seen to on the loop, without locks.
  class CqCaretaker final : public LoopClient {
   public:
    explicit CqCaretaker(Nic& nic) : nic_(nic) {}
    Instant LeaseEnd() const override { return Instant{}; }
    void CountParked(bool) override {}
    void OnContinue() override {}
    void OnDeadline(Instant) override {}
    void OnNotice() override { nic_.FailQpsOfOverrunCqs(); }

   private:
    Nic& nic_;
  };

  // Whether the next registration is to fail.
  bool FailsRegistration();
  // Before there is a context for the first time: hears from the fabric of the host's addresses and links.
  void WatchHost();
  void OnHostChanged();
  bool IsLinked();
  // With mutex_ held.
  void ShowPortState(bool active);
  NicLoop& loop() { return loop_; }
  void FailQpsOfOverrunCqs();
  // Deletes a destroyed QP whose stream has ended. On the loop's thread.
  void Bury(QueuePair* qp);
  // `settle`: wait until the program has acknowledged the events it got about the object.
  int DestroyCq(uint32_t handle, bool settle);
  int DestroyQp(uint32_t handle, bool settle);
  int DestroySrq(uint32_t handle, bool settle);
  using EntryTable = std::map<uint32_t, RegionEntry>;
  int Release(EntryTable& table, uint32_t handle, int (MemoryRegistry::*release)(uint32_t));
  // nullopt: all are in use.
  std::optional<uint32_t> NextQpNumber(uint8_t slot);

  Fabric& fabric_;
  const DeviceProfile profile_;
  NicOptions options_;
  const std::unique_ptr<StagSource> secrets_;  // to fork; never drawn from
  MemoryRegistry registry_;
  NicLoop loop_;
  CqCaretaker cq_caretaker_{*this};
  std::atomic<bool> port_active_{true};
  std::atomic<bool> failed_{false};
  std::atomic<bool> is_watching_{false};
  const std::shared_ptr<InjectionPlan> injections_;
  std::mutex registrations_mutex_;
  PlaceInjections registrations_;  // guarded by registrations_mutex_
  LatePlacements late_placements_;
  std::unique_ptr<RocePort> roce_;           // of an InfiniBand device
  std::unique_ptr<DatagramPort> datagrams_;  // likewise

  mutable std::mutex mutex_;  // all below; taken before every other lock
  bool is_linked_ = false;    // when the fabric last said something
  uint32_t last_handle_ = 0;  // handles are never used twice
  uint32_t last_qp_number_ = 0;
  std::map<uint32_t, std::unique_ptr<NicContext>> contexts_;
  std::map<uint32_t, Pd> pds_;
  EntryTable regions_;
  EntryTable windows_;
  std::map<uint32_t, Channel> channels_;
  std::map<uint32_t, Cq> cqs_;
  std::map<uint32_t, Srq> srqs_;
  std::map<uint32_t, std::unique_ptr<AddressHandle>> ahs_;
  std::map<uint32_t, std::unique_ptr<QueuePair>> qps_;
  std::map<uint32_t, QueuePair*> qps_by_number_;
  std::map<uint32_t, std::unique_ptr<QueuePair>> lingering_;  // by handle; destroyed, and their streams still end
  uint64_t connections_ = 0;
  QueuePair::Counters past_work_;  // of QPs that are gone
};

}  // namespace stagecoach::emu
