#include "rpcrdma/onc/credentials.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace stagecoach::rpcrdma {
namespace {

constexpr uint32_t kProcedure = 7;

OpaqueAuth Auth(AuthFlavor flavor, size_t size = 0) {
  OpaqueAuth auth{.flavor = static_cast<uint32_t>(flavor)};
  auth.body.append(std::vector<std::byte>(size, std::byte{0xee}));
  return auth;
}

OpaqueAuth Sys(uint32_t name, uint32_t gids, size_t behind = 0) {
  std::array<std::byte, 600> body;
  XdrWriter out(body);
  out.U32(0);
  out.String(std::string(name, 'x'));
  out.U32(0);
  out.U32(0);
  out.U32(gids);
  for (uint32_t i = 0; i < gids; ++i) out.U32(i);
  OpaqueAuth auth{.flavor = static_cast<uint32_t>(AuthFlavor::kSys)};
  auth.body.append(out.written());
  auth.body.append(std::vector<std::byte>(behind));
  return auth;
}

AuthStat Judge(const OpaqueAuth& cred, const OpaqueAuth& verf = AuthNone(),
               std::span<const AuthFlavor> taken = kUsualFlavors, uint32_t procedure = kProcedure) {
  return JudgeAuth({.proc = procedure, .cred = cred, .verf = verf}, taken);
}

TEST(JudgeAuth, AuthSysIsReadToItsLastByte) {
  EXPECT_EQ(Judge(Sys(0, 0)), AuthStat::kOk);
  EXPECT_EQ(Judge(Sys(255, 16)), AuthStat::kOk);
  EXPECT_EQ(Judge(Sys(256, 16)), AuthStat::kBadCred);
  EXPECT_EQ(Judge(Sys(255, 17)), AuthStat::kBadCred);
  EXPECT_EQ(Judge(Sys(8, 2, 1)), AuthStat::kBadCred);
  EXPECT_EQ(Judge(Sys(8, 2, 4)), AuthStat::kBadCred);
  const OpaqueAuth whole = Sys(8, 2);
  for (size_t size = 0; size < whole.body.size(); ++size) {
    OpaqueAuth cut{.flavor = whole.flavor};
    cut.body.append(whole.body.view().first(size));
    EXPECT_EQ(Judge(cut), AuthStat::kBadCred) << size;
  }
  // Counts that promise more than there is.
  for (const size_t word : {size_t{4}, whole.body.size() - 12}) {
    OpaqueAuth lying = whole;
    for (size_t i = 0; i < 4; ++i) lying.body[word + i] = std::byte{0xff};
    EXPECT_EQ(Judge(lying), AuthStat::kBadCred) << word;
  }
}

TEST(JudgeAuth, AFlavorThatIsNotTakenIsTooWeakOrWithoutASession) {
  for (const AuthFlavor flavor :
       {AuthFlavor::kShort, AuthFlavor::kDh, AuthFlavor::kRpcsecGss, static_cast<AuthFlavor>(4),
        static_cast<AuthFlavor>(390003), static_cast<AuthFlavor>(UINT32_MAX)}) {
    EXPECT_EQ(Judge(Auth(flavor, 20)), AuthStat::kRejectedCred) << static_cast<uint32_t>(flavor);
    EXPECT_EQ(Judge(Auth(flavor, 20), AuthNone(), kUsualFlavors, 0), AuthStat::kRejectedCred) << "NULL as well";
  }
  const std::array sys = {AuthFlavor::kSys};
  EXPECT_EQ(Judge(AuthNone(), AuthNone(), sys), AuthStat::kTooWeak);
  EXPECT_EQ(Judge(Sys(8, 2), AuthNone(), sys), AuthStat::kOk);
  const std::array none = {AuthFlavor::kNone};
  EXPECT_EQ(Judge(Sys(8, 2), AuthNone(), none), AuthStat::kTooWeak);
  EXPECT_EQ(Judge(Sys(8, 17), AuthNone(), none), AuthStat::kTooWeak) << "whatever is in it";
}

TEST(JudgeAuth, NullIsTakenWithAuthNoneWhateverElseIs) {
  const std::array gss = {AuthFlavor::kRpcsecGss};
  EXPECT_EQ(Judge(AuthNone(), AuthNone(), gss, 0), AuthStat::kOk);
  EXPECT_EQ(Judge(AuthNone(), AuthNone(), {}, 0), AuthStat::kOk);
  EXPECT_EQ(Judge(AuthNone(), AuthNone(), gss, 1), AuthStat::kTooWeak);
  EXPECT_EQ(Judge(Sys(8, 2), AuthNone(), gss, 0), AuthStat::kTooWeak);
}

TEST(JudgeAuth, WhatIsInAnotherFlavorIsForItsProgram) {
  const std::array gss = {AuthFlavor::kRpcsecGss};
  EXPECT_EQ(Judge(Auth(AuthFlavor::kRpcsecGss, 400), Auth(AuthFlavor::kRpcsecGss, 28), gss), AuthStat::kOk);
  EXPECT_EQ(Judge(Auth(AuthFlavor::kRpcsecGss), AuthNone(), gss), AuthStat::kOk);
}

TEST(JudgeAuth, TheVerifierIsAuthNone) {
  for (const OpaqueAuth& cred : {AuthNone(), Sys(8, 2)}) {
    EXPECT_EQ(Judge(cred, Auth(AuthFlavor::kSys, 4)), AuthStat::kBadVerf);
    EXPECT_EQ(Judge(cred, Auth(AuthFlavor::kRpcsecGss, 28)), AuthStat::kBadVerf);
    EXPECT_EQ(Judge(cred, Auth(static_cast<AuthFlavor>(UINT32_MAX))), AuthStat::kBadVerf);
    EXPECT_EQ(Judge(cred, Auth(AuthFlavor::kNone, 400)), AuthStat::kOk) << "the body of AUTH_NONE is undefined";
  }
  EXPECT_EQ(Judge(Sys(8, 17), Auth(AuthFlavor::kSys, 4)), AuthStat::kBadCred) << "the credential comes first";
  EXPECT_EQ(Judge(Auth(AuthFlavor::kNone, 400)), AuthStat::kOk);
}

}  // namespace
}  // namespace stagecoach::rpcrdma
