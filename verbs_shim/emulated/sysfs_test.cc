// What programs read of sysfs by libibverbs.

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <arpa/inet.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

extern "C" {
const char* ibv_get_sysfs_path(void);
int ibv_read_sysfs_file(const char* directory, const char* file, char* buffer, size_t size);
}

namespace stagecoach::verbs {
namespace {

class SysfsTest : public testing::Test {
 protected:
  void SetUp() override {
    list_ = ibv_get_device_list(nullptr);
    ASSERT_NE(list_, nullptr);
    context_ = ibv_open_device(list_[0]);
    ASSERT_NE(context_, nullptr);
  }
  void TearDown() override {
    ibv_close_device(context_);
    ibv_free_device_list(list_);
  }

  // "-1" when there is none.
  static std::string Read(const std::string& directory, const std::string& file) {
    char text[256];
    const int length = ibv_read_sysfs_file(directory.c_str(), file.c_str(), text, sizeof(text));
    return length < 0 ? "-1" : std::string(text, static_cast<size_t>(length));
  }
  std::string Own(const std::string& file) const { return Read(list_[0]->ibdev_path, file); }

  ibv_device** list_ = nullptr;
  ibv_context* context_ = nullptr;
};

TEST_F(SysfsTest, TheDevicesFilesSayWhatQueriesSay) {
  ibv_device_attr device{};
  ASSERT_EQ(ibv_query_device(context_, &device), 0);
  EXPECT_EQ(Own("fw_ver"), device.fw_ver);
  EXPECT_EQ(Own("node_type"), context_->device->node_type == IBV_NODE_RNIC ? "4: RNIC" : "1: CA");
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(context_, 1, &port), 0);
  ASSERT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(Own("ports/1/state"), "4: ACTIVE");
  EXPECT_EQ(Own("ports/1//rate"), "40 Gb/sec (4X QDR)") << "a path may have more slashes than it needs";
  ASSERT_GT(port.gid_tbl_len, 0);
  for (int i = 0; i < port.gid_tbl_len; ++i) {
    ibv_gid gid{};
    ASSERT_EQ(ibv_query_gid(context_, 1, i, &gid), 0);
    ibv_gid read{};
    ASSERT_EQ(inet_pton(AF_INET6, Own("ports/1/gids/" + std::to_string(i)).c_str(), &read), 1) << i;
    EXPECT_EQ(std::memcmp(read.raw, gid.raw, sizeof(gid.raw)), 0) << i;
  }
  EXPECT_EQ(Own("ports/1/gids/" + std::to_string(port.gid_tbl_len)), "-1");
  EXPECT_EQ(Read(list_[0]->dev_path, "ibdev"), list_[0]->name);
}

TEST_F(SysfsTest, PathsAreBelowTheOneOfSysfs) {
  EXPECT_STREQ(ibv_get_sysfs_path(), "/sys");
  EXPECT_EQ(std::string(list_[0]->ibdev_path), std::string("/sys/class/infiniband/") + list_[0]->name);
  EXPECT_EQ(std::string(list_[0]->dev_path), "/sys/class/infiniband_verbs/uverbs0");
  EXPECT_STREQ(list_[0]->dev_name, "uverbs0");
}

TEST_F(SysfsTest, WhatDoesNotFitIsCutAndWhatIsNotThereIsAnError) {
  char text[4] = {};
  EXPECT_EQ(ibv_read_sysfs_file(list_[0]->ibdev_path, "fw_ver", text, sizeof(text)), 3);
  EXPECT_STREQ(text, "1.0");
  EXPECT_EQ(ibv_read_sysfs_file(list_[0]->ibdev_path, "fw_ver", text, 1), 0);
  EXPECT_STREQ(text, "");
  errno = 0;
  EXPECT_EQ(ibv_read_sysfs_file(list_[0]->ibdev_path, "fw_ver", text, 0), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(Own("nothing"), "-1");
  EXPECT_EQ(errno, ENOENT);
}

TEST_F(SysfsTest, FilesOfOthersAreRead) {
  std::ofstream(testing::TempDir() + "/file") << "their value\n";
  EXPECT_EQ(Read(testing::TempDir(), "file"), "their value");
  EXPECT_EQ(Read(testing::TempDir(), "no-file"), "-1");
}

}  // namespace
}  // namespace stagecoach::verbs
