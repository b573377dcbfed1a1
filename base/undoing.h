// Undoing: takes back what has been done, unless all of it was.
#pragma once

#include <utility>

namespace stagecoach {

template <typename Undo>
class Undoing {
 public:
  // `undo` is called at the end of the scope, also by an exception, unless Done() was. It must not throw.
  explicit Undoing(Undo undo) : undo_(std::move(undo)) {}
  ~Undoing() {
    if (!done_) undo_();
  }
  Undoing(const Undoing&) = delete;
  Undoing& operator=(const Undoing&) = delete;
  void Done() { done_ = true; }

 private:
  Undo undo_;
  bool done_ = false;
};

}  // namespace stagecoach
