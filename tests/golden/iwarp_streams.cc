#include "tests/golden/iwarp_streams.h"

#include "base/cursor.h"
#include "emu/wire/mpa.h"

namespace stagecoach::testing {

namespace {

using emu::wire::MpaFrame;
using emu::wire::MpaFrameKind;

// The frame at the start of `stream`; empty when there is no whole one.
ConstBytes LeadingFrame(MpaFrameKind kind, ConstBytes stream) {
  const auto size = emu::wire::MpaFrameSize(kind, stream);
  return size.has_value() && *size <= stream.size() ? stream.first(*size) : ConstBytes{};
}

}  // namespace

std::vector<RecordedFpdu> CutFpdus(ConstBytes& stream) {
  std::vector<RecordedFpdu> fpdus;
  while (stream.size() >= emu::wire::kMpaLengthSize) {
    const size_t length = ByteReader(stream).U16();
    const size_t size = emu::wire::FpduSize(length);
    if (size > stream.size()) break;
    const size_t covered = size - emu::wire::kMpaCrcSize;
    fpdus.push_back({.covered = stream.first(covered),
                     .ulpdu = stream.subspan(emu::wire::kMpaLengthSize, length),
                     .pad = stream.subspan(emu::wire::kMpaLengthSize + length, emu::wire::FpduPad(length)),
                     .crc = stream.subspan(covered, emu::wire::kMpaCrcSize)});
    stream = stream.subspan(size);
  }
  return fpdus;
}

std::vector<std::byte> WithoutSegmentationFlag(ConstBytes frame) {
  std::vector<std::byte> bytes(frame.begin(), frame.end());
  if (bytes.size() > emu::wire::kMpaKeySize) {
    bytes[emu::wire::kMpaKeySize] &= ~std::byte{emu::wire::kMpaFlagSiwSegmentationOffload};
  }
  return bytes;
}

std::optional<IwarpConnection> CutIwarp(const TcpConnection& connection) {
  IwarpConnection iwarp;
  iwarp.request = LeadingFrame(MpaFrameKind::kRequest, connection.from_client.bytes);
  if (iwarp.request.empty()) return std::nullopt;
  iwarp.reply = LeadingFrame(MpaFrameKind::kReply, connection.from_server.bytes);
  iwarp.client_rest = ConstBytes(connection.from_client.bytes).subspan(iwarp.request.size());
  iwarp.server_rest = ConstBytes(connection.from_server.bytes).subspan(iwarp.reply.size());
  const auto reply = MpaFrame::Decode(MpaFrameKind::kReply, iwarp.reply);
  if (!reply.has_value() || reply->rejected()) return iwarp;
  iwarp.accepted = true;
  iwarp.crc = reply->crc();
  iwarp.from_client = CutFpdus(iwarp.client_rest);
  iwarp.from_server = CutFpdus(iwarp.server_rest);
  return iwarp;
}

}  // namespace stagecoach::testing
