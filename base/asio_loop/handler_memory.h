// HandlerMemory: where a handler lies that Asio keeps while it waits for something, so that to wait again needs no
// memory of the system.
//
// It has room for one handler at a time. Asio gives it back before it calls the handler, which can wait again at once.
// Whatever does not fit in takes its memory from the system.
#pragma once

#include <array>
#include <asio/bind_allocator.hpp>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace stagecoach {

class HandlerMemory {
 public:
  // `handler`, which Asio will keep in `memory`. The handler keeps that.
  template <typename Handler>
  static auto Bind(std::shared_ptr<HandlerMemory> memory, Handler handler) {
    return asio::bind_allocator(Allocator<std::byte>(std::move(memory)), std::move(handler));
  }

  template <typename T>
  class Allocator {
   public:
    using value_type = T;
    explicit Allocator(std::shared_ptr<HandlerMemory> memory) : memory_(std::move(memory)) {}
    template <typename U>
    Allocator(const Allocator<U>& other) : memory_(other.memory_) {}  // NOLINT: as allocators are made of each other

    T* allocate(size_t count) {
      static_assert(alignof(T) <= alignof(std::max_align_t));
      if (count * sizeof(T) > kSize || memory_->is_taken_.exchange(true)) return std::allocator<T>().allocate(count);
      return reinterpret_cast<T*>(memory_->room_.data());
    }
    void deallocate(T* block, size_t count) {
      if (reinterpret_cast<std::byte*>(block) != memory_->room_.data()) {
        return std::allocator<T>().deallocate(block, count);
      }
      memory_->is_taken_.store(false);
    }
    template <typename U>
    bool operator==(const Allocator<U>& other) const {
      return memory_ == other.memory_;
    }

   private:
    template <typename U>
    friend class Allocator;
    std::shared_ptr<HandlerMemory> memory_;
  };

 private:
  static constexpr size_t kSize = 256;

  alignas(std::max_align_t) std::array<std::byte, kSize> room_;
  std::atomic<bool> is_taken_{false};
};

}  // namespace stagecoach
