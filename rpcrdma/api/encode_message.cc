#include "rpcrdma/api/encode_message.h"

#include <algorithm>

namespace stagecoach::rpcrdma::internal {
namespace {

constexpr size_t kFirstBuffer = 1024;

}  // namespace

std::optional<EncodedMessage> EncodeMessage(std::vector<std::byte>* buffer, size_t bytes_max, size_t eligible_max,
                                            FunctionRef<void(XdrWriter&)> write) {
  size_t room = std::min(std::max(buffer->size(), kFirstBuffer), bytes_max);
  while (true) {
    if (buffer->size() < room) buffer->resize(room);
    XdrWriter out(MutableBytes(*buffer).first(room), eligible_max);
    write(out);
    if (out.ok()) {
      return EncodedMessage{
          .size = out.written().size(), .items = out.eligible(), .longest_inside = out.longest_inside()};
    }
    if (room == bytes_max) return std::nullopt;
    room += std::min(room, bytes_max - room);
  }
}

}  // namespace stagecoach::rpcrdma::internal
