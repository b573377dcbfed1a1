// Spare blocks: memory of the process's own for the little that has to reach a loop when the system has none left.
//
// They lie in the program's data, so that no allocator can refuse them, and cost no memory until they are used. There
// are 1024 of 256 bytes, for what is short-lived. Once all of them are taken, who wants another is refused as by any
// allocator (std::bad_alloc), until one is given back.
//
// Threading: any. No locks, so that a child finds none taken after fork(2).
#pragma once

#include <cstddef>
#include <new>

namespace stagecoach {

constexpr size_t kSpareBlockSize = 256;
constexpr size_t kSpareBlocks = 1024;

// Null: none is left, or `size` is more than one has. Aligned for anything that has no alignment of its own.
void* TakeSpareBlock(size_t size);
// False: it is none.
bool GiveSpareBlock(void* block);

// An allocator that takes what `Usual` has no memory for from the spare blocks.
template <typename T, template <typename> typename Usual>
class SpareAllocator {
 public:
  using value_type = T;
  template <typename U>
  struct rebind {
    using other = SpareAllocator<U, Usual>;
  };

  SpareAllocator() = default;
  template <typename U>
  SpareAllocator(const SpareAllocator<U, Usual>&) {}  // NOLINT: as allocators are made of each other

  T* allocate(size_t count) {
    try {
      return Usual<T>().allocate(count);
    } catch (const std::bad_alloc&) {
      void* const block = TakeSpareBlock(count * sizeof(T));
      if (block == nullptr) throw;
      return static_cast<T*>(block);
    }
  }
  void deallocate(T* memory, size_t count) {
    if (!GiveSpareBlock(memory)) Usual<T>().deallocate(memory, count);
  }
  bool operator==(const SpareAllocator&) const = default;
};

}  // namespace stagecoach
