#include "verbs_shim/cxx/handles.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <utility>

namespace stagecoach::verbs {
namespace {

// An object whose destruction is told, and may be refused.
struct Thing {
  int destroyed = 0;
  int refuse_with = 0;
};
struct ThingTraits {
  static int Destroy(Thing* thing) {
    if (thing->refuse_with != 0) return thing->refuse_with;
    ++thing->destroyed;
    return 0;
  }
};
using ThingHandle = Handle<Thing, ThingTraits>;

TEST(Handle, DestroysWhatItOwnsOnce) {
  Thing thing;
  {
    ThingHandle first(&thing);
    ThingHandle second = std::move(first);
    EXPECT_FALSE(first);  // NOLINT: the moved-from handle is empty
    EXPECT_EQ(second.get(), &thing);
    EXPECT_EQ(second.Destroy(), 0);
    EXPECT_FALSE(second);
  }
  EXPECT_EQ(thing.destroyed, 1);
}

TEST(Handle, AssignmentDestroysTheOldObject) {
  Thing old_thing;
  Thing new_thing;
  ThingHandle handle(&old_thing);
  handle = ThingHandle(&new_thing);
  EXPECT_EQ(old_thing.destroyed, 1);
  EXPECT_EQ(new_thing.destroyed, 0);
  EXPECT_EQ(handle.release(), &new_thing);
}

TEST(Handle, KeepsWhatRefusesToGo) {
  Thing thing;
  thing.refuse_with = EBUSY;
  ThingHandle handle(&thing);
  EXPECT_EQ(handle.Destroy(), EBUSY);
  EXPECT_EQ(handle.get(), &thing);
  thing.refuse_with = 0;
  EXPECT_EQ(handle.Destroy(), 0);
}

TEST(VerbsError, SaysWhichCallAndWhy) {
  const VerbsError error{ENOMEM, "ibv_reg_mr"};
  EXPECT_EQ(error.ToString(), "ibv_reg_mr: Cannot allocate memory");
}

TEST(OpenDevice, AnUnknownNameIsNoDevice) {
  auto opened = OpenDevice("no-such-device");
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().error, 0);
}

}  // namespace
}  // namespace stagecoach::verbs
