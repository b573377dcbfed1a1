// For tests: what every reliable record layer does, whatever carries its records. A layer's test says how two joined
// ends are had, and has all of this run over them:
//
//   struct Pair {
//     Llp& a();
//     Llp& b();
//     void DropA();    // destroys it
//     void RunLoop();  // both ends' watchers have been told what there is to tell
//   };
//   INSTANTIATE_TYPED_TEST_SUITE_P(Name, LlpContract, Pair);
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "emu/llp/llp.h"
#include "tests/support/fake_memory.h"

namespace stagecoach::emu {

template <typename Pair>
class LlpContract : public testing::Test {
 protected:
  class Watcher final : public ReadyWatcher {
   public:
    void OnReady() override { ++calls; }
    int calls = 0;
  };

  ~LlpContract() override {
    if (has_a_) a().SetWatcher(nullptr);
    b().SetWatcher(nullptr);
  }

  Llp& a() { return pair_.a(); }
  Llp& b() { return pair_.b(); }
  void DropA() {
    a().SetWatcher(nullptr);
    has_a_ = false;
    pair_.DropA();
  }

  // True: it has left.
  bool Say(Llp& llp, std::string_view text, uint64_t cookie = 1) {
    if (llp.CanQueue()) llp.QueueRecord(AsBytes(text.substr(0, kHead)), Parts(text), cookie);
    return llp.Flush(memory_).status == TxStatus::kIdle;
  }
  // Of a record that is not all there yet nothing, and the next call goes on with it.
  std::optional<std::string> Hear(Llp& llp) {
    auto begun = begun_.find(&llp);
    if (begun == begun_.end()) {
      RecordHead record;
      if (Next(llp, &record) != RxStatus::kReady) return std::nullopt;
      EXPECT_EQ(record.head.size(), std::min(record.length, kMaxRecordHead));
      std::string text(record.length, '?');
      CopyBytes(AsMutableBytes(text.data(), std::min(record.length, kHead)), record.head);
      begun = begun_.emplace(&llp, std::move(text)).first;
    }
    std::string& text = begun->second;
    const size_t head = std::min(text.size(), kHead);
    const MutableBytes payload = AsMutableBytes(text.data() + head, text.size() - head);
    const std::array<MutableBytes, 2> parts = {payload.first(payload.size() / 2), payload.subspan(payload.size() / 2)};
    const RxStatus status = AskTwice([&] { return llp.Place(head, parts).status; });
    if (status == RxStatus::kWouldBlock) return std::nullopt;
    EXPECT_EQ(status, RxStatus::kReady);
    return std::move(begun_.extract(begun).mapped());
  }
  RxStatus Next(Llp& llp) {
    RecordHead record;
    return Next(llp, &record);
  }
  RxStatus Next(Llp& llp, RecordHead* record) {
    return AskTwice([&] { return llp.NextRecord(record).status; });
  }
  // A layer may say once that it would block where readiness says at once that it does not.
  template <typename Question>
  RxStatus AskTwice(Question question) {
    pair_.RunLoop();
    const RxStatus status = question();
    return status == RxStatus::kWouldBlock ? question() : status;
  }
  std::vector<uint64_t> Sent(Llp& llp) {
    std::vector<uint64_t> sent;
    for (uint64_t cookie; llp.TakeSent(&cookie);) sent.push_back(cookie);
    return sent;
  }

  static constexpr size_t kHead = 4;

  // What follows the head: half of it by key.
  std::vector<TxPart> Parts(std::string_view text) {
    text.remove_prefix(std::min(text.size(), kHead));
    if (text.empty()) return {};
    const std::string_view by_key = text.substr(0, text.size() / 2);
    stag_ = memory_.Add(by_key.size());
    CopyBytes(memory_.Bytes(stag_), AsBytes(by_key));
    return {TxPart{.by_key = true,
                   .key = stag_,
                   .address = FakeMemory::Address(stag_),
                   .length = static_cast<uint32_t>(by_key.size())},
            TxPart{.bytes = AsBytes(text.substr(text.size() / 2))}};
  }

  // Records are refused, if not the next one, then soon: what leaves by a stream may be too early to hear of its end.
  void ExpectNoMoreIsTaken(Llp& llp) {
    TxResult result;
    for (int i = 0; i < 3 && result.status == TxStatus::kIdle; ++i) {
      llp.QueueRecord(AsBytes("late"), {}, 1);
      result = llp.Flush(memory_);
      pair_.RunLoop();
    }
    EXPECT_EQ(result.status, TxStatus::kReset);
  }

  FakeMemory memory_;
  std::map<const Llp*, std::string> begun_;
  uint32_t stag_ = 0;  // of the record that was said last
  Watcher watcher_;    // of b, where a test sets it
  Pair pair_;
  bool has_a_ = true;
};

TYPED_TEST_SUITE_P(LlpContract);

TYPED_TEST_P(LlpContract, RecordsComeInOrderAndThenTheEnd) {
  for (const char* text : {"one", "two", "three and a payload"}) ASSERT_TRUE(this->Say(this->a(), text));
  this->a().Shutdown();
  for (const char* text : {"one", "two", "three and a payload"}) EXPECT_EQ(this->Hear(this->b()), text);
  EXPECT_EQ(this->Next(this->b()), RxStatus::kEof);
  EXPECT_EQ(this->Next(this->b()), RxStatus::kEof) << "for good";
  ASSERT_TRUE(this->Say(this->b(), "answer")) << "receiving goes on";
  EXPECT_EQ(this->Hear(this->a()), "answer");
}

TYPED_TEST_P(LlpContract, RecordsOfEverySizeArriveAsTheyWere) {
  const size_t most = this->a().MaxUlpdu();
  for (size_t size = 1; size <= most; size = size == most ? most + 1 : std::min(most, size * 2 + 1)) {
    std::string text(size, 'x');
    for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 7 + (i >> 8));
    // A large one may leave only as it is received.
    this->Say(this->a(), text);
    this->Say(this->b(), text);
    ASSERT_EQ(this->Hear(this->b()), text) << size;
    ASSERT_EQ(this->Hear(this->a()), text) << size;
    ASSERT_EQ(this->a().Flush(this->memory_).status, TxStatus::kIdle) << size;
    ASSERT_EQ(this->b().Flush(this->memory_).status, TxStatus::kIdle) << size;
  }
  EXPECT_EQ(this->a().counters().tx_records, this->b().counters().rx_records);
  EXPECT_EQ(this->a().counters().tx_payload_bytes, this->b().counters().rx_payload_bytes);
}

TYPED_TEST_P(LlpContract, CookiesOfWhatHasLeftComeInOrder) {
  EXPECT_TRUE(this->a().TxIdle());
  for (const uint64_t cookie : {7, 3, 9}) this->a().QueueRecord(AsBytes("head"), {}, cookie);
  EXPECT_FALSE(this->a().TxIdle());
  EXPECT_EQ(this->Sent(this->a()), (std::vector<uint64_t>{}));
  EXPECT_EQ(this->a().Flush(this->memory_).status, TxStatus::kIdle);
  EXPECT_TRUE(this->a().TxIdle());
  EXPECT_EQ(this->Sent(this->a()), (std::vector<uint64_t>{7, 3, 9}));
}

TYPED_TEST_P(LlpContract, MemoryIsPinnedOnlyWhileItLeaves) {
  ASSERT_TRUE(this->Say(this->a(), "head and payload"));
  EXPECT_EQ(this->memory_.pins_taken(), 1);
  EXPECT_EQ(this->memory_.pins(), 0);
  this->memory_.Invalidate(this->stag_);
  EXPECT_EQ(this->Hear(this->b()), "head and payload");
}

TYPED_TEST_P(LlpContract, WhatPrecedesMemoryThatIsGoneLeavesFirst) {
  this->a().QueueRecord(AsBytes("first"), {}, 1);
  this->a().QueueRecord(AsBytes("head"), this->Parts("head and payload"), 2);
  this->memory_.Invalidate(this->stag_);
  const TxResult result = this->a().Flush(this->memory_);
  EXPECT_EQ(result.status, TxStatus::kMemoryFault);
  EXPECT_EQ(result.memory_fault, MemoryFault::kStaleStag);
  EXPECT_EQ(result.cookie, 2u);
  EXPECT_EQ(this->Sent(this->a()), (std::vector<uint64_t>{1}));
  EXPECT_EQ(this->Hear(this->b()), "first");
  EXPECT_EQ(this->Next(this->b()), RxStatus::kWouldBlock);
}

TYPED_TEST_P(LlpContract, PayloadThatNobodyWantsIsThrownAway) {
  for (const char* text : {"one, with a payload", "two"}) ASSERT_TRUE(this->Say(this->a(), text));
  RecordHead record;
  ASSERT_EQ(this->Next(this->b(), &record), RxStatus::kReady);
  ASSERT_EQ(this->AskTwice([&] { return this->b().Place(3, {}).status; }), RxStatus::kReady);
  EXPECT_EQ(this->Hear(this->b()), "two");
}

TYPED_TEST_P(LlpContract, WhoeverAbortsResetsBothEnds) {
  this->a().Abort();
  EXPECT_EQ(this->Next(this->a()), RxStatus::kReset);
  EXPECT_EQ(this->Next(this->b()), RxStatus::kReset);
  this->ExpectNoMoreIsTaken(this->b());
}

TYPED_TEST_P(LlpContract, WhoeverGoesHasEndedAndTakesNoMore) {
  ASSERT_TRUE(this->Say(this->a(), "last"));
  this->DropA();
  EXPECT_EQ(this->Hear(this->b()), "last");
  EXPECT_EQ(this->Next(this->b()), RxStatus::kEof);
  this->ExpectNoMoreIsTaken(this->b());
}

TYPED_TEST_P(LlpContract, AFullLayerTakesNoMoreAndTellsWhenThereIsRoom) {
  const std::string large(std::min<size_t>(this->a().MaxUlpdu(), 8192), 'x');
  size_t said = 0;
  while (this->a().CanQueue()) {
    ASSERT_LT(said++, 10000u);
    this->a().QueueRecord(AsBytes(std::string_view(large).substr(0, this->kHead)), this->Parts(large), 1);
    this->a().Flush(this->memory_);
  }
  EXPECT_GT(said, 10u);
  EXPECT_EQ(this->a().Flush(this->memory_).status, TxStatus::kWouldBlock);
  this->a().SetWatcher(&this->watcher_);
  this->a().Arm(false, true);
  this->pair_.RunLoop();
  EXPECT_EQ(this->watcher_.calls, 0);
  size_t heard = 0;
  while (this->Hear(this->b())) ++heard;
  EXPECT_GT(heard, 10u);
  this->pair_.RunLoop();
  EXPECT_EQ(this->watcher_.calls, 1) << "one-shot";
  while (heard < said) {
    this->a().Flush(this->memory_);
    const std::optional<std::string> next = this->Hear(this->b());
    ASSERT_TRUE(next == large) << heard;
    ++heard;
  }
  EXPECT_EQ(this->a().Flush(this->memory_).status, TxStatus::kIdle);
  EXPECT_EQ(this->Sent(this->a()).size(), said);
}

TYPED_TEST_P(LlpContract, ReadinessIsToldOnceForEachArm) {
  this->b().SetWatcher(&this->watcher_);
  this->b().Arm(true, false);
  this->pair_.RunLoop();
  EXPECT_EQ(this->watcher_.calls, 0);
  ASSERT_TRUE(this->Say(this->a(), "one"));
  ASSERT_TRUE(this->Say(this->a(), "two"));
  this->pair_.RunLoop();
  EXPECT_EQ(this->watcher_.calls, 1);
  this->b().Arm(true, false);
  EXPECT_EQ(this->watcher_.calls, 1) << "never within the call";
  this->pair_.RunLoop();
  EXPECT_EQ(this->watcher_.calls, 2) << "what is there already";
  this->b().Arm(true, false);
  this->b().Arm(false, false);
  EXPECT_EQ(this->Hear(this->b()), "one");
  EXPECT_EQ(this->Hear(this->b()), "two");
  ASSERT_TRUE(this->Say(this->a(), "three"));
  this->b().SetWatcher(nullptr);
  this->pair_.RunLoop();
  EXPECT_LE(this->watcher_.calls, 3) << "one may be late";
}

// As by a poller.
TYPED_TEST_P(LlpContract, WhatIsTakenBeforeItIsToldIsNotTheLastToBeTold) {
  this->b().SetWatcher(&this->watcher_);
  ASSERT_TRUE(this->Say(this->a(), "one"));
  RecordHead record;
  ASSERT_EQ(this->Next(this->b(), &record), RxStatus::kReady);
  this->b().Arm(true, false);
  ASSERT_EQ(this->AskTwice([&] { return this->b().Place(record.head.size(), {}).status; }), RxStatus::kReady);
  this->pair_.RunLoop();
  const int calls = this->watcher_.calls;
  EXPECT_LE(calls, 1);
  if (calls == 1) this->b().Arm(true, false);
  ASSERT_TRUE(this->Say(this->a(), "two"));
  this->pair_.RunLoop();
  EXPECT_EQ(this->watcher_.calls, calls + 1);
}

TYPED_TEST_P(LlpContract, EveryEndIsTold) {
  this->b().SetWatcher(&this->watcher_);
  this->b().Arm(true, false);
  this->a().Shutdown();
  this->pair_.RunLoop();
  EXPECT_EQ(this->watcher_.calls, 1);
  EXPECT_EQ(this->Next(this->b()), RxStatus::kEof);
  this->b().Arm(false, false);
  this->b().Arm(true, true);
  this->a().Abort();
  this->pair_.RunLoop();
  EXPECT_EQ(this->watcher_.calls, 2);
}

TYPED_TEST_P(LlpContract, AnEndThatGoesIsTold) {
  this->b().SetWatcher(&this->watcher_);
  this->b().Arm(true, false);
  this->DropA();
  this->pair_.RunLoop();
  EXPECT_EQ(this->watcher_.calls, 1);
}

TYPED_TEST_P(LlpContract, WhatIsDrainedIsGoneAndThenComesTheEnd) {
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(this->Say(this->a(), "unwanted, with a payload"));
  this->a().Shutdown();
  this->pair_.RunLoop();
  Llp::Drained drained;
  bool any = false;
  for (int turns = 0; !drained.end; ++turns) {
    ASSERT_LT(turns, 100);
    drained = this->b().Drain();
    any = any || drained.any;
  }
  EXPECT_TRUE(any);
  EXPECT_EQ(drained.end->status, RxStatus::kEof);
}

REGISTER_TYPED_TEST_SUITE_P(LlpContract, RecordsComeInOrderAndThenTheEnd, RecordsOfEverySizeArriveAsTheyWere,
                            CookiesOfWhatHasLeftComeInOrder, MemoryIsPinnedOnlyWhileItLeaves,
                            WhatPrecedesMemoryThatIsGoneLeavesFirst, PayloadThatNobodyWantsIsThrownAway,
                            WhoeverAbortsResetsBothEnds, WhoeverGoesHasEndedAndTakesNoMore,
                            AFullLayerTakesNoMoreAndTellsWhenThereIsRoom, ReadinessIsToldOnceForEachArm,
                            WhatIsTakenBeforeItIsToldIsNotTheLastToBeTold, EveryEndIsTold, AnEndThatGoesIsTold,
                            WhatIsDrainedIsGoneAndThenComesTheEnd);

}  // namespace stagecoach::emu
