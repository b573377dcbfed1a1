// PcapNgWriter: a capture file that stock Wireshark opens and dissects as MPA and DDP/RDMAP, or as RoCEv2, with
// RPC-over-RDMA in it.
//
// Writes pcapng (draft-ietf-opsawg-pcapng: Section Header, Interface Description, Enhanced Packet Blocks; nanoseconds;
// raw IP). What taps see are records, so what stands around them is made here.
//
// iWARP: IP and TCP headers: handshake, running sequence numbers, valid checksums, FIN or RST. One FPDU is one segment;
// one too long for an IP packet takes two. Every segment acknowledges all that has passed the other way: the capture
// tells what the NIC saw and not how the path delivered it.
//
// RoCE (annex A17 of the InfiniBand specification): IP and UDP headers, pad bytes and ICRC, to UDP port 4791, from a
// port that both addresses and the destination QP make. Nothing tells of the stream that carries the packets: it has
// no counterpart in a network of InfiniBand QPs.
//
// Errors: once a write fails (a full disk), the file is cut back to its last whole packet, the reason is kept and
// reported once, and everything after is dropped. The NIC is not disturbed.
//
// Forked children do not have the file (base/fork).
//
// Thread-safe. Flows keep the writer alive. Files are readable by their owner alone: captures hold what was
// transferred.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "emu/tap/capture.h"

namespace stagecoach::emu {

class PcapNgWriter final : public CaptureSink, public std::enable_shared_from_this<PcapNgWriter> {
 public:
  // Time since the Unix epoch, or since the beginning of a simulated world. Any thread.
  using Clock = std::function<std::chrono::nanoseconds()>;
  // Called once, with words for people, from whichever thread met the error. Must not call the writer or its flows.
  using ErrorCallback = std::function<void(const std::string& message)>;

  struct Error {
    int error = 0;  // errno
    std::string message;
  };

  // Creates or overwrites `path`: a regular file, or a device; a pipe could block the NIC and is refused.
  static Result<std::shared_ptr<PcapNgWriter>, Error> Create(const std::string& path, Clock clock,
                                                             ErrorCallback on_error);
  // Writes to `fd`, a file from its beginning or a device, which it closes (CloseDescriptor). `path` names it in
  // messages, `interface` what was captured, where captures of several processes are merged.
  static Result<std::shared_ptr<PcapNgWriter>, Error> Take(int fd, const std::string& path,
                                                           const std::string& interface, Clock clock,
                                                           ErrorCallback on_error);
  // Whether a file, open for reading, is a capture by this class without a packet.
  static bool HasNoPackets(int fd);
  ~PcapNgWriter() override;
  PcapNgWriter(const PcapNgWriter&) = delete;
  PcapNgWriter& operator=(const PcapNgWriter&) = delete;

  static std::chrono::nanoseconds WallClock();

  std::shared_ptr<CaptureFlow> OpenFlow(CaptureStyle style, const IpEndpoint& local, const IpEndpoint& remote,
                                        bool initiator) override;

  uint64_t packets() const;
  // What stopped the capture; empty while all is well.
  std::string error() const;

 private:
  class Flow;
  class IwarpFlow;
  class RoceFlow;
  using FlowKey = std::pair<IpEndpoint, IpEndpoint>;

  PcapNgWriter(std::string path, int fd, Clock clock, ErrorCallback on_error);

  // All of these with mutex_ held.
  bool WriteHeader(const std::string& interface);
  void WritePacket(CaptureDirection direction, ConstBytes headers, ConstBytes payload);
  bool WriteAll(std::span<const ConstBytes> parts);
  void Fail(int error);

  const std::string path_;
  const int fd_;
  const Clock clock_;
  const ErrorCallback on_error_;
  mutable std::mutex mutex_;
  uint64_t good_size_ = 0;  // bytes of the file that are whole blocks; guarded by mutex_, as is all below
  uint64_t packets_ = 0;
  uint64_t last_time_ = 0;
  std::string error_;
  std::vector<std::byte> packet_;  // where flows build FPDUs and RoCE packets
  std::set<FlowKey> open_flows_;   // by (local, remote)
};

}  // namespace stagecoach::emu
