// What end-to-end tests get for calls of the test service.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "rpcrdma/api/client.h"
#include "tests/e2e/test_service.h"

namespace stagecoach::e2e {

using Outcome = Result<rpcrdma::Reply, rpcrdma::CallError>;

inline rpcrdma::ProcedureId Id(Procedure procedure) {
  return {kProgram, 3, procedure};
}

// A call of kEcho or kSource had this result, which lies at `place` unless that is null.
inline void ExpectData(const Outcome& outcome, ConstBytes data, const std::byte* place = nullptr) {
  ASSERT_TRUE(outcome.has_value()) << outcome.error().ToString();
  rpcrdma::XdrReader results = outcome->results();
  const ConstBytes result = outcome->Settle(results.EligibleOpaque("data", kDataMax), 0);
  ASSERT_TRUE(results.Finish().has_value());
  EXPECT_TRUE(std::ranges::equal(result, data));
  if (place != nullptr) {
    EXPECT_EQ(result.data(), place);
  }
}

}  // namespace stagecoach::e2e
