// Unseen: work that a program's ThreadSanitizer does not look at.
//
// Programs may be built with ThreadSanitizer and load libraries of ours that are not. The tool then sees what such
// libraries ask of the C library (memory, descriptors, memcpy) and none of the atomic operations that order it, and
// reports races that are none, as it would not of a kernel's device. It has functions by which code says that accesses
// of this thread are none of its business for a while; they are there when the tool is, and cost a test otherwise.
// Locks are still seen.
//
// In a build of ours with the tool everything is looked at.
//
// Threading: any.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define STAGECOACH_SEEN_BY_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STAGECOACH_SEEN_BY_THREAD_SANITIZER 1
#endif
#endif

#ifndef STAGECOACH_SEEN_BY_THREAD_SANITIZER
extern "C" {
// ThreadSanitizer's names (dynamic annotations), for the file and line that says so.
[[gnu::weak]] void AnnotateIgnoreReadsBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreReadsEnd(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace stagecoach {

// From its beginning to its end on one thread. May be nested.
class Unseen {
 public:
#ifdef STAGECOACH_SEEN_BY_THREAD_SANITIZER
  Unseen() {}
#else
  Unseen() {
    if (AnnotateIgnoreReadsBegin == nullptr || AnnotateIgnoreWritesBegin == nullptr) return;
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    if (AnnotateIgnoreReadsEnd == nullptr || AnnotateIgnoreWritesEnd == nullptr) return;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#endif
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};

}  // namespace stagecoach
