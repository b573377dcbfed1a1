#include "rpcrdma/api/call_message.h"

#include <utility>

#include "rpcrdma/api/encode_message.h"
#include "rpcrdma/api/registered_memory_internal.h"

namespace stagecoach::rpcrdma::internal {
namespace {

// Null: nothing of the call or its reply may be placed directly.
const ProcedureBinding* FindBinding(const BindingRegistry& bindings, const CallName& name) {
  const Binding* binding = bindings.Find(name.program, name.version);
  return binding == nullptr ? nullptr : binding->Find(name.procedure);
}

// [5666bis:4.4.1+2] [5666:3.4#2] [5666bis:5.4.2+1] [5666:3.4+15] [5666:3.5+6] [2004:3.6+4] [5666bis:6.2+3] [5666:3.6+4]
// [2004:3.7+4] [5666bis:6#1] What the Binding does not list as eligible stays in the reply message, which is so much
// longer.
void ProvideForReply(const CallOptions& options, const ProcedureBinding* binding, CallMessage* message) {
  message->reply_base_max = options.reply_bytes_max ? *options.reply_bytes_max
                            : binding != nullptr    ? ReplyBytesMax(*binding, message->bytes(), message->items)
                                                    : kReplyBytesMax;
  const size_t offered = binding != nullptr ? binding->results.size() : 0;
  for (const MutableBytes buffer : options.result_buffers) {
    if (message->results.size() < offered) {
      message->results.push_back(buffer);
    } else {
      message->reply_base_max += XdrRoundUp(buffer.size());
    }
  }
}

// False: longer than `bytes_max`.
bool Encode(const CallName& name, Client::ArgsWriter args, const CallOptions& options, const BindingRegistry& bindings,
            size_t bytes_max, CallMessage* message) {
  const ProcedureBinding* const binding = FindBinding(bindings, name);
  message->direct_placement = options.direct_placement;
  CallHeader header{.prog = name.program, .vers = name.version, .proc = name.procedure};
  if (options.credentials != nullptr) header.cred = *options.credentials;
  const size_t eligible_max = binding != nullptr ? binding->arguments.size() : 0;
  auto encoded = EncodeMessage(&message->buffer, bytes_max, eligible_max, [&](XdrWriter& out) {
    EncodeCall(header, out);
    args(out);
  });
  if (!encoded) return false;
  message->size = encoded->size;
  message->items = std::move(encoded->items);
  message->longest_inside = encoded->longest_inside;
  ProvideForReply(options, binding, message);
  return true;
}

// False: some of the call's memory is not in it, or is to be written and must not be.
bool AdoptMemory(const CallOptions& options, CallMessage* message) {
  const std::shared_ptr<LastingMemory>& memory = RegisteredMemoryAccess::Of(options.registered_memory);
  if (memory == nullptr) return true;
  for (const EligibleItem& item : message->items) {
    if (!memory->Contains(item.data)) return false;
  }
  for (const MutableBytes buffer : options.result_buffers) {
    if (!memory->Contains(buffer) || (!buffer.empty() && !memory->writable())) return false;
  }
  message->lasting = memory;
  return true;
}

}  // namespace

std::optional<CallError> MakeCallMessage(const CallName& name, Client::ArgsWriter args, const CallOptions& options,
                                         const BindingRegistry& bindings, size_t bytes_max, CallMessage* message) {
  if (!Encode(name, args, options, bindings, bytes_max, message)) return TooLargeCall(name, bytes_max);
  if (!AdoptMemory(options, message)) {
    return NamedError(
        CallError::Kind::kMemory, name,
        "an argument or a result buffer is not in its registered memory, or is to be written and must not be");
  }
  return std::nullopt;
}

}  // namespace stagecoach::rpcrdma::internal
