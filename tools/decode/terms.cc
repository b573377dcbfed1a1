#include "tools/decode/terms.h"

namespace stagecoach::decode {
namespace {

using enum Force;

// clang-format off
constexpr Terms kDraft2004 = {
    .document = Document::k2004, .profile = &rpcrdma::kDraft2004,
    .type = "rdma_proc", .position = "position", .handle = "handle", .length = "length", .offset = "offset",
    .error = "rpc_rdma_errcode",
    .call_size = "maxcallsize", .reply_size = "maxreplysize",
    .fixed_fields = "4.1", .xid = "4.1", .version = "4.1", .credit = "4.1", .message_type = "4.1",
    .read_list = "4.2", .read_position = "3.4", .alignment = "3.4", .segment = "3.4", .write_list = "3.7", .reply_chunk = "5.2",
    .padded = "3.5", .done = "3.8", .errors = "5.3", .message = "4.1", .long_call = "5.1", .no_message = "4.1",
    .configuration = {Document::k2004, "6.2"},
    .xid_of_message = {kAdvice, "4.1"},
    .nonzero_grant = {kNone, ""},
    .nonzero_idle_grant = {kBinding, "3.3"},
    .sorted_reads = {kNone, ""},
    .position_zero_first = {kAdvice, "5.1"},
    .round_up_chunk = {kAdvice, "3.4"},
    .no_read_read = {kNone, ""},
    .no_padded = {kNone, ""},
    .no_done = {kNone, ""},
    .write_list_returned = {kBinding, "3.7"},
    .reply_chunk_or_message = {kBinding, "5.2"},
};

constexpr Terms kRfc5666 = {
    .document = Document::k5666, .profile = &rpcrdma::kRfc5666,
    .type = "rdma_proc", .position = "position", .handle = "handle", .length = "length", .offset = "offset",
    .error = "rpc_rdma_errcode",
    .call_size = "maxcall_sendsize", .reply_size = "maxreply_sendsize",
    .fixed_fields = "4.1", .xid = "4.1", .version = "4.1", .credit = "4.1", .message_type = "4.1",
    .read_list = "4.3", .read_position = "3.4", .alignment = "3.7", .segment = "3.4", .write_list = "3.6", .reply_chunk = "5.2",
    .padded = "3.9", .done = "3.8", .errors = "4.2", .message = "4.1", .long_call = "5.1", .no_message = "4.1",
    .configuration = {Document::k5666, "6.2"},
    .xid_of_message = {kBinding, "4.1"},
    .nonzero_grant = {kNone, ""},
    .nonzero_idle_grant = {kBinding, "3.3"},
    .sorted_reads = {kNone, ""},
    .position_zero_first = {kAdvice, "5.1"},
    .round_up_chunk = {kAdvice, "3.7"},
    .no_read_read = {kAdvice, "3.8"},
    .no_padded = {kNone, ""},
    .no_done = {kNone, ""},
    .write_list_returned = {kBinding, "3.6"},
    .reply_chunk_or_message = {kBinding, "5.2"},
};

constexpr Terms kRfc5666bis = {
    .document = Document::k5666bis, .profile = &rpcrdma::kRfc5666bis,
    .type = "rdma_proc", .position = "rdma_position", .handle = "rdma_handle", .length = "rdma_length",
    .offset = "rdma_offset", .error = "err",
    .call_size = "maxcall_sendsize", .reply_size = "maxreply_sendsize",
    .fixed_fields = "5.1", .xid = "5.1.1", .version = "5.1.2", .credit = "5.1.3", .message_type = "5.1.4",
    .read_list = "5.2.1", .read_position = "4.4.4", .alignment = "4.4.4.1", .segment = "4.4.2", .write_list = "5.2.2", .reply_chunk = "5.2.3",
    .padded = "5.7.1", .done = "5.7.2", .errors = "5.5", .message = "5.1.4", .long_call = "5.3.3", .no_message = "5.1.4",
    .configuration = {Document::k5666, "6.2"},
    .xid_of_message = {kBinding, "5.1.1"},
    .nonzero_grant = {kBinding, "4.3"},
    .nonzero_idle_grant = {kBinding, "4.3"},
    .sorted_reads = {kAdvice, "5.2.1"},
    .position_zero_first = {kAdvice, "5.2.1"},
    .round_up_chunk = {kNone, ""},
    .no_read_read = {kBinding, "4.1"},
    .no_padded = {kAdvice, "5.7.1"},
    .no_done = {kAdvice, "5.7.2"},
    .write_list_returned = {kBinding, "4.4.5"},
    .reply_chunk_or_message = {kBinding, "4.4.5.1"},
};

// Chunks are used as version 1 uses them (v2 10.1), so its rules about them hold.
constexpr Terms kVersion2 = {
    .document = Document::kV2, .profile = &rpcrdma::kRfc5666bis,
    .type = "rdma_htype", .position = "rdma_position", .handle = "rdma_handle", .length = "rdma_length",
    .offset = "rdma_offset", .error = "rdma_err",
    .call_size = "maxcall_sendsize", .reply_size = "maxreply_sendsize",
    .fixed_fields = "3.1", .xid = "3.1", .version = "3.1", .credit = "3.1", .message_type = "5.2",
    .read_list = "3.3", .read_position = "6.3", .alignment = "10.1", .segment = "6.3", .write_list = "3.3", .reply_chunk = "3.3",
    .padded = "", .done = "", .errors = "5.3.3", .message = "5.3.1", .long_call = "5.3.2", .no_message = "5.3.2",
    .configuration = {Document::k5666, "6.2"},
    .xid_of_message = {kBinding, "10.1"},
    .nonzero_grant = {kBinding, "10.1"},
    .nonzero_idle_grant = {kBinding, "10.1"},
    .sorted_reads = {kNone, ""},
    .position_zero_first = {kNone, ""},
    .round_up_chunk = {kNone, ""},
    .no_read_read = {kBinding, "3.3"},
    .no_padded = {kNone, ""},
    .no_done = {kNone, ""},
    .write_list_returned = {kBinding, "10.1"},
    .reply_chunk_or_message = {kBinding, "10.1"},
};
// clang-format on

}  // namespace

const Terms& TermsOf(const rpcrdma::ProtocolProfile& profile) {
  for (const Terms* each : {&kDraft2004, &kRfc5666}) {
    if (each->profile->name == profile.name) return *each;
  }
  return kRfc5666bis;
}

const Terms& TermsOfVersion2() {
  return kVersion2;
}

}  // namespace stagecoach::decode
