// What a Reply owns: the message, in itself when it is short. And where a Reply comes from.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/small_vector.h"
#include "rpcrdma/api/client.h"
#include "rpcrdma/api/errors_internal.h"
#include "rpcrdma/core/requester.h"
#include "rpcrdma/xdr/reduced_stream.h"

namespace stagecoach::rpcrdma::internal {

struct ReplyStorage {
  std::array<std::byte, 448> brief;
  std::vector<std::byte> longer;
  std::unique_ptr<std::byte[]> reply_chunk;
  std::unique_ptr<std::byte[]> read_chunks;
  std::vector<std::unique_ptr<std::byte[]>> grown;  // results that were longer than the caller's memory
  SmallVector<uint64_t, 2> placed;
  std::optional<WrongLengths> wrong_lengths;  // unless they are to be exact

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

struct ReplyMaker {
  // Of a call without failure: its reply, or why that is none. Eligible results lie in `buffers` if they were placed.
  // `wrong_lengths` counts those of the connection (WrongLengths), and is null where they are to be exact.
  static Result<Reply, CallError> Make(CallOutcome& outcome, const CallName& name,
                                       const SmallVector<MutableBytes, 2>& buffers,
                                       std::shared_ptr<std::atomic<uint64_t>> wrong_lengths = nullptr);
};

}  // namespace stagecoach::rpcrdma::internal
