// Cuts a recorded TCP connection into its MPA frames and FPDUs, for tests over captures of real peers.
//
// Deliberately simple and independent of the record layer under test: whole streams in memory, no markers (no recorded
// peer uses any).
#pragma once

#include <optional>
#include <vector>

#include "base/bytes.h"
#include "tests/support/pcap_reader.h"

namespace stagecoach::testing {

struct RecordedFpdu {
  ConstBytes covered;  // length field, ULPDU and pad: what the CRC covers
  ConstBytes ulpdu;
  ConstBytes pad;
  ConstBytes crc;
};

// Views into the TcpConnection.
struct IwarpConnection {
  ConstBytes request;  // whole MPA frames; empty when not there
  ConstBytes reply;
  bool accepted = false;
  bool crc = false;  // the Reply's C
  std::vector<RecordedFpdu> from_client;
  std::vector<RecordedFpdu> from_server;
  // Bytes behind the last whole FPDU (or behind a Request that got no acceptance).
  ConstBytes client_rest;
  ConstBytes server_rest;
};

// Cuts whole FPDUs off the front of `stream`; what is left of it is less than one.
std::vector<RecordedFpdu> CutFpdus(ConstBytes& stream);

// A Request or Reply without siw's private flag, which we neither set nor copy.
std::vector<std::byte> WithoutSegmentationFlag(ConstBytes frame);

// nullopt when the client did not send a whole MPA Request: another protocol.
std::optional<IwarpConnection> CutIwarp(const TcpConnection& connection);

}  // namespace stagecoach::testing
