// Programs that load the libraries instead of being linked with them, and programs with other libraries of their own.
#include "tests/dropin/dropin_fixture.h"

namespace stagecoach::tests {
namespace {

std::string FolderOf(const char* folder) {
  return (std::filesystem::current_path() / folder).string();
}
std::string Helper(const std::string& name) {
  return FolderOf("tests/dropin") + "/" + name;
}

class LoadingTest : public DropInTest {
 protected:
  // Succeeds, and has said nothing on standard error. What it has said otherwise.
  std::string Run(const std::string& command) {
    const auto process = Start(command);
    EXPECT_EQ(process->Wait(), 0) << command << ": " << process->Err();
    EXPECT_EQ(process->Err(), "") << command;
    return process->Out();
  }
};

TEST_F(LoadingTest, InEitherOrder) {
  EXPECT_EQ(Run(Helper("loader verbs-first")), "");
  EXPECT_EQ(Run(Helper("loader cm-first")), "");
  EXPECT_EQ(Run(Helper("loader cm-alone")), "");
}

TEST_F(LoadingTest, ByTheNamesAndVersionsThatProgramsAskForOursIsFound) {
  std::istringstream files(Run(Helper("loader versions")));
  int count = 0;
  for (std::string file; std::getline(files, file); ++count) {
    EXPECT_NE(file.find("verbs_shim/dropin/"), std::string::npos) << file;
  }
  EXPECT_EQ(count, 11);
}

// The device's thread runs on, and programs open them again.
TEST_F(LoadingTest, ClosedTheyStay) {
  EXPECT_EQ(Run(Helper("loader close")), "");
}

TEST_F(LoadingTest, NothingBeginsBeforeADeviceIsAskedFor) {
  EXPECT_EQ(Run(Helper("loader nothing-begins")), "");
}

TEST_F(LoadingTest, ThroughALibraryThatIsLinkedWithTheSystems) {
  EXPECT_EQ(Run(Helper("loader through ") + Helper("libplugin.so")), "");
}

TEST_F(LoadingTest, IntoAProgramWithARuntimeOfItsOwn) {
  const std::string program = Helper("own_runtime");
  Process needed(base_, {"readelf", "-d", program});
  ASSERT_EQ(needed.Wait(), 0);
  ASSERT_EQ(needed.Out().find("libstdc++"), std::string::npos) << "it is linked with the one of the libraries";
  EXPECT_EQ(Run(program), "");
}

TEST_F(LoadingTest, BeforeTheProgramsOwn) {
  const std::string folder = FolderOf("verbs_shim/dropin");
  Process devices(base_,
                  {"env", "LD_PRELOAD=" + folder + "/libibverbs.so.1:" + folder + "/librdmacm.so.1", "ibv_devices"});
  EXPECT_EQ(devices.Wait(), 0);
  EXPECT_NE(devices.Out().find("stagecoach0"), std::string::npos) << devices.Out();
  EXPECT_EQ(devices.Err(), "");
}

}  // namespace
}  // namespace stagecoach::tests
