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
};

struct TcpConnection {
  uint32_t client_address = 0;  // the end that sent the SYN
  uint16_t client_port = 0;
  uint32_t server_address = 0;
  uint16_t server_port = 0;
  TcpDirection from_client;
  TcpDirection from_server;

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
