// For tests: NICs with one QP each, joined by an MPA connection as it stands after its handshake.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "emu/backend/tcp/tcp_fabric.h"
#include "emu/fabric/fabric.h"
#include "emu/inject/plan.h"
#include "emu/llp/llp.h"
#include "emu/nic/iwarp/iwarp_connection.h"
#include "emu/nic/nic.h"
#include "emu/nic/test_records.h"
#include "emu/sim/sim_world.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {

inline constexpr uint32_t kFullAccess = kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead | kAccessWindowBind;

// Registered memory of a test. The host owns the bytes: they must outlive its connections, which place into them
// whenever the peer pleases.
struct TestBuffer {
  std::vector<std::byte>& bytes;
  Nic::Region region;

  uint64_t address() const { return reinterpret_cast<uintptr_t>(bytes.data()); }
  ScatterGather Sge(size_t offset, size_t length) const {
    return {address() + offset, static_cast<uint32_t>(length), region.stag};
  }
  ScatterGather All() const { return Sge(0, bytes.size()); }
};

class RecordingObserver final : public ConnectionObserver {
 public:
  void OnFirstRecord() override {
    std::lock_guard lock(mutex_);
    ++first_records_;
  }
  void OnClosed(const CloseNotice& notice) override {
    std::lock_guard lock(mutex_);
    closed_.push_back(notice);
  }
  int first_records() const {
    std::lock_guard lock(mutex_);
    return first_records_;
  }
  std::vector<CloseNotice> closed() const {
    std::lock_guard lock(mutex_);
    return closed_;
  }

 private:
  mutable std::mutex mutex_;
  int first_records_ = 0;
  std::vector<CloseNotice> closed_;
};

// A device with one of everything.
class TestHost {
 public:
  TestHost(TestRecords fabric, const std::string& name, DeviceProfile profile = IwarpProfile(),
           TraceSink* trace = nullptr, uint32_t cq_capacity = 1024, QpCapabilities capabilities = {64, 64, 4, 4, 128},
           std::shared_ptr<InjectionPlan> injections = nullptr)
      : records(std::move(fabric)) {
    NicOptions options;
    options.name = name;
    options.stags = SeededStagSource(Prng(7).Fork(name));
    options.trace = trace;
    options.injections = std::move(injections);
    options.complain = [this](const std::string& words) { complaints.push_back(words); };
    nic = std::make_unique<Nic>(records.fabric(), std::move(profile), std::move(options));
    context = *nic->OpenContext();
    pd = *nic->AllocatePd(*context);
    channel = *nic->CreateChannel(*context);
    cq = *nic->CreateCq(*context, cq_capacity, channel, nullptr);
    QpCreate create;
    create.pd = pd;
    create.send_cq = create.receive_cq = cq;
    create.capabilities = capabilities;
    qp = *nic->CreateQp(*context, create);
  }

  void ToInit() {
    QpAttributes attributes;
    attributes.state = QpState::kInit;
    ASSERT_EQ(qp->Modify(attributes, qp_attr::kState | qp_attr::kAccessFlags | qp_attr::kPkeyIndex | qp_attr::kPort),
              0);
  }
  int ToState(QpState state) {
    QpAttributes attributes;
    attributes.state = state;
    return qp->Modify(attributes, qp_attr::kState);
  }

  TestBuffer Register(size_t size, uint32_t access = kFullAccess, uint8_t fill = 0) {
    TestBuffer buffer{memory.emplace_back(size, static_cast<std::byte>(fill)), {}};
    RegionRequest request;
    request.pd = pd;
    request.address = buffer.bytes.data();
    request.length = size;
    request.iova = buffer.address();
    request.access = access;
    const auto region = nic->RegisterRegion(*context, request);
    EXPECT_TRUE(region.has_value());
    buffer.region = *region;
    return buffer;
  }

  int Send(uint64_t wr_id, std::vector<ScatterGather> sges, PostOpcode opcode = PostOpcode::kSend, uint32_t stag = 0,
           uint64_t offset = 0) {
    SendRequest request;
    request.wr_id = wr_id;
    request.opcode = opcode;
    request.signaled = true;
    request.sges = sges;
    request.remote_stag = stag;
    request.remote_offset = offset;
    return qp->PostSend(request);
  }
  int Receive(uint64_t wr_id, std::vector<ScatterGather> sges) { return qp->PostReceive({wr_id, sges}); }

  // Appends what has completed to `completions`; true if there are at least `count` now.
  bool Completed(size_t count) {
    WorkCompletion batch[16];
    while (const size_t n = cq->Poll(batch)) completions.insert(completions.end(), batch, batch + n);
    return completions.size() >= count;
  }

  // An observer for connections of this host, which outlives them.
  std::shared_ptr<ConnectionObserver> Observer() { return {std::shared_ptr<void>(), &observer}; }

  std::deque<std::vector<std::byte>> memory;  // before the NIC, as the observer: the NIC uses both to its end
  RecordingObserver observer;
  std::vector<std::string> complaints;  // for tests with one thread
  const TestRecords records;
  std::unique_ptr<Nic> nic;
  NicContext* context = nullptr;
  uint32_t pd = 0;
  CompletionChannel* channel = nullptr;
  CompletionQueue* cq = nullptr;
  QueuePair* qp = nullptr;
  std::vector<WorkCompletion> completions;
};

// Polls both, whatever the first has.
inline bool BothCompleted(TestHost& one, TestHost& other, size_t count) {
  const bool done = one.Completed(count);
  return other.Completed(count) && done;
}

struct JoinOptions {
  bool crc = false;
  uint32_t ird = 16;
  uint32_t ord = 16;
  bool extensions = false;
};

inline ConnectionSetup SetupOf(Fabric& fabric, std::unique_ptr<Stream> stream, bool initiator,
                               const JoinOptions& options, std::shared_ptr<ConnectionObserver> observer) {
  ConnectionSetup setup;
  setup.llp = fabric.RecordsOver(std::move(stream), {.crc = options.crc});
  setup.initiator = initiator;
  setup.ird = options.ird;
  setup.ord = options.ord;
  setup.extensions = options.extensions;
  setup.rtr = ConnectionSetup::Rtr::kWrite;
  setup.observer = std::move(observer);
  return setup;
}

inline void Attach(TestHost& host, std::unique_ptr<Stream> stream, bool initiator, const JoinOptions& options = {}) {
  host.ToInit();
  ASSERT_EQ(host.nic->AttachConnection(host.qp->qp_number(), SetupOf(host.nic->fabric(), std::move(stream), initiator,
                                                                     options, host.Observer())),
            0);
}

// Takes a UD QP from RESET to RTS.
inline void DatagramsToRts(QueuePair& qp, uint32_t qkey) {
  QpAttributes attributes;
  attributes.qkey = qkey;
  attributes.state = QpState::kInit;
  EXPECT_EQ(qp.Modify(attributes, qp_attr::kState | qp_attr::kPkeyIndex | qp_attr::kPort | qp_attr::kQkey), 0);
  attributes.state = QpState::kRtr;
  EXPECT_EQ(qp.Modify(attributes, qp_attr::kState), 0);
  attributes.state = QpState::kRts;
  EXPECT_EQ(qp.Modify(attributes, qp_attr::kState | qp_attr::kSqPsn), 0);
}

// Two hosts of one simulated world.
struct SimPair {
  explicit SimPair(const LinkOptions& link = {}, uint64_t seed = 1, TraceSink* trace = nullptr)
      : world([&] {
          SimWorld::Options options;
          options.seed = seed;
          options.link = link;
          options.trace = trace;
          return options;
        }()),
        fabric_a(world.AddHost("a", {*IpEndpoint::Parse("10.0.0.1", 0)})),
        fabric_b(world.AddHost("b", {*IpEndpoint::Parse("10.0.0.2", 0)})) {}

  // The two ends of a new stream: of a, which connects, and of b.
  std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>> Streams() {
    std::unique_ptr<Stream> client;
    std::unique_ptr<Stream> server;
    auto listener = *fabric_b.Listen(*IpEndpoint::Parse("10.0.0.2", 4791), 8,
                                     [&](std::unique_ptr<Stream> stream) { server = std::move(stream); });
    auto attempt =
        fabric_a.Connect({}, *IpEndpoint::Parse("10.0.0.2", 4791),
                         [&](Result<std::unique_ptr<Stream>, FabricError> result) { client = std::move(*result); });
    EXPECT_TRUE(world.RunUntil([&] { return client != nullptr && server != nullptr; }));
    return {std::move(client), std::move(server)};
  }

  void Join(TestHost& a, TestHost& b, const JoinOptions& options = {}) {
    auto [client, server] = Streams();
    Attach(b, std::move(server), /*initiator=*/false, options);
    Attach(a, std::move(client), /*initiator=*/true, options);
  }

  // A middlebox kills all that is established between the hosts, streams and records.
  void ResetConnections() {
    world.ResetConnections(fabric_a, fabric_b);
    ResetTestRecords();
  }

  SimWorld world;
  SimFabric& fabric_a;
  SimFabric& fabric_b;
};

// Says one record to whoever has the other end of `llp`, as a peer that has no NIC.
inline void SayRecord(SimWorld& world, Llp& llp, ConstBytes record) {
  FakeMemory nothing;
  const size_t head = std::min(record.size(), kMaxTxHeader);
  const TxPart rest{.bytes = record.subspan(head)};
  llp.QueueRecord(record.first(head), {&rest, 1}, 0);
  TxStatus status = TxStatus::kWouldBlock;
  EXPECT_TRUE(world.RunUntil([&] { return (status = llp.Flush(nothing).status) != TxStatus::kWouldBlock; }));
  uint64_t cookie = 0;
  while (llp.TakeSent(&cookie)) {
  }
}

// The two ends of a loopback TCP connection: of `from`, which connects, and of `to`.
inline std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>> TcpStreams(Fabric& from, Fabric& to) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_ptr<Stream> client;
  std::unique_ptr<Stream> server;
  auto listener = *to.Listen(*IpEndpoint::Parse("127.0.0.1", 0), 8, [&](std::unique_ptr<Stream> stream) {
    std::lock_guard lock(mutex);
    server = std::move(stream);
    changed.notify_all();
  });
  auto attempt = from.Connect({}, listener->local(), [&](Result<std::unique_ptr<Stream>, FabricError> result) {
    std::lock_guard lock(mutex);
    if (result) client = std::move(*result);
    changed.notify_all();
  });
  std::unique_lock lock(mutex);
  EXPECT_TRUE(changed.wait_for(lock, std::chrono::seconds(10), [&] { return client && server; }));
  lock.unlock();
  attempt.reset();
  listener.reset();
  return {std::move(client), std::move(server)};
}

// Asks `done` again and again, for at most ten seconds.
template <typename Done>
bool Eventually(Done done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace stagecoach::emu
