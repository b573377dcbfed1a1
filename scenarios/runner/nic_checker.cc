#include "scenarios/runner/nic_checker.h"

#include <fmt/format.h>

#include <algorithm>

namespace stagecoach::scenario {
namespace {

// Of ibv_access_flags, in which regions and windows tell their rights.
constexpr uint64_t kLocalWrite = 1u << 0;
constexpr uint64_t kRemoteWrite = 1u << 1;
constexpr uint64_t kRemoteRead = 1u << 2;
constexpr uint64_t kRemoteAtomic = 1u << 3;
constexpr uint64_t kWindowBind = 1u << 4;

constexpr uint64_t kAtomicSize = 8;

// The kinds of records, of iWARP ("Write", "Atomic Request") as of InfiniBand ("Write First", "Write Only with
// Immediate").
bool IsWrite(std::string_view opcode) {
  return opcode.substr(0, 5) == "Write";
}

// Fills a Receive.
bool IsSend(std::string_view opcode) {
  return opcode.substr(0, 4) == "Send";
}

bool IsAtomic(std::string_view opcode) {
  return opcode == "Compare and Swap" || opcode == "Fetch and Add" || opcode == "Atomic Request";
}

// Writes may be placed in any order among themselves. One with Immediate data completes a Receive, as a Send does.
bool MayOvertakeWrites(std::string_view opcode) {
  return IsWrite(opcode) && opcode.find("Immediate") == std::string_view::npos;
}

bool IsWithin(uint64_t offset, uint64_t length, uint64_t bytes) {
  return offset <= bytes && length <= bytes - offset;
}

// A queue pair is called NIC/qp-NUMBER.
std::string_view NicNameOf(std::string_view component) {
  return component.substr(0, component.find('/'));
}

template <typename Map>
typename Map::mapped_type& FindOrMake(Map& map, std::string_view name) {
  const auto found = map.find(name);
  if (found != map.end()) return found->second;
  return map.emplace(std::string(name), typename Map::mapped_type()).first->second;
}

}  // namespace

template <typename T>
T NicChecker::Event::Fact(std::string_view key) const {
  if (const T* value = FindFact<T>(facts, key)) return *value;
  violations->Add(now, "trace.facts", fmt::format("{} {} does not tell \"{}\"", component, name, key));
  return T();
}

NicChecker::QueuePair& NicChecker::QueuePairOf(std::string_view component) {
  return FindOrMake(queue_pairs_, component);
}

NicChecker::Nic& NicChecker::NicOf(std::string_view component) {
  return FindOrMake(nics_, NicNameOf(component));
}

const NicChecker::Stag* NicChecker::Nic::Find(uint64_t stag) const {
  const auto found = stags.find(stag >> 8);
  if (found == stags.end() || !found->second.valid || found->second.key != (stag & 0xff)) return nullptr;
  return &found->second;
}

void NicChecker::Object(const Event& event, std::string_view rule, std::string_view what) {
  violations_->Add(event.now, rule,
                   fmt::format("{}: {}", what, FormatTraceEvent(event.now, event.component, event.name, event.facts)));
}

void NicChecker::OnEvent(Instant now, std::string_view component, std::string_view event_name,
                         std::initializer_list<TraceFact> facts) {
  const Event event{now, component, event_name, facts, violations_};
  if (event_name == "connection.attached") {
    QueuePairOf(component).pd = event.Number("pd");
    QueuePairOf(component).receive_pd = event.Number("receive_pd");
  } else if (event_name == "work.posted") {
    QueuePair& qp = QueuePairOf(component);
    if (event.Number("number") != qp.sends_posted) Object(event, "completion.order", "posted out of turn");
    if (event.Number("signaled") != 0) qp.awaited.push_back(qp.sends_posted);
    ++qp.sends_posted;
  } else if (event_name == "send.completed") {
    JudgeSend(event, QueuePairOf(component));
  } else if (event_name == "receive.completed") {
    QueuePair& qp = QueuePairOf(component);
    const uint64_t number = event.Number("number");
    if (number != qp.next_receive) Object(event, "completion.order", "Receives");
    qp.next_receive = number + 1;
  } else if (event_name == "qp.destroyed") {
    JudgeDestroyed(event, QueuePairOf(component));
    queue_pairs_.erase(queue_pairs_.find(component));
    for (auto& [index, stag] : NicOf(component).stags) {
      if (stag.window && !stag.any_queue_pair && stag.queue_pair == component) stag.valid = false;
    }
  } else if (event_name == "placement.kept") {
    ++QueuePairOf(component).kept;
  } else if (event_name == "placement.done") {
    JudgePlaced(event, QueuePairOf(component));
  } else if (event_name == "record.placed") {
    JudgeRecord(event, QueuePairOf(component));
  } else if (event_name == "response.started") {
    JudgeUse(event, event.Number("length"), kRemoteRead, QueuePairOf(component).pd);
  } else if (event_name == "part.placed") {
    JudgePart(event, QueuePairOf(component));
  } else if (event_name == "stag.allocated" || event_name == "window.allocated") {
    JudgeAllocated(event);
  } else if (event_name == "stag.reregistered") {
    Stag& stag = NicOf(component).stags[event.Number("index")];
    stag.key = event.Number("key");
    stag.bytes = event.Number("bytes");
    stag.pd = event.Number("pd");
    stag.access = event.Number("access");
  } else if (event_name == "stag.freed") {
    JudgeFreed(event);
  } else if (event_name == "window.bound" || event_name == "window.invalidated") {
    JudgeWindow(event);
  } else if (event_name == "fabric.restored") {
    // A host that starts again has a new NIC of the old name.
    nics_.erase(std::string(component) + "-rnic");
  }
}

// --- Queues ---

void NicChecker::JudgeSend(const Event& event, QueuePair& qp) {
  const uint64_t number = event.Number("number");
  // Work that asked for no completion leaves gaps; flushed work does not.
  if (number < qp.next_send || number >= qp.sends_posted) {
    Object(event, "completion.order", "sends");
  } else if (qp.failed && number != qp.next_send) {
    Object(event, "completion.lost", "flushed work is passed over");
  }
  for (; !qp.awaited.empty() && qp.awaited.front() <= number; qp.awaited.pop_front()) {
    if (qp.awaited.front() < number) Object(event, "completion.lost", "a send that asked for one is passed over");
  }
  qp.next_send = number + 1;
  qp.failed = qp.failed || event.Word("status") != "success";
}

void NicChecker::JudgeDestroyed(const Event& event, const QueuePair& qp) {
  if (event.Number("receives_posted") != qp.next_receive + event.Number("receives_outstanding")) {
    Object(event, "completion.lost", "Receives");
  }
  const uint64_t posted = event.Number("sends_posted");
  if (posted != qp.sends_posted) Object(event, "completion.lost", "sends were posted that nobody saw");
  // What is no longer outstanding has been told of, if it was to be, or is held back by an injection.
  const uint64_t done = posted - std::min(posted, event.Number("sends_outstanding"));
  const auto untold = static_cast<uint64_t>(
      std::count_if(qp.awaited.begin(), qp.awaited.end(), [done](uint64_t number) { return number < done; }));
  const uint64_t flushed = qp.failed && done > qp.next_send ? done - qp.next_send : 0;
  if (std::max(untold, flushed) > event.Number("sends_held")) Object(event, "completion.lost", "sends");
  JudgeOrder(event, qp);
  JudgeLeftOver(event, qp);
}

void NicChecker::Finish(Instant now) {
  for (const auto& [component, qp] : queue_pairs_) {
    violations_->Add(now, "completion.lost", fmt::format("{} was never destroyed", component));
    if (qp.unplaced == 0) continue;
    violations_->Add(now, "placement.stag",
                     fmt::format("{} bytes of the last record of {} are nowhere", qp.unplaced, component));
  }
}

// --- Memory ---

void NicChecker::JudgeOrder(const Event& event, const QueuePair& qp) {
  if (qp.kept > 0) Object(event, "placement.order", fmt::format("{} Writes are not in place", qp.kept));
}

void NicChecker::JudgePlaced(const Event& event, QueuePair& qp) {
  const uint64_t writes = event.Number("writes");
  if (writes > qp.kept) Object(event, "placement.order", fmt::format("{} Writes were to be placed", qp.kept));
  qp.kept -= std::min(qp.kept, writes);
}

void NicChecker::JudgeLeftOver(const Event& event, const QueuePair& qp) {
  if (qp.unplaced == 0) return;
  Object(event, "placement.stag", fmt::format("{} bytes of the record before it are nowhere", qp.unplaced));
}

void NicChecker::JudgeRecord(const Event& event, QueuePair& qp) {
  const std::string_view opcode = event.Word("opcode");
  const uint64_t length = event.Number("length");
  const uint64_t run = event.Number("run");
  if (!MayOvertakeWrites(opcode)) JudgeOrder(event, qp);
  JudgeLeftOver(event, qp);
  qp.unplaced = 0;
  if (opcode == "Terminate") return;  // the NIC's own to read
  if (IsAtomic(opcode)) {
    // Its operands are no payload; what it changes is told all the same.
    if (run != kAtomicSize) Object(event, "placement.stag", "an atomic changes 8 bytes");
    return JudgeUse(event, run, kRemoteAtomic, qp.pd);
  }
  uint64_t right = IsWrite(opcode) ? kRemoteWrite : kLocalWrite;
  // Of iWARP: it names the sink of the Read by STag, as a Write would.
  if (opcode == "Read Response") right = kLocalWrite | kRemoteWrite;
  qp.right = right;
  qp.domain = IsSend(opcode) ? qp.receive_pd : qp.pd;
  JudgeUse(event, run, qp.right, qp.domain);
  if (run > length) Object(event, "placement.stag", "more than the record has");
  qp.unplaced = length - std::min(run, length);
}

void NicChecker::JudgePart(const Event& event, QueuePair& qp) {
  const uint64_t length = event.Number("length");
  JudgeUse(event, length, qp.right, qp.domain);
  if (length > qp.unplaced) Object(event, "placement.stag", "more than the record has");
  qp.unplaced -= std::min(length, qp.unplaced);
}

void NicChecker::JudgeUse(const Event& event, uint64_t length, uint64_t right, std::optional<uint64_t> domain) {
  // Without bytes nothing is touched, and no STag is looked at (RFC 5040 section 5.1).
  if (length == 0) return;
  ++placements_judged_;
  const Nic& nic = NicOf(event.component);
  const Stag* const stag = nic.Find(event.Number("stag"));
  if (stag == nullptr) {
    Object(event, "placement.stag", "the STag is not valid");
  } else if (stag->pd != domain) {
    Object(event, "placement.stag", fmt::format("the STag is of PD {}", stag->pd));
  } else if (stag->window && !stag->any_queue_pair && stag->queue_pair != event.component) {
    Object(event, "placement.stag", fmt::format("the window belongs to {}", stag->queue_pair));
  } else if (stag->window && nic.Find(stag->region) == nullptr) {
    Object(event, "placement.stag", "the region of the window is not valid");
  } else if ((stag->access & right) != right || (stag->window && (right & kLocalWrite) != 0)) {
    Object(event, "placement.stag",
           fmt::format("the STag gives the rights {:#x}, and this takes {:#x}", stag->access, right));
  } else if (!IsWithin(event.Number("offset"), length, stag->bytes)) {
    Object(event, "placement.stag", fmt::format("the STag names {} bytes", stag->bytes));
  }
}

void NicChecker::JudgeWindow(const Event& event) {
  const uint64_t number = event.Number("stag");
  Stag& stag = NicOf(event.component).stags[number >> 8];
  if (event.name == "window.bound") {
    JudgeBinding(event, stag);
    stag.valid = true;
    stag.key = number & 0xff;
    stag.bytes = event.Number("bytes");
    stag.access = event.Number("access");
    stag.region = event.Number("region");
    stag.queue_pair = event.component;
    stag.any_queue_pair = event.Number("type") == 1;
    return;
  }
  stag.valid = false;
  JudgeOrder(event, QueuePairOf(event.component));
}

void NicChecker::JudgeBinding(const Event& event, const Stag& window) {
  const std::optional<uint64_t> pd = QueuePairOf(event.component).pd;
  const uint64_t access = event.Number("access");
  const Stag* const region = NicOf(event.component).Find(event.Number("region"));
  if (!window.window || window.pd != pd) {
    Object(event, "window.bound", "not a window of the PD");
  } else if (region == nullptr || region->window || region->pd != pd) {
    Object(event, "window.bound", "not a region of the PD");
  } else if ((region->access & kWindowBind) == 0 ||
             ((access & (kRemoteWrite | kRemoteAtomic)) != 0 && (region->access & kLocalWrite) == 0)) {
    Object(event, "window.bound", fmt::format("the region gives the rights {:#x}", region->access));
  } else if (!IsWithin(event.Number("offset"), event.Number("bytes"), region->bytes)) {
    Object(event, "window.bound", fmt::format("the region has {} bytes", region->bytes));
  }
}

void NicChecker::JudgeAllocated(const Event& event) {
  constexpr uint64_t kQuarantine = 65536;
  const uint64_t index = event.Number("index");
  Nic& nic = NicOf(event.component);
  Stag& stag = nic.stags[index];
  stag = {};
  stag.window = event.name == "window.allocated";
  stag.pd = event.Number("pd");
  if (!stag.window) {
    stag.valid = true;
    stag.key = event.Number("key");
    stag.bytes = event.Number("bytes");
    stag.access = event.Number("access");
  }
  const auto before = nic.freed_as.find(index);
  if (before == nic.freed_as.end()) return;
  if (nic.freed - before->second <= kQuarantine) {
    Object(event, "stag.quarantine", fmt::format("STag index {} is used again too early", index));
  }
  nic.freed_as.erase(before);
}

void NicChecker::JudgeFreed(const Event& event) {
  for (const auto& [name, qp] : queue_pairs_) {
    if (qp.kept == 0 || NicNameOf(name) != event.component) continue;
    Object(event, "placement.order",
           fmt::format("memory is deregistered, and {} Writes of {} are not in place", qp.kept, name));
  }
  const uint64_t index = event.Number("index");
  Nic& nic = NicOf(event.component);
  nic.stags.erase(index);
  nic.freed_as[index] = nic.freed++;
}

}  // namespace stagecoach::scenario
