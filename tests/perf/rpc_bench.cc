// Rate of NULL calls and bandwidth of 1 MiB PUT (Read chunk) and GET (Write chunk) between two pinned processes over
// loopback, through the C++ API. GET of 64 KiB and 1 MiB also with the client's memory registered once (_registered).
//
// Usage: rpc_bench SECONDS [ADDRESS [polling|events]]
//
// "polling" runs both ends with the loop's poll phase, "events" without it: each wakeup then goes through the
// completion channel. "serial" has one call outstanding, as a synchronous client would; the other NULL rows keep 16.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "base/asio_loop/asio_loop.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/server.h"
#include "tests/perf/measure.h"

namespace {

using namespace stagecoach;           // NOLINT(google-build-using-namespace): a program, not a header
using namespace stagecoach::rpcrdma;  // NOLINT(google-build-using-namespace)
using perf::PinTo;
using perf::Row;
using perf::Seconds;

constexpr uint32_t kProgram = 0x20000098;
constexpr uint32_t kVersion = 1;
enum Procedure : uint32_t { kNull = 0, kPut = 1, kGet = 2 };
constexpr size_t kBlock = 1 << 20;

constexpr const char* kData[] = {"data"};
constexpr ProcedureBinding kProcedures[] = {
    {.number = kNull, .name = "NULL"},
    {.number = kPut, .name = "PUT", .arguments = kData, .reply_fixed = 4},
    {.number = kGet, .name = "GET", .results = kData, .reply_fixed = 4},
};
constexpr Binding kBinding{.program = kProgram, .version = kVersion, .name = "blocks", .procedures = kProcedures};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "rpc_bench: %s\n", what.c_str());
  std::exit(1);
}

// Takes blocks and throws them away; gives blocks from one pooled buffer's worth of memory.
class BlockService final : public Service {
 public:
  uint32_t program() const override { return kProgram; }
  VersionRange versions() const override { return {kVersion, kVersion}; }
  bool idempotent(uint32_t, uint32_t) const override { return true; }
  std::span<const Binding> bindings() const override { return {&kBinding, 1}; }
  void Handle(Request request) override {
    switch (request.procedure()) {
      case kNull:
        return request.Reply();
      case kPut: {
        const ConstBytes data = request.args().EligibleOpaque("data", kBlock);
        if (!request.args().Finish()) return request.Fail(AcceptStat::kGarbageArgs);
        return request.Reply([&](XdrWriter& results) { results.U32(static_cast<uint32_t>(data.size())); });
      }
      case kGet: {
        const uint32_t size = request.args().U32("size");
        if (!request.args().Finish() || size > kBlock) return request.Fail(AcceptStat::kGarbageArgs);
        std::optional<Buffer> block = request.Allocate(size);
        if (!block) return request.Fail(AcceptStat::kSystemErr);
        const ConstBytes bytes = block->bytes();
        return request.Reply([bytes](XdrWriter& results) { results.EligibleOpaque(bytes); }, std::move(*block));
      }
      default:
        return request.Fail(AcceptStat::kProcUnavail);
    }
  }
};

AsioLoop::Options LoopOptions(bool polling) {
  AsioLoop::Options options;
  options.poll_time = polling ? Duration(200us) : Duration(0);
  return options;
}

[[noreturn]] void RunServer(const char* address, bool polling, int port_pipe) {
  PinTo(1);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  AsioLoop loop(LoopOptions(polling));
  BlockService service;
  Server server(loop, {});
  server.Register(&service);
  if (auto listening = server.Listen(address, 0); !listening) Die(listening.error().ToString());
  const uint16_t port = server.port();
  if (write(port_pipe, &port, sizeof(port)) != sizeof(port)) Die("the pipe is broken");
  loop.Run();
  _exit(0);
}

class Load {
 public:
  Load(const char* address, uint16_t port, bool polling) : loop_(LoopOptions(polling)), client_(loop_, {}) {
    client_.Register(kBinding);
    bool connected = false;
    client_.Connect(address, port, [&](Result<void, CallError> result) {
      if (!result) Die(result.error().ToString());
      connected = true;
    });
    while (!connected) loop_.RunOnce();
  }

  double NullRate(int depth, double seconds) { return Run({.procedure = kNull}, depth, seconds); }
  // In MB/s.
  double BlockRate(Procedure procedure, size_t size, bool registered, double seconds) {
    const Kind kind{procedure, size, registered ? memory_ : RegisteredMemory()};
    return Run(kind, kBlockDepth, seconds) * static_cast<double>(size) / 1e6;
  }

 private:
  static constexpr int kBlockDepth = 4;

  struct Kind {
    Procedure procedure;
    size_t size = 0;
    RegisteredMemory memory;
  };

  double Run(const Kind& kind, int depth, double seconds) {
    stop_ = false;
    done_ = 0;
    for (int i = 0; i < depth; ++i) Start(kind, i);
    while (done_ < 100) loop_.RunOnce();
    const double start = Seconds();
    const uint64_t before = done_;
    while (Seconds() - start < seconds) {
      for (int i = 0; i < 16; ++i) loop_.RunOnce(1ms);
    }
    const double rate = static_cast<double>(done_ - before) / (Seconds() - start);
    stop_ = true;
    while (client_.outstanding() > 0) loop_.RunOnce();
    return rate;
  }

  void Start(const Kind& kind, int slot) {
    CallOptions options;
    options.registered_memory = kind.memory;
    if (kind.procedure == kGet) {
      options.result_buffers = {MutableBytes(sinks_).subspan(static_cast<size_t>(slot) * kBlock, kind.size)};
    }
    const auto args = [&](XdrWriter& writer) {
      if (kind.procedure == kPut) writer.EligibleOpaque(ConstBytes(source_).first(kind.size));
      if (kind.procedure == kGet) writer.U32(static_cast<uint32_t>(kind.size));
    };
    client_.Call({kProgram, kVersion, kind.procedure}, args, options,
                 [this, &kind, slot](Result<Reply, CallError> reply) {
                   if (!reply) Die(reply.error().ToString());
                   ++done_;
                   if (!stop_) Start(kind, slot);
                 });
  }

  AsioLoop loop_;
  Client client_;
  std::vector<std::byte> source_ = std::vector<std::byte>(kBlock, std::byte{1});
  std::vector<std::byte> sinks_ = std::vector<std::byte>(kBlockDepth * kBlock);
  const RegisteredMemory memory_{sinks_};
  uint64_t done_ = 0;
  bool stop_ = false;
};

void Measure(const char* address, bool polling, double seconds) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) Die("no pipe");
  // Forked before the first verbs call, so each process has a NIC of its own.
  const pid_t server = fork();
  if (server == 0) RunServer(address, polling, pipe_ends[1]);
  close(pipe_ends[1]);
  uint16_t port = 0;
  if (read(pipe_ends[0], &port, sizeof(port)) != sizeof(port)) Die("the server did not start");
  close(pipe_ends[0]);
  // The client's NIC must not exist when the next server is forked either.
  const pid_t client = fork();
  if (client == 0) {
    PinTo(0);
    {
      Load load(address, port, polling);
      Row(polling ? "rpc_null_rate_serial_polling" : "rpc_null_rate_serial_events", load.NullRate(1, seconds),
          "calls/s");
      Row(polling ? "rpc_null_rate_polling" : "rpc_null_rate_events", load.NullRate(16, seconds), "calls/s");
      if (polling) {
        Row("rpc_put_1m", load.BlockRate(kPut, kBlock, false, seconds), "MB/s");
        Row("rpc_get_1m", load.BlockRate(kGet, kBlock, false, seconds), "MB/s");
        Row("rpc_get_1m_registered", load.BlockRate(kGet, kBlock, true, seconds), "MB/s");
        Row("rpc_get_64k", load.BlockRate(kGet, 64 << 10, false, seconds), "MB/s");
        Row("rpc_get_64k_registered", load.BlockRate(kGet, 64 << 10, true, seconds), "MB/s");
      }
    }
    _exit(0);
  }
  int status = 0;
  waitpid(client, &status, 0);
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  const char* address = argc > 2 ? argv[2] : "127.0.0.1";
  const std::string only = argc > 3 ? argv[3] : "";
  if (only != "events") Measure(address, true, seconds);
  if (only != "polling") Measure(address, false, seconds);
  return 0;
}
