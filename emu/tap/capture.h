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
  // A record (ULPDU), in any number of parts; at most 65,535 bytes, what is beyond is cut.
  virtual void Record(CaptureDirection direction, std::span<const ConstBytes> ulpdu) = 0;
  // Nothing follows in this direction. Repeated calls do nothing.
  virtual void Close(CaptureDirection direction, CaptureEnd how) = 0;
};

class CaptureSink {
 public:
  virtual ~CaptureSink() = default;

  // A connection has been established; `initiator`: by the local end. When both ends of a connection are captured in
  // one process, the second flow opened for it stays silent, so that each byte is in the capture once.
  virtual std::shared_ptr<CaptureFlow> OpenFlow(const IpEndpoint& local, const IpEndpoint& remote, bool initiator) = 0;
};

}  // namespace stagecoach::emu
