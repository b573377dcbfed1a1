// What programs see when descriptors end: the call says EMFILE, or the event does that answers it, and nothing is left
// half made.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>

#include "verbs_shim/emulated/want.h"

// --- Requests for descriptors that fail ---

namespace {

// The function of that name that comes after this program's.
template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

bool Fails() {
  if (!stagecoach::verbs::emulated::FailsNow()) return false;
  errno = EMFILE;
  return true;
}

}  // namespace

extern "C" {

int socket(int family, int type, int protocol) {
  static const auto next = Next<int (*)(int, int, int)>("socket");
  return Fails() ? -1 : next(family, type, protocol);
}
int accept4(int listener, sockaddr* address, socklen_t* length, int flags) {
  static const auto next = Next<int (*)(int, sockaddr*, socklen_t*, int)>("accept4");
  return Fails() ? -1 : next(listener, address, length, flags);
}
int epoll_create1(int flags) {
  static const auto next = Next<int (*)(int)>("epoll_create1");
  return Fails() ? -1 : next(flags);
}
int eventfd(unsigned int value, int flags) {
  static const auto next = Next<int (*)(unsigned int, int)>("eventfd");
  return Fails() ? -1 : next(value, flags);
}

}  // extern "C"

namespace stagecoach::verbs::emulated {
namespace {

// While it lives, the process gets `count` descriptors more.
class Shortage {
 public:
  explicit Shortage(int count) {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit now = before_;
    now.rlim_cur = 0;
    for (int free = 0; now.rlim_cur < before_.rlim_cur; ++now.rlim_cur) {
      const bool is_free = fcntl(static_cast<int>(now.rlim_cur), F_GETFD) < 0;
      if (is_free && free++ == count) break;
    }
    setrlimit(RLIMIT_NOFILE, &now);
  }
  ~Shortage() { setrlimit(RLIMIT_NOFILE, &before_); }
  Shortage(const Shortage&) = delete;
  Shortage& operator=(const Shortage&) = delete;

 private:
  rlimit before_{};
};

constexpr int kMostDescriptors = 20;  // no call needs as many

// `call` answers with an errno, or 0. It is called with 0 descriptors to be had, and with more and more until it
// succeeds.
void CallWithFew(const std::string& name, const std::function<int()>& call, const std::function<void()>& undo) {
  ASSERT_EQ(call(), 0) << name;  // what is made once is there
  undo();
  int error = EMFILE;
  for (int count = 0; error != 0; ++count) {
    ASSERT_LT(count, kMostDescriptors) << name;
    const std::string what = name + " with " + std::to_string(count) + " descriptors";
    const Inventory before;
    {
      const Shortage shortage(count);
      error = call();
    }
    if (error != 0) {
      EXPECT_EQ(error, EMFILE) << what << ": " << strerror(error);
      ExpectNoMoreThan(before, what);
      ASSERT_EQ(call(), 0) << what << ", then with more";
    }
    undo();
    ExpectNoMoreThan(before, what);
  }
}

sockaddr* Loopback(in_port_t port = 0) {
  static sockaddr_in address;
  address = {};
  address.sin_family = AF_INET;
  address.sin_port = port;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return reinterpret_cast<sockaddr*>(&address);
}

// Exit codes: 0, it starts with that many; 1, it does not and says so; else what went wrong.
int StartWith(int count) {
  {
    const Shortage shortage(count);
    if (ibv_device** const list = ibv_get_device_list(nullptr)) {
      ibv_free_device_list(list);
      return 0;
    }
    if (errno != EMFILE) return 2;
  }
  ibv_device** const list = ibv_get_device_list(nullptr);
  if (list == nullptr) return 3;
  ibv_context* const context = ibv_open_device(list[0]);
  if (context == nullptr || ibv_close_device(context) != 0) return 4;
  return 1;
}

// Comes first: children of a process without threads can be followed by ThreadSanitizer.
TEST(NoDescriptorStartTest, TheDeviceIsStartedWhenThereAreDescriptors) {
  int status = 1;
  for (int count = 0; status != 0; ++count) {
    ASSERT_LT(count, kMostDescriptors);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(kWantPatience / 1000);
      _exit(StartWith(count));
    }
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << status;
    status = WEXITSTATUS(status);
    ASSERT_LE(status, 1) << "with " << count << " descriptors";
  }
}

TEST(NoDescriptorTest, Verbs) {
  ibv_device** const devices = ibv_get_device_list(nullptr);
  ASSERT_NE(devices, nullptr);
  ibv_context* opened = nullptr;
  CallWithFew(
      "ibv_open_device", [&] { return ErrnoUnless((opened = ibv_open_device(devices[0])) != nullptr); },
      [&] { EXPECT_EQ(ibv_close_device(opened), 0); });
  ibv_context* const context = ibv_open_device(devices[0]);
  ASSERT_NE(context, nullptr);
  ibv_comp_channel* channel = nullptr;
  CallWithFew(
      "ibv_create_comp_channel", [&] { return ErrnoUnless((channel = ibv_create_comp_channel(context)) != nullptr); },
      [&] { EXPECT_EQ(ibv_destroy_comp_channel(channel), 0); });
  EXPECT_EQ(ibv_close_device(context), 0);
  ibv_free_device_list(devices);
}

class NoDescriptorCmTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(channel_ = rdma_create_event_channel(), nullptr); }
  void TearDown() override { rdma_destroy_event_channel(channel_); }

  void Create() { ASSERT_EQ(rdma_create_id(channel_, &id_, nullptr, RDMA_PS_TCP), 0); }
  void Destroy() { EXPECT_EQ(rdma_destroy_id(id_), 0); }
  // The errno of a call, or of the event that follows it.
  int ErrnoOfEvent(int result, rdma_cm_event_type wanted) {
    if (result != 0) return errno;
    pollfd waiting{channel_->fd, POLLIN, 0};
    if (poll(&waiting, 1, kWantPatience) != 1) return ETIME;
    rdma_cm_event* event = nullptr;
    if (rdma_get_cm_event(channel_, &event) != 0) return errno;
    const int error = event->event == wanted ? 0 : -event->status;
    EXPECT_EQ(rdma_ack_cm_event(event), 0);
    return error;
  }

  rdma_event_channel* channel_ = nullptr;
  rdma_cm_id* id_ = nullptr;
};

TEST_F(NoDescriptorCmTest, Ids) {
  rdma_event_channel* channel = nullptr;
  CallWithFew(
      "rdma_create_event_channel", [&] { return ErrnoUnless((channel = rdma_create_event_channel()) != nullptr); },
      [&] { rdma_destroy_event_channel(channel); });
  CallWithFew(
      "rdma_create_id without a channel",
      [&] { return ErrnoUnless(rdma_create_id(nullptr, &id_, nullptr, RDMA_PS_TCP) == 0); }, [&] { Destroy(); });
  rdma_addrinfo* answer = nullptr;
  rdma_addrinfo hints{};
  hints.ai_port_space = RDMA_PS_TCP;
  hints.ai_flags = RAI_PASSIVE;
  ASSERT_EQ(rdma_getaddrinfo("127.0.0.1", "0", &hints, &answer), 0);
  CallWithFew(
      "rdma_create_ep", [&] { return ErrnoUnless(rdma_create_ep(&id_, answer, nullptr, nullptr) == 0); },
      [&] { rdma_destroy_ep(id_); });
  rdma_freeaddrinfo(answer);
}

TEST_F(NoDescriptorCmTest, Addresses) {
  const auto undo = [&] { Destroy(); };
  // Each with an id of its own: one that has found its address keeps it.
  const auto with_id = [&](const std::function<int()>& call) {
    return [&, call] {
      Create();
      const int error = call();
      if (error != 0) Destroy();
      return error;
    };
  };
  CallWithFew("rdma_bind_addr", with_id([&] { return ErrnoUnless(rdma_bind_addr(id_, Loopback()) == 0); }), undo);
  CallWithFew("rdma_listen",
              with_id([&] { return ErrnoUnless(rdma_bind_addr(id_, Loopback()) == 0 && rdma_listen(id_, 1) == 0); }),
              undo);
  CallWithFew("rdma_resolve_addr", with_id([&] {
                return ErrnoOfEvent(rdma_resolve_addr(id_, nullptr, Loopback(htons(1)), kWantPatience),
                                    RDMA_CM_EVENT_ADDR_RESOLVED);
              }),
              undo);
}

TEST(NoDescriptorTest, ProgramsThatConnect) {
  PlayWithEachFailing(Who::kCaller, EMFILE);
}

TEST(NoDescriptorTest, TheDevicesThread) {
  PlayWithEachFailing(Who::kOthers, EMFILE);
}

}  // namespace
}  // namespace stagecoach::verbs::emulated
