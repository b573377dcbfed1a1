// XDR of the bulk file program (bulk_file.x), written and read by hand over rpcrdma/xdr.
//
// Encode appends one value; Decode reads one. Both leave the verdict to the writer's and the reader's sticky state, so
// a whole message is coded and then asked about once (XdrWriter::ok, XdrReader::Finish). Decoding is strict:
// enumerations in range, mode bits within 0777, nanoseconds below a second, counts bounded. It does not judge names
// (names.h does): a bad name is an answer of the program, not garbage.
//
// The data of READ and WRITE is DDP-eligible: encoded views must outlive the message, decoded views point into the
// memory the data arrived in.
#pragma once

#include "base/result.h"
#include "rpcrdma/ulb/file/types.h"
#include "rpcrdma/xdr/xdr_reader.h"
#include "rpcrdma/xdr/xdr_writer.h"

namespace stagecoach::rpcrdma::file {

struct WriteRequest {
  WriteInfo info;
  ConstBytes data;
};

struct ReadReply {
  ReadInfo info;
  ConstBytes data;
};

void Encode(XdrWriter& out, const Path& path);
void Encode(XdrWriter& out, const Attributes& attributes);
void Encode(XdrWriter& out, const Limits& limits);
void Encode(XdrWriter& out, const ListArgs& args);
void Encode(XdrWriter& out, const Page& page);
void Encode(XdrWriter& out, const Opened& opened);
void Encode(XdrWriter& out, const ReadArgs& args);
void Encode(XdrWriter& out, const ReadReply& reply);
void Encode(XdrWriter& out, const CreateArgs& args);
void Encode(XdrWriter& out, const WriteRequest& request);
void Encode(XdrWriter& out, const CommitArgs& args);
void Encode(XdrWriter& out, const MakeDirectoryArgs& args);
void Encode(XdrWriter& out, Handle handle);

void Decode(XdrReader& in, Path& path);
void Decode(XdrReader& in, Attributes& attributes);
void Decode(XdrReader& in, Limits& limits);
void Decode(XdrReader& in, ListArgs& args);
void Decode(XdrReader& in, Page& page);
void Decode(XdrReader& in, Opened& opened);
void Decode(XdrReader& in, ReadArgs& args);
void Decode(XdrReader& in, ReadReply& reply);
void Decode(XdrReader& in, CreateArgs& args);
void Decode(XdrReader& in, WriteRequest& request);
void Decode(XdrReader& in, CommitArgs& args);
void Decode(XdrReader& in, MakeDirectoryArgs& args);
void Decode(XdrReader& in, Handle& handle);

void Encode(XdrWriter& out, Status status);
void Decode(XdrReader& in, Status& status);

// The unions of the .x file: a status, and a value only if that is BF_OK.
template <typename T>
void EncodeResult(XdrWriter& out, const Result<T, Status>& result) {
  Encode(out, result ? Status::kOk : result.error());
  if constexpr (!std::is_void_v<T>) {
    if (result) Encode(out, *result);
  }
}
template <typename T>
Result<T, Status> DecodeResult(XdrReader& in) {
  Status status = Status::kOk;
  Decode(in, status);
  if (status != Status::kOk) return Err(status);
  if constexpr (std::is_void_v<T>) {
    return {};
  } else {
    T value{};
    Decode(in, value);
    return value;
  }
}

// Bytes an entry takes in a LIST page.
size_t EncodedSize(const Entry& entry);
// A page without entries, its status included.
inline constexpr size_t kEmptyPageSize = 4 + 8 + 4 + 4;
// Any call's arguments without data fit in this.
inline constexpr size_t kArgumentsMax = 8 + 4 + kDepthMax * 8 + kPathBytesMax + 64;

}  // namespace stagecoach::rpcrdma::file
