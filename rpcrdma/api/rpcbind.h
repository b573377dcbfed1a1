// Rpcbind: finding RPC-over-RDMA services by way of the rpcbind daemon (RFC 1833) of their host, and being found.
//
// From rpcrdma/api/rpcbind_test.cc#look-up:
//
//   void Find(Rpcbind& rpcbind, Client& client, Client::ConnectHandler on_connected,
//             const std::function<void(const std::string&)>& report) {
//     rpcbind.AsyncLookUp("127.0.0.1", {kProgram, 1},
//                         [&client, on_connected = std::move(on_connected),
//                          report](const Result<RpcbindFound, RpcbindError>& found) mutable {
//                           if (!found) return report(found.error().message);
//                           client.Connect(found->sockaddr(), std::move(on_connected));
//                         });
//   }
//
// From rpcrdma/api/rpcbind_test.cc#register:
//
//   asio::awaitable<void> Publish(Rpcbind& rpcbind, const sockaddr_storage& listening,
//                                 const std::function<asio::awaitable<void>()>& serve,
//                                 const std::function<void(const std::string&)>& report) {
//     RpcbindService service{.program = kProgram, .versions = {1}};
//     service.addresses = ListeningAddresses(listening);  // *server.address()
//     const Result<void, RpcbindError> registered =
//         co_await rpcbind.AsyncRegister(service, RpcbindConflict::kRefuse, asio::use_awaitable);
//     if (!registered) co_return report(registered.error().message);
//     co_await serve();
//     co_await rpcbind.AsyncWithdraw(service, asio::use_awaitable);  // before the process ends
//   }
//
// A lookup asks over TCP, port 111; it takes the port from the answer, and nothing else: the address to connect to is
// the one that answered, so that whoever answers for a host cannot send its clients elsewhere. Registrations go through
// the daemon's local socket, since it takes them from its own host only and notes whose they are. The daemon keeps them
// until they are withdrawn or it ends, whatever becomes of the process: a server that is killed leaves its own behind,
// and one that outlives its daemon has to register again. Nobody tells; registering what is registered does no harm, so
// a server may do it from time to time.
//
// Whatever answers as rpcbind is bounded in bytes and time, and checked. Messages show none of its bytes that a
// terminal would act on.
//
// Handlers run once, from the loop, never inside the call that started the operation. ~Rpcbind ends what is under way;
// its handlers then run with kCancelled. Sockets are the system's: for loops of real processes, not for simulated ones.
//
// Threading: everything on the loop's thread (or before it runs). The loop outlives the Rpcbind.
#pragma once

#include <sys/socket.h>

#include <asio/async_result.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "base/result.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/completion.h"
#include "rpcrdma/api/function.h"
#include "rpcrdma/bind/rpcb.h"
#include "rpcrdma/bind/universal_address.h"

namespace stagecoach::rpcrdma {

namespace internal {
class RpcbindOperation;
}

struct RpcbindError {
  // In the order of how much was learnt; kCancelled apart.
  enum class Kind : uint8_t {
    kResolve,         // the host name means nothing
    kNoRpcbind,       // nobody answers as rpcbind there: refused, unreachable, no local socket
    kTimedOut,        // RpcbindOptions::timeout is over
    kConnectionLost,  // it went in the middle
    kVersions,        // it speaks neither version 3 nor 4 of the protocol: `versions`
    kDenied,          // it declined to answer, or to change what it has
    kMalformed,       // its answer is none
    kNotRegistered,   // the program is not known there
    kNotForRdma,      // the program is, but for other netids only: `netids`
    kOtherVersion,    // the program is, for the netid, in other versions only: `versions`
    kInUse,           // registered for another address already: `holders`
    kCancelled,       // by ~Rpcbind, or by the cancellation slot of a token
  };

  Kind kind = Kind::kNoRpcbind;
  std::vector<uint32_t> versions;         // ascending; with kVersions (the lowest and the highest) and kOtherVersion
  std::vector<std::string> netids;        // each once, as they came; with kNotForRdma
  std::vector<UniversalAddress> holders;  // with kInUse; what is registered and is no address is left out
  int system_error = 0;                   // errno, where one is behind it, else 0
  // The whole line: what was asked, of whom, and why it failed.
  std::string message;

  const std::string& ToString() const { return message; }
};
std::string_view ToString(RpcbindError::Kind kind);

struct RpcbindOptions {
  // Of one operation, the lookup of a host name and all its addresses included: an address that does not answer gets an
  // equal share of what is left, the last one all of it.
  Duration timeout = 5s;
  uint16_t port = kRpcbPort;
  std::string local_socket = kRpcbLocalSocket;
  // As in ClientOptions; every operation has a copy.
  HostResolver resolver;
};

struct RpcbindQuery {
  uint32_t program = 0;
  uint32_t version = 0;
};

struct RpcbindFound {
  // Where to connect: the address at which rpcbind answered, with the port that is registered.
  sockaddr_storage address = {};
  // As registered; often 0.0.0.0 or ::, sometimes an address that only the host itself understands.
  UniversalAddress registered;

  const ::sockaddr* sockaddr() const { return reinterpret_cast<const ::sockaddr*>(&address); }
};

// What a server is to be found by: each version at each address.
struct RpcbindService {
  uint32_t program = 0;
  std::vector<uint32_t> versions;
  std::vector<UniversalAddress> addresses;
};

// The universal addresses of a server that listens on `address`: its own; for the IPv6 wildcard also the one of IPv4,
// of which such a listener takes connections, too. Empty for other families.
std::vector<UniversalAddress> ListeningAddresses(const sockaddr_storage& address);

// What becomes of a registration of the same program, version and netid for another address. kReplace is for those
// whose server is gone: the daemon cannot know.
enum class RpcbindConflict : uint8_t { kRefuse, kReplace };

class Rpcbind {
 public:
  using LookUpHandler = UniqueFunction<void(Result<RpcbindFound, RpcbindError>)>;
  using DoneHandler = UniqueFunction<void(Result<void, RpcbindError>)>;

  Rpcbind(AsioLoop& loop, RpcbindOptions options);
  ~Rpcbind();
  Rpcbind(const Rpcbind&) = delete;
  Rpcbind& operator=(const Rpcbind&) = delete;

  // --- With plain callbacks ---

  // `host` is a numeric address, or a name, which is resolved on a thread of its own. Looks for netid rdma when that is
  // an IPv4 address, for rdma6 when it is IPv6. The addresses of a name (16 at most) are asked one after the other
  // until one has the program; when none has, the error is that of the address at which the most was learnt, and its
  // message names each.
  void LookUp(std::string_view host, const RpcbindQuery& query, LookUpHandler handler);
  // All or nothing, as far as the daemon stays there: what was registered before an error is taken back. What
  // kReplace has taken away by then is not put back: nobody was there. What is registered for the same address already
  // counts as done.
  void Register(const RpcbindService& service, RpcbindConflict conflict, DoneHandler handler);
  // Takes back what is registered for these very addresses; another's registration stays.
  void Withdraw(const RpcbindService& service, DoneHandler handler);

  // --- With completion tokens ---

  // Signature void(Result<RpcbindFound, RpcbindError>). What a token with a cancellation slot started ends with
  // kCancelled when that is emitted; of a registration or its withdrawal, what is changed by then stays so.
  template <typename Token>
  auto AsyncLookUp(std::string_view host, const RpcbindQuery& query, Token&& token) {
    return asio::async_initiate<Token, void(Result<RpcbindFound, RpcbindError>)>(
        [this](auto handler, const std::string& host, RpcbindQuery query) {
          internal::Begin<Result<RpcbindFound, RpcbindError>>(std::move(handler), [&](auto completion) {
            LookUp(host, query, std::move(completion));
            return LatestCanceller();
          });
        },
        token, std::string(host), query);
  }
  // Signature void(Result<void, RpcbindError>).
  template <typename Token>
  auto AsyncRegister(const RpcbindService& service, RpcbindConflict conflict, Token&& token) {
    return asio::async_initiate<Token, void(Result<void, RpcbindError>)>(
        [this](auto handler, const RpcbindService& service, RpcbindConflict conflict) {
          internal::Begin<Result<void, RpcbindError>>(std::move(handler), [&](auto completion) {
            Register(service, conflict, std::move(completion));
            return LatestCanceller();
          });
        },
        token, service, conflict);
  }
  // Signature void(Result<void, RpcbindError>).
  template <typename Token>
  auto AsyncWithdraw(const RpcbindService& service, Token&& token) {
    return asio::async_initiate<Token, void(Result<void, RpcbindError>)>(
        [this](auto handler, const RpcbindService& service) {
          internal::Begin<Result<void, RpcbindError>>(std::move(handler), [&](auto completion) {
            Withdraw(service, std::move(completion));
            return LatestCanceller();
          });
        },
        token, service);
  }

 private:
  // Of the operation that began last. May outlive the Rpcbind, and does nothing then.
  UniqueFunction<void()> LatestCanceller();
  void Keep(std::shared_ptr<internal::RpcbindOperation> operation);

  AsioLoop& loop_;
  const RpcbindOptions options_;
  // Weak: an operation that is over goes by itself. Swept whenever one begins.
  std::vector<std::weak_ptr<internal::RpcbindOperation>> operations_;
};

}  // namespace stagecoach::rpcrdma
