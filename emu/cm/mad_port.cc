#include "emu/cm/mad_port.h"

#include <utility>

#include "emu/nic/nic.h"
#include "emu/wire/ib.h"

namespace stagecoach::emu {
namespace {

class NicMadPort final : public MadPort {
 public:
  explicit NicMadPort(Nic& nic) : nic_(nic) {}

  void Start(Handlers handlers) override {
    nic_.datagrams().SetGsiHandler(
        [on_mad = std::move(handlers.on_mad)](const DatagramPeer& from, const wire::IbHeader&, ConstBytes payload) {
          on_mad(from, payload);
        });
    nic_.datagrams().SetLinkHandler(std::move(handlers.on_link));
    nic_.roce().SetLossHandler(std::move(handlers.on_loss));
  }

  void Stop() override {
    nic_.datagrams().SetGsiHandler({});
    nic_.datagrams().SetLinkHandler({});
    nic_.roce().SetLossHandler({});
  }

  DatagramPeer PeerAt(const RocePath& path, uint8_t slot) const override { return nic_.datagrams().PeerAt(path, slot); }

  bool Send(const DatagramPeer& to, ConstBytes mad) override {
    wire::IbHeader header;
    header.service = wire::IbService::kUd;
    header.op = wire::IbOp::kSendOnly;
    header.destination_qp = header.source_qp = kGsiQp;
    header.qkey = kGsiQkey;
    header.psn = next_psn_++ & wire::kPsnMask;
    return nic_.datagrams().Send(to, header, mad) == DatagramPort::Sent::kQueued;
  }

 private:
  Nic& nic_;
  uint32_t next_psn_ = 0;  // the loop's own
};

}  // namespace

std::unique_ptr<MadPort> MakeMadPort(Nic& nic) {
  return std::make_unique<NicMadPort>(nic);
}

}  // namespace stagecoach::emu
