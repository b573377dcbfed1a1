// Programs that were compiled against other versions of <infiniband/verbs.h> than the libraries know.
#include <set>

#include "tests/dropin/dropin_fixture.h"

namespace stagecoach::tests {
namespace {

class HeadersTest : public DropInTest {
 protected:
  // What the program says of its layout, when it has found everything as it should be.
  std::string Run(const std::string& program) {
    const auto process = Start((std::filesystem::current_path() / "tests/dropin" / program).string());
    EXPECT_EQ(process->Wait(), 0) << program << ": " << process->Err();
    EXPECT_EQ(process->Err(), "");
    return process->Out();
  }
};

TEST_F(HeadersTest, WhatTheyKnowWorksAndWhatTheLibrariesDoNotKnowIsNotThere) {
  const std::set<std::string> layouts = {Run("headers"), Run("headers_newer"), Run("headers_older")};
  EXPECT_EQ(layouts.size(), 3u) << "the versions do not differ";
}

// A function that a newer library has and ours has not is the dynamic loader's to complain of.
TEST_F(HeadersTest, AProgramThatNeedsANewerLibraryIsToldSo) {
  const auto process = Start((std::filesystem::current_path() / "tests/dropin/needs_newer").string());
  EXPECT_NE(process->Wait(), 0);
  EXPECT_NE(process->Err().find("version `IBVERBS_1.99' not found"), std::string::npos) << process->Err();
}

}  // namespace
}  // namespace stagecoach::tests
