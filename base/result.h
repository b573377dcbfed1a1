// Result<T, E>: a value or a typed error. An alias, so that std::expected can take its place.
#pragma once

#include <tl/expected.hpp>

namespace stagecoach {

template <typename T, typename E>
using Result = tl::expected<T, E>;

template <typename E>
tl::unexpected<std::decay_t<E>> Err(E&& error) {
  return tl::unexpected<std::decay_t<E>>(std::forward<E>(error));
}

}  // namespace stagecoach
