#include "rpcrdma/api/rpcbind.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <asio/buffer.hpp>
#include <asio/generic/stream_protocol.hpp>
#include <asio/write.hpp>
#include <cerrno>
#include <cstring>
#include <functional>
#include <random>

#include "rpcrdma/api/lookup.h"
#include "rpcrdma/api/resolve.h"
#include "rpcrdma/loop/deadline.h"
#include "rpcrdma/verbs/address_text.h"

namespace stagecoach::rpcrdma {
namespace internal {
namespace {

using Kind = RpcbindError::Kind;
using Endpoint = asio::generic::stream_protocol::endpoint;

// How many versions or netids a message lists.
constexpr size_t kListedMax = 16;

template <typename List>
std::string ListText(const List& list) {
  if (list.size() <= kListedMax) return fmt::format("{}", fmt::join(list, ", "));
  return fmt::format("{} and {} more", fmt::join(list.begin(), list.begin() + kListedMax, ", "),
                     list.size() - kListedMax);
}

std::string ServiceText(const RpcbindService& service) {
  std::vector<std::string> addresses;
  for (const UniversalAddress& address : service.addresses) {
    addresses.push_back(fmt::format("{} ({})", rpcrdma::ToString(address), rpcrdma::ToString(address.netid)));
  }
  return fmt::format("program {} version {} at {}", ProgramText(service.program), ListText(service.versions),
                     ListText(addresses));
}

std::vector<RpcbMapping> MappingsOf(const RpcbindService& service) {
  std::vector<RpcbMapping> mappings;
  for (const uint32_t version : service.versions) {
    for (const UniversalAddress& address : service.addresses) {
      mappings.push_back({.program = service.program,
                          .version = version,
                          .netid = std::string(rpcrdma::ToString(address.netid)),
                          .address = rpcrdma::ToString(address)});
    }
  }
  return mappings;
}

// Of the daemon's mappings the one in whose place `wanted` would be: it has one for each program, version and netid.
const RpcbMapping* Find(const std::vector<RpcbMapping>& mappings, const RpcbMapping& wanted) {
  const auto found = std::find_if(mappings.begin(), mappings.end(), [&](const RpcbMapping& mapping) {
    return mapping.program == wanted.program && mapping.version == wanted.version && mapping.netid == wanted.netid;
  });
  return found == mappings.end() ? nullptr : &*found;
}

}  // namespace

// One conversation with a daemon: a connection, calls on it one after the other, one deadline for all of it. Where a
// host has several addresses there may be one conversation with each, one after the other. Its timer keeps it alive
// until it is over.
class RpcbindOperation : public std::enable_shared_from_this<RpcbindOperation> {
 public:
  RpcbindOperation(AsioLoop& loop, const RpcbindOptions& options, std::string what)
      : loop_(loop), options_(options), what_(std::move(what)), socket_(loop.context()), xid_(std::random_device()()) {}
  virtual ~RpcbindOperation() = default;
  RpcbindOperation(const RpcbindOperation&) = delete;
  RpcbindOperation& operator=(const RpcbindOperation&) = delete;

  void StartWithHost(const std::string& host) {
    deadline_ = DeadlineAfter(loop_.Now(), options_.timeout);
    SetTimer(deadline_);
    if (const auto address = ParseAddress(host, options_.port)) return OnResolved({address->storage});
    lookup_.emplace(loop_, options_.resolver ? options_.resolver : HostResolver(&AskSystem), host, options_.port,
                    [this](const Lookup::Outcome& resolved) {
                      const auto self = shared_from_this();
                      lookup_.reset();
                      if (!resolved) return Fail(Kind::kResolve, resolved.error());
                      OnResolved(*resolved);
                    });
  }

  void StartWithSocket(const std::string& path) {
    SetTimer(DeadlineAfter(loop_.Now(), options_.timeout));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
      return Fail(Kind::kNoRpcbind, "the path is too long for a socket", ENAMETOOLONG);
    }
    std::memcpy(address.sun_path, path.data(), path.size());
    Connect(Endpoint(&address, sizeof(address)));
  }

  void Cancel() { Fail(Kind::kCancelled, "cancelled"); }

 protected:
  virtual void OnConnected() = 0;
  // Hands the error to whoever asked, by the loop.
  virtual void Deliver(RpcbindError error) = 0;

  // Of the host; port included.
  const sockaddr_storage& peer() const { return peer_; }

  // The next call, none other being under way. `next` runs when it is answered, and not when that fails.
  void Dump(uint32_t program, std::function<void(const std::vector<RpcbMapping>&)> next) {
    Call(RpcbProcedure::kDump, {}, [this, program, next = std::move(next)](ConstBytes record) {
      return DecodeRpcbDump(record, xid_, program).map(next);
    });
  }
  void Change(RpcbProcedure procedure, RpcbMapping mapping, std::function<void(bool)> next) {
    Call(procedure, std::move(mapping),
         [this, next = std::move(next)](ConstBytes record) { return DecodeRpcbDone(record, xid_).map(next); });
  }

  // The end, without an error; the caller still holds a reference.
  void End() {
    over_ = true;
    loop_.Cancel(timer_);
    lookup_.reset();
    EndConversation();
  }
  // Of this operation, or of its conversation with one of several addresses.
  void Fail(Kind kind, const std::string& why, int system_error = 0) {
    RpcbindError error;
    error.kind = kind;
    error.system_error = system_error;
    Fail(std::move(error), why);
  }
  void Fail(RpcbindError error, const std::string& why) {
    if (over_) return;
    const auto self = shared_from_this();
    if (error.kind != Kind::kCancelled && addresses_.size() > 1) {
      // The address at which the most was learnt says what kind of failure it is.
      tried_ += fmt::format("{}{}: {}", tried_.empty() ? "" : "; ", FormatHost(Sockaddr(peer_)), why);
      if (!failed_ || error.kind > failed_->kind) failed_ = std::move(error);
      if (next_address_ < addresses_.size() && loop_.Now() < deadline_) return TryNextAddress();
      error = std::move(*failed_);
      error.message = what_ + ": " + tried_;
    } else {
      error.message = what_ + ": " + why;
    }
    End();
    Deliver(std::move(error));
  }

  template <typename Outcome>
  void Post(UniqueFunction<void(Outcome)> handler, Outcome outcome) {
    auto shared =
        std::make_shared<std::pair<UniqueFunction<void(Outcome)>, Outcome>>(std::move(handler), std::move(outcome));
    loop_.Post([shared] { shared->first(std::move(shared->second)); });
  }

  static const sockaddr* Sockaddr(const sockaddr_storage& address) {
    return reinterpret_cast<const sockaddr*>(&address);
  }

 private:
  // Takes an answer: decodes it and goes on, or says what is wrong with it.
  using Decoder = std::function<Result<void, RpcbFault>(ConstBytes record)>;

  void SetTimer(Instant when) {
    loop_.Cancel(timer_);
    timer_ = loop_.At(when, [self = shared_from_this()] {
      self->Fail(Kind::kTimedOut, self->lookup_ ? "the name was not resolved in time" : "no answer in time", ETIMEDOUT);
    });
  }

  void OnResolved(const std::vector<sockaddr_storage>& resolved) {
    if (resolved.empty()) return Fail(Kind::kResolve, "the name has no address");
    for (const sockaddr_storage& address : resolved) {
      if (ToUniversalAddress(Sockaddr(address)) && addresses_.size() < kAddressesMax) addresses_.push_back(address);
    }
    if (addresses_.empty()) return Fail(Kind::kResolve, "neither an IPv4 nor an IPv6 address");
    TryNextAddress();
  }

  // Each gets an equal share of the time that is left.
  void TryNextAddress() {
    EndConversation();
    version_ = kRpcbVersionMax;
    const Duration left = std::max(deadline_ - loop_.Now(), Duration::zero());
    SetTimer(loop_.Now() + left / (addresses_.size() - next_address_));
    peer_ = addresses_[next_address_++];
    Connect(Endpoint(&peer_, peer_.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in)));
  }

  void EndConversation() {
    ++conversation_;
    asio::error_code ignored;
    socket_.close(ignored);
  }

  // What is still to come of a conversation that has ended leads nowhere.
  template <typename... Outcome>
  auto InConversation(void (RpcbindOperation::*then)(Outcome...)) {
    return [self = shared_from_this(), conversation = conversation_, then](Outcome... outcome) {
      if (self->conversation_ == conversation) ((*self).*then)(outcome...);
    };
  }

  void Connect(const Endpoint& endpoint) {
    socket_.async_connect(endpoint, InConversation(&RpcbindOperation::OnConnect));
  }

  void OnConnect(const asio::error_code& error) {
    if (error) return Fail(Kind::kNoRpcbind, "no rpcbind there: " + error.message(), error.value());
    OnConnected();
  }

  void Call(RpcbProcedure procedure, RpcbMapping mapping, Decoder decoder) {
    procedure_ = procedure;
    mapping_ = std::move(mapping);
    decoder_ = std::move(decoder);
    Send();
  }

  void Send() {
    out_ = EncodeRpcbCall(++xid_, version_, procedure_, mapping_);
    answer_.emplace(kRpcbAnswerMax);
    asio::async_write(socket_, asio::buffer(out_), InConversation(&RpcbindOperation::OnSent));
  }

  void OnSent(const asio::error_code& error, size_t /*size*/) {
    if (error) return Fail(Kind::kConnectionLost, error.message(), error.value());
    Receive();
  }

  void Receive() { socket_.async_read_some(asio::buffer(in_), InConversation(&RpcbindOperation::OnReceived)); }

  void OnReceived(const asio::error_code& error, size_t size) {
    if (error == asio::error::eof) return Fail(Kind::kConnectionLost, "it closed the connection without an answer");
    if (error) return Fail(Kind::kConnectionLost, error.message(), error.value());
    const auto whole = answer_->Take(ConstBytes(in_).first(size));
    if (!whole) return FailMalformed(rpcrdma::ToString(whole.error()));
    if (!*whole) return Receive();
    const Decoder decoder = std::exchange(decoder_, nullptr);
    const auto taken = decoder(answer_->record());
    if (taken) return;
    const RpcbFault& fault = taken.error();
    RpcbindError failure;
    switch (fault.kind) {
      case RpcbFault::Kind::kVersions:
        // Asked as version 4 first; 3 has the same calls.
        if (version_ > kRpcbVersionMin && fault.versions.low <= kRpcbVersionMin &&
            fault.versions.high >= kRpcbVersionMin) {
          version_ = kRpcbVersionMin;
          decoder_ = decoder;
          return Send();
        }
        failure.kind = Kind::kVersions;
        failure.versions = {fault.versions.low, fault.versions.high};
        return Fail(std::move(failure), fault.text);
      case RpcbFault::Kind::kDenied:
      case RpcbFault::Kind::kUnavailable:
        return Fail(Kind::kDenied, fault.text);
      case RpcbFault::Kind::kMalformed:
      case RpcbFault::Kind::kForeign:
        return FailMalformed(fault.text);
    }
  }

  void FailMalformed(const std::string& why) { Fail(Kind::kMalformed, "malformed answer: " + why); }

  AsioLoop& loop_;
  const RpcbindOptions options_;
  const std::string what_;
  bool over_ = false;
  EventLoop::TimerId timer_ = 0;
  std::optional<Lookup> lookup_;
  // Of a host:
  Instant deadline_{};
  std::vector<sockaddr_storage> addresses_;
  size_t next_address_ = 0;  // the one after that which is being tried
  sockaddr_storage peer_ = {};
  std::optional<RpcbindError> failed_;  // of several addresses: what came of those tried
  std::string tried_;                   // of each, in words

  uint64_t conversation_ = 0;
  asio::generic::stream_protocol::socket socket_;
  uint32_t version_ = kRpcbVersionMax;

  // The call under way.
  uint32_t xid_;
  RpcbProcedure procedure_ = RpcbProcedure::kDump;
  RpcbMapping mapping_;
  Decoder decoder_;
  std::vector<std::byte> out_;
  std::optional<RecordAssembler> answer_;
  std::array<std::byte, 4096> in_;
};

namespace {

class LookUpOperation final : public RpcbindOperation {
 public:
  LookUpOperation(AsioLoop& loop, const RpcbindOptions& options, std::string_view host, const RpcbindQuery& query,
                  Rpcbind::LookUpHandler handler)
      : RpcbindOperation(loop, options,
                         fmt::format("look up program {} version {} by rpcbind at {}", ProgramText(query.program),
                                     query.version, FormatHostPort(host, options.port))),
        query_(query),
        handler_(std::move(handler)) {}

 private:
  void OnConnected() override {
    Dump(query_.program, [this](const std::vector<RpcbMapping>& mappings) { OnMappings(mappings); });
  }

  void OnMappings(const std::vector<RpcbMapping>& mappings) {
    // [5666bis:7+1] [5666:9+1] [2004:9+1]
    // 5666bis section 11: the address family says which netid.
    const Netid netid = ToUniversalAddress(Sockaddr(peer()))->netid;
    const RpcbMapping* const found =
        Find(mappings, {.program = query_.program, .version = query_.version, .netid = std::string(ToString(netid))});
    if (found == nullptr) return FailNotFound(mappings, ToString(netid));
    const auto registered = ParseUniversalAddress(netid, found->address);
    if (!registered || registered->port == 0) {
      return Fail(
          RpcbindError::Kind::kMalformed,
          fmt::format("malformed answer: it is registered for {} at {}: {}", ToString(netid), Quoted(found->address),
                      registered ? "port 0 is no address" : ToString(registered.error())));
    }
    RpcbindFound result{.address = peer(), .registered = *registered};
    const in_port_t port = htons(registered->port);
    if (result.address.ss_family == AF_INET) {
      reinterpret_cast<sockaddr_in*>(&result.address)->sin_port = port;
    } else {
      reinterpret_cast<sockaddr_in6*>(&result.address)->sin6_port = port;
    }
    End();
    Post<Result<RpcbindFound, RpcbindError>>(std::move(handler_), result);
  }

  void FailNotFound(const std::vector<RpcbMapping>& mappings, std::string_view netid) {
    RpcbindError error;
    for (const RpcbMapping& mapping : mappings) {
      if (mapping.netid == netid) error.versions.push_back(mapping.version);
      if (std::find(error.netids.begin(), error.netids.end(), mapping.netid) == error.netids.end()) {
        error.netids.push_back(mapping.netid);
      }
    }
    std::sort(error.versions.begin(), error.versions.end());
    if (mappings.empty()) {
      error.kind = RpcbindError::Kind::kNotRegistered;
      return Fail(std::move(error), "the program is not registered there");
    }
    if (error.versions.empty()) {
      error.kind = RpcbindError::Kind::kNotForRdma;
      std::vector<std::string> names;
      for (const std::string& name : error.netids) names.push_back(Quoted(name));
      const std::string why = fmt::format("the program is registered for {}, not for {}", ListText(names), netid);
      return Fail(std::move(error), why);
    }
    error.kind = RpcbindError::Kind::kOtherVersion;
    error.netids.clear();
    error.versions.erase(std::unique(error.versions.begin(), error.versions.end()), error.versions.end());
    const std::string why =
        fmt::format("for {} the program is registered in version {} only", netid, ListText(error.versions));
    Fail(std::move(error), why);
  }

  void Deliver(RpcbindError error) override {
    Post<Result<RpcbindFound, RpcbindError>>(std::move(handler_), Err(std::move(error)));
  }

  const RpcbindQuery query_;
  Rpcbind::LookUpHandler handler_;
};

// Operations that end with success or an error.
class ChangeOperation : public RpcbindOperation {
 protected:
  ChangeOperation(AsioLoop& loop, const RpcbindOptions& options, std::string_view verb, const RpcbindService& service,
                  Rpcbind::DoneHandler handler)
      : RpcbindOperation(loop, options,
                         fmt::format("{} {} with rpcbind at {}", verb, ServiceText(service), options.local_socket)),
        program_(service.program),
        wanted_(MappingsOf(service)),
        handler_(std::move(handler)) {}

  void OnConnected() final {
    Dump(program_, [this](const std::vector<RpcbMapping>& mappings) { OnMappings(mappings); });
  }
  virtual void OnMappings(const std::vector<RpcbMapping>& mappings) = 0;

  const std::vector<RpcbMapping>& wanted() const { return wanted_; }

  void Succeed() {
    End();
    Post<Result<void, RpcbindError>>(std::move(handler_), {});
  }

  // The daemon lets a mapping be changed by the user it is of, and by root.
  static std::string NotOurs(const RpcbMapping& mapping) {
    return fmt::format("version {} for {} is registered at {} by {}, and is not ours to take back", mapping.version,
                       Quoted(mapping.netid), Quoted(mapping.address), Quoted(mapping.owner));
  }

 private:
  void Deliver(RpcbindError error) final {
    Post<Result<void, RpcbindError>>(std::move(handler_), Err(std::move(error)));
  }

  const uint32_t program_;
  const std::vector<RpcbMapping> wanted_;
  Rpcbind::DoneHandler handler_;
};

class RegisterOperation final : public ChangeOperation {
 public:
  RegisterOperation(AsioLoop& loop, const RpcbindOptions& options, const RpcbindService& service,
                    RpcbindConflict conflict, Rpcbind::DoneHandler handler)
      : ChangeOperation(loop, options, "register", service, std::move(handler)), conflict_(conflict) {}

 private:
  void OnMappings(const std::vector<RpcbMapping>& mappings) override {
    for (const RpcbMapping& mapping : wanted()) {
      const RpcbMapping* const present = Find(mappings, mapping);
      if (present != nullptr && present->address == mapping.address) continue;
      to_set_.push_back(mapping);
      if (present != nullptr) to_unset_.push_back(*present);
    }
    if (conflict_ == RpcbindConflict::kRefuse && !to_unset_.empty()) return FailInUse();
    UnsetNext();
  }

  void FailInUse() {
    RpcbindError error;
    error.kind = RpcbindError::Kind::kInUse;
    std::vector<std::string> held;
    for (const RpcbMapping& present : to_unset_) {
      const auto holder = ParseUniversalAddress(*ParseNetid(present.netid), present.address);
      if (holder) error.holders.push_back(*holder);
      held.push_back(fmt::format("version {} for {} at {}", present.version, present.netid, Quoted(present.address)));
    }
    const std::string why = fmt::format("it is registered already: {}", ListText(held));
    Fail(std::move(error), why);
  }

  void UnsetNext() {
    if (unset_ == to_unset_.size()) return SetNext();
    const RpcbMapping& mapping = to_unset_[unset_];
    Change(RpcbProcedure::kUnset, mapping, [this, &mapping](bool done) {
      if (!done) return Fail(RpcbindError::Kind::kDenied, NotOurs(mapping));
      ++unset_;
      UnsetNext();
    });
  }

  void SetNext() {
    if (set_ == to_set_.size()) return Succeed();
    Change(RpcbProcedure::kSet, to_set_[set_], [this](bool done) {
      if (!done) return TakeBack();
      ++set_;
      SetNext();
    });
  }

  // The daemon refused one: whoever was quicker has it. What is registered by now goes, so that half a service is not
  // found.
  void TakeBack() {
    if (set_ == 0) {
      return Fail(RpcbindError::Kind::kInUse, "refused: somebody else has registered it meanwhile");
    }
    --set_;
    Change(RpcbProcedure::kUnset, to_set_[set_], [this](bool) { TakeBack(); });
  }

  const RpcbindConflict conflict_;
  std::vector<RpcbMapping> to_unset_;
  size_t unset_ = 0;  // of them are
  std::vector<RpcbMapping> to_set_;
  size_t set_ = 0;  // of them are
};

class WithdrawOperation final : public ChangeOperation {
 public:
  WithdrawOperation(AsioLoop& loop, const RpcbindOptions& options, const RpcbindService& service,
                    Rpcbind::DoneHandler handler)
      : ChangeOperation(loop, options, "withdraw", service, std::move(handler)) {}

 private:
  void OnMappings(const std::vector<RpcbMapping>& mappings) override {
    // UNSET does not look at the address: what somebody else has put there since must not go.
    for (const RpcbMapping& mapping : wanted()) {
      const RpcbMapping* const present = Find(mappings, mapping);
      if (present != nullptr && present->address == mapping.address) to_unset_.push_back(*present);
    }
    UnsetNext();
  }

  void UnsetNext() {
    if (unset_ == to_unset_.size()) return Succeed();
    const RpcbMapping& mapping = to_unset_[unset_];
    Change(RpcbProcedure::kUnset, mapping, [this, &mapping](bool done) {
      if (!done) return Fail(RpcbindError::Kind::kDenied, NotOurs(mapping));
      ++unset_;
      UnsetNext();
    });
  }

  std::vector<RpcbMapping> to_unset_;
  size_t unset_ = 0;  // of them are
};

}  // namespace
}  // namespace internal

std::string_view ToString(RpcbindError::Kind kind) {
  using Kind = RpcbindError::Kind;
  switch (kind) {
    case Kind::kResolve:
      return "resolve";
    case Kind::kNoRpcbind:
      return "no rpcbind";
    case Kind::kTimedOut:
      return "timed out";
    case Kind::kConnectionLost:
      return "connection lost";
    case Kind::kVersions:
      return "versions";
    case Kind::kDenied:
      return "denied";
    case Kind::kMalformed:
      return "malformed";
    case Kind::kNotRegistered:
      return "not registered";
    case Kind::kNotForRdma:
      return "not for RDMA";
    case Kind::kOtherVersion:
      return "other version";
    case Kind::kInUse:
      return "in use";
    case Kind::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

std::vector<UniversalAddress> ListeningAddresses(const sockaddr_storage& address) {
  const auto own = ToUniversalAddress(reinterpret_cast<const sockaddr*>(&address));
  if (!own) return {};
  if (own->netid == Netid::kRdma6 && own->wildcard()) {
    return {UniversalAddress{.netid = Netid::kRdma, .port = own->port}, *own};
  }
  return {*own};
}

Rpcbind::Rpcbind(AsioLoop& loop, RpcbindOptions options) : loop_(loop), options_(std::move(options)) {}

Rpcbind::~Rpcbind() {
  for (const auto& weak : operations_) {
    if (const auto operation = weak.lock()) operation->Cancel();
  }
}

void Rpcbind::LookUp(std::string_view host, const RpcbindQuery& query, LookUpHandler handler) {
  const auto operation = std::make_shared<internal::LookUpOperation>(loop_, options_, host, query, std::move(handler));
  Keep(operation);
  operation->StartWithHost(std::string(host));
}

// [5666bis:7+2] [5666:10+1] [2004:10#1]
void Rpcbind::Register(const RpcbindService& service, RpcbindConflict conflict, DoneHandler handler) {
  const auto operation =
      std::make_shared<internal::RegisterOperation>(loop_, options_, service, conflict, std::move(handler));
  Keep(operation);
  operation->StartWithSocket(options_.local_socket);
}

void Rpcbind::Withdraw(const RpcbindService& service, DoneHandler handler) {
  const auto operation = std::make_shared<internal::WithdrawOperation>(loop_, options_, service, std::move(handler));
  Keep(operation);
  operation->StartWithSocket(options_.local_socket);
}

UniqueFunction<void()> Rpcbind::LatestCanceller() {
  return [latest = operations_.back()] {
    if (const auto operation = latest.lock()) operation->Cancel();
  };
}

void Rpcbind::Keep(std::shared_ptr<internal::RpcbindOperation> operation) {
  std::erase_if(operations_, [](const auto& weak) { return weak.expired(); });
  operations_.push_back(std::move(operation));
}

}  // namespace stagecoach::rpcrdma
