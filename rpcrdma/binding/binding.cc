#include "rpcrdma/binding/binding.h"

#include <algorithm>

namespace stagecoach::rpcrdma {

const ProcedureBinding* Binding::Find(uint32_t procedure) const {
  const auto found =
      std::find_if(procedures.begin(), procedures.end(), [&](const auto& each) { return each.number == procedure; });
  return found == procedures.end() ? nullptr : &*found;
}

void BindingRegistry::Add(const Binding& binding) {
  for (const Binding*& known : bindings_) {
    if (known->program != binding.program || known->version != binding.version) continue;
    known = &binding;
    return;
  }
  bindings_.push_back(&binding);
}

const Binding* BindingRegistry::Find(uint32_t program, uint32_t version) const {
  for (const Binding* binding : bindings_) {
    if (binding->program == program && binding->version == version) return binding;
  }
  return nullptr;
}

uint64_t ReplyBytesMax(const ProcedureBinding& procedure, ConstBytes call, const EligibleItems& items) {
  uint64_t grows = 0;
  if (procedure.reply_grows != nullptr) {
    ReducedStream stream{.base = call};
    for (const EligibleItem& item : items) stream.chunks.push_back({item.position, item.data});
    XdrReader reader(stream);
    if (DecodeCall(reader)) grows = procedure.reply_grows(reader);
    // Arguments that are not the procedure's will not be answered with its results.
    if (!reader.ok()) grows = 0;
  }
  return std::min(kEndlessReply, kRpcReplyHeaderMax + procedure.reply_fixed + std::min(kEndlessReply, grows));
}

}  // namespace stagecoach::rpcrdma
