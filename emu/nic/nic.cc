#include "emu/nic/nic.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/mark.h"
#include "base/mutant.h"
#include "base/undoing.h"
#include "emu/nic/iwarp/iwarp_connection.h"
#include "emu/tap/injection_tap.h"

namespace stagecoach::emu {
namespace {

// QP numbers have 24 bits; 0 and 1 are special on InfiniBand, and programs know that.
constexpr uint32_t kFirstQpNumber = 2;
constexpr uint32_t kQpNumberMask = 0xffffff;
// Of an InfiniBand device's QP numbers: what the slot leaves (roce_port.h).
constexpr uint32_t kIndexMask = (1u << kSlotShift) - 1;

// Bytes of one buffer's description in a send queue. What a work request describes and what it has inline lie in the
// same place on devices, so that a QP always takes as much inline data; rdma_xclient counts on 16 bytes that it does
// not ask for.
constexpr uint32_t kGatherEntrySize = 16;

NicOptions WithSource(NicOptions options) {
  if (options.stags == nullptr) options.stags = SystemStagSource();
  return options;
}

template <typename Entry>
uint32_t ContextOf(const Entry& entry) {
  return entry.context;
}
uint32_t ContextOf(const std::unique_ptr<AddressHandle>& ah) {
  return ah->context;
}
uint32_t ContextOf(const std::unique_ptr<QueuePair>& qp) {
  return qp->context().id();
}

// The handles of a context's objects, one after the other and without memory for a list of them: closing a device does
// not fail half way. 0: no more.
template <typename Table>
uint32_t NextOf(const Table& table, uint32_t context, uint32_t after) {
  auto entry = table.upper_bound(after);
  while (entry != table.end() && ContextOf(entry->second) != context) ++entry;
  return entry != table.end() ? entry->first : 0;
}

// The options' rules with the device's habits behind them.
std::shared_ptr<InjectionPlan> WithHabits(std::shared_ptr<InjectionPlan> rules, const DeviceProfile& profile) {
  if (rules == nullptr) rules = InjectionPlan::Make({});
  rules->AddHabits(profile.habits, profile.luck_seed);
  return rules;
}

// An entry that is not in its table yet, so that putting it there needs no memory.
template <typename Table>
typename Table::node_type NewEntry(uint32_t handle, typename Table::mapped_type entry) {
  Table alone;
  alone.emplace(handle, std::move(entry));
  return alone.extract(handle);
}

}  // namespace

Nic::Nic(Fabric& fabric, DeviceProfile profile, NicOptions options)
    : fabric_(fabric),
      profile_(std::move(profile)),
      options_(WithSource(std::move(options))),
      secrets_(options_.stags->Fork("secrets")),
      registry_(profile_, std::move(options_.stags)),
      loop_(fabric),
      injections_(WithHabits(options_.injections, profile_)),
      registrations_(injections_, SetOf(InjectionAction::kFailRegistration), name() + "/registrations"),
      late_placements_(options_.trace),
      roce_(profile_.transport == TransportKind::kInfiniband ? std::make_unique<RocePort>(*this, fabric, profile_)
                                                             : nullptr),
      datagrams_(roce_ != nullptr ? std::make_unique<DatagramPort>(*this, loop_, fabric, profile_) : nullptr),
      last_qp_number_(kFirstQpNumber - 1) {}

Nic::~Nic() {
  if (is_watching_) fabric_.WatchAddresses(nullptr);
  while (!contexts_.empty()) CloseContext(contexts_.begin()->second.get());
  std::map<uint32_t, std::unique_ptr<QueuePair>> lingering;
  {
    std::lock_guard lock(mutex_);
    lingering.swap(lingering_);
  }
  if (!lingering.empty()) STAGECOACH_MARK("nic.taken_down_with_qps_lingering");
  for (const auto& [handle, qp] : lingering) qp->Drop();
  // The first gives streams to the second, which is not used by QPs any more.
  roce_.reset();
  datagrams_.reset();
  // Nothing completes any more.
  loop_.Remove(&cq_caretaker_);
}

uint8_t Nic::active_mtu() {
  return is_infiniband() ? roce_->ActiveMtu() : profile_.max_mtu;
}

// --- Contexts ---

Result<NicContext*, int> Nic::OpenContext() {
  WatchHost();
  std::lock_guard lock(mutex_);
  if (failed()) return Err(EIO);
  const uint32_t id = ++last_handle_;
  auto context = std::make_unique<NicContext>(fabric_, id);
  if (!context->async_events().usable()) return Err(int{errno});
  return contexts_.emplace(id, std::move(context)).first->second.get();
}

int Nic::CloseContext(NicContext* context) {
  std::unique_lock lock(mutex_);
  const auto found = contexts_.find(context->id());
  if (found == contexts_.end()) return ENOENT;
  const uint32_t id = context->id();
  if (NextOf(qps_, id, 0) != 0) STAGECOACH_MARK("nic.context_closed_with_qps");
  const auto each = [&](const auto& table, auto destroy) {
    for (uint32_t handle = NextOf(table, id, 0); handle != 0; handle = NextOf(table, id, handle)) {
      lock.unlock();
      destroy(handle);
      lock.lock();
    }
  };
  // In the order of their dependencies. Nobody can acknowledge events any more, so nothing waits for that.
  each(qps_, [this](uint32_t handle) { DestroyQp(handle, /*settle=*/false); });
  each(cqs_, [this](uint32_t handle) { DestroyCq(handle, /*settle=*/false); });
  each(srqs_, [this](uint32_t handle) { DestroySrq(handle, /*settle=*/false); });
  std::erase_if(channels_, [id](const auto& entry) { return entry.second.context == id; });
  each(ahs_, [this](uint32_t handle) { DestroyAh(handle); });
  each(windows_, [this](uint32_t handle) { DeallocateWindow(handle); });
  each(regions_, [this](uint32_t handle) { DeregisterRegion(handle); });
  std::erase_if(pds_, [id](const auto& entry) { return entry.second.context == id; });
  contexts_.erase(id);
  return 0;
}

bool Nic::Has(const NicContext& context, ObjectKind kind, uint32_t handle) const {
  const auto is_in = [&](const auto& table) {
    const auto found = table.find(handle);
    return found != table.end() && found->second.context == context.id();
  };
  std::lock_guard lock(mutex_);
  switch (kind) {
    case ObjectKind::kPd:
      return is_in(pds_);
    case ObjectKind::kRegion:
      return is_in(regions_);
    case ObjectKind::kWindow:
      return is_in(windows_);
    case ObjectKind::kCq:
      return is_in(cqs_);
    case ObjectKind::kSrq:
      return is_in(srqs_);
    case ObjectKind::kAh: {
      const auto found = ahs_.find(handle);
      return found != ahs_.end() && found->second->context == context.id();
    }
    case ObjectKind::kQp: {
      const auto found = qps_.find(handle);
      return found != qps_.end() && &found->second->context() == &context;
    }
  }
  return false;
}

// --- Protection domains ---

Result<uint32_t, int> Nic::AllocatePd(NicContext& context) {
  std::lock_guard lock(mutex_);
  if (failed()) return Err(EIO);
  if (pds_.size() >= profile_.max_pd) return Err(ENOMEM);
  const uint32_t handle = ++last_handle_;
  pds_[handle] = {.context = context.id(), .users = 0};
  return handle;
}

Nic::Pd* Nic::FindPd(const NicContext& context, uint32_t handle) {
  const auto found = pds_.find(handle);
  return found != pds_.end() && found->second.context == context.id() ? &found->second : nullptr;
}

int Nic::DeallocatePd(uint32_t pd) {
  std::lock_guard lock(mutex_);
  const auto found = pds_.find(pd);
  if (found == pds_.end()) return ENOENT;
  if (found->second.users != 0) return EBUSY;
  pds_.erase(found);
  return 0;
}

// --- Memory ---

bool Nic::FailsRegistration() {
  if (!registrations_.IsWatched()) return false;
  bool fails = false;
  std::optional<InjectionFiring> fired;
  {
    std::lock_guard lock(registrations_mutex_);
    fails = registrations_.Judge() != nullptr;
    fired = registrations_.TheFired();
  }
  if (fired) TraceFired(trace(), fabric_.Now(), name(), {&*fired, 1});
  return fails;
}

Result<Nic::Region, int> Nic::RegisterRegion(NicContext& context, const RegionRequest& request) {
  if (FailsRegistration()) {
    STAGECOACH_MARK("nic.registration_fails_by_rule");
    Trace(trace(), fabric_.Now(), name(), "registration.failed", {{"bytes", request.length}});
    return Err(ENOMEM);
  }
  {
    std::lock_guard lock(mutex_);
    if (failed()) return Err(EIO);
    Pd* const pd = FindPd(context, request.pd);
    if (pd == nullptr) return Err(EINVAL);
    ++pd->users;  // keeps the PD while memory is probed without the lock
  }
  Undoing let_go([&] {
    std::lock_guard lock(mutex_);
    --pds_.find(request.pd)->second.users;
  });
  auto entry = NewEntry<EntryTable>(
      0, {.context = context.id(), .pd = request.pd, .length = request.length, .access = request.access});
  const Result<uint32_t, int> stag = registry_.Register(request);
  if (!stag) {
    if (stag.error() == ENOMEM) {
      Trace(trace(), fabric_.Now(), name(), "registration.failed", {{"bytes", request.length}});
    }
    return Err(stag.error());
  }
  let_go.Done();
  std::lock_guard lock(mutex_);
  const uint32_t handle = ++last_handle_;
  entry.key() = handle;
  entry.mapped().stag = *stag;
  regions_.insert(std::move(entry));
  Trace(trace(), fabric_.Now(), name(), "stag.allocated",
        {{"index", uint64_t{StagIndex(*stag)}},
         {"key", uint64_t{StagKey(*stag)}},
         {"bytes", request.length},
         {"pd", uint64_t{request.pd}},
         {"access", uint64_t{request.access}}});
  return Region{handle, *stag};
}

Result<Nic::Region, int> Nic::ReregisterRegion(NicContext& context, uint32_t handle, const RegionChange& change) {
  std::unique_lock lock(mutex_);
  if (failed()) return Err(EIO);
  const auto found = regions_.find(handle);
  if (found == regions_.end() || found->second.context != context.id()) return Err(ENOENT);
  if (change.pd) {
    Pd* const pd = FindPd(context, *change.pd);
    if (pd == nullptr) return Err(EINVAL);
    ++pd->users;
  }
  // Out of the table meanwhile: nobody else can change or end it.
  auto node = regions_.extract(found);
  RegionEntry& entry = node.mapped();
  lock.unlock();
  const Result<uint32_t, int> stag = registry_.Reregister(entry.stag, change);
  SettlePlacements();  // as in Release
  lock.lock();
  if (change.pd) --pds_[stag ? std::exchange(entry.pd, *change.pd) : *change.pd].users;
  if (stag) {
    entry.stag = *stag;
    if (change.range) entry.length = change.range->length;
    if (change.access) entry.access = *change.access;
    Trace(trace(), fabric_.Now(), name(), "stag.reregistered",
          {{"index", uint64_t{StagIndex(*stag)}},
           {"key", uint64_t{StagKey(*stag)}},
           {"bytes", entry.length},
           {"pd", uint64_t{entry.pd}},
           {"access", uint64_t{entry.access}}});
  }
  regions_.insert(std::move(node));
  if (!stag) return Err(stag.error());
  return Region{handle, *stag};
}

Result<Nic::Region, int> Nic::AllocateWindow(NicContext& context, uint32_t pd_handle, WindowType type) {
  std::lock_guard lock(mutex_);
  if (failed()) return Err(EIO);
  Pd* const pd = FindPd(context, pd_handle);
  if (pd == nullptr) return Err(EINVAL);
  auto entry = NewEntry<EntryTable>(0, {.context = context.id(), .pd = pd_handle, .length = 0});
  const Result<uint32_t, int> stag = registry_.AllocateWindow(pd_handle, type);
  if (!stag) {
    if (stag.error() == ENOMEM) Trace(trace(), fabric_.Now(), name(), "registration.failed", {{"bytes", uint64_t{0}}});
    return Err(stag.error());
  }
  ++pd->users;
  // A window's STag is good for nothing before it is bound.
  Trace(trace(), fabric_.Now(), name(), "window.allocated",
        {{"index", uint64_t{StagIndex(*stag)}}, {"pd", uint64_t{pd_handle}}});
  const uint32_t handle = ++last_handle_;
  entry.key() = handle;
  entry.mapped().stag = *stag;
  windows_.insert(std::move(entry));
  return Region{handle, *stag};
}

int Nic::Release(EntryTable& table, uint32_t handle, int (MemoryRegistry::*release)(uint32_t)) {
  const bool undrained =
      STAGECOACH_MUTANT("deregister-without-draining", "memory is deregistered while Writes to it are on their way");
  std::unique_lock lock(mutex_);
  const auto found = table.find(handle);
  if (found == table.end()) return ENOENT;
  auto node = table.extract(found);
  const RegionEntry& entry = node.mapped();
  lock.unlock();
  // Without the lock: it waits for accesses under way. What they have put aside before is placed now, when nothing more
  // can come and the memory is not the program's yet.
  const int error = (registry_.*release)(entry.stag);
  if (!undrained) SettlePlacements();
  lock.lock();
  if (error != 0) {
    table.insert(std::move(node));
  } else {
    --pds_[entry.pd].users;
    Trace(trace(), fabric_.Now(), name(), "stag.freed", {{"index", uint64_t{StagIndex(entry.stag)}}});
  }
  return error;
}

int Nic::DeregisterRegion(uint32_t handle) {
  return Release(regions_, handle, &MemoryRegistry::Deregister);
}

int Nic::DeallocateWindow(uint32_t handle) {
  return Release(windows_, handle, &MemoryRegistry::DeallocateWindow);
}

// --- Injections and reports ---

void Nic::SettlePlacements() {
  if (injections_->EverHad(SetOf(InjectionAction::kPlaceLate))) late_placements_.PlaceAll(fabric_.Now());
}

Nic::Objects Nic::objects() const {
  std::lock_guard lock(mutex_);
  return {contexts_.size(), pds_.size(), regions_.size(), windows_.size(), channels_.size(),
          cqs_.size(),      qps_.size(), srqs_.size(),    ahs_.size()};
}

std::string Nic::Describe() {
  const Objects count = objects();
  std::string text = name() + ": " + std::to_string(count.contexts) + " contexts, " + std::to_string(count.pds) +
                     " PDs, " + std::to_string(count.regions) + " regions, " + std::to_string(count.windows) +
                     " windows, " + std::to_string(count.channels) + " channels, " + std::to_string(count.cqs) +
                     " CQs, " + std::to_string(count.srqs) + " SRQs, " + std::to_string(count.ahs) + " AHs, " +
                     std::to_string(count.qps) + " QPs\n";
  if (roce_ != nullptr) {
    const RocePort::Counters port = roce_->counters();
    text += "  streams for packets: " + std::to_string(port.carriers_refused) + " refused, " +
            std::to_string(port.not_proven) + " of them without a proof, " + std::to_string(port.calls_not_proven) +
            " of ours to who is not the peer\n";
  }
  std::lock_guard lock(mutex_);
  for (const auto& [handle, qp] : qps_) text += "  " + qp->Describe() + "\n";
  for (const auto& [handle, qp] : lingering_) text += "  " + qp->Describe() + ", destroyed\n";
  return text;
}

// --- Completion channels and queues ---

Result<CompletionChannel*, int> Nic::CreateChannel(NicContext& context) {
  std::lock_guard lock(mutex_);
  if (failed()) return Err(EIO);
  const uint32_t handle = ++last_handle_;
  auto channel = std::make_shared<CompletionChannel>(fabric_, handle);
  if (!channel->usable()) return Err(int{errno});
  Channel& entry = channels_[handle];
  entry.context = context.id();
  entry.channel = std::move(channel);
  return entry.channel.get();
}

int Nic::DestroyChannel(CompletionChannel* channel) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(channels_.begin(), channels_.end(),
                                  [channel](const auto& entry) { return entry.second.channel.get() == channel; });
  if (found == channels_.end()) return ENOENT;
  if (found->second.users != 0) return EBUSY;
  channels_.erase(found);
  return 0;
}

Result<CompletionQueue*, int> Nic::CreateCq(NicContext& context, uint32_t capacity, CompletionChannel* channel,
                                            void* cookie, CompletionQueueFlags flags) {
  if (capacity == 0 || capacity > profile_.max_cqe) return Err(EINVAL);
  std::lock_guard lock(mutex_);
  if (failed()) return Err(EIO);
  if (cqs_.size() >= profile_.max_cq) return Err(ENOMEM);
  Channel* used = nullptr;
  if (channel != nullptr) {
    const auto found = channels_.find(channel->handle());
    if (found == channels_.end() || found->second.channel.get() != channel) return Err(EINVAL);
    if (found->second.context != context.id()) return Err(EBADF);
    used = &found->second;
  }
  const uint32_t handle = ++last_handle_;
  auto cq = std::make_unique<CompletionQueue>(fabric_, fabric_.HasProgressThread() ? &loop_ : nullptr, profile_, handle,
                                              capacity, channel, &context.async_events(), cookie, flags);
  cq->SetOverrunListener([this] { loop_.Notify(&cq_caretaker_); });
  CompletionQueue* const result = cq.get();
  cqs_.emplace(handle, Cq{.context = context.id(), .cq = std::move(cq)});
  if (used != nullptr) ++used->users;
  return result;
}

int Nic::ResizeCq(uint32_t handle, uint32_t capacity) {
  if (capacity == 0 || capacity > profile_.max_cqe) return EINVAL;
  std::lock_guard lock(mutex_);
  const auto found = cqs_.find(handle);
  return found == cqs_.end() ? ENOENT : found->second.cq->Resize(capacity);
}

int Nic::DestroyCq(uint32_t handle) {
  return DestroyCq(handle, /*settle=*/true);
}

int Nic::DestroyCq(uint32_t handle, bool settle) {
  std::unique_ptr<CompletionQueue> cq;
  {
    std::lock_guard lock(mutex_);
    const auto found = cqs_.find(handle);
    if (found == cqs_.end()) return ENOENT;
    if (found->second.users != 0) return EBUSY;
    cq = std::move(found->second.cq);
    cqs_.erase(found);
  }
  cq->Settle(settle);
  if (cq->channel() != nullptr) {
    std::lock_guard lock(mutex_);
    --channels_[cq->channel()->handle()].users;
  }
  return 0;
}

CompletionQueue* Nic::FindCq(uint32_t handle) {
  std::lock_guard lock(mutex_);
  const auto found = cqs_.find(handle);
  return found == cqs_.end() ? nullptr : found->second.cq.get();
}

void Nic::FailQpsOfOverrunCqs() {
  // Held throughout, so the QPs stay; what is asked of them waits for nobody.
  std::lock_guard lock(mutex_);
  for (const auto& [handle, entry] : cqs_) {
    if (!entry.cq->overrun()) continue;
    for (const auto& [qp_handle, qp] : qps_) {
      if (qp->Uses(entry.cq.get())) qp->Fail(QueuePair::kCqFailed);
    }
  }
}

// --- Shared receive queues ---

Result<SharedReceiveQueue*, int> Nic::CreateSrq(NicContext& context, uint32_t pd_handle,
                                                const SrqAttributes& attributes, void* cookie) {
  if (attributes.max_wr == 0 || attributes.max_wr > profile_.max_srq_wr || attributes.max_sge > profile_.max_srq_sge ||
      attributes.limit > attributes.max_wr) {
    return Err(EINVAL);
  }
  std::lock_guard lock(mutex_);
  if (failed()) return Err(EIO);
  Pd* const pd = FindPd(context, pd_handle);
  if (pd == nullptr) return Err(EINVAL);
  if (srqs_.size() >= profile_.max_srq) return Err(ENOMEM);
  const uint32_t handle = ++last_handle_;
  auto srq = std::make_unique<SharedReceiveQueue>(handle, pd_handle, attributes, context.async_events(), cookie);
  SharedReceiveQueue* const result = srq.get();
  srqs_.emplace(handle, Srq{.context = context.id(), .srq = std::move(srq)});
  ++pd->users;
  return result;
}

int Nic::ModifySrq(uint32_t handle, std::optional<uint32_t> max_wr, std::optional<uint32_t> limit) {
  std::lock_guard lock(mutex_);
  const auto found = srqs_.find(handle);
  if (found == srqs_.end()) return ENOENT;
  if (max_wr && *max_wr > profile_.max_srq_wr) return EINVAL;
  return found->second.srq->Modify(max_wr, limit);
}

int Nic::DestroySrq(uint32_t handle) {
  return DestroySrq(handle, /*settle=*/true);
}

int Nic::DestroySrq(uint32_t handle, bool settle) {
  Srq gone;
  NicContext* context = nullptr;
  {
    std::lock_guard lock(mutex_);
    const auto found = srqs_.find(handle);
    if (found == srqs_.end()) return ENOENT;
    if (found->second.users != 0) return EBUSY;
    gone = std::move(found->second);
    srqs_.erase(found);
    --pds_[gone.srq->pd()].users;
    context = contexts_[gone.context].get();
  }
  context->async_events().Settle(&gone.srq->async_account(), settle);
  return 0;
}

SharedReceiveQueue* Nic::FindSrq(uint32_t handle) {
  std::lock_guard lock(mutex_);
  const auto found = srqs_.find(handle);
  return found == srqs_.end() ? nullptr : found->second.srq.get();
}

// --- The port, and the end of the device ---

bool Nic::IsLinked() {
  const std::vector<LocalAddress> addresses = fabric_.LocalAddresses();
  return std::any_of(addresses.begin(), addresses.end(), [](const LocalAddress& each) { return each.is_linked; });
}

void Nic::WatchHost() {
  // Without a descriptor for it the device works, and the next program that opens it may have more luck.
  if (is_watching_ || !fabric_.WatchAddresses([this] { OnHostChanged(); })) return;
  // What there is now is no news.
  const bool linked = IsLinked();
  if (roce_ != nullptr) roce_->GidsHaveChanged();
  std::lock_guard lock(mutex_);
  if (!is_watching_.exchange(true)) is_linked_ = linked;
}

void Nic::OnHostChanged() {
  const bool gids_have_changed = roce_ != nullptr && roce_->GidsHaveChanged();
  const bool linked = IsLinked();
  std::lock_guard lock(mutex_);
  if (gids_have_changed && !failed()) {
    Trace(trace(), fabric_.Now(), name(), "port.gids_changed");
    for (const auto& [id, context] : contexts_) context->async_events().Push({.type = AsyncEventType::kGidChange});
  }
  if (std::exchange(is_linked_, linked) != linked) ShowPortState(linked);
}

void Nic::SetPortState(bool active) {
  std::lock_guard lock(mutex_);
  ShowPortState(active);
}

void Nic::ShowPortState(bool active) {
  if (port_active_.exchange(active) == active || failed()) return;
  for (const auto& [id, context] : contexts_) {
    context->async_events().Push({.type = active ? AsyncEventType::kPortActive : AsyncEventType::kPortError});
  }
}

void Nic::Fail() {
  std::lock_guard lock(mutex_);
  if (failed_.exchange(true)) return;
  Trace(trace(), fabric_.Now(), name(), "device.failed");
  for (const auto& [id, context] : contexts_) context->async_events().Push({.type = AsyncEventType::kDeviceFatal});
  for (const auto& [handle, qp] : qps_) qp->Fail(QueuePair::kDeviceFailed);
}

// --- Queue pairs ---

std::optional<uint32_t> Nic::NextQpNumber(uint8_t slot) {
  // The slot's first and last numbers are special in some, and in each as many are given out.
  constexpr size_t kNumbersOfASlot = kIndexMask + 1 - kFirstQpNumber;
  if (is_infiniband() && qps_by_number_.size() >= kNumbersOfASlot) return std::nullopt;
  do {
    if (is_infiniband()) {
      last_qp_number_ = uint32_t{slot} << kSlotShift | ((last_qp_number_ + 1) & kIndexMask);
    } else {
      last_qp_number_ = (last_qp_number_ + 1) & kQpNumberMask;
    }
  } while (last_qp_number_ < kFirstQpNumber || last_qp_number_ == kQpNumberMask ||
           qps_by_number_.count(last_qp_number_) != 0);
  return last_qp_number_;
}

Result<QueuePair*, int> Nic::CreateQp(NicContext& context, const QpCreate& create) {
  QpCapabilities wanted = create.capabilities;
  if (create.srq != nullptr)
    wanted.max_receive_wr = wanted.max_receive_sge = 0;  // ignored, as its Receives are the SRQ's
  if (wanted.max_send_wr > profile_.max_qp_wr || wanted.max_receive_wr > profile_.max_qp_wr ||
      wanted.max_send_sge > profile_.max_sge || wanted.max_receive_sge > profile_.max_sge ||
      wanted.max_inline > profile_.max_inline) {
    return Err(EINVAL);
  }
  if (create.send_cq == nullptr || create.receive_cq == nullptr) return Err(EINVAL);
  if (create.type != QpType::kRc && !is_infiniband()) return Err(EOPNOTSUPP);
  uint8_t slot = 0;
  if (is_infiniband()) {
    const Result<uint8_t, int> taken = roce_->Slot();
    if (!taken) return Err(taken.error());
    slot = *taken;
  }
  std::lock_guard lock(mutex_);
  Pd* const pd = FindPd(context, create.pd);
  const auto send_cq = cqs_.find(create.send_cq->handle());
  const auto receive_cq = cqs_.find(create.receive_cq->handle());
  if (pd == nullptr || send_cq == cqs_.end() || receive_cq == cqs_.end()) return Err(EINVAL);
  // Closing the one context would leave the other's QP without what it needs.
  for (const auto& cq : {send_cq, receive_cq}) {
    if (cq->second.context != context.id()) return Err(EINVAL);
  }
  if (create.srq != nullptr) {
    const auto srq = srqs_.find(create.srq->handle());
    if (srq == srqs_.end() || srq->second.context != context.id()) return Err(EINVAL);
  }
  if (failed()) return Err(EIO);
  if (qps_.size() >= profile_.max_qp) {
    STAGECOACH_MARK("nic.qps_used_up");
    return Err(ENOMEM);
  }
  QpCreate granted = create;
  granted.capabilities = wanted;
  granted.capabilities.max_send_wr = std::max(wanted.max_send_wr, 1u);
  granted.capabilities.max_inline =
      std::max(wanted.max_inline, std::min(wanted.max_send_sge * kGatherEntrySize, profile_.max_inline));
  if (create.srq == nullptr) granted.capabilities.max_receive_wr = std::max(wanted.max_receive_wr, 1u);
  const std::optional<uint32_t> number = NextQpNumber(slot);
  if (!number) {
    STAGECOACH_MARK("nic.qp_numbers_used_up");
    return Err(ENOMEM);
  }
  const uint32_t handle = ++last_handle_;
  auto qp = std::make_unique<QueuePair>(*this, context, handle, *number, granted);
  QueuePair* const result = qp.get();
  auto entry = NewEntry<decltype(qps_)>(handle, std::move(qp));
  qps_by_number_.emplace(*number, result);
  Undoing out_of_sight([&] { qps_by_number_.erase(*number); });
  if (create.type == QpType::kUd) datagrams_->Join(*result);
  out_of_sight.Done();
  qps_.insert(std::move(entry));
  ++pd->users;
  ++send_cq->second.users;
  ++receive_cq->second.users;
  if (create.srq != nullptr) ++srqs_[create.srq->handle()].users;
  return result;
}

int Nic::DestroyQp(uint32_t handle) {
  return DestroyQp(handle, /*settle=*/true);
}

int Nic::DestroyQp(uint32_t handle, bool settle) {
  decltype(qps_)::node_type entry;
  {
    std::lock_guard lock(mutex_);
    entry = qps_.extract(handle);
    if (entry.empty()) return ENOENT;
    qps_by_number_.erase(entry.mapped()->qp_number());
  }
  QueuePair* const qp = entry.mapped().get();
  if (qp->type() == QpType::kUd) datagrams_->Leave(*qp);
  const bool lingers = qp->Retire();
  qp->context().async_events().Settle(&qp->async_account(), settle);
  registry_.UnbindWindowsOf(qp->qp_number());

  std::lock_guard lock(mutex_);
  --pds_[qp->pd()].users;
  --cqs_[qp->send_cq()->handle()].users;
  --cqs_[qp->receive_cq()->handle()].users;
  if (qp->srq() != nullptr) --srqs_[qp->srq()->handle()].users;
  if (!lingers) {
    past_work_.Add(qp->counters());
    return 0;
  }
  // From here on the loop owns the QP. If the stream has ended already, the notice lets it find out.
  lingering_.insert(std::move(entry));
  loop_.Notify(qp);
  return 0;
}

void Nic::Bury(QueuePair* qp) {
  std::unique_ptr<QueuePair> buried;
  std::lock_guard lock(mutex_);
  const auto found = lingering_.find(qp->handle());
  if (found == lingering_.end()) STAGECOACH_MARK("nic.buried_before_it_lingers");
  if (found == lingering_.end()) return;  // DestroyQp has not let go of it yet and will ask again
  buried = std::move(found->second);
  lingering_.erase(found);
  past_work_.Add(buried->counters());
}

QueuePair* Nic::FindQp(uint32_t handle) {
  std::lock_guard lock(mutex_);
  const auto found = qps_.find(handle);
  return found == qps_.end() ? nullptr : found->second.get();
}

void Nic::ExpectConnection(uint32_t qp_number, bool extensions) {
  std::lock_guard lock(mutex_);  // keeps the QP
  const auto found = qps_by_number_.find(qp_number);
  if (found != qps_by_number_.end()) found->second->ExpectConnection(extensions);
}

void Nic::ForgoConnection(uint32_t qp_number) {
  std::lock_guard lock(mutex_);  // keeps the QP
  const auto found = qps_by_number_.find(qp_number);
  if (found != qps_by_number_.end()) found->second->ForgoConnection();
}

int Nic::AttachConnection(uint32_t qp_number, ConnectionSetup setup) {
  std::shared_ptr<ConnectionObserver> observer = std::move(setup.observer);
  std::lock_guard lock(mutex_);  // keeps the QP
  const auto found = qps_by_number_.find(qp_number);
  if (found == qps_by_number_.end()) return EINVAL;
  if (failed()) return EIO;
  QueuePair& qp = *found->second;
  const std::string connection_name = name() + "/qp-" + std::to_string(qp_number);
  if (std::shared_ptr<ConnectionInjections> injections = injections_->NewConnection(connection_name)) {
    setup.llp = WithInjections(
        std::move(setup.llp), std::move(injections),
        {.fabric = fabric_, .trace = options_.trace, .name = connection_name, .transport = InjectionTransport::kIwarp});
  }
  const int error = qp.Attach(std::make_unique<IwarpConnection>(qp, std::move(setup)), std::move(observer));
  if (error == 0) ++connections_;
  return error;
}

bool Nic::TakeCarrier(uint32_t qp_number, uint64_t generation, uint64_t serial, std::unique_ptr<Llp> llp) {
  std::lock_guard lock(mutex_);  // keeps the QP
  const auto found = qps_by_number_.find(qp_number);
  if (found == qps_by_number_.end() || failed()) return false;
  if (!found->second->TakeCarrier(generation, serial, std::move(llp))) return false;
  ++connections_;
  return true;
}

std::optional<QpState> Nic::StateOf(uint32_t qp_number) {
  std::lock_guard lock(mutex_);
  const auto found = qps_by_number_.find(qp_number);
  if (found == qps_by_number_.end()) return std::nullopt;
  return found->second->state();
}

int Nic::ModifyQp(uint32_t qp_number, const QpAttributes& attributes, uint32_t mask) {
  std::lock_guard lock(mutex_);  // keeps the QP
  const auto found = qps_by_number_.find(qp_number);
  return found == qps_by_number_.end() ? ENOENT : found->second->Modify(attributes, mask);
}

void Nic::ShareSecret(uint32_t qp_number, uint32_t remote_qp, const wire::Gid& remote,
                      const wire::CarrierSecret& secret) {
  std::lock_guard lock(mutex_);  // keeps the QP
  const auto found = qps_by_number_.find(qp_number);
  if (found != qps_by_number_.end()) found->second->ShareSecret(remote_qp, remote, secret);
}

int Nic::Disconnect(uint32_t qp_number) {
  // Held throughout, as DestroyQp takes a QP out of the table under it: the QP stays. The connection's turn that this
  // may be waits for nobody.
  std::lock_guard lock(mutex_);
  const auto found = qps_by_number_.find(qp_number);
  if (found == qps_by_number_.end()) return ENOENT;
  found->second->Disconnect();
  return 0;
}

Nic::Counters Nic::counters() const {
  std::lock_guard lock(mutex_);
  Counters counters{.connections = connections_, .work = past_work_, .memory = registry_.counters()};
  for (const auto& [handle, qp] : qps_) counters.work.Add(qp->counters());
  return counters;
}

}  // namespace stagecoach::emu
