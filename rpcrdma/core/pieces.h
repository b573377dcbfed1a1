// Turns the pieces a plan names into bytes.
#pragma once

#include <span>

#include "base/bytes.h"
#include "base/cursor.h"
#include "base/mutant.h"
#include "rpcrdma/core/chunk_planner.h"

namespace stagecoach::rpcrdma {

// A message as its encoder left it: bytes that stayed, views of eligible items that did not.
struct EncodedMessage {
  ConstBytes base;
  std::span<const EligibleItem> items;
};

// The bytes of a kBase or kItem piece.
inline ConstBytes PieceBytes(const EncodedMessage& message, const Piece& piece) {
  const ConstBytes source = piece.source == Piece::Source::kItem ? message.items[piece.index].data : message.base;
  return source.subspan(piece.offset, piece.length);
}

// Gathers what follows the header in a Send.
inline void WriteInline(const EncodedMessage& message, std::span<const Piece> pieces, ByteWriter& out) {
  for (const Piece& piece : pieces) {
    if (piece.source == Piece::Source::kPad) {
      const bool short_by_one = STAGECOACH_MUTANT("round-up-off-by-one", "round-up between inline items lacks a byte");
      out.Zeros(piece.length - (short_by_one ? 1 : 0));
    } else {
      out.Bytes(PieceBytes(message, piece));
    }
  }
}

}  // namespace stagecoach::rpcrdma
