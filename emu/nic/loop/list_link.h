// ListLink: a place in one list at most, which knows its neighbours. To put something into such a list needs no memory.
#pragma once

namespace stagecoach::emu {

// A list is a circle of these, one of which is nobody's. Not thread-safe.
class ListLink {
 public:
  ListLink() = default;
  ListLink(const ListLink&) = delete;
  ListLink& operator=(const ListLink&) = delete;

  bool IsLinked() const { return next_ != this; }
  ListLink* next() { return next_; }
  // Before `other`, which of a list's nobody is its end.
  void InsertBefore(ListLink& other) {
    previous_ = other.previous_;
    next_ = &other;
    previous_->next_ = other.previous_ = this;
  }
  void Unlink() {
    previous_->next_ = next_;
    next_->previous_ = previous_;
    next_ = previous_ = this;
  }

 private:
  ListLink* previous_ = this;
  ListLink* next_ = this;
};

}  // namespace stagecoach::emu
