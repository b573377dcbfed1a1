// What a Reply owns: the message, in itself when it is short.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "base/small_vector.h"

namespace stagecoach::rpcrdma::internal {

struct ReplyStorage {
  std::array<std::byte, 448> brief;
  std::vector<std::byte> longer;
  std::unique_ptr<std::byte[]> reply_chunk;
  SmallVector<uint64_t, 2> placed;

  // Keeps a copy of `message`.
  ConstBytes Keep(ConstBytes message) {
    if (message.size() <= brief.size()) {
      CopyBytes(brief, message);
      return ConstBytes(brief).first(message.size());
    }
    longer.assign(message.begin(), message.end());
    return longer;
  }
};

}  // namespace stagecoach::rpcrdma::internal
