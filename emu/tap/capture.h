// Capture: what passes on a connection, told to a sink that makes frames of it.
//
// A sink gives each connection a flow; whoever sees something of the connection (capture_fabric.h the opening and the
// end, capture_tap.h the records) tells it to the flow. Implemented by PcapNgWriter.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/bytes.h"
#include "emu/fabric/address.h"

namespace stagecoach::emu {

// As seen from the flow's local end.
enum class CaptureDirection : uint8_t { kSent, kReceived };

// What a connection is shown as. The device says so, and never the bytes, which are a peer's.
enum class CaptureStyle : uint8_t {
  kIwarp,  // MPA over TCP, as it is
  kRoce,   // RoCEv2: the packets of InfiniBand QPs over UDP, and nothing of the stream that carries them
};

// How one direction of a connection ends. kReset ends both.
enum class CaptureEnd : uint8_t { kFin, kReset };

// Each member from any thread; calls about one direction come in the order of its bytes. None fails: a capture that
// cannot go on falls silent, and the connection does not notice.
class CaptureFlow {
 public:
  virtual ~CaptureFlow() = default;

  // An MPA Request or Reply frame, or whatever a stranger sent in its place. The frames decide how records are framed
  // from then on: CRC if the Reply says so, markers towards an end that asked for them (RFC 5044 section 7.1).
  virtual void Handshake(CaptureDirection direction, ConstBytes bytes) = 0;
  // A record (an ULPDU, or an InfiniBand packet as emu/wire/ib.h has it), in any number of parts; at most 65,535 bytes,
  // what is beyond is cut.
  virtual void Record(CaptureDirection direction, std::span<const ConstBytes> record) = 0;
  // Nothing follows in this direction. Repeated calls do nothing.
  virtual void Close(CaptureDirection direction, CaptureEnd how) = 0;
};

class CaptureSink {
 public:
  virtual ~CaptureSink() = default;

  // A connection has been established; `initiator`: by the local end. When both ends of a connection are captured in
  // one process, the second flow opened for it stays silent, so that each byte is in the capture once. In the style of
  // RoCE flows are told of records alone.
  virtual std::shared_ptr<CaptureFlow> OpenFlow(CaptureStyle style, const IpEndpoint& local, const IpEndpoint& remote,
                                                bool initiator) = 0;
};

}  // namespace stagecoach::emu
