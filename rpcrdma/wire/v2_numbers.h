// The numbers of RPC-over-RDMA version 2, draft-cel-nfsv4-rpcrdma-version-two-09 sections 6.3 and 6.4. rpcrdma_v2.x
// beside this file has them in XDR.
#pragma once

#include <cstdint>

namespace stagecoach::rpcrdma {

// rdma_flags [v2:3.2+2]: the one flag of the base protocol. In what carries an XID that its receiver made up.
inline constexpr uint32_t kFlagResponse = 0x00000001;  // RPCRDMA2_F_RESPONSE

// rdma_htype [v2:5.2+1] [v2:5.2+2] [v2:5.2+3] [v2:5.2+4] [v2:6.4+1]
inline constexpr uint32_t kRdma2Msg = 0;
inline constexpr uint32_t kRdma2Nomsg = 1;
inline constexpr uint32_t kRdma2Error = 4;  // in version 1, too
inline constexpr uint32_t kRdma2ConnProp = 5;

// rdma_err [v2:6.4+2] [v2:5.3.3+8]
inline constexpr uint32_t kRdma2ErrVers = 1;    // in version 1, too
inline constexpr uint32_t kRdma2ErrBadXdr = 2;  // in version 1 ERR_CHUNK
inline constexpr uint32_t kRdma2ErrInvalHtype = 3;
inline constexpr uint32_t kRdma2ErrReadChunks = 4;
inline constexpr uint32_t kRdma2ErrWriteChunks = 5;
inline constexpr uint32_t kRdma2ErrSegments = 6;
inline constexpr uint32_t kRdma2ErrWriteResource = 7;
inline constexpr uint32_t kRdma2ErrReplyResource = 8;
inline constexpr uint32_t kRdma2ErrSystem = 9;

// rdma_which of a property [v2:4.2+1] [v2:4.2+2]
inline constexpr uint32_t kRdma2PropidRbsiz = 1;
inline constexpr uint32_t kRdma2PropidBrs = 2;

}  // namespace stagecoach::rpcrdma
