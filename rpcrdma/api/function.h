// The two kinds of callable the API takes: FunctionRef, for one that runs before the call returns, and UniqueFunction,
// for one that is kept and may own what cannot be copied (an Asio handler).
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "base/check.h"

namespace stagecoach::rpcrdma {

template <typename Signature>
class FunctionRef;

// Refers to a callable without owning it: for parameters only.
template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F, typename = std::enable_if_t<!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> &&
                                                    std::is_invocable_r_v<R, F&, Args...>>>
  FunctionRef(F&& function)  // NOLINT: implicit on purpose
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(function)))),
        call_([](void* object, Args... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<Args>(args)...);
        }) {}

  R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

template <typename Signature>
class UniqueFunction;

// Move-only std::function. Callables of up to kInline bytes live in the object: completing a call allocates nothing.
template <typename R, typename... Args>
class UniqueFunction<R(Args...)> {
 public:
  static constexpr size_t kInline = 64;

  UniqueFunction() = default;
  UniqueFunction(std::nullptr_t) {}  // NOLINT: implicit on purpose
  template <typename F, typename = std::enable_if_t<!std::is_same_v<std::remove_cvref_t<F>, UniqueFunction> &&
                                                    std::is_invocable_r_v<R, std::decay_t<F>&, Args...>>>
  UniqueFunction(F&& function) {  // NOLINT: implicit on purpose
    using Callable = std::decay_t<F>;
    if constexpr (sizeof(Callable) <= kInline && alignof(Callable) <= alignof(std::max_align_t) &&
                  std::is_nothrow_move_constructible_v<Callable>) {
      new (storage_) Callable(std::forward<F>(function));
      operations_ = &kInlineOperations<Callable>;
    } else {
      *reinterpret_cast<Callable**>(storage_) = new Callable(std::forward<F>(function));
      operations_ = &kHeapOperations<Callable>;
    }
  }
  UniqueFunction(UniqueFunction&& other) noexcept { MoveFrom(other); }
  UniqueFunction& operator=(UniqueFunction&& other) noexcept {
    if (this != &other) {
      Reset();
      MoveFrom(other);
    }
    return *this;
  }
  ~UniqueFunction() { Reset(); }

  explicit operator bool() const { return operations_ != nullptr; }

  R operator()(Args... args) {
    STAGECOACH_CHECK(operations_ != nullptr);
    return operations_->call(storage_, std::forward<Args>(args)...);
  }

 private:
  struct Operations {
    R (*call)(void* storage, Args... args);
    void (*move)(void* to, void* from) noexcept;  // leaves `from` destroyed
    void (*destroy)(void* storage) noexcept;
  };

  template <typename F>
  static constexpr Operations kInlineOperations = {
      [](void* storage, Args... args) -> R { return (*static_cast<F*>(storage))(std::forward<Args>(args)...); },
      [](void* to, void* from) noexcept {
        new (to) F(std::move(*static_cast<F*>(from)));
        static_cast<F*>(from)->~F();
      },
      [](void* storage) noexcept { static_cast<F*>(storage)->~F(); },
  };
  template <typename F>
  static constexpr Operations kHeapOperations = {
      [](void* storage, Args... args) -> R { return (**static_cast<F**>(storage))(std::forward<Args>(args)...); },
      [](void* to, void* from) noexcept { *static_cast<F**>(to) = *static_cast<F**>(from); },
      [](void* storage) noexcept { delete *static_cast<F**>(storage); },
  };

  void MoveFrom(UniqueFunction& other) noexcept {
    operations_ = std::exchange(other.operations_, nullptr);
    if (operations_ != nullptr) operations_->move(storage_, other.storage_);
  }
  void Reset() noexcept {
    if (operations_ != nullptr) std::exchange(operations_, nullptr)->destroy(storage_);
  }

  const Operations* operations_ = nullptr;
  alignas(std::max_align_t) std::byte storage_[kInline];
};

}  // namespace stagecoach::rpcrdma
