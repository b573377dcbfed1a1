// two_ends serve ADDRESS PORT        serves until a client asks it to stop
// two_ends call ADDRESS PORT CASE... does each CASE on a connection of its own; "cases" instead of all that: lists them
//
// What two ends of iWARP connections owe each other, done by two processes that need not use the same libraries: linked
// with the system's libibverbs and librdmacm, either can be given ours when it is loaded. For each connection either
// end writes one line,
//
//     CASE <tab> what it saw, in words
//
// and judges nothing: dropin.tsv says which words are to come from whom. A number instead of a word is one that all
// devices agree on. What cannot be done at all (no device, no memory) ends the program with status 3; a wait has a
// bound, and its end is a word like any other.
//
// The server learns the case from the request's private data, and tells in its own where its memory is.

#include <arpa/inet.h>
#include <endian.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace stagecoach {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// For anything to come, and for what comes with the end of a connection. A server waits longer for that: its caller may
// still be at work, and if nothing ends the connection it is the caller who leaves, so that what either sees does not
// depend on who is faster. Having waited in vain it still comes in time to its next client, which waits kPatience.
constexpr milliseconds kPatience{8000};
constexpr milliseconds kPatienceAtTheEnd{2000};
constexpr milliseconds kPatienceWithCallers{6000};
// For an event that may not come, by a server whose caller waits kPatience for what follows.
constexpr milliseconds kPatienceWithEvents{4000};
// An answer that takes longer waited for more than its way: between what a slow machine needs and the 250 ms after
// which our device first sends an empty Write (DeviceProfile::first_answer_nudge).
constexpr milliseconds kAtOnce{200};
constexpr size_t kLongest = size_t{1} << 20;
// Around what is written, to see that nothing else was.
constexpr size_t kMargin = 64;
constexpr size_t kRegion = kLongest + 2 * kMargin;
constexpr uint8_t kBackground = 0xee;
constexpr int kReceives = 3;
constexpr int kReads = 32;
constexpr int kWrites = 8;
constexpr uint8_t kDepth = 4;

// On both sides of where segments end: with paths of 1500 bytes and of 64 KiB, tagged and untagged, and where siw
// changes its ways (24, 80 and 4096).
constexpr size_t kSizes[] = {0,    1,     2,     3,     4,     19,    24,    25,    80,     81,      1423,
                             1424, 1425,  1428,  1429,  1447,  1448,  1449,  2848,  4095,   4096,    4097,
                             5001, 65455, 65456, 65457, 65460, 65461, 65535, 65536, 100001, kLongest};

[[noreturn]] void Die(const char* what) {
  fmt::print(stderr, "two_ends: {}: {}\n", what, std::strerror(errno));
  std::exit(3);
}

template <typename T>
T* Must(T* made, const char* what) {
  if (made == nullptr) Die(what);
  return made;
}

uint8_t Pattern(size_t message, size_t at) {
  return static_cast<uint8_t>(message * 7 + at * 31 + (at >> 8) * 3);
}

// Whether `file` becomes readable before `end`.
bool Readable(int file, Clock::time_point end) {
  pollfd one{file, POLLIN, 0};
  const auto left = std::chrono::ceil<milliseconds>(end - Clock::now());
  return ::poll(&one, 1, static_cast<int>(std::max<int64_t>(left.count(), 0))) > 0;
}

// As <infiniband/verbs.h> has them, without their prefix: the libraries have sentences of their own.
std::string Name(ibv_wc_status status) {
  static const std::map<ibv_wc_status, const char*> names = {
      {IBV_WC_SUCCESS, "success"},
      {IBV_WC_LOC_LEN_ERR, "LOC_LEN_ERR"},
      {IBV_WC_LOC_QP_OP_ERR, "LOC_QP_OP_ERR"},
      {IBV_WC_LOC_PROT_ERR, "LOC_PROT_ERR"},
      {IBV_WC_WR_FLUSH_ERR, "WR_FLUSH_ERR"},
      {IBV_WC_MW_BIND_ERR, "MW_BIND_ERR"},
      {IBV_WC_BAD_RESP_ERR, "BAD_RESP_ERR"},
      {IBV_WC_LOC_ACCESS_ERR, "LOC_ACCESS_ERR"},
      {IBV_WC_REM_INV_REQ_ERR, "REM_INV_REQ_ERR"},
      {IBV_WC_REM_ACCESS_ERR, "REM_ACCESS_ERR"},
      {IBV_WC_REM_OP_ERR, "REM_OP_ERR"},
      {IBV_WC_FATAL_ERR, "FATAL_ERR"},
      {IBV_WC_GENERAL_ERR, "GENERAL_ERR"},
  };
  const auto found = names.find(status);
  return found != names.end() ? found->second : fmt::format("status {}", static_cast<int>(status));
}

std::string Name(ibv_event_type type) {
  static const std::map<ibv_event_type, const char*> names = {
      {IBV_EVENT_QP_FATAL, "QP_FATAL"},           {IBV_EVENT_QP_REQ_ERR, "QP_REQ_ERR"},
      {IBV_EVENT_QP_ACCESS_ERR, "QP_ACCESS_ERR"}, {IBV_EVENT_COMM_EST, "COMM_EST"},
      {IBV_EVENT_SQ_DRAINED, "SQ_DRAINED"},       {IBV_EVENT_QP_LAST_WQE_REACHED, "QP_LAST_WQE_REACHED"},
  };
  const auto found = names.find(type);
  return found != names.end() ? found->second : fmt::format("event {}", static_cast<int>(type));
}

// --- What the connection manager says ---

struct Event {
  rdma_cm_event_type type;
  int status;
  rdma_cm_id* id;
  std::string private_data;
  unsigned responder_resources;
  unsigned initiator_depth;

  // Without what all their names begin with.
  std::string Name() const { return std::string(rdma_event_str(type)).substr(std::strlen("RDMA_CM_EVENT_")); }
};

class Events {
 public:
  ~Events() { rdma_destroy_event_channel(channel_); }
  rdma_event_channel* channel() const { return channel_; }

  // The next one of this id; those of others are dropped, but for requests.
  std::optional<Event> Next(rdma_cm_id* id, Clock::time_point end) {
    while (Readable(channel_->fd, end)) {
      Event event = Get();
      if (event.id == id) return event;
      if (event.type == RDMA_CM_EVENT_CONNECT_REQUEST) requests_.push_back(std::move(event));
    }
    return std::nullopt;
  }
  std::optional<Event> Next(rdma_cm_id* id) { return Next(id, Clock::now() + kPatience); }

  Event NextRequest() {
    while (requests_.empty()) {
      Event event = Get();
      if (event.type == RDMA_CM_EVENT_CONNECT_REQUEST) requests_.push_back(std::move(event));
    }
    Event event = std::move(requests_.front());
    requests_.pop_front();
    return event;
  }

 private:
  Event Get() {
    rdma_cm_event* got = nullptr;
    if (rdma_get_cm_event(channel_, &got) != 0) Die("rdma_get_cm_event");
    const rdma_conn_param& with = got->param.conn;
    Event event{got->event, got->status, got->id, {}, with.responder_resources, with.initiator_depth};
    if (with.private_data != nullptr)
      event.private_data.assign(static_cast<const char*>(with.private_data), with.private_data_len);
    rdma_ack_cm_event(got);
    return event;
  }

  rdma_event_channel* const channel_ = Must(rdma_create_event_channel(), "rdma_create_event_channel");
  std::deque<Event> requests_;
};

// --- Completions, by their events ---

class Completions {
 public:
  explicit Completions(ibv_context* device)
      : channel_(Must(ibv_create_comp_channel(device), "ibv_create_comp_channel")),
        cq_(Must(ibv_create_cq(device, 128, nullptr, channel_, 0), "ibv_create_cq")) {}
  ~Completions() {
    ibv_ack_cq_events(cq_, events_);
    ibv_destroy_cq(cq_);
    ibv_destroy_comp_channel(channel_);
  }
  ibv_cq* cq() const { return cq_; }

  std::optional<ibv_wc> Next(Clock::time_point end) {
    while (true) {
      ibv_wc completion{};
      const int polled = ibv_poll_cq(cq_, 1, &completion);
      if (polled < 0) Die("ibv_poll_cq");
      if (polled > 0) return completion;
      // Armed before the look that decides: what comes in between has its event.
      if (!armed_) {
        Arm(false);
      } else if (!Wait(end)) {
        return std::nullopt;
      }
    }
  }
  std::optional<ibv_wc> Next() { return Next(Clock::now() + kPatience); }

  void Arm(bool solicited_only) {
    if (ibv_req_notify_cq(cq_, solicited_only ? 1 : 0) != 0) Die("ibv_req_notify_cq");
    armed_ = true;
  }
  // For the event of an armed queue.
  bool Wait(Clock::time_point end) {
    if (!Readable(channel_->fd, end)) return false;
    ibv_cq* queue = nullptr;
    void* context = nullptr;
    if (ibv_get_cq_event(channel_, &queue, &context) != 0) Die("ibv_get_cq_event");
    ++events_;
    armed_ = false;
    return true;
  }

 private:
  ibv_comp_channel* const channel_;
  ibv_cq* const cq_;
  bool armed_ = false;
  unsigned events_ = 0;
};

// --- One end of a connection ---

// Memory of the server, as its private data names it: `closed` is the same memory without any right for others.
struct Region {
  uint64_t address = 0;
  uint32_t open = 0;
  uint32_t closed = 0;

  std::string Encode() const {
    const uint64_t words[] = {htobe64(address), htobe64(uint64_t{open} << 32 | closed)};
    return std::string(reinterpret_cast<const char*>(words), sizeof(words));
  }
  static Region Decode(const std::string& text) {
    uint64_t words[2] = {};
    std::memcpy(words, text.data(), std::min(text.size(), sizeof(words)));
    const uint64_t keys = be64toh(words[1]);
    return {be64toh(words[0]), static_cast<uint32_t>(keys >> 32), static_cast<uint32_t>(keys)};
  }
};

class End {
 public:
  End(Events& events, rdma_cm_id* id)
      : events_(events),
        id_(id),
        pd_(Must(ibv_alloc_pd(id->verbs), "ibv_alloc_pd")),
        sends_(id->verbs),
        receives_(id->verbs),
        region_(kRegion, kBackground),
        outbox_(kRegion, kBackground),
        inbox_(kReceives * kLongest),
        open_(Register(region_, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
                                    WindowsIfAny(id->verbs))),
        closed_(Register(region_, IBV_ACCESS_LOCAL_WRITE)),
        // What a Read fetches comes as a tagged message, as a Write does (RFC 5040 section 5.1).
        outbox_mr_(Register(outbox_, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)),
        inbox_mr_(Register(inbox_, IBV_ACCESS_LOCAL_WRITE)) {
    ibv_qp_init_attr attributes{};
    attributes.send_cq = sends_.cq();
    attributes.recv_cq = receives_.cq();
    attributes.qp_type = IBV_QPT_RC;
    attributes.cap = {.max_send_wr = 64, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 0};
    if (rdma_create_qp(id_, pd_, &attributes) != 0) Die("rdma_create_qp");
    const int file = id_->verbs->async_fd;
    if (::fcntl(file, F_SETFL, ::fcntl(file, F_GETFL) | O_NONBLOCK) != 0) Die("fcntl");
  }
  ~End() {
    rdma_destroy_qp(id_);
    if (window_ != nullptr) ibv_dealloc_mw(window_);
    for (ibv_mr* region : {open_, closed_, outbox_mr_, inbox_mr_}) ibv_dereg_mr(region);
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  rdma_cm_id* id() const { return id_; }
  uint8_t* region() { return region_.data() + kMargin; }
  uint8_t* outbox() { return outbox_.data() + kMargin; }
  Region TellRegion() { return {reinterpret_cast<uint64_t>(region()), open_->rkey, closed_->rkey}; }

  void Say(std::string words) { said_ += (said_.empty() ? "" : ", ") + std::move(words); }
  const std::string& said() const { return said_; }

  void PostReceive(uint64_t slot, size_t bytes) {
    ibv_sge part{reinterpret_cast<uint64_t>(inbox_.data() + slot * kLongest), static_cast<uint32_t>(bytes),
                 inbox_mr_->lkey};
    ibv_recv_wr request{.wr_id = slot, .next = nullptr, .sg_list = &part, .num_sge = 1};
    ibv_recv_wr* bad = nullptr;
    if (const int error = ibv_post_recv(id_->qp, &request, &bad); error != 0) {
      Say(fmt::format("ibv_post_recv: {}", std::strerror(std::abs(error))));
    } else {
      ++posted_;
    }
  }

  // Of `bytes` in the outbox, or into it, at `offset`. 0 or the errno, which siw's provider gives a sign.
  int Post(ibv_wr_opcode opcode, size_t bytes, uint64_t address = 0, uint32_t key = 0, unsigned flags = 0,
           size_t offset = 0) {
    ibv_sge part{reinterpret_cast<uint64_t>(outbox() + offset), static_cast<uint32_t>(bytes), outbox_mr_->lkey};
    ibv_send_wr request{};
    request.sg_list = &part;
    request.num_sge = bytes > 0 ? 1 : 0;
    request.opcode = opcode;
    request.send_flags = IBV_SEND_SIGNALED | flags;
    request.wr.rdma.remote_addr = address;
    // libsiw takes the key that a Send invalidates from here, too.
    request.wr.rdma.rkey = key;
    if (opcode == IBV_WR_SEND_WITH_INV) request.invalidate_rkey = key;
    ibv_send_wr* bad = nullptr;
    return std::abs(ibv_post_send(id_->qp, &request, &bad));
  }

  // Posts one and waits for it; says what became of it under `what` if that is no success, or if `always`.
  bool Do(const char* what, ibv_wr_opcode opcode, size_t bytes, uint64_t address = 0, uint32_t key = 0,
          bool always = false) {
    std::string came;
    if (const int error = Post(opcode, bytes, address, key); error != 0) {
      came = std::strerror(error);
    } else {
      const auto completion = sends_.Next();
      came = completion ? Name(completion->status) : "no completion";
      if (completion && completion->status == IBV_WC_SUCCESS && !always) return true;
    }
    Say(fmt::format("{}: {}", what, came));
    return came == "success";
  }

  // The next message; says so if there is none.
  std::optional<ibv_wc> Receive(milliseconds patience = kPatience) {
    const auto completion = receives_.Next(Clock::now() + patience);
    if (completion) --posted_;
    if (completion && completion->status == IBV_WC_SUCCESS) return completion;
    Say(completion ? fmt::format("Receive: {}", Name(completion->status)) : "no message");
    return std::nullopt;
  }

  // Whether the message of that completion is number `message`, of `bytes`; posts its Receive again.
  bool Check(const ibv_wc& completion, size_t message, size_t bytes) {
    const uint8_t* const data = inbox_.data() + completion.wr_id * kLongest;
    bool same = completion.byte_len == bytes;
    for (size_t i = 0; same && i < bytes; ++i) same = data[i] == Pattern(message, i);
    if (!same) Say(fmt::format("message of {} bytes: {} bytes came, or others", bytes, completion.byte_len));
    PostReceive(completion.wr_id, kLongest);
    return same;
  }
  const uint8_t* Inbox(const ibv_wc& completion) const { return inbox_.data() + completion.wr_id * kLongest; }

  // Message number `message` in the outbox.
  void Fill(uint8_t* to, size_t message, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) to[i] = Pattern(message, i);
  }
  // Whether memory of kRegion bytes holds that at `offset`, and the background elsewhere; which it then has everywhere.
  static bool Found(uint8_t* memory, size_t offset, size_t message, size_t bytes) {
    uint8_t* const whole = memory - kMargin;
    const size_t begin = kMargin + offset;
    bool same = true;
    for (size_t i = 0; i < kRegion; ++i) {
      const bool inside = i >= begin && i < begin + bytes;
      same = same && whole[i] == (inside ? Pattern(message, i - begin) : kBackground);
    }
    std::memset(whole, kBackground, kRegion);
    return same;
  }

  Completions& sends() { return sends_; }
  Completions& receives() { return receives_; }

  // Opens the region by a window of type 2 if the device has such. The key to invalidate.
  uint32_t KeyToInvalidate() {
    window_ = ibv_alloc_mw(pd_, IBV_MW_TYPE_2);
    if (window_ == nullptr) return open_->rkey;
    ibv_send_wr request{};
    request.opcode = IBV_WR_BIND_MW;
    request.send_flags = IBV_SEND_SIGNALED;
    request.bind_mw.mw = window_;
    request.bind_mw.rkey = ibv_inc_rkey(window_->rkey);
    request.bind_mw.bind_info = {open_, reinterpret_cast<uint64_t>(region()), kLongest, IBV_ACCESS_REMOTE_WRITE};
    ibv_send_wr* bad = nullptr;
    if (ibv_post_send(id_->qp, &request, &bad) != 0) Die("ibv_post_send of a bind");
    const auto bound = sends_.Next();
    if (!bound || bound->status != IBV_WC_SUCCESS) Say("the window is not bound");
    return request.bind_mw.rkey;
  }

  // Waits for the end of the connection, and says how it came and what became of the Receives.
  void Finish(milliseconds patience) {
    const auto event = events_.Next(id_, Clock::now() + patience);
    if (!event) {
      Say("no end");
    } else {
      Say(event->Name());
    }
    std::map<std::string, int> became;
    // Without an end they have been waited for already.
    const auto end = Clock::now() + (event ? kPatienceAtTheEnd : milliseconds(0));
    while (posted_ > 0) {
      const auto completion = receives_.Next(end);
      if (!completion) break;
      --posted_;
      ++became[Name(completion->status)];
    }
    if (posted_ > 0) became["left"] = posted_;
    for (const auto& [word, count] : became) Say(fmt::format("{} Receives: {}", count, word));
    SayAsyncEvents();
  }

 private:
  static int WindowsIfAny(ibv_context* device) {
    ibv_device_attr attributes{};
    if (ibv_query_device(device, &attributes) != 0) Die("ibv_query_device");
    return attributes.max_mw > 0 ? IBV_ACCESS_MW_BIND : 0;
  }
  ibv_mr* Register(std::vector<uint8_t>& memory, int access) {
    return Must(ibv_reg_mr(pd_, memory.data(), memory.size(), access), "ibv_reg_mr");
  }

  // Of this QP; the device's other ones are of connections before.
  void SayAsyncEvents() {
    ibv_async_event event{};
    while (ibv_get_async_event(id_->verbs, &event) == 0) {
      if (event.element.qp == id_->qp) Say(Name(event.event_type));
      ibv_ack_async_event(&event);
    }
  }

  struct PdCloser {
    void operator()(ibv_pd* pd) const { ibv_dealloc_pd(pd); }
  };

  Events& events_;
  rdma_cm_id* const id_;
  ibv_pd* const pd_;
  const std::unique_ptr<ibv_pd, PdCloser> pd_owner_{pd_};  // behind the QP and the memory in it
  Completions sends_;
  Completions receives_;
  std::vector<uint8_t> region_;
  std::vector<uint8_t> outbox_;
  std::vector<uint8_t> inbox_;
  ibv_mr* const open_;
  ibv_mr* const closed_;
  ibv_mr* const outbox_mr_;
  ibv_mr* const inbox_mr_;
  ibv_mw* window_ = nullptr;
  int posted_ = 0;  // Receives
  std::string said_;
};

// --- The cases ---

void Disconnect(End& end) {
  if (rdma_disconnect(end.id()) != 0) end.Say(fmt::format("rdma_disconnect: {}", std::strerror(errno)));
  end.Finish(kPatienceAtTheEnd);
}

void AwaitTheEnd(End& end) {
  end.Finish(kPatienceAtTheEnd);
}

void AwaitTheCaller(End& end) {
  end.Finish(kPatienceWithCallers);
}

// Messages of all sizes, each answered by the same bytes.
void CallSend(End& end, const Region&) {
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    end.Fill(end.outbox(), i, kSizes[i]);
    if (!end.Do("Send", IBV_WR_SEND, kSizes[i])) return AwaitTheEnd(end);
    const auto answer = end.Receive();
    if (!answer || !end.Check(*answer, i, kSizes[i])) break;
    if (i + 1 == std::size(kSizes)) end.Say("all sizes");
  }
  Disconnect(end);
}

void ServeSend(End& end) {
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    const auto message = end.Receive();
    if (!message || !end.Check(*message, i, kSizes[i])) break;
    end.Fill(end.outbox(), i, kSizes[i]);
    if (!end.Do("Send", IBV_WR_SEND, kSizes[i])) break;
    if (i + 1 == std::size(kSizes)) end.Say("all sizes");
  }
  AwaitTheCaller(end);
}

// Writes of all sizes to odd places, each followed by a message without bytes, which is answered when what was written
// has been looked at.
size_t PlaceOf(size_t message) {
  return kSizes[message] < kLongest ? message % 7 : 0;
}

void CallWrite(End& end, const Region& server) {
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    end.Fill(end.outbox(), i, kSizes[i]);
    if (!end.Do("Write", IBV_WR_RDMA_WRITE, kSizes[i], server.address + PlaceOf(i), server.open) ||
        !end.Do("Send", IBV_WR_SEND, 0)) {
      return AwaitTheEnd(end);
    }
    const auto answer = end.Receive();
    if (!answer || !end.Check(*answer, i, 0)) break;
    if (i + 1 == std::size(kSizes)) end.Say("all sizes");
  }
  Disconnect(end);
}

void ServeWrite(End& end) {
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    const auto message = end.Receive();
    if (!message || !end.Check(*message, i, 0)) break;
    if (!End::Found(end.region(), PlaceOf(i), i, kSizes[i]))
      end.Say(fmt::format("the Write of {} bytes is not in place", kSizes[i]));
    if (!end.Do("Send", IBV_WR_SEND, 0)) break;
    if (i + 1 == std::size(kSizes)) end.Say("all sizes");
  }
  AwaitTheCaller(end);
}

// Reads of all sizes from odd places, one after another.
void CallRead(End& end, const Region& server) {
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    if (!end.Do("Read", IBV_WR_RDMA_READ, kSizes[i], server.address, server.open)) return AwaitTheEnd(end);
    if (!End::Found(end.outbox(), 0, 0, kSizes[i]))
      end.Say(fmt::format("the Read of {} bytes did not bring them", kSizes[i]));
  }
  end.Say("all sizes");
  Disconnect(end);
}

void OfferForRead(End& end) {
  end.Fill(end.region(), 0, kLongest);
}

// More Reads than may be outstanding, posted at once: they wait for each other.
void CallReads(End& end, const Region& server) {
  constexpr size_t kBytes = kLongest / kReads;
  for (size_t i = 0; i < kReads; ++i) {
    if (const int error = end.Post(IBV_WR_RDMA_READ, kBytes, server.address + i * kBytes, server.open, 0, i * kBytes);
        error != 0) {
      end.Say(fmt::format("Read: {}", std::strerror(error)));
      return Disconnect(end);
    }
  }
  for (int i = 0; i < kReads; ++i) {
    const auto completion = end.sends().Next();
    if (completion && completion->status == IBV_WC_SUCCESS) continue;
    end.Say(completion ? fmt::format("Read: {}", Name(completion->status)) : "no completion");
    return AwaitTheEnd(end);
  }
  end.Say(End::Found(end.outbox(), 0, 0, kLongest) ? fmt::format("{} Reads", kReads)
                                                   : "the Reads did not bring what was there");
  Disconnect(end);
}

// A key that the server names is invalidated by a Send: a window's, if its device has such.
void CallInvalidate(End& end, const Region&) {
  if (!end.Do("Send", IBV_WR_SEND, 0)) return AwaitTheEnd(end);
  const auto named = end.Receive();
  if (!named) return Disconnect(end);
  uint32_t key = 0;
  std::memcpy(&key, end.Inbox(*named), sizeof(key));
  end.Do("Send With Invalidate", IBV_WR_SEND_WITH_INV, 4, 0, ntohl(key), true);
  if (end.Receive()) end.Say("answered");
  Disconnect(end);
}

void ServeInvalidate(End& end) {
  if (!end.Receive()) return AwaitTheCaller(end);
  const uint32_t key = end.KeyToInvalidate();
  const uint32_t named = htonl(key);
  std::memcpy(end.outbox(), &named, sizeof(named));
  if (!end.Do("Send", IBV_WR_SEND, sizeof(named))) return AwaitTheCaller(end);
  if (const auto message = end.Receive()) {
    const bool told = (message->wc_flags & IBV_WC_WITH_INV) != 0;
    end.Say(!told                              ? "the completion does not tell the key"
            : message->invalidated_rkey == key ? "the completion tells the key"
                                               : "another key");
    end.Do("Send", IBV_WR_SEND, 0);
  }
  AwaitTheCaller(end);
}

void CallInvalidateUnknown(End& end, const Region& server) {
  end.Do("Send With Invalidate", IBV_WR_SEND_WITH_INV, 4, 0, server.open ^ 0x5a5a5a00, true);
  AwaitTheEnd(end);
}

// An event of the queue comes for the message that asks for one, and then what came before it is there.
void CallSolicited(End& end, const Region&) {
  const bool told =
      end.Do("Send", IBV_WR_SEND, 0) && end.Post(IBV_WR_SEND, 0, 0, 0, IBV_SEND_SOLICITED) == 0 && end.sends().Next();
  if (!told) end.Say("not sent");
  if (end.Receive()) end.Say("answered");
  Disconnect(end);
}

void ArmForSolicited(End& end) {
  end.receives().Arm(true);
}

void ServeSolicited(End& end) {
  if (!end.receives().Wait(Clock::now() + kPatienceWithEvents)) end.Say("no event");
  if (end.Receive(milliseconds(0)) && end.Receive(milliseconds(0))) end.Say("both at the event");
  end.Do("Send", IBV_WR_SEND, 0);
  AwaitTheCaller(end);
}

// The first message right behind the handshake: siw's responder may leave it in the socket until another comes.
void CallFirst(End& end, const Region&) {
  const auto begin = Clock::now();
  end.Post(IBV_WR_SEND, 16);
  const bool answered = end.Receive(milliseconds(3000)).has_value();
  const bool late = Clock::now() - begin > kAtOnce;
  if (answered) end.Say(late ? "answered late" : "answered at once");
  rdma_disconnect(end.id());
}

void ServeFirst(End& end) {
  if (end.Receive()) end.Do("Send", IBV_WR_SEND, 16);
}

// What the server's memory, or its Receives, do not allow.
void CallWriteUnknown(End& end, const Region& server) {
  end.Do("Write", IBV_WR_RDMA_WRITE, 64, server.address, server.open ^ 0x5a5a5a00, true);
  AwaitTheEnd(end);
}
void CallWriteBeyond(End& end, const Region& server) {
  end.Do("Write", IBV_WR_RDMA_WRITE, 2 * kMargin, server.address + kLongest, server.open, true);
  AwaitTheEnd(end);
}
void CallWriteClosed(End& end, const Region& server) {
  end.Do("Write", IBV_WR_RDMA_WRITE, 64, server.address, server.closed, true);
  AwaitTheEnd(end);
}
void CallReadUnknown(End& end, const Region& server) {
  end.Do("Read", IBV_WR_RDMA_READ, 64, server.address, server.open ^ 0x5a5a5a00, true);
  AwaitTheEnd(end);
}
void CallReadBeyond(End& end, const Region& server) {
  end.Do("Read", IBV_WR_RDMA_READ, 2 * kMargin, server.address + kLongest, server.open, true);
  AwaitTheEnd(end);
}
void CallReadClosed(End& end, const Region& server) {
  end.Do("Read", IBV_WR_RDMA_READ, 64, server.address, server.closed, true);
  AwaitTheEnd(end);
}
void CallOneSend(End& end, const Region&) {
  end.Do("Send", IBV_WR_SEND, 64, 0, 0, true);
  AwaitTheEnd(end);
}

void ServeUntouched(End& end) {
  AwaitTheCaller(end);
  end.Say(End::Found(end.region(), 0, 0, 0) ? "memory untouched" : "memory written");
}

// Ends in order, by either, with Receives outstanding; with Writes in the queue; and by a program that just ends.
void CallDisconnect(End& end, const Region&) {
  Disconnect(end);
}
void CallOneSendAndAwait(End& end, const Region&) {
  if (!end.Do("Send", IBV_WR_SEND, 64)) end.Say("not sent");
  AwaitTheEnd(end);
}
void ServeDisconnect(End& end) {
  if (!end.Receive()) return AwaitTheCaller(end);
  Disconnect(end);
}
void CallDisconnectInTheMiddle(End& end, const Region& server) {
  int posted = 0;
  while (posted < kWrites && end.Post(IBV_WR_RDMA_WRITE, kLongest, server.address, server.open) == 0) ++posted;
  if (rdma_disconnect(end.id()) != 0) end.Say(fmt::format("rdma_disconnect: {}", std::strerror(errno)));
  int completed = 0;
  while (completed < posted && end.sends().Next()) ++completed;
  end.Say(fmt::format("{} of {} Writes completed", completed, kWrites));
  end.Finish(kPatienceAtTheEnd);
}
void CallLeave(End& end, const Region&) {
  if (!end.Do("Send", IBV_WR_SEND, 64)) end.Say("not sent");
  if (end.Receive()) end.Say("answered");
  fmt::print("leave\t{}\n", end.said());
  std::fflush(stdout);
  ::_exit(0);
}
void ServeLeave(End& end) {
  if (end.Receive()) end.Do("Send", IBV_WR_SEND, 0);
  AwaitTheCaller(end);
}

void Nothing(End&) {}

struct Case {
  const char* name;
  // Of the server's, posted before it accepts.
  int receives;
  size_t bytes;
  void (*call)(End&, const Region&);  // null: it does not come to a connection
  void (*serve)(End&);
  void (*before)(End&) = Nothing;  // at the server, before it accepts
};

constexpr Case kCases[] = {
    {"send", kReceives, kLongest, CallSend, ServeSend},
    {"write", kReceives, kLongest, CallWrite, ServeWrite},
    {"read", kReceives, kLongest, CallRead, AwaitTheCaller, OfferForRead},
    {"reads at once", kReceives, kLongest, CallReads, AwaitTheCaller, OfferForRead},
    {"send with invalidate", kReceives, kLongest, CallInvalidate, ServeInvalidate},
    {"solicited event", kReceives, kLongest, CallSolicited, ServeSolicited, ArmForSolicited},
    {"first message", kReceives, kLongest, CallFirst, ServeFirst},
    {"write to unknown memory", kReceives, kLongest, CallWriteUnknown, ServeUntouched},
    {"write beyond the end", kReceives, kLongest, CallWriteBeyond, ServeUntouched},
    {"write without the right", kReceives, kLongest, CallWriteClosed, ServeUntouched},
    {"read of unknown memory", kReceives, kLongest, CallReadUnknown, AwaitTheCaller},
    {"read beyond the end", kReceives, kLongest, CallReadBeyond, AwaitTheCaller},
    {"read without the right", kReceives, kLongest, CallReadClosed, AwaitTheCaller},
    {"invalidate unknown memory", kReceives, kLongest, CallInvalidateUnknown, AwaitTheCaller},
    {"send too long", 1, 16, CallOneSend, AwaitTheCaller},
    {"send without a receive", 0, 0, CallOneSend, AwaitTheCaller},
    {"client disconnects", kReceives, kLongest, CallDisconnect, AwaitTheCaller},
    {"server disconnects", kReceives, kLongest, CallOneSendAndAwait, ServeDisconnect},
    {"disconnect in the middle", kReceives, kLongest, CallDisconnectInTheMiddle, AwaitTheCaller},
    {"rejection", 0, 0, nullptr, nullptr},
    {"nobody listens", 0, 0, nullptr, nullptr},
    {"leave", kReceives, kLongest, CallLeave, ServeLeave},
    {"stop", 0, 0, nullptr, nullptr},
};

const Case* CaseOf(std::string_view name) {
  const auto* const found =
      std::find_if(std::begin(kCases), std::end(kCases), [&](const Case& one) { return one.name == name; });
  return found != std::end(kCases) ? found : nullptr;
}

rdma_conn_param Parameters(const std::string& private_data) {
  rdma_conn_param parameters{};
  parameters.private_data = private_data.data();
  parameters.private_data_len = static_cast<uint8_t>(private_data.size());
  parameters.responder_resources = kDepth;
  parameters.initiator_depth = kDepth;
  parameters.retry_count = 7;
  parameters.rnr_retry_count = 7;
  return parameters;
}

// --- The two programs ---

sockaddr_in AddressOf(const char* text, const char* port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(port)));
  if (inet_pton(AF_INET, text, &address.sin_addr) != 1) {
    fmt::print(stderr, "two_ends: '{}' is no IPv4 address\n", text);
    std::exit(2);
  }
  return address;
}

int Serve(sockaddr_in address) {
  Events events;
  rdma_cm_id* listener = nullptr;
  if (rdma_create_id(events.channel(), &listener, nullptr, RDMA_PS_TCP) != 0) Die("rdma_create_id");
  if (rdma_bind_addr(listener, reinterpret_cast<sockaddr*>(&address)) != 0) Die("rdma_bind_addr");
  if (rdma_listen(listener, 8) != 0) Die("rdma_listen");
  for (bool stopped = false; !stopped;) {
    const Event request = events.NextRequest();
    const size_t number =
        request.private_data.empty() ? std::size(kCases) : static_cast<uint8_t>(request.private_data[0]);
    if (number >= std::size(kCases) || kCases[number].call == nullptr) {
      const std::string words = "not now";
      rdma_reject(request.id, words.data(), static_cast<uint8_t>(words.size()));
      rdma_destroy_id(request.id);
      stopped = number < std::size(kCases) && std::string_view(kCases[number].name) == "stop";
      continue;
    }
    const Case& one = kCases[number];
    {
      End end(events, request.id);
      for (int i = 0; i < one.receives; ++i) end.PostReceive(static_cast<uint64_t>(i), one.bytes);
      one.before(end);
      const std::string told = end.TellRegion().Encode();
      rdma_conn_param parameters = Parameters(told);
      if (rdma_accept(request.id, &parameters) != 0) {
        end.Say(fmt::format("rdma_accept: {}", std::strerror(errno)));
      } else if (const auto event = events.Next(request.id); !event || event->type != RDMA_CM_EVENT_ESTABLISHED) {
        end.Say(event ? event->Name() : "not established");
      } else {
        one.serve(end);
      }
      fmt::print("{}\t{}\n", one.name, end.said());
      std::fflush(stdout);
    }
    rdma_destroy_id(request.id);
  }
  rdma_destroy_id(listener);
  return 0;
}

// What the attempt ended with, in words; empty: it is established, and `server` is known.
std::string Connect(Events& events, rdma_cm_id* id, uint8_t number, Region* server) {
  const std::string asked(1, static_cast<char>(number));
  rdma_conn_param parameters = Parameters(asked);
  if (rdma_connect(id, &parameters) != 0) return fmt::format("rdma_connect: {}", std::strerror(errno));
  const auto event = events.Next(id);
  if (!event) return "not established";
  if (event->type == RDMA_CM_EVENT_ESTABLISHED) {
    *server = Region::Decode(event->private_data);
    return {};
  }
  std::string words = event->Name();
  if (event->status != 0) words += fmt::format(" ({})", std::strerror(std::abs(event->status)));
  // Of a server that has accepted, and whose answer does not please, it is a Region.
  const bool is_text =
      std::all_of(event->private_data.begin(), event->private_data.end(), [](char c) { return c >= ' '; });
  if (!event->private_data.empty() && is_text) words += fmt::format(" '{}'", event->private_data);
  return words;
}

int Call(sockaddr_in address, const std::vector<const Case*>& cases) {
  Events events;
  for (const Case* one : cases) {
    sockaddr_in to = address;
    if (std::string_view(one->name) == "nobody listens") to.sin_port = htons(1);
    rdma_cm_id* id = nullptr;
    if (rdma_create_id(events.channel(), &id, nullptr, RDMA_PS_TCP) != 0) Die("rdma_create_id");
    const auto resolved = [&](rdma_cm_event_type type) {
      const auto event = events.Next(id);
      return event && event->type == type;
    };
    if (rdma_resolve_addr(id, nullptr, reinterpret_cast<sockaddr*>(&to), kPatience.count()) != 0)
      Die("rdma_resolve_addr");
    if (!resolved(RDMA_CM_EVENT_ADDR_RESOLVED)) Die("no address");
    if (rdma_resolve_route(id, kPatience.count()) != 0) Die("rdma_resolve_route");
    if (!resolved(RDMA_CM_EVENT_ROUTE_RESOLVED)) Die("no route");
    {
      End end(events, id);
      for (uint64_t i = 0; i < kReceives; ++i) end.PostReceive(i, kLongest);
      Region server;
      std::string failed = Connect(events, id, static_cast<uint8_t>(one - kCases), &server);
      if (!failed.empty()) {
        end.Say(std::move(failed));
      } else if (one->call != nullptr) {
        one->call(end, server);
      }
      fmt::print("{}\t{}\n", one->name, end.said());
      std::fflush(stdout);
    }
    rdma_destroy_id(id);
  }
  return 0;
}

int Main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "cases" && argc == 2) {
    for (const Case& one : kCases) fmt::print("{}\n", one.name);
    return 0;
  }
  if (what == "serve" && argc == 4) return Serve(AddressOf(argv[2], argv[3]));
  if (what == "call" && argc > 4) {
    std::vector<const Case*> cases;
    for (int i = 4; i < argc; ++i) {
      cases.push_back(CaseOf(argv[i]));
      if (cases.back() != nullptr) continue;
      fmt::print(stderr, "two_ends: no case '{}'\n", argv[i]);
      return 2;
    }
    return Call(AddressOf(argv[2], argv[3]), cases);
  }
  fmt::print(stderr, "two_ends serve ADDRESS PORT | two_ends call ADDRESS PORT CASE... | two_ends cases\n");
  return 2;
}

}  // namespace
}  // namespace stagecoach

int main(int argc, char** argv) {
  return stagecoach::Main(argc, argv);
}
