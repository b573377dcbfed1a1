// What a strange or dying process at the other end can do: a peer that is killed, and bytes that are no MPA thrown at a
// listener.
//
// Not in simulation. Raw bytes are thrown at iWARP devices only: others have no TCP port. The peer is this program
// started again with the server's port as its argument, or a rival that wants that port.

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "verbs_shim/tests/harness.h"
#include "verbs_shim/tests/peer_process.h"

namespace stagecoach::verbs {
namespace {

// --- The peer ---

// Connects, sends one message, then waits to be killed. Failures end it with a status.
int RunPeer(uint16_t port) {
  sockaddr_storage storage = TheSurroundings().ServerAddress();
  reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(port);
  auto channel = CreateEventChannel().value();
  auto id = CreateCmId(channel.get()).value();
  const auto expect = [&](rdma_cm_event_type type) {
    auto event = GetCmEvent(channel.get());
    return event && (*event)->event == type;
  };
  if (rdma_resolve_addr(id.get(), nullptr, reinterpret_cast<sockaddr*>(&storage), 2000) != 0) return 10;
  if (!expect(RDMA_CM_EVENT_ADDR_RESOLVED)) return 11;
  if (rdma_resolve_route(id.get(), 2000) != 0 || !expect(RDMA_CM_EVENT_ROUTE_RESOLVED)) return 12;
  auto pd = AllocatePd(id->verbs).value();
  auto cq = CreateCq(id->verbs, 8).value();
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = cq.get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
  if (!CreateCmQp(id.get(), pd.get(), &attributes)) return 13;
  rdma_conn_param parameters{};
  if (rdma_connect(id.get(), &parameters) != 0 || !expect(RDMA_CM_EVENT_ESTABLISHED)) return 14;
  Buffer buffer(pd.get(), 16);
  if (Post(id->qp, {.sges = {buffer.Sge()}}) != 0) return 15;
  if (NextCompletion(cq.get()).status != IBV_WC_SUCCESS) return 16;
  pause();
  return 17;
}

// Wants the port for itself. Ends with the errno that says why it cannot have it, or 0.
int RunRival(uint16_t port) {
  sockaddr_storage storage = TheSurroundings().ServerAddress();
  reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(port);
  auto channel = CreateEventChannel().value();
  auto id = CreateCmId(channel.get()).value();
  if (rdma_bind_addr(id.get(), reinterpret_cast<sockaddr*>(&storage)) != 0) return errno;
  return rdma_listen(id.get(), 1) != 0 ? errno : 0;
}

// A plain TCP connection to the listener, for saying the wrong things.
class RawPeer {
 public:
  explicit RawPeer(const sockaddr_storage& address) : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    EXPECT_EQ(connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(sockaddr_in)), 0)
        << std::strerror(errno);
  }
  ~RawPeer() { close(socket_); }
  void Send(std::string_view bytes) {
    EXPECT_EQ(send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  // True once the other end has closed or reset the connection, whatever it said before.
  bool Closed() {
    return TheSurroundings().Until([this] {
      char byte;
      const ssize_t n = recv(socket_, &byte, 1, MSG_DONTWAIT);
      return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
    });
  }

 private:
  const int socket_;
};

class PeerProcessTest : public VerbsTest {
 protected:
  void SetUp() override {
    VerbsTest::SetUp();
    if (IsSkipped()) return;
    pair = std::make_unique<Pair>();
    pair->Listen();
  }
  void TearDown() override {
    pair.reset();
    VerbsTest::TearDown();
  }
  // True, and the test is skipped, where a listener has no TCP port to throw bytes at.
  bool SkippedWithoutTcp() {
    auto device = OpenDevice();
    if (!device || (*device)->device->transport_type == IBV_TRANSPORT_IWARP) return false;
    [] { GTEST_SKIP() << "skipped: not an iWARP device"; }();
    return true;
  }
  uint16_t port() const { return ntohs(rdma_get_src_port(pair->listener.get())); }

  // Takes a request, accepts, and has one Receive posted.
  void AcceptOne(size_t receive_size) {
    CmEvent request = pair->server.NextEvent();
    ASSERT_TRUE(request);
    ASSERT_EQ(request->event, RDMA_CM_EVENT_CONNECT_REQUEST);
    pair->server.id = CmId(request->id);
    request = {};
    pair->server.Prepare(pair->server_options);
    inbox = std::make_unique<Buffer>(pair->server.pd.get(), receive_size);
    ASSERT_EQ(PostReceive(pair->server.qp(), 1, {inbox->Sge()}), 0);
    ASSERT_EQ(PostReceive(pair->server.qp(), 2, {inbox->Sge()}), 0);
    ASSERT_EQ(rdma_accept(pair->server.id.get(), &pair->server_options.connection), 0);
  }

  std::unique_ptr<Buffer> inbox;
  std::unique_ptr<Pair> pair;
};

TEST_F(PeerProcessTest, AKilledPeerIsADisconnection) {
  PeerProcess peer({"--peer", std::to_string(port())});
  AcceptOne(64);
  pair->server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  peer.Kill();
  if (!IsIwarp(pair->server.id.get())) {
    pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
    ASSERT_EQ(rdma_disconnect(pair->server.id.get()), 0);
  }
  ExpectCompletion(pair->server.receive_cq.get(), 2, IBV_WC_WR_FLUSH_ERR);
  if (IsIwarp(pair->server.id.get())) pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
  inbox.reset();
}

TEST_F(PeerProcessTest, APortOfAnotherProcessIsInUseUntilItIsFree) {
  EXPECT_EQ(PeerProcess({"--rival", std::to_string(port())}).Wait(), EADDRINUSE);
  const uint16_t freed = port();
  pair->listener = {};
  EXPECT_EQ(PeerProcess({"--rival", std::to_string(freed)}).Wait(), 0);
}

TEST_F(PeerProcessTest, GarbageEndsItsOwnStreamAndNothingElse) {
  if (SkippedWithoutTcp()) return;
  const std::vector<std::string> garbage = {
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      std::string(1, '\0'),
      std::string(1000, '\xff'),
      // The right key, then a revision nobody knows.
      std::string("MPA ID Req Frame") + std::string("\x00\x07\x00\x00", 4),
      // A private data length beyond what a frame may carry.
      std::string("MPA ID Req Frame") + std::string("\x00\x01\xff\xff", 4),
      // Enhanced, but too short for its own IRD/ORD word.
      std::string("MPA ID Req Frame") + std::string("\x10\x02\x00\x02\x00\x00", 6),
  };
  for (size_t i = 0; i < garbage.size(); ++i) {
    RawPeer peer(pair->ListenAddress());
    peer.Send(garbage[i]);
    EXPECT_TRUE(peer.Closed()) << "garbage " << i;
  }
  EXPECT_FALSE(pair->server.EventWaiting());
  // The listener is as well as ever.
  PeerProcess peer({"--peer", std::to_string(port())});
  AcceptOne(64);
  pair->server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  inbox.reset();
}

TEST_F(PeerProcessTest, ARequestCutOffInTheMiddleIsForgotten) {
  if (SkippedWithoutTcp()) return;
  { RawPeer(pair->ListenAddress()).Send("MPA ID Req"); }
  { RawPeer silent(pair->ListenAddress()); }
  PeerProcess peer({"--peer", std::to_string(port())});
  AcceptOne(64);
  pair->server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED);
  ExpectCompletion(pair->server.receive_cq.get(), 1);
  inbox.reset();
}

TEST_F(PeerProcessTest, ARequesterThatGoesAwayBeforeTheAnswerIsAnError) {
  if (SkippedWithoutTcp()) return;
  {
    RawPeer peer(pair->ListenAddress());
    peer.Send(std::string("MPA ID Req Frame") + std::string("\x10\x02\x00\x04\x80\x08\xc0\x08", 8));
    ASSERT_TRUE(BecomesReadable(pair->server.channel->fd));
  }
  AcceptOne(64);
  // Its stream has ended before the ready-to-receive message it promised.
  EXPECT_NE(pair->server.ExpectEvent(RDMA_CM_EVENT_CONNECT_ERROR), 0);
  inbox.reset();
}

TEST_F(PeerProcessTest, GarbageAfterTheHandshakeEndsTheConnection) {
  if (SkippedWithoutTcp()) return;
  RawPeer peer(pair->ListenAddress());
  // Revision 1: no word about depths, and no RTR.
  peer.Send(std::string("MPA ID Req Frame") + std::string("\x00\x01\x00\x00", 4));
  AcceptOne(64);
  pair->server.ExpectEvent(RDMA_CM_EVENT_ESTABLISHED);
  peer.Send(std::string(64, '\xee'));
  EXPECT_TRUE(peer.Closed());
  ExpectCompletion(pair->server.receive_cq.get(), 1, IBV_WC_WR_FLUSH_ERR);
  pair->server.ExpectEvent(RDMA_CM_EVENT_DISCONNECTED);
  inbox.reset();
}

TEST_F(PeerProcessTest, AServerThatIsNoRdmaServerIsAConnectError) {
  if (SkippedWithoutTcp()) return;
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_storage address = world().ServerAddress();
  socklen_t length = sizeof(sockaddr_in);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  pair->ResolveTo(address);
  pair->client.Prepare(pair->client_options);
  ASSERT_EQ(rdma_connect(pair->client.id.get(), &pair->client_options.connection), 0);
  const int accepted = accept(listener, nullptr, nullptr);
  ASSERT_GE(accepted, 0);
  const std::string banner = "SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n";
  ASSERT_EQ(send(accepted, banner.data(), banner.size(), MSG_NOSIGNAL), static_cast<ssize_t>(banner.size()));
  EXPECT_EQ(pair->client.ExpectEvent(RDMA_CM_EVENT_CONNECT_ERROR), -EPROTO);
  close(accepted);
  close(listener);
}

}  // namespace
}  // namespace stagecoach::verbs

int main(int argc, char** argv) {
  if (argc == 3 && argv[1][0] == '-') {
    const auto port = static_cast<uint16_t>(std::atoi(argv[2]));
    if (std::strcmp(argv[1], "--peer") == 0) return stagecoach::verbs::RunPeer(port);
    if (std::strcmp(argv[1], "--rival") == 0) return stagecoach::verbs::RunRival(port);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
