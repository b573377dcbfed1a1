// Whether a rule can ever fire: what its action, its kinds and its places leave of each other on a device. What can
// never fire is refused with words, as a test of what is done must not run when nothing is.
//
// All of it follows from the tables of actions and kinds (action.h, message_kind.h). Pure functions; any thread.
#pragma once

#include <optional>
#include <string>

#include "emu/inject/action.h"
#include "emu/inject/message_kind.h"
#include "emu/inject/rule.h"

namespace stagecoach::emu {

// Why an action cannot be done to what goes this way, in words; nothing: it can.
std::optional<std::string> WhyNotDirection(InjectionAction action, InjectionDirection direction);

// Why a rule can never fire on a transport, in words: what of it, and what there is instead. Nothing: it can.
std::optional<std::string> WhyNotOn(InjectionTransport transport, const InjectionRule& rule);

}  // namespace stagecoach::emu
