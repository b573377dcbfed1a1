#include "scenarios/runner/silent_peer_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/cursor.h"
#include "base/trace.h"
#include "emu/fabric/fabric.h"
#include "emu/fabric/stream.h"
#include "emu/nic/device_profile.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/mpa.h"

namespace stagecoach::scenario {
namespace {

// Of what a peer says first, so many bytes.
std::vector<std::byte> Words(bool infiniband, size_t said) {
  std::array<std::byte, emu::wire::kCarrierHelloSize + emu::wire::kMpaFrameSizeMax> room{};
  ByteWriter out(room);
  if (infiniband) {
    emu::wire::CarrierHello().Encode(out);
  } else {
    emu::wire::MpaFrame().Encode(out);
  }
  return {room.begin(), room.begin() + static_cast<ptrdiff_t>(said)};
}

}  // namespace

// One stream at a time.
class SilentPeerProgram::Visitor final : public emu::ReadyWatcher {
 public:
  Visitor(SilentPeerProgram& program, uint32_t number)
      : program_(program), number_(number), times_left_(program.spec_.times()) {}
  ~Visitor() override {
    if (timer_ != 0) loop().Cancel(timer_);
    Let();
  }

  void ComeIn(Duration time) {
    timer_ = loop().At(loop().Now() + time, [this] {
      timer_ = 0;
      Come();
    });
  }

  void OnReady() override {
    std::array<std::byte, 256> answer;
    const MutableBytes into(answer);
    emu::IoResult result;
    do {
      result = stream_->Read({&into, 1});
    } while (result.status == emu::IoStatus::kOk);
    if (result.status == emu::IoStatus::kWouldBlock) return Stay();
    ++program_.tally_.shut_out;
    Tell("silence.shut_out");
    Leave();
  }

  bool is_there() const { return stream_ != nullptr; }

 private:
  EventLoop& loop() const { return program_.stage_.loop(program_.host()); }
  void Tell(std::string_view event) const {
    Trace(program_.stage_.trace(), program_.stage_.Now(), program_.name_, event, {{"stream", uint64_t{number_}}});
  }

  void Come() {
    --times_left_;
    attempt_ = program_.stage_.world()
                   .fabric(program_.host())
                   .Connect({}, program_.there_, [this](Result<std::unique_ptr<emu::Stream>, emu::FabricError> result) {
                     if (!result) {
                       Tell("silence.not_heard");
                       return Leave();
                     }
                     ++program_.tally_.silent_streams;
                     since_ = program_.stage_.Now();
                     Tell("silence.begins");
                     stream_ = std::move(*result);
                     stream_->SetWatcher(this);
                     Stay();
                   });
  }

  // Says what is still to be said, and waits to be shut out.
  void Stay() {
    const ConstBytes all = program_.words_;
    while (said_ < all.size()) {
      const ConstBytes rest = all.subspan(said_);
      const emu::IoResult result = stream_->Write({&rest, 1});
      if (result.status != emu::IoStatus::kOk) break;
      said_ += result.bytes;
    }
    stream_->Arm(true, said_ < all.size());
  }

  // Not at once: the stream, or the attempt, is calling.
  void Leave() {
    timer_ = loop().At(loop().Now(), [this] {
      timer_ = 0;
      Let();
      if (times_left_ > 0) ComeIn(Duration(program_.spec_.again_ns()));
    });
  }

  void Let() {
    Judge();
    if (stream_ != nullptr) stream_->SetWatcher(nullptr);
    stream_.reset();
    attempt_.reset();
    said_ = 0;
  }

  void Judge() {
    Stage& stage = program_.stage_;
    const SilentPeer& spec = program_.spec_;
    if (stream_ == nullptr || stage.Now() - since_ <= kShutOutTime) return;
    if (stage.Disturbed(spec.host(), spec.server(), since_)) return;
    stage.Violate(
        "silence.held",
        fmt::format("{}, stream {}: {} has let it say nothing for {} s", program_.name_, number_, spec.server(),
                    std::chrono::duration_cast<std::chrono::seconds>(stage.Now() - since_).count()));
  }

  SilentPeerProgram& program_;
  const uint32_t number_;
  uint32_t times_left_;
  size_t said_ = 0;
  EventLoop::TimerId timer_ = 0;
  Instant since_{};  // the stream is there
  std::unique_ptr<emu::ConnectAttempt> attempt_;
  std::unique_ptr<emu::Stream> stream_;
};

SilentPeerProgram::SilentPeerProgram(Stage& stage, const SilentPeer& spec, uint32_t index)
    : stage_(stage), spec_(spec), name_(fmt::format("{}/silent-peer-{}", spec.host(), index)) {
  const auto& hosts = stage.scenario().host();
  const Host& server =
      *std::find_if(hosts.begin(), hosts.end(), [&](const Host& each) { return each.name() == spec.server(); });
  const emu::DeviceProfile device = MakeProfile(server.device());
  const bool infiniband = device.transport == emu::TransportKind::kInfiniband;
  // The first of its block: a host is one process.
  there_ = *emu::IpEndpoint::Parse(stage.AddressOf(spec.server()),
                                   infiniband ? device.port_base : static_cast<uint16_t>(spec.port()));
  words_ = Words(infiniband, spec.said_bytes());
}

SilentPeerProgram::~SilentPeerProgram() = default;

void SilentPeerProgram::Start() {
  for (uint32_t i = 0; i < spec_.streams(); ++i) {
    visitors_.push_back(std::make_unique<Visitor>(*this, i));
    visitors_.back()->ComeIn(Duration(spec_.start_ns()));
  }
}

void SilentPeerProgram::Kill() {
  visitors_.clear();
}

std::string SilentPeerProgram::Describe() const {
  const auto there =
      std::count_if(visitors_.begin(), visitors_.end(), [](const auto& visitor) { return visitor->is_there(); });
  return fmt::format("{}: {} streams, {} have been shut out\n", name_, there, tally_.shut_out);
}

}  // namespace stagecoach::scenario
