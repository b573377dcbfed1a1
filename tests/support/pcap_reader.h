// Reads classic pcap files and puts the TCP streams in them together again: the byte streams of recorded peers, for
// golden tests.
//
// Understands both byte orders, microsecond and nanosecond files, Ethernet frames with IPv4. Not understood, and
// reported as an error: other link types, pcapng. IP fragments and IPv6 are skipped and counted. Checksums are not
// looked at. Single-threaded; memory is bounded by the size of the file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"

namespace stagecoach::testing {

// One direction of a connection, in sequence order from the first byte after SYN.
struct TcpDirection {
  std::vector<std::byte> bytes;
  // Set when the capture lacks bytes: `bytes` ends before the gap.
  bool gap = false;
  bool fin = false;
  bool reset = false;
};

// What one packet of a connection says of how far its sender had come. What a sender does follows from no more of the
// other end's bytes than it has acknowledged by then, wherever on the path the capture was taken.
struct TcpPacket {
  bool from_client = false;
  uint64_t sent = 0;              // bytes of the sender's stream that the capture holds by now, in order
  uint64_t acknowledged = 0;      // bytes of the other end's stream that the sender has; at most what the capture holds
  bool fin_acknowledged = false;  // and it knows that there will be no more
  bool fin = false;               // the sender has ended its stream, with this packet or before
  bool reset = false;
};

struct TcpConnection {
  uint32_t client_address = 0;  // the end that sent the SYN
  uint16_t client_port = 0;
  uint32_t server_address = 0;
  uint16_t server_port = 0;
  TcpDirection from_client;
  TcpDirection from_server;
  std::vector<TcpPacket> packets;  // in the order of the capture, from the SYN on

  std::string Name() const;  // "10.0.2.15:56258 -> 10.0.2.15:7174"
};

struct TcpCapture {
  std::vector<TcpConnection> connections;  // in the order of their SYNs
  uint64_t packets = 0;
  uint64_t skipped_packets = 0;  // not whole TCP over IPv4 segments of a connection whose SYN was seen
};

// The error says what is wrong with the file, and where.
Result<TcpCapture, std::string> ReadTcpCapture(ConstBytes pcap);
// The same from a file.
Result<TcpCapture, std::string> ReadTcpCaptureFile(const std::string& path);

}  // namespace stagecoach::testing
