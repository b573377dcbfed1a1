// Peers that speak something else where iWARP is expected: the client against streams of any kind, and the server
// against garbage on its port. (Behind the ports of InfiniBand devices no program waits for streams:
// strange_carrier_test, emu/nic/roce_port_test.)
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cli/cli_fixture.h"

namespace stagecoach::tests {
namespace {

// A TCP listener on loopback that treats each connection as told.
class Listener {
 public:
  explicit Listener(std::function<void(int)> treat) {
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(fd_, 8), 0);
    EXPECT_EQ(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this, treat = std::move(treat)] {
      for (;;) {
        const int peer = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
        if (peer < 0) return;
        treat(peer);
        ::close(peer);
      }
    });
  }
  ~Listener() {
    ::shutdown(fd_, SHUT_RDWR);
    thread_.join();
    ::close(fd_);
  }
  std::string url(const std::string& path) const {
    return "stagecoach://127.0.0.1:" + std::to_string(port_) + "/" + path;
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int fd_ = -1;
  uint16_t port_ = 0;
  std::thread thread_;
};

void SendAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    if (n <= 0) return;
    text.remove_prefix(static_cast<size_t>(n));
  }
}
void ReadUntilEnd(int fd) {
  char buffer[4096];
  while (::read(fd, buffer, sizeof(buffer)) > 0) {
  }
}

// What such a peer may do. The process under test is started before the listener's thread, so that fork() meets one
// thread.
class StrangePeerTest : public CliTest {
 protected:
  static constexpr const char* kNoMpa = "does not speak iWARP (MPA)";

  // Takes our MPA Request of revision 2 and answers as a good peer would (RFC 6581 section 4): enhanced, no CRC, no
  // markers, peer-to-peer by a zero-length Write, IRD and ORD of 1.
  static bool AcceptMpa(int peer) {
    unsigned char request[20];
    if (::recv(peer, request, sizeof(request), MSG_WAITALL) != sizeof(request)) return false;
    std::string rest((request[18] << 8) + request[19], '\0');
    if (::recv(peer, rest.data(), rest.size(), MSG_WAITALL) != static_cast<ssize_t>(rest.size())) return false;
    SendAll(peer, std::string("MPA ID Rep Frame") + std::string("\x10\x02\x00\x04\x80\x01\x80\x01", 8));
    return true;
  }

  // The peer is named, and so is what is wrong with it.
  void ExpectRefused(const std::string& cause, std::function<void(int)> treat, std::vector<std::string> options = {}) {
    const Listener listener(std::move(treat));
    std::vector<std::string> arguments = {"get"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    arguments.push_back(listener.url("file"));
    arguments.push_back((local_ / "file").string());
    const Outcome get = Run(arguments);
    EXPECT_EQ(get.code, 1) << get.err;
    EXPECT_NE(get.err.find(listener.address()), std::string::npos) << get.err;
    EXPECT_NE(get.err.find(cause), std::string::npos) << get.err;
    EXPECT_EQ(get.err.find("\n"), get.err.size() - 1) << "one line: " << get.err;
    EXPECT_TRUE(fs::is_empty(local_));
  }
};

TEST_F(StrangePeerTest, AnHttpServer) {
  ExpectRefused(kNoMpa, [](int peer) {
    SendAll(peer, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    ::shutdown(peer, SHUT_WR);
    ReadUntilEnd(peer);
  });
}

TEST_F(StrangePeerTest, APeerThatClosesAtOnce) {
  ExpectRefused("the peer rejected the connection", [](int) {});
}

TEST_F(StrangePeerTest, APeerThatSendsRandomBytes) {
  const std::string noise = Pattern(100'000);
  ExpectRefused(kNoMpa, [&](int peer) {
    SendAll(peer, noise);
    ::shutdown(peer, SHUT_WR);
    ReadUntilEnd(peer);
  });
}

TEST_F(StrangePeerTest, APeerThatSaysNothing) {
  ExpectRefused("no answer in time", [](int peer) { ReadUntilEnd(peer); }, {"--timeout", "0.3"});
}

TEST_F(StrangePeerTest, APeerThatAcceptsAndThenSendsGarbageFrames) {
  // A frame as MPA wants it, of 20 bytes that are no DDP segment; what follows does not matter any more.
  const std::string noise = std::string("\x00\x14", 2) + std::string(20, '\xff') + std::string(6, '\0') + Pattern(4096);
  ExpectRefused("closed the connection", [&](int peer) {
    if (!AcceptMpa(peer)) return;
    SendAll(peer, noise);
    ::shutdown(peer, SHUT_WR);
    ReadUntilEnd(peer);
  });
}

TEST_F(StrangePeerTest, APeerThatAcceptsAndThenHangsUp) {
  ExpectRefused("closed the connection", [&](int peer) {
    if (!AcceptMpa(peer)) return;
    ::shutdown(peer, SHUT_WR);
    ReadUntilEnd(peer);
  });
}

// A stream to the server that says what it is told, and goes with its object.
class Visitor {
 public:
  explicit Visitor(uint16_t port) {
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~Visitor() { ::close(fd_); }
  Visitor(const Visitor&) = delete;
  Visitor& operator=(const Visitor&) = delete;
  int fd() const { return fd_; }
  // What the server says until it hangs up, or for 20 s.
  std::string ReadToTheEnd() const {
    std::string said;
    for (pollfd readable{fd_, POLLIN, 0}; ::poll(&readable, 1, 20'000) == 1;) {
      char buffer[4096];
      const ssize_t n = ::read(fd_, buffer, sizeof(buffer));
      if (n <= 0) return said;
      said.append(buffer, static_cast<size_t>(n));
    }
    ADD_FAILURE() << "the server does not hang up";
    return said;
  }

 private:
  int fd_ = -1;
};

TEST_F(CliTest, SilentStreamsOnItsPortKeepNobodyFromAServer) {
  Serve();
  const uint16_t port = static_cast<uint16_t>(std::stoi(address_.substr(address_.find(':') + 1)));
  std::vector<std::unique_ptr<Visitor>> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(std::make_unique<Visitor>(port));
  ExpectServerAlive();
}

// MPA revision 1, and eight bytes of private data (RFC 8797): 4096 bytes inline, each way.
void AskForAConnection(const Visitor& client) {
  SendAll(client.fd(), "MPA ID Req Frame" + std::string("\x00\x01\x00\x08\xf6\xab\x0e\x18\x01\x00\x03\x03", 12));
}

// A limit for all, and another one for each address, which does not contradict it: 64 used to be the end.
TEST_F(CliTest, HalfOfManyPlacesAreForOneAddress) {
  Serve({"--max-clients", "200"});
  const uint16_t port = static_cast<uint16_t>(std::stoi(address_.substr(address_.find(':') + 1)));
  std::vector<std::unique_ptr<Visitor>> clients;
  for (int i = 0; i < 100; ++i) {
    clients.push_back(std::make_unique<Visitor>(port));
    AskForAConnection(*clients.back());
    char reply[28];
    ASSERT_EQ(::recv(clients.back()->fd(), reply, sizeof(reply), MSG_WAITALL), ssize_t{sizeof(reply)});
    EXPECT_EQ(reply[16] & 0x20, 0) << "client " << i << " is rejected";
  }
  const Outcome refused = Run({"ping", "-c", "1", Url()});
  EXPECT_NE(
      refused.err.find(": the server takes at most 100 connections from one address, or one /64 network of IPv6\n"),
      std::string::npos)
      << refused.err;
}

TEST_F(CliTest, AClientThatAsksForNothingLosesItsPlace) {
  Serve({"--max-clients", "1", "--client-idle", "1"});
  const uint16_t port = static_cast<uint16_t>(std::stoi(address_.substr(address_.find(':') + 1)));
  const Visitor client(port);
  AskForAConnection(client);
  EXPECT_EQ(client.ReadToTheEnd().substr(0, 16), "MPA ID Rep Frame");
  // The server gives it a moment to close its end.
  EXPECT_TRUE(WaitUntil([&] { return Run({"ping", "-c", "1", Url()}).code == 0; }));
}

TEST_F(CliTest, AServerOutlivesGarbageOnItsPort) {
  Serve();
  const uint16_t port = static_cast<uint16_t>(std::stoi(address_.substr(address_.find(':') + 1)));
  const std::string key = "MPA ID Req Frame";
  const std::string noise = Pattern(5000, 3);
  for (const std::string& text :
       {std::string(), std::string("GET / HTTP/1.1\r\n\r\n"), noise, key, key + std::string("\x00\x01", 2),
        key + std::string("\x00\x01\xff\xff", 4) + noise, key + std::string("\x40\x01\x00\x00", 4) + noise,
        key + std::string("\x00\x02\x00\x00", 4) + noise, key + std::string("\xff\xff\xff\xff", 4) + noise}) {
    for (bool half_close : {false, true}) {
      const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(port);
      ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
      SendAll(fd, text);
      if (half_close) {
        ::shutdown(fd, SHUT_WR);
        // The server hangs up; a bound, in case it does not.
        pollfd readable{fd, POLLIN, 0};
        EXPECT_EQ(::poll(&readable, 1, 20'000), 1);
      }
      ::close(fd);
    }
  }
  ExpectServerAlive();
  WriteFile(local_ / "file", "still here");
  EXPECT_EQ(Run({"put", (local_ / "file").string(), Url()}).code, 0);
}

}  // namespace
}  // namespace stagecoach::tests
