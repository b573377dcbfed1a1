// A ping-pong over RDMA Read and Write, on the stock verbs and rdma_cm API alone; either end also talks to Linux rping.
//
// The protocol is rping's. All it says is a 16-byte message, big-endian, carried by Send:
//
//     u64 buffer address | u32 rkey | u32 length
//
// and one round goes so:
//
//     client                                   server
//       |---- Send: "my source is here" -------->|
//       |<=== RDMA Read of the source ===========|
//       |---------------------------------------- Send (content ignored): "got it" -> client
//       |---- Send: "my sink is here" ---------->|
//       |<=== RDMA Write of the same bytes ======|
//       |<--- Send (content ignored): "done" ----|
//
// The client moves no data itself: its memory is read and written by the server. Both ends wait for completions on one
// completion channel, and look at rdma_cm's channel as well: an iWARP stream that ends flushes what waits on it, while
// an InfiniBand queue pair does not know that its peer has gone. Single-threaded; exit status 0 only if every round
// went well.

#include <endian.h>
#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/cursor.h"
#include "verbs_shim/cxx/handles.h"

namespace stagecoach {
namespace {

using verbs::VerbsError;

constexpr size_t kMessageSize = 16;
// The largest ping a server reads; rping has the same limit. What a peer announces is checked against it.
constexpr uint32_t kMaxPing = 64 * 1024;
constexpr int kResolveTimeoutMs = 5000;

struct Options {
  std::string server;
  std::string client;
  int count = 10;
  uint32_t size = 64;
  int connections = 1;
  bool verify = false;
};

struct BufferAdvertisement {
  uint64_t address = 0;
  uint32_t rkey = 0;
  uint32_t length = 0;
};

// Every failure ends as one sentence on standard error.
using Status = Result<void, std::string>;

std::string Words(const char* call, int error) {
  return fmt::format("{}: {}", call, std::strerror(error));
}

// Which request a completion belongs to.
enum WorkId : uint64_t { kReceive, kSend, kRead, kWrite };

const char* WorkName(uint64_t id) {
  switch (id) {
    case kReceive:
      return "Receive";
    case kSend:
      return "Send";
    case kRead:
      return "RDMA Read";
    default:
      return "RDMA Write";
  }
}

// One connection: its queue pair, its message buffers, and the data buffer the peer (client) or we (server) move.
class Connection {
 public:
  // `data_access`: what others may do with the data buffer.
  Status SetUp(rdma_cm_id* id, uint32_t data_size, int data_access) {
    id_ = id;
    data_.resize(data_size);
    auto pd = verbs::AllocatePd(id->verbs);
    if (!pd) return Err(pd.error().ToString());
    pd_ = std::move(*pd);
    auto channel = verbs::CreateCompletionChannel(id->verbs);
    if (!channel) return Err(channel.error().ToString());
    channel_ = std::move(*channel);
    auto cq = verbs::CreateCq(id->verbs, 16, nullptr, channel_.get());
    if (!cq) return Err(cq.error().ToString());
    cq_ = std::move(*cq);
    auto messages = verbs::RegisterMemory(pd_.get(), messages_, sizeof(messages_), IBV_ACCESS_LOCAL_WRITE);
    if (!messages) return Err(messages.error().ToString());
    messages_mr_ = std::move(*messages);
    // iWARP carries a Read Response as a tagged message, so the sink of a Read must be open to remote writes (RFC 5040
    // section 5.1).
    auto data = verbs::RegisterMemory(pd_.get(), data_.data(), data_.size(), IBV_ACCESS_LOCAL_WRITE | data_access);
    if (!data) return Err(data.error().ToString());
    data_mr_ = std::move(*data);

    ibv_qp_init_attr attributes{};
    attributes.send_cq = cq_.get();
    attributes.recv_cq = cq_.get();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 8, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    if (auto qp = verbs::CreateCmQp(id, pd_.get(), &attributes); !qp) return Err(qp.error().ToString());
    has_qp_ = true;
    if (const int error = ibv_req_notify_cq(cq_.get(), 0); error != 0) return Err(Words("ibv_req_notify_cq", error));
    // A Receive must be waiting before the peer may send: iWARP has no "receiver not ready".
    return PostReceive();
  }

  ~Connection() {
    if (has_qp_) rdma_destroy_qp(id_);
    if (unacknowledged_ > 0) ibv_ack_cq_events(cq_.get(), unacknowledged_);
  }

  MutableBytes data() { return data_; }

  // What of our memory the peer may use, for SendAdvertisement.
  BufferAdvertisement Advertise(MutableBytes part) const {
    return {reinterpret_cast<uint64_t>(part.data()), data_mr_->rkey, static_cast<uint32_t>(part.size())};
  }

  Status SendAdvertisement(const BufferAdvertisement& advertisement) {
    ByteWriter writer(MutableBytes(messages_[1], kMessageSize));
    writer.U64(advertisement.address);
    writer.U32(advertisement.rkey);
    writer.U32(advertisement.length);
    ibv_sge sge{reinterpret_cast<uint64_t>(messages_[1]), kMessageSize, messages_mr_->lkey};
    ibv_send_wr request{
        .wr_id = kSend, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    if (auto posted = Post(&request); !posted) return posted;
    return WaitFor(kSend);
  }

  // Waits for the peer's next message.
  Result<BufferAdvertisement, std::string> ReceiveAdvertisement() {
    if (auto received = WaitFor(kReceive); !received) return Err(received.error());
    if (received_bytes_ != kMessageSize) {
      return Err(fmt::format("the peer sent a message of {} bytes; this protocol knows only {}", received_bytes_,
                             kMessageSize));
    }
    ByteReader reader(ConstBytes(messages_[0], kMessageSize));
    BufferAdvertisement advertisement;
    advertisement.address = reader.U64();
    advertisement.rkey = reader.U32();
    advertisement.length = reader.U32();
    if (auto posted = PostReceive(); !posted) return Err(posted.error());
    return advertisement;
  }

  // Moves data().first(from.length) from or to the peer's memory.
  Status Read(const BufferAdvertisement& from) { return Move(IBV_WR_RDMA_READ, kRead, from); }
  Status Write(const BufferAdvertisement& to) { return Move(IBV_WR_RDMA_WRITE, kWrite, to); }

  // True when the last failure was the peer's orderly good-bye rather than a fault.
  bool peer_left() const { return peer_left_; }

 private:
  Status PostReceive() {
    ibv_sge sge{reinterpret_cast<uint64_t>(messages_[0]), kMessageSize, messages_mr_->lkey};
    ibv_recv_wr request{.wr_id = kReceive, .next = nullptr, .sg_list = &sge, .num_sge = 1};
    ibv_recv_wr* bad = nullptr;
    if (const int error = ibv_post_recv(id_->qp, &request, &bad); error != 0) return Err(Words("ibv_post_recv", error));
    return {};
  }

  Status Post(ibv_send_wr* request) {
    ibv_send_wr* bad = nullptr;
    if (const int error = ibv_post_send(id_->qp, request, &bad); error != 0) return Err(Words("ibv_post_send", error));
    return {};
  }

  Status Move(ibv_wr_opcode opcode, WorkId work, const BufferAdvertisement& remote) {
    ibv_sge sge{reinterpret_cast<uint64_t>(data_.data()), remote.length, data_mr_->lkey};
    ibv_send_wr request{
        .wr_id = work, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED};
    request.wr.rdma.remote_addr = remote.address;
    request.wr.rdma.rkey = remote.rkey;
    if (auto posted = Post(&request); !posted) return posted;
    return WaitFor(work);
  }

  // The peer's answer may be completed before our own Send is reported, so completions are counted by kind.
  Status WaitFor(WorkId work) {
    bool ended = false;
    while (done_[work] == 0) {
      ibv_wc completion;
      const int polled = ibv_poll_cq(cq_.get(), 1, &completion);
      if (polled < 0) return Err(std::string("ibv_poll_cq failed"));
      if (polled > 0) {
        if (completion.status != IBV_WC_SUCCESS) {
          peer_left_ = completion.status == IBV_WC_WR_FLUSH_ERR;
          return Err(fmt::format("{}: {}", WorkName(completion.wr_id), ibv_wc_status_str(completion.status)));
        }
        ++done_[completion.wr_id];
        if (completion.wr_id == kReceive) received_bytes_ = completion.byte_len;
        continue;
      }
      // Nothing there: sleep until the CQ says so, arm it again, and look once more, since a completion may slip in
      // between. What rdma_cm has to say of an established connection is that it has ended.
      pollfd either[] = {{channel_->fd, POLLIN, 0}, {id_->channel->fd, POLLIN, 0}};
      if (::poll(either, std::size(either), -1) < 0) {
        if (errno == EINTR) continue;
        return Err(Words("poll", errno));
      }
      if (either[0].revents == 0) {
        // What has completed before may have come between our look and the event.
        if (std::exchange(ended, true)) {
          peer_left_ = true;
          return Err(std::string("the peer has ended the connection"));
        }
        continue;
      }
      ibv_cq* cq = nullptr;
      void* context = nullptr;
      if (ibv_get_cq_event(channel_.get(), &cq, &context) != 0) return Err(Words("ibv_get_cq_event", errno));
      ++unacknowledged_;
      if (const int error = ibv_req_notify_cq(cq, 0); error != 0) return Err(Words("ibv_req_notify_cq", error));
    }
    --done_[work];
    return {};
  }

  // Destroyed in reverse: memory and CQ before the channel and the PD they depend on.
  rdma_cm_id* id_ = nullptr;
  std::vector<std::byte> data_;
  std::byte messages_[2][kMessageSize] = {};  // received, sent
  verbs::ProtectionDomain pd_;
  verbs::CompletionChannel channel_;
  verbs::CompletionQueue cq_;
  verbs::MemoryRegion messages_mr_;
  verbs::MemoryRegion data_mr_;
  bool has_qp_ = false;
  unsigned unacknowledged_ = 0;
  unsigned done_[4] = {};
  uint32_t received_bytes_ = 0;
  bool peer_left_ = false;
};

rdma_conn_param ConnectionParameters() {
  rdma_conn_param parameters{};
  parameters.responder_resources = 1;  // Reads the peer may have outstanding towards us
  parameters.initiator_depth = 1;      // and we towards the peer
  parameters.retry_count = 7;
  parameters.rnr_retry_count = 7;
  return parameters;
}

// Fetches the next event, which must be `expected`.
Result<verbs::CmEvent, std::string> Expect(rdma_event_channel* channel, rdma_cm_event_type expected) {
  auto event = verbs::GetCmEvent(channel);
  if (!event) return Err(event.error().ToString());
  if ((*event)->event != expected) {
    const int status = (*event)->status;
    // iWARP says why by an errno, InfiniBand by its own list of reasons.
    return Err(fmt::format("waited for {}, but got {}{}", rdma_event_str(expected), rdma_event_str((*event)->event),
                           status < 0   ? fmt::format(" ({})", std::strerror(-status))
                           : status > 0 ? fmt::format(" (reason {})", status)
                                        : std::string()));
  }
  return std::move(*event);
}

// "10.0.0.1:7174" or "[::1]:7174".
Result<sockaddr_storage, std::string> ParseEndpoint(const std::string& text, bool passive) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return Err(fmt::format("'{}' is not ADDRESS:PORT", text));
  std::string host = text.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = passive ? AI_PASSIVE : 0;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), text.c_str() + colon + 1, &hints, &found);
      error != 0) {
    return Err(fmt::format("'{}': {}", text, gai_strerror(error)));
  }
  sockaddr_storage address{};
  std::memcpy(&address, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return address;
}

Status ServeRounds(Connection* connection, int* rounds) {
  for (;;) {
    auto source = connection->ReceiveAdvertisement();
    if (!source) {
      // Between rounds is where a client says good-bye.
      if (connection->peer_left()) return {};
      return Err(source.error());
    }
    if (source->length > kMaxPing)
      return Err(fmt::format("the client offers {} bytes, more than {}", source->length, kMaxPing));
    if (auto read = connection->Read(*source); !read) return read;
    if (auto told = connection->SendAdvertisement({}); !told) return told;

    auto sink = connection->ReceiveAdvertisement();
    if (!sink) return Err(sink.error());
    if (sink->length > kMaxPing)
      return Err(fmt::format("the client's sink has {} bytes, more than {}", sink->length, kMaxPing));
    if (auto written = connection->Write(*sink); !written) return written;
    // A client that has this may leave at once, and then nothing acknowledges it: on InfiniBand its good-bye and the
    // acknowledgement travel apart.
    if (auto told = connection->SendAdvertisement({}); !told && !connection->peer_left()) return told;
    ++*rounds;
  }
}

Status ServeOne(rdma_event_channel* channel, rdma_cm_id* id) {
  Connection connection;
  if (auto ready = connection.SetUp(id, kMaxPing, IBV_ACCESS_REMOTE_WRITE); !ready) return ready;
  rdma_conn_param parameters = ConnectionParameters();
  if (rdma_accept(id, &parameters) != 0) return Err(Words("rdma_accept", errno));
  if (auto established = Expect(channel, RDMA_CM_EVENT_ESTABLISHED); !established) return Err(established.error());
  int rounds = 0;
  Status served = ServeRounds(&connection, &rounds);
  if (!served) rdma_disconnect(id);
  if (auto ended = Expect(channel, RDMA_CM_EVENT_DISCONNECTED); !ended) return Err(ended.error());
  if (served) fmt::print("served {} rounds\n", rounds);
  return served;
}

Status RunServer(const Options& options) {
  auto address = ParseEndpoint(options.server, true);
  if (!address) return Err(address.error());
  auto channel = verbs::CreateEventChannel();
  if (!channel) return Err(channel.error().ToString());
  auto listener = verbs::CreateCmId(channel->get());
  if (!listener) return Err(listener.error().ToString());
  if (rdma_bind_addr(listener->get(), reinterpret_cast<sockaddr*>(&*address)) != 0) {
    return Err(fmt::format("{}: {}", options.server, Words("rdma_bind_addr", errno)));
  }
  if (rdma_listen(listener->get(), 4) != 0)
    return Err(fmt::format("{}: {}", options.server, Words("rdma_listen", errno)));
  fmt::print("listening on port {}\n", be16toh(rdma_get_src_port(listener->get())));
  std::fflush(stdout);

  for (int served = 0; options.connections == 0 || served < options.connections; ++served) {
    // Of this connection alone: other clients may call meanwhile.
    auto events = verbs::CreateEventChannel();
    if (!events) return Err(events.error().ToString());
    rdma_cm_id* id = nullptr;
    {
      auto request = Expect(channel->get(), RDMA_CM_EVENT_CONNECT_REQUEST);
      if (!request) return Err(request.error());
      id = (*request)->id;
    }
    verbs::CmId owner(id);
    if (rdma_migrate_id(id, events->get()) != 0) return Err(Words("rdma_migrate_id", errno));
    if (auto outcome = ServeOne(events->get(), id); !outcome) return outcome;
    std::fflush(stdout);
  }
  return {};
}

// Printable, and different in each round, so that a stale buffer cannot pass for a fresh one. A zero byte ends it:
// rping's server takes the ping for a string and writes back as far as that.
void FillPing(MutableBytes bytes, int round) {
  const std::string head = fmt::format("rdma-ping-{}: ", round);
  size_t at = CopyBytes(bytes, AsBytes(head));
  for (int letter = round; at < bytes.size(); ++at, ++letter) bytes[at] = static_cast<std::byte>('A' + letter % 58);
  if (!bytes.empty()) bytes.back() = std::byte{0};
}

Status RunRounds(Connection* connection, const Options& options) {
  const MutableBytes source = connection->data().first(options.size);
  const MutableBytes sink = connection->data().subspan(options.size);
  for (int round = 0; round < options.count; ++round) {
    FillPing(source, round);
    if (auto sent = connection->SendAdvertisement(connection->Advertise(source)); !sent) return sent;
    if (auto read = connection->ReceiveAdvertisement(); !read) return Err(read.error());
    if (auto sent = connection->SendAdvertisement(connection->Advertise(sink)); !sent) return sent;
    if (auto written = connection->ReceiveAdvertisement(); !written) return Err(written.error());
    if (options.verify && AsText(source) != AsText(sink))
      return Err(fmt::format("round {}: the bytes that came back differ", round));
  }
  return {};
}

Status RunClient(const Options& options) {
  auto address = ParseEndpoint(options.client, false);
  if (!address) return Err(address.error());
  auto channel = verbs::CreateEventChannel();
  if (!channel) return Err(channel.error().ToString());
  auto id = verbs::CreateCmId(channel->get());
  if (!id) return Err(id.error().ToString());
  if (rdma_resolve_addr(id->get(), nullptr, reinterpret_cast<sockaddr*>(&*address), kResolveTimeoutMs) != 0) {
    return Err(Words("rdma_resolve_addr", errno));
  }
  if (auto resolved = Expect(channel->get(), RDMA_CM_EVENT_ADDR_RESOLVED); !resolved) return Err(resolved.error());
  if (rdma_resolve_route(id->get(), kResolveTimeoutMs) != 0) return Err(Words("rdma_resolve_route", errno));
  if (auto resolved = Expect(channel->get(), RDMA_CM_EVENT_ROUTE_RESOLVED); !resolved) return Err(resolved.error());

  Connection connection;
  if (auto ready = connection.SetUp(id->get(), 2 * options.size, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
      !ready)
    return ready;
  rdma_conn_param parameters = ConnectionParameters();
  if (rdma_connect(id->get(), &parameters) != 0) return Err(Words("rdma_connect", errno));
  if (auto established = Expect(channel->get(), RDMA_CM_EVENT_ESTABLISHED); !established)
    return Err(established.error());

  Status outcome = RunRounds(&connection, options);
  // After a fault the connection may have ended already; then there is nothing to say good-bye to.
  if (rdma_disconnect(id->get()) == 0) {
    if (auto ended = Expect(channel->get(), RDMA_CM_EVENT_DISCONNECTED); !ended && outcome) return Err(ended.error());
  }
  if (outcome) fmt::print("{} rounds of {} bytes{}\n", options.count, options.size, options.verify ? ", verified" : "");
  return outcome;
}

int Main(int argc, char** argv) {
  CLI::App app("Ping-pong over RDMA Read and Write; speaks the wire protocol of rping.");
  Options options;
  auto* server = app.add_option("--server", options.server, "serve on ADDRESS:PORT (port 0: any free one)");
  auto* client = app.add_option("--client", options.client, "connect to ADDRESS:PORT");
  server->excludes(client);
  app.add_option("--count", options.count, "client: rounds")->capture_default_str()->check(CLI::Range(1, 1000000000));
  app.add_option("--size", options.size, "client: bytes per ping")
      ->capture_default_str()
      ->check(CLI::Range(1u, kMaxPing));
  app.add_flag("--verify", options.verify, "client: compare what comes back");
  app.add_option("--connections", options.connections, "server: connections to serve, one after another; 0: no end")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  if (options.server.empty() == options.client.empty()) {
    fmt::print(stderr, "verbs_pingpong: give --server ADDRESS:PORT or --client ADDRESS:PORT\n");
    return 2;
  }
  const Status status = options.server.empty() ? RunClient(options) : RunServer(options);
  if (status) return 0;
  fmt::print(stderr, "verbs_pingpong: {}\n", status.error());
  return 1;
}

}  // namespace
}  // namespace stagecoach

int main(int argc, char** argv) {
  return stagecoach::Main(argc, argv);
}
