// OUTPUT_DIRECTORY CAPTURE...: writes the seed corpora from recorded traffic, one input for each shape of frame,
// segment and header that occurs; those of InfiniBand packets, of RFC 7306 and of version 2 of RPC-over-RDMA, of which
// there is no recording, one for each opcode or type, and of rpcbind's answers, one of each kind; operations for the
// targets that are sequences of them; the beginnings of the recordings themselves, and files in the other forms that
// `stagecoach decode` reads.
//
// Run from the root of the tree: bazel run //tests/fuzz:make_corpus -- "$PWD/tests/fuzz/corpus"
// "$PWD"/tests/golden/captures/*.pcap
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "base/cursor.h"
#include "emu/wire/carrier_hello.h"
#include "emu/wire/carrier_proof.h"
#include "emu/wire/cm_mad.h"
#include "emu/wire/ib.h"
#include "emu/wire/mpa.h"
#include "emu/wire/rdmap.h"
#include "rpcrdma/onc/rpc_message.h"
#include "rpcrdma/wire/header_v1.h"
#include "rpcrdma/wire/header_v2.h"
#include "rpcrdma/xdr/xdr_writer.h"
#include "tests/fuzz/decode_inputs.h"
#include "tests/golden/iwarp_streams.h"

namespace stagecoach::testing {
namespace {

using Bytes = std::vector<std::byte>;

constexpr size_t kPayloadKept = 24;   // of a segment
constexpr size_t kMessageKept = 40;   // of an RPC message behind its header
constexpr size_t kStreamKept = 1200;  // of a stream of FPDUs
constexpr uint8_t kResponderChoices = 0x02;
constexpr uint8_t kInitiatorChoices = 0x17;

class Corpus {
 public:
  explicit Corpus(std::filesystem::path root) : root_(std::move(root)) {}

  // Keeps the first input of each shape.
  void Add(const std::string& target, const std::string& shape, const Bytes& input) {
    if (sizes_.emplace(target + "/" + shape, input.size()).second) Write(target, shape, input);
  }
  // Keeps the longest, which has most to be read, and of several the first.
  void AddLongest(const std::string& target, const std::string& shape, const Bytes& input) {
    const auto [known, is_first] = sizes_.emplace(target + "/" + shape, input.size());
    if (!is_first && known->second >= input.size()) return;
    known->second = input.size();
    Write(target, shape, input);
  }
  size_t size() const { return sizes_.size(); }

 private:
  void Write(const std::string& target, const std::string& shape, const Bytes& input) {
    const auto directory = root_ / target;
    std::filesystem::create_directories(directory);
    std::ofstream file(directory / shape, std::ios::binary);
    file.write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
  }

  std::filesystem::path root_;
  std::map<std::string, size_t> sizes_;  // by target and shape
};

Bytes WithChoices(uint8_t choices, ConstBytes bytes) {
  Bytes input = {static_cast<std::byte>(choices)};
  input.insert(input.end(), bytes.begin(), bytes.end());
  return input;
}

void AddHandshake(Corpus& corpus, const IwarpConnection& c) {
  // Flags, revision, length and the enhanced word are the shape.
  const auto shape = [](ConstBytes frame) { return ToHex(frame.subspan(16, std::min<size_t>(frame.size() - 16, 8))); };
  corpus.Add("mpa_handshake", "request_" + shape(c.request), WithChoices(kResponderChoices, c.request));
  if (!c.reply.empty()) corpus.Add("mpa_handshake", "reply_" + shape(c.reply), WithChoices(kInitiatorChoices, c.reply));
}

void AddSegments(Corpus& corpus, const std::vector<RecordedFpdu>& fpdus) {
  for (const RecordedFpdu& fpdu : fpdus) {
    const auto header = emu::wire::DecodeSegment(fpdu.ulpdu, fpdu.ulpdu.size());
    std::string shape = ToHex(fpdu.ulpdu.first(std::min<size_t>(fpdu.ulpdu.size(), 2)));
    size_t kept = fpdu.ulpdu.size();
    if (!header.has_value()) {
      shape = "bad_" + std::to_string(static_cast<int>(header.error().kind)) + "_" + shape;
    } else if (header->opcode() == emu::wire::RdmapOpcode::kTerminate) {
      shape += "_" + ToHex(fpdu.ulpdu.subspan(header->EncodedSize(), 4));
    } else {
      kept = std::min(kept, header->EncodedSize() + kPayloadKept);
    }
    const ConstBytes record = fpdu.ulpdu.first(std::min<size_t>(kept, 128));
    corpus.Add("segment", shape, Bytes(record.begin(), record.end()));
  }
}

void AddStream(Corpus& corpus, const IwarpConnection& c, const std::vector<RecordedFpdu>& fpdus,
               const std::string& name) {
  if (fpdus.empty()) return;
  Bytes stream;
  for (const RecordedFpdu& fpdu : fpdus) {
    if (stream.size() + fpdu.covered.size() + fpdu.crc.size() > kStreamKept) break;
    stream.insert(stream.end(), fpdu.covered.begin(), fpdu.covered.end());
    stream.insert(stream.end(), fpdu.crc.begin(), fpdu.crc.end());
  }
  if (!stream.empty()) corpus.Add("fpdu", name, WithChoices(c.crc ? 0x11 : 0x12, stream));
}

// As decode_message_fuzz.cc reads messages: each by itself, and a call with its reply.
void AddExchange(Corpus& corpus, const std::string& shape, std::initializer_list<Bytes> messages) {
  Bytes input;
  uint8_t choices = 6;  // the client, by RFC 5666bis
  for (const Bytes& message : messages) {
    for (const size_t value : {size_t{choices}, message.size() >> 8, message.size() & 0xff}) {
      input.push_back(static_cast<std::byte>(value));
    }
    input.insert(input.end(), message.begin(), message.end());
    choices ^= 1;
  }
  corpus.Add("decode_message", shape, input);
}

// As a message stands in a file of text.
void AddHex(Corpus& corpus, const std::string& shape, ConstBytes message) {
  std::string text = ToHex(message) + "\n";
  const ConstBytes plain = AsBytes(text);
  corpus.Add("decode_input", "hex_" + shape, Bytes(plain.begin(), plain.end()));
  std::string dump = "00000000:";
  for (const std::byte each : message.first(std::min<size_t>(16, message.size()))) dump += " " + ToHex({&each, 1});
  const ConstBytes xxd = AsBytes(dump);
  corpus.Add("decode_input", "xxd_" + shape, Bytes(xxd.begin(), xxd.end()));
}

void AddHeaders(Corpus& corpus, const std::vector<RecordedFpdu>& fpdus) {
  for (const RecordedFpdu& fpdu : fpdus) {
    const auto segment = emu::wire::DecodeSegment(fpdu.ulpdu, fpdu.ulpdu.size());
    if (!segment.has_value() || !emu::wire::IsSend(segment->opcode()) || segment->message_offset != 0) continue;
    const ConstBytes message = fpdu.ulpdu.subspan(segment->EncodedSize());
    if (message.size() < rpcrdma::kFixedFieldsSize) continue;
    ByteReader in(message);
    const auto header = rpcrdma::DecodeHeaderV1(in);
    std::string shape = "bad_" + ToHex(message.subspan(4, 12));
    size_t kept = message.size();
    if (header.has_value()) {
      shape = "type" + std::to_string(static_cast<int>(header->type())) + "_v" + std::to_string(header->version);
      if (const rpcrdma::ChunkLists* lists = header->chunks()) {
        shape += "_r" + std::to_string(lists->reads.size()) + "_w" + std::to_string(lists->writes.segments().size()) +
                 "_c" + std::to_string(lists->reply.has_value() ? lists->reply->size() : 0);
      }
      kept = std::min(kept, in.position() + kMessageKept);
    }
    const ConstBytes input = message.first(std::min<size_t>(kept, 256));
    corpus.Add("rpcrdma_header", shape, Bytes(input.begin(), input.end()));
    AddExchange(corpus, shape, {Bytes(input.begin(), input.end())});
    AddHex(corpus, shape, input.first(std::min<size_t>(input.size(), 64)));
    // Behind the limits and the shapes of a call and of a reply: a few of each.
    for (const uint8_t each : {0x2d, 0xff}) {
      Bytes semantics(13, static_cast<std::byte>(each));
      semantics.insert(semantics.end(), input.begin(), input.end());
      corpus.Add("header_semantics", shape + "_" + std::to_string(each), semantics);
    }
    if (!header.has_value() || !header->has_inline_message()) continue;
    const ConstBytes whole = message.first(std::min<size_t>(message.size(), 512));
    corpus.AddLongest("rpc_message", shape, Bytes(whole.begin(), whole.end()));
  }
}

// Messages of which there is no recording: the deprecated types, and an answer in the layout of version 1.
void AddExchanges(Corpus& corpus) {
  const auto words = [](std::initializer_list<uint32_t> values) {
    Bytes bytes(values.size() * 4);
    ByteWriter out(bytes);
    for (const uint32_t value : values) out.U32(value);
    return bytes;
  };
  const Bytes call = words({7, 1, 32, 0, 0, 1, 1, 9, 100, 0, 0, 0, 0, 7, 0, 2, 100417, 1, 1, 0, 0, 0, 0, 1, 2, 3});
  AddExchange(corpus, "write_chunk",
              {call, words({7, 1, 32, 0, 0, 1, 1, 9, 99, 0, 0, 0, 0, 7, 1, 0, 0, 0, 0, 4, 5, 6})});
  AddExchange(corpus, "msgp", {words({7, 1, 32, 2, 64, 512, 0, 0, 0, 7, 0, 2, 100003, 3, 0, 0, 0, 0, 0})});
  AddExchange(corpus, "done", {words({7, 1, 32, 3})});
  AddExchange(corpus, "echoed_version", {call, words({7, 2, 32, 4, 1, 1, 1})});
  AddExchange(corpus, "error", {call, words({7, 1, 32, 4, 3, 0, 0, 0, 0, 0, 0, 0, 0})});
}

// The beginning of a capture, as decode_input_fuzz.cc reads files.
void AddFile(Corpus& corpus, const std::string& name, const std::string& path) {
  constexpr size_t kFileKept = 1900;
  std::ifstream file(path, std::ios::binary);
  std::string text(kFileKept, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  const ConstBytes kept = AsBytes(text).first(static_cast<size_t>(file.gcount()));
  corpus.Add("decode_input", name, Bytes(kept.begin(), kept.end()));
}

template <typename Message>
void AddExtension(Corpus& corpus, const emu::wire::SegmentHeader& header, const Message& message) {
  Bytes record(header.EncodedSize() + message.EncodedSize());
  ByteWriter out(record);
  header.Encode(out);
  message.Encode(out);
  corpus.Add("segment", ToHex(ConstBytes(record).first(2)), record);
}

void AddExtensions(Corpus& corpus) {
  using namespace emu::wire;
  AddExtension(corpus, SegmentHeader::Immediate(false, 1), ImmediateData::Of(7));
  AddExtension(corpus, SegmentHeader::Immediate(true, 1), ImmediateData::Of(7));
  AddExtension(corpus, SegmentHeader::AtomicRequest(1), AtomicRequest::CompareSwap(1, 0x15a, 8, 2, 3));
  AddExtension(corpus, SegmentHeader::AtomicResponse(1), AtomicResponse{1, 2});
}

// Two of each opcode in a row, as ib_transport_fuzz.cc reads them: for its QP, and for the first region of its memory.
void AddIbPackets(Corpus& corpus) {
  using namespace emu::wire;
  constexpr uint32_t kQp = 0x11;
  constexpr uint32_t kKey = 0x15a;
  constexpr uint64_t kAddress = uint64_t{1} << 32;
  constexpr uint8_t kForUsNearAndPadded = 7;
  for (const IbService service : {IbService::kRc, IbService::kUc}) {
    for (int op = 0; op <= static_cast<int>(IbOp::kSendOnlyInv); ++op) {
      Bytes input = {static_cast<std::byte>(service == IbService::kUc ? 1 : 0)};
      bool known = true;
      for (uint32_t psn = 0; psn < 2; ++psn) {
        IbHeader header{.service = service,
                        .op = static_cast<IbOp>(op),
                        .destination_qp = kQp,
                        .ack_request = true,
                        .psn = psn,
                        .address = kAddress,
                        .rkey = kKey,
                        .dma_length = 8,
                        .swap_or_add = 1,
                        .invalidate_rkey = kKey,
                        .syndrome = kIbAck};
        Bytes record(header.EncodedSize() + 8);
        ByteWriter out(record);
        header.Encode(out);
        if (!DecodeIb(record, record.size()).has_value()) record.resize(header.EncodedSize());
        known = known && DecodeIb(record, record.size()).has_value();
        input.push_back(static_cast<std::byte>(record.size()));
        input.push_back(std::byte{kForUsNearAndPadded});
        input.insert(input.end(), record.begin(), record.end());
      }
      const std::string shape = std::string(ToString(service)) + "_" + ToHex(ConstBytes(input).subspan(3, 1));
      if (known) corpus.Add("ib_transport", shape, input);
    }
  }
}

// Datagrams of either opcode, long enough to end in a route.
void AddDatagrams(Corpus& corpus) {
  using namespace emu::wire;
  const Bytes ipv4 = {std::byte{0x45}, std::byte{0x00}, std::byte{0x00}, std::byte{0x38}, std::byte{0x00},
                      std::byte{0x00}, std::byte{0x40}, std::byte{0x00}, std::byte{0x40}, std::byte{0x11},
                      std::byte{0x22}, std::byte{0x8d}, std::byte{0x0a}, std::byte{0x01}, std::byte{0x02},
                      std::byte{0x03}, std::byte{0x0a}, std::byte{0x01}, std::byte{0x02}, std::byte{0x04}};
  constexpr size_t kRoute = 40;
  for (const IbOp op : {IbOp::kSendOnly, IbOp::kSendOnlyImm}) {
    for (const bool six : {false, true}) {
      IbHeader header{.service = IbService::kUd, .op = op, .destination_qp = 1, .qkey = 0x80010000, .source_qp = 1};
      Bytes record(header.EncodedSize() + kDatagramIpSize + kRoute);
      ByteWriter out(record);
      header.Encode(out);
      EncodeDatagramIp(header, out);
      if (six) {
        record[header.EncodedSize() + kDatagramIpSize] = std::byte{0x60};
      } else {
        std::copy(ipv4.begin(), ipv4.end(), record.end() - static_cast<ptrdiff_t>(ipv4.size()));
      }
      const std::string name = op == IbOp::kSendOnly ? "send" : "send_imm";
      corpus.Add("ib_datagram", name + (six ? "_ipv6" : "_ipv4"), record);
    }
  }
}

// One of each message that agrees on connections, with a request's IP header and a rejection's redirection.
void AddCmMads(Corpus& corpus) {
  using namespace emu::wire;
  CmReq req{.local_id = 1, .service_id = ServiceIdOf(CmPortSpace::kTcp, 20049), .qp_number = 0x11, .path_mtu = 3};
  CmIpHeader{.source_port = 40000}.Encode(std::span(req.private_data).first<kCmIpHeaderSize>());
  CmRej rej{.local_id = 2, .remote_id = 1, .information_length = CmRej::kInformationSize};
  rej.reason = CmReason::kRedirected;
  CmRedirect{.qp_number = 0x10001}.Encode(rej.information);
  const CmMessage messages[] = {
      req, CmMra{}, rej, CmRep{}, CmRtu{}, CmDreq{}, CmDrep{}, CmSidrReq{}, CmSidrRep{},
  };
  for (const CmMessage& message : messages) {
    const CmMadBytes bytes = EncodeCmMad({1, message});
    corpus.Add("cm_mad", ToString(AttributeOf(message)), Bytes(bytes.begin(), bytes.end()));
  }
}

// The hello of a carrier and of a link, each answer, and what is said when a proof is asked for.
void AddCarrierHellos(Corpus& corpus) {
  using namespace emu::wire;
  const auto add = [&](const std::string& shape, const auto& message, size_t size) {
    Bytes bytes(size);
    ByteWriter out(bytes);
    message.Encode(out);
    corpus.Add("carrier_hello", shape, bytes);
    return bytes;
  };
  CarrierHello hello{.source_qp = 2, .destination_qp = 0x10002};
  hello.source[15] = 1;
  hello.destination[15] = 2;
  hello.nonce[0] = std::byte{3};
  Bytes proven = add("carrier", hello, kCarrierHelloSize);
  proven.resize(proven.size() + sizeof(CarrierNonce) + kCarrierProofSize, std::byte{4});
  corpus.Add("carrier_hello", "proof", proven);
  hello.crc = true;
  add("carrier_crc", hello, kCarrierHelloSize);
  hello.datagrams = true;
  hello.source_qp = hello.destination_qp = 0x10000;
  add("link", hello, kCarrierHelloSize);
  for (int status = 0; status <= static_cast<int>(CarrierStatus::kWait); ++status) {
    CarrierAnswer answer{.status = static_cast<CarrierStatus>(status)};
    answer.sends = answer.status == CarrierStatus::kProve;
    answer.token.fill(std::byte{5});
    add("answer_" + std::to_string(status), answer, kCarrierAnswerSize);
  }
}

// Records as rpcb_fuzz.cc reads them, in one piece or byte by byte, and addresses.
void AddRpcbAnswers(Corpus& corpus) {
  using namespace rpcrdma;
  const auto add = [&](const std::string& shape, uint8_t step, const ReplyHeader& header, const auto& results) {
    Bytes record(512);
    ByteWriter mark(record);
    XdrWriter out(MutableBytes(record).subspan(4));
    EncodeReply(header, out);
    results(out);
    record.resize(4 + out.written().size());
    mark.U32(0x80000000u | static_cast<uint32_t>(record.size() - 4));
    corpus.Add("rpcb", shape, WithChoices(step, record));
  };
  const auto nothing = [](XdrWriter&) {};
  add("done", 0xff, SuccessReply(1), [](XdrWriter& out) { out.Bool(true); });
  add("versions", 0xff, ProgMismatchReply(1, {2, 3}), nothing);
  add("denied", 0xff, AuthErrorReply(1, AuthStat::kTooWeak), nothing);
  for (const uint8_t step : {0, 0xff}) {
    add("dump_" + std::to_string(step), step, SuccessReply(1), [](XdrWriter& out) {
      for (const char* netid : {"rdma", "rdma6"}) {
        out.Optional(true);
        out.U32(0x20000099);
        out.U32(1);
        out.String(netid);
        out.String(netid == std::string("rdma") ? "0.0.0.0.78.81" : "2001:db8::1.78.81");
        out.String("superuser");
      }
      out.Optional(false);
    });
  }
  for (const char* address : {"192.0.2.1.78.81", "::ffff:192.0.2.1.78.81", "2001:db8:0:1:2:3:4:5.0.111"}) {
    const ConstBytes text = AsBytes(std::string_view(address));
    corpus.Add("rpcb", std::string("address_") + std::to_string(text.size()), Bytes(text.begin(), text.end()));
  }
}

// One of each header type and error of version 2; answers to a probe in the layout of either version; sets of
// properties with their exceptions.
void AddVersion2(Corpus& corpus) {
  using namespace rpcrdma;
  const auto words = [](std::initializer_list<uint32_t> values) {
    Bytes bytes(4 * values.size());
    ByteWriter out(bytes);
    for (const uint32_t value : values) out.U32(value);
    return bytes;
  };
  Bytes before;  // a reply's call, among others
  const auto add = [&](const std::string& shape, Header::Body body, uint32_t flags, const Bytes& message = {}) {
    const Header header{.xid = 7, .version = 2, .credits = 32, .flags = flags, .body = std::move(body)};
    Bytes bytes(EncodedSizeV2(header));
    ByteWriter out(bytes);
    EncodeHeaderV2(header, out);
    bytes.insert(bytes.end(), message.begin(), message.end());
    corpus.Add("rpcrdma_header_v2", shape, bytes);
    AddExchange(corpus, "v2_" + shape, {before, bytes});
    before = bytes;
  };
  ChunkLists lists;
  lists.reads = {{8, {1, 5, 0x1000}}, {8, {2, 3, 0x2000}}};
  lists.writes.AppendChunk(SegmentArray{{3, 100, 0x3000}, {4, 100, 0x4000}});
  lists.reply = SegmentArray{{5, 1000, 0x5000}};
  ChunkLists long_call;
  long_call.reads = {{0, {6, 3000, 0x6000}}};
  ChunkLists long_reply;
  long_reply.reply = lists.reply;
  const Bytes call = words({7, 0, 2, 0x20000099});
  const Bytes reply = words({7, 1, 0, 0});
  add("call", RdmaMsg{}, 0, call);
  add("call_with_chunks", RdmaMsg{lists, 4}, 0, call);
  add("reply", RdmaMsg{}, kFlagResponse, reply);
  add("reply_not_marked", RdmaMsg{}, 0, reply);
  add("long_call", RdmaNomsg{long_call, 6}, 0);
  add("long_reply", RdmaNomsg{long_reply}, kFlagResponse);
  add("err_vers", ErrVers{1, 2}, kFlagResponse);
  add("err_bad_xdr", ErrBadXdr{}, kFlagResponse);
  add("err_inval_htype", ErrInvalHtype{}, kFlagResponse);
  add("err_read_chunks", ErrReadChunks{3}, kFlagResponse);
  add("err_write_chunks", ErrWriteChunks{3}, kFlagResponse);
  add("err_segments", ErrSegments{3}, kFlagResponse);
  add("err_write_resource", ErrWriteResource{1, 2000}, kFlagResponse);
  add("err_reply_resource", ErrReplyResource{2000}, kFlagResponse);
  add("err_system", ErrSystem{}, kFlagResponse);
  add("err_other", ErrOther{10}, kFlagResponse);
  add("connprop", ConnProp{MakePropertySet({})}, 0);
  add("connprop_answer", ConnProp{MakePropertySet({16384, ReverseSupport::kGeneral})}, kFlagResponse);
  corpus.Add("rpcrdma_header_v2", "type_6", words({7, 2, 32, 6, 0, 8, 1, 7, 0}));
  corpus.Add("rpcrdma_header_v2", "type_7", words({7, 2, 32, 7, 2, 4}));
  corpus.Add("rpcrdma_header_v2", "version_1_echoes_2", words({7, 2, 32, 4, 1, 1, 1}));
  corpus.Add("rpcrdma_header_v2", "version_1_answers_1", words({7, 1, 32, 4, 1, 1, 1}));
  corpus.Add("rpcrdma_header_v2", "err_chunk", words({7, 2, 32, 4, 2}));

  corpus.Add("rpcrdma_properties", "none", words({0}));
  corpus.Add("rpcrdma_properties", "defaults", words({2, 1, 0, 2, 0}));
  corpus.Add("rpcrdma_properties", "both", words({2, 1, 4, 8192, 2, 4, 2}));
  corpus.Add("rpcrdma_properties", "twice", words({2, 1, 4, 8192, 1, 4, 8192}));
  corpus.Add("rpcrdma_properties", "too_long", words({1, 1, 8, 8192, 0}));
  corpus.Add("rpcrdma_properties", "too_small", words({1, 1, 4, 1023}));
  corpus.Add("rpcrdma_properties", "no_level", words({1, 2, 4, 3}));
  corpus.Add("rpcrdma_properties", "of_an_extension", words({2, 77, 8, 1, 2, 1, 4, 1024}));
  corpus.Add("rpcrdma_properties", "round_up", words({2, 99, 5, 0x01020304, 0x05ffffff, 2, 4, 0}));
}

// Operations as the targets of the same names read them: one way through each of the larger parts of an engine.
void AddOperations(Corpus& corpus) {
  const auto add = [&](const char* target, const char* shape, Bytes configuration,
                       std::initializer_list<std::initializer_list<int>> operations) {
    for (const auto& operation : operations) {
      for (const int value : operation) configuration.push_back(static_cast<std::byte>(value));
    }
    corpus.Add(target, shape, configuration);
  };
  const auto bytes = [](std::initializer_list<int> values) {
    Bytes result;
    for (const int value : values) result.push_back(static_cast<std::byte>(value));
    return result;
  };

  // Submit: 0, choices, words, items, results, longest reply, deadline. Reply: 3, call, choices, amount, credits, no
  // spoiling, invalidation. Completions: 7 of a Send, 8 of an invalidation.
  const Bytes calls = bytes({0x42, 0x0a, 0xff, 0xff});
  add("requester", "inline", calls, {{0, 0, 2, 0}, {7, 0}, {3, 0, 0, 0, 8, 0, 0}, {0, 0, 3, 0}, {0, 0, 4, 0}});
  add("requester", "read_chunks", calls, {{0, 3, 2, 150, 120, 4}, {3, 0, 0, 4, 8, 0, 0}, {8, 0}, {8, 0}, {7, 0}});
  add("requester", "write_chunks", calls, {{0, 0x0c, 2, 150, 100, 4}, {3, 0, 1, 33, 8, 0, 3}, {8, 1}, {8, 0}});
  add("requester", "wrong_length", bytes({0x4a, 0x1a, 0xff, 0xff}),
      {{0, 0x08, 2, 150, 4}, {3, 0, 3, 3, 8, 0, 0}, {8, 0}, {0, 0x08, 2, 150, 4}, {3, 0, 3, 4, 8, 0, 0}, {8, 0}});
  add("requester", "reply_chunk", calls, {{0, 0x08, 2, 99, 200}, {3, 0, 7, 16, 8, 0, 1}, {8, 0}, {12, 0}});
  add("requester", "long_call", calls, {{0, 2, 100, 40, 4}, {3, 0, 0, 4, 8, 0, 0}, {8, 0}, {8, 0}});
  add("requester", "errors", calls,
      {{0, 2, 2, 200, 4}, {3, 0, 0x20, 0, 3, 0, 0}, {8, 0}, {0, 2, 2, 200, 4}, {3, 0, 0x40, 9, 3, 0, 0}, {8, 0}});
  add("requester", "cancelled", calls, {{0, 2, 2, 200, 4}, {10, 0}, {8, 0}, {3, 0, 0, 0, 2, 0, 0}});
  add("requester", "timed_out", calls, {{0, 0x20, 2, 4, 9}, {0, 0x20, 2, 4, 9}, {11, 200}, {3, 0, 0, 0, 2, 0, 0}});
  add("requester", "lost", calls, {{0, 2, 2, 200, 4}, {0, 0, 2, 4}, {15, 0}, {0, 0, 2, 4}});
  add("requester", "inline_only", bytes({0x43, 0x0a, 0xff, 0xff}),
      {{0, 0x20, 2, 4, 9}, {0, 0, 2, 4}, {11, 200}, {3, 0, 0, 0, 2, 0, 0}});

  // A reply that is read: its counts and lengths come before what spoils it. Completions: 2 of a Read.
  const Bytes reading = bytes({0x42, 0xaa, 0xff, 0xff});
  add("requester", "long_reply_read", reading,
      {{0, 0, 2, 0}, {7, 0}, {3, 0, 0x10, 0, 8, 5, 40, 60, 0, 0}, {2, 1}, {2, 0}, {8, 0}, {7, 0}, {0, 0, 2, 0}});
  add("requester", "results_read", reading,
      {{0, 0, 2, 0}, {7, 0}, {3, 0, 0x10, 0x1c, 8, 0x11, 20, 5, 0, 0}, {2, 0}, {2, 0}, {8, 0}, {7, 0}});
  add("requester", "reading_cancelled", reading,
      {{0, 0, 2, 0}, {7, 0}, {3, 0, 0x10, 0, 8, 4, 40, 0, 0}, {10, 0}, {2, 0}, {8, 0}, {7, 0}});

  // Version 2, in the second byte of the configuration: 0x40 from the start, 0x80 to be found, 0xc0 the reverse
  // direction. Behind the four: what of resends, windows and buffers; what of the ends. Errors: choices 0x20, and
  // before what spoils them their code and number. 2 0: an extension's message; 2 1: properties; 2 2: properties of the
  // peer.
  const auto speaking = [&](int kind, int of_calls, int of_ends) {
    return bytes({0x42, 0x1a + kind, 0xff, 0xff, of_calls, of_ends});
  };
  const Bytes version_2 = speaking(0x40, 0, 8);
  add("requester", "v2_inline", version_2,
      {{0, 0x80, 2, 0}, {7, 0}, {3, 0, 0, 0, 8, 0, 0}, {0, 0, 3, 0}, {0, 0, 4, 0}, {3, 0, 0x60, 0, 8, 0, 0}});
  add("requester", "v2_remote_invalidation", speaking(0x40, 0x20, 0),
      {{0, 3, 2, 150, 120, 4}, {3, 0, 0, 4, 8, 0, 1}, {8, 0}, {8, 0}});
  add("requester", "v2_err_read_chunks", version_2,
      {{0, 3, 2, 150, 120, 4}, {3, 0, 0x20, 0, 8, 4, 0, 0, 0}, {8, 0}, {8, 0}, {7, 0}, {3, 0, 0, 4, 8, 0, 0}});
  add("requester", "v2_err_write_chunks", version_2,
      {{0, 0x0c, 2, 150, 100, 4}, {3, 0, 0x20, 0, 8, 5, 1, 0, 0}, {8, 0}, {8, 0}, {7, 0}, {3, 0, 7, 16, 8, 0, 0}});
  add("requester", "v2_err_segments", version_2,
      {{0, 0x13, 2, 150, 120, 4}, {3, 0, 0x20, 0, 8, 6, 2, 0, 0}, {8, 0}, {8, 0}, {8, 0}, {8, 0}, {8, 0}, {7, 0}});
  add("requester", "v2_err_write_resource", version_2,
      {{0, 8, 2, 150, 4}, {3, 0, 0x20, 0, 8, 7, 0x41, 0, 0}, {8, 0}, {7, 0}, {3, 0, 3, 0, 8, 0, 0}, {8, 0}});
  add("requester", "v2_err_reply_resource", version_2,
      {{0, 0, 2, 99}, {3, 0, 0x20, 0, 8, 8, 0x60, 0, 0}, {8, 0}, {7, 0}, {3, 0, 7, 16, 8, 0, 0}, {8, 0}});
  add("requester", "v2_errors", version_2,
      {{0, 2, 2, 200, 4},
       {3, 0, 0x20, 0, 8, 2, 0, 0, 0},
       {8, 0},
       {0, 0, 2, 4},
       {3, 0, 0x20, 0, 8, 9, 0, 0, 0},
       {7, 0},
       {0, 0, 2, 4},
       {3, 0, 0x20, 0, 8, 10, 0, 0, 0}});
  add("requester", "v2_cancelled_before_resend", version_2,
      {{0, 3, 2, 150, 120, 4}, {3, 0, 0x20, 0, 8, 4, 0, 0, 0}, {10, 0}, {8, 0}, {8, 0}});
  add("requester", "v2_properties", speaking(0x40, 0xc0, 0xe),
      {{2, 1, 50}, {0, 0, 255, 0}, {2, 2, 7, 0x2a, 0, 0}, {7, 0}, {2, 2, 7, 0x2e, 0, 0}, {3, 0, 0, 0, 2, 0, 0}});
  add("requester", "v2_properties_refused", version_2, {{2, 1, 50}, {2, 3, 3, 0, 0, 0}, {0, 0, 2, 0}});
  add("requester", "v2_properties_unanswered", version_2, {{2, 1, 50}, {7, 0}, {11, 60}, {2, 2, 7, 0x2a, 0, 0}});
  add("requester", "v2_properties_malformed", version_2, {{2, 1, 50}, {0, 0, 2, 0}, {2, 2, 7, 1, 0, 0}});
  add("requester", "v2_extension", version_2,
      {{2, 0, 4, 10}, {3, 0, 0x80, 3, 8, 0, 0}, {7, 0}, {2, 0, 8, 10, 5}, {11, 9}, {3, 0, 0x80, 3, 8, 0, 0}});
  add("requester", "probe", speaking(0x80, 0, 0),
      {{0, 0, 2, 0}, {7, 0}, {3, 0, 0, 0, 8, 0, 0}, {2, 1, 50}, {2, 2, 7, 0x2a, 0, 0}, {0, 2, 2, 200, 4}});
  add("requester", "probe_refused", speaking(0x80, 0, 0),
      {{0, 0, 2, 0}, {7, 0}, {3, 0, 0xa0, 1, 8, 0, 0}, {0, 2, 2, 200, 4}, {7, 0}, {3, 0, 0, 0, 8, 0, 0}, {8, 0}});
  add("requester", "probe_refused_by_2", speaking(0x80, 0, 0),
      {{0, 0, 2, 0}, {3, 0, 0x20, 0, 8, 1, 0x41, 0, 0}, {7, 0}, {0, 0, 2, 0}, {3, 0, 0, 0, 8, 0, 0}});
  add("requester", "reverse", speaking(0xc0, 0, 0),
      {{0, 0x20, 2, 4, 9}, {11, 20}, {3, 0, 0, 0, 8, 0, 0}, {2, 2, 0, 0x30, 0, 0}, {0, 0x22, 2, 200, 4, 9}, {11, 20}});
  add("requester", "reverse_not_served", speaking(0xc0, 0, 0), {{0, 0, 2, 4}, {2, 2, 0, 0x20, 0, 0}, {0, 0, 2, 4}});

  // A call: 0, choices, XID, counts, segments (length, choice), no spoiling, what its memory holds. Completions: 5 of a
  // Read, 7 of a Send, 9 of an invalidation. Answer: 10, request, how, size, items.
  const Bytes requests = bytes({0xe1, 0, 0x0f, 2, 20});
  add("responder", "inline", requests, {{0, 0x18, 7, 0, 0, 0}, {10, 0, 0, 3}, {7, 0}, {0, 8, 8, 0, 0, 0}});
  add("responder", "read_chunks", requests,
      {{0, 0x18, 7, 2, 1, 40, 20, 5, 30, 21, 0, 0}, {5, 1}, {5, 0}, {9, 0}, {9, 0}, {10, 0, 0, 3}, {7, 0}});
  add("responder", "write_chunks", requests,
      {{0, 0x18, 7, 8, 2, 40, 20, 30, 21, 1, 80, 22, 0, 0}, {10, 0, 0x10, 3, 60, 50}, {7, 0}, {9, 0}, {9, 0}});
  add("responder", "reply_chunk", requests,
      {{0, 0x18, 7, 0x90, 50, 20, 60, 21, 0, 0}, {10, 0, 0x08, 60, 9}, {7, 0}, {9, 0}, {9, 0}});
  add("responder", "long_call", requests,
      {{0, 3, 7, 1, 40, 20, 9, 21, 1, 30, 22, 0, 0}, {5, 0}, {5, 0}, {5, 0}, {9, 0}, {9, 0}, {10, 0, 0, 3}});
  add("responder", "refused", requests, {{0, 0x18, 7, 0, 0, 0}, {10, 0, 1, 0}, {0, 0x18, 7, 0, 0, 0}, {10, 0, 2, 0}});
  add("responder", "version_2", requests, {{4, 16, 0, 0, 0, 7, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0}});
  add("responder", "error_and_done", requests,
      {{4, 20, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 2, 0},
       {4, 16, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3, 0}});
  add("responder", "lost", requests, {{0, 0x18, 7, 1, 1, 40, 20, 0, 0}, {0, 0x18, 8, 0, 0, 0}, {15, 0}});
  add("responder", "overrun", bytes({0xe1, 0xf6, 0x0f, 2, 20}),
      {{0, 0x18, 7, 0, 0, 0}, {10, 0, 0, 3}, {0, 0x18, 7, 0, 0, 0}, {0, 0x18, 8, 0, 0, 0}, {0, 0x18, 9, 0, 0, 0}});
  add("responder", "inline_only", bytes({0xf9, 0, 0x0f, 2, 20}),
      {{0, 0x18, 7, 0, 0, 0}, {0, 0x18, 8, 4, 1, 9, 9, 0, 0}, {10, 0, 0, 3}, {7, 0}});

  // Version 2, in the fourth byte of the configuration: 0x40. Behind the five: who this is, and what it knows; how many
  // chunks it takes. A call has its form (0: of version 2; 0x40 properties, 0x80 an extension's message) and the handle
  // to invalidate before what spoils it.
  const auto answering = [&](int choices, int lists) { return bytes({0xe1, 0, 0x0f, 0x42, 20, choices, lists}); };
  add("responder", "v2_inline", answering(0, 0),
      {{0, 0x18, 7, 0, 0, 0, 0, 0}, {10, 0, 0, 3}, {7, 0}, {0, 0x18, 8, 0, 0x10, 0, 0}, {0, 0x18, 9, 0, 4, 0, 0, 0}});
  add("responder", "v1_first", answering(0, 0),
      {{0, 0x18, 7, 0, 0x10, 0, 0}, {10, 0, 0, 3}, {7, 0}, {0, 0x18, 8, 0, 0, 0, 0, 0}, {0, 0x18, 9, 0, 0x10, 0, 0}});
  add("responder", "v2_alone", answering(1, 0), {{0, 0x18, 7, 0, 0x10, 0, 0}, {0, 0x18, 8, 0, 0, 0, 0, 0}});
  add("responder", "v2_invalidate", answering(0x12, 0),
      {{0, 0x18, 7, 2, 1, 40, 20, 5, 30, 21, 0, 1, 0, 0}, {5, 1}, {5, 0}, {9, 0}, {9, 0}, {10, 0, 0, 3}, {7, 0}});
  add("responder", "v2_handle_of_nobody", answering(0x12, 0), {{0, 0x18, 7, 2, 1, 40, 20, 5, 30, 21, 0, 255, 0, 0}});
  add("responder", "v2_properties", answering(0x20, 0),
      {{0, 0x18, 7, 0, 0x40, 0x2a, 0, 0}, {0, 0x18, 0, 0, 0x44, 0x2e, 0, 0}, {0, 0x18, 8, 0, 0x40, 1, 0, 0}, {7, 0}});
  add("responder", "v2_extension", answering(0x60, 0),
      {{0, 0x18, 7, 0, 0x80, 0, 0, 0}, {0, 0x18, 7, 0, 0x80, 4, 0, 0}, {7, 0}, {0, 0x18, 7, 0, 0xa0, 0, 0, 0}});
  add("responder", "v2_limits", answering(0x82, 0x25),
      {{0, 0x18, 7, 2, 1, 40, 20, 1, 30, 21, 0, 0, 0, 0},
       {0, 0x18, 7, 8, 1, 40, 20, 1, 30, 21, 0, 0, 0, 0},
       {7, 0},
       {0, 0x18, 7, 0xd0, 9, 20, 9, 21, 9, 22, 0, 0, 0, 0}});
  add("responder", "v2_err_write_resource", answering(2, 0),
      {{0, 0x18, 7, 4, 1, 10, 20, 0, 0, 0, 0}, {10, 0, 8, 3, 60}, {7, 0}, {9, 0}});
  add("responder", "v2_err_reply_resource", answering(2, 0), {{0, 0x18, 7, 0, 0, 0, 0, 0}, {10, 0, 0x80, 127}});
  add("responder", "v2_err_system", answering(2, 0), {{0, 0x18, 7, 0, 0, 0, 0, 0}, {10, 0, 1, 0}});
  add("responder", "v2_reverse", answering(0x13, 0),
      {{0, 0x18, 7, 1, 1, 40, 20, 0, 0, 0, 0}, {5, 0}, {9, 0}, {10, 0, 0, 3}, {7, 0}});
  add("responder", "v2_reverse_inline", answering(7, 0),
      {{0, 0x18, 7, 1, 1, 40, 20, 0, 0, 0, 0}, {7, 0}, {0, 0x18, 7, 0x50, 9, 20, 0, 0, 0, 0}, {10, 0, 0, 3}});
  add("responder", "v2_reverse_none", answering(0x0b, 0),
      {{0, 0x18, 7, 0, 0, 0, 0, 0}, {0, 0x18, 7, 0, 0x40, 0, 0, 0}});

  // RDMA_DONE: 15, choice, which of the replies that are exposed, what the memory of a call would hold.
  add("responder", "exposed", bytes({0xe1, 0, 0x0f, 0xfe, 20}),
      {{0, 0x18, 7, 0, 0, 0},
       {10, 0, 0, 255, 0},
       {7, 0},
       {15, 12, 0, 0},
       {9, 0},
       {0, 0x18, 8, 0, 0, 0},
       {10, 0, 0, 3}});

  // Limits of records and bytes, then calls (client, call), answers (which, message, item) and time.
  const Bytes limits = bytes({5, 3, 200, 100, 40});
  add("replay_cache", "again", limits, {{0, 1}, {0, 1}, {2, 20, 8}, {0, 1}, {4, 1}, {2, 200, 200}, {4, 1}});
  add("replay_cache", "room", limits,
      {{0, 1},
       {2, 1, 1},
       {0, 2},
       {2, 1, 1},
       {4, 1},
       {2, 1, 1},
       {4, 2},
       {2, 9, 9},
       {8, 1},
       {2, 1, 1},
       {8, 2},
       {2, 1, 1},
       {8, 3},
       {2, 1, 1},
       {8, 4},
       {2, 1, 1}});
  add("replay_cache", "age", limits, {{0, 1}, {2, 1, 1}, {0xfb}, {0, 1}, {2, 1, 1}});

  // The other end: 0 and 2 produce, 1 and 3 consume, 4 and 5 write. Ours: 6 receives, 7 throws away, 8 sends.
  add("shm_ring", "records", {}, {{4, 10}, {0, 6}, {6, 14}, {4, 0}, {0, 1}, {6, 0}, {4, 127}, {0, 65}, {6, 48}});
  add("shm_ring", "two_at_once", {}, {{5, 0, 8, 48, 0, 0, 0, 1, 0, 0, 0}, {0, 14}, {6, 46}, {4, 5}, {6, 0}, {7}});
  add("shm_ring", "thrown_away", {}, {{0, 200}, {7}, {0, 100}, {7}, {4, 3}, {0, 3}, {6, 8}});
  add("shm_ring", "sent", {},
      {{8, 100},
       {8, 100},
       {8, 0},
       {1, 0},
       {8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {1, 64},
       {8, 255}});
  add("shm_ring", "produced_too_much", {}, {{2, 8, 16, 0, 0, 0, 0, 0, 0}, {6, 0}});
  add("shm_ring", "produced_less", {}, {{4, 10}, {0, 6}, {6, 0}, {2, 8, 0, 0, 0, 0, 0, 0, 0}, {6, 0}});
  add("shm_ring", "consumed_too_much", {},
      {{8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {8, 255},
       {3, 0, 32, 0, 0, 0, 0, 0, 0},
       {8, 255}});
  add("shm_ring", "no_kind", {}, {{5, 0, 8, 8, 0, 0, 0, 3, 0, 0, 0}, {0, 2}, {6, 0}});
  const std::initializer_list<int> somewhere = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  add("shm_ring", "refers", {}, {{9, 1, 48, 100}, somewhere, {0, 12}, {6, 14}, {4, 10}, {0, 6}, {6, 0}});
  add("shm_ring", "refers_twice", {}, {{9, 2, 72, 20}, somewhere, somewhere, {0, 19}, {6, 48}});
  add("shm_ring", "refers_to_nothing", {}, {{9, 1, 48, 0}, somewhere, {0, 12}, {6, 14}});
  add("shm_ring", "refers_too_often", {}, {{9, 33, 48, 1}, {0, 200}, {6, 14}});
  add("shm_ring", "refers_beyond", {}, {{9, 1, 48, 100}, somewhere, {0, 11}, {6, 14}});
  add("shm_ring", "is_referred", {}, {{10, 31, 0}, {10, 0, 24}, {10, 31, 3}, {10, 31, 3}, {1, 0}, {10, 31, 3}});
}

int Main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s OUTPUT_DIRECTORY CAPTURE...\n", argv[0]);
    return 2;
  }
  Corpus corpus(argv[1]);
  AddIbPackets(corpus);
  AddExtensions(corpus);
  AddDatagrams(corpus);
  AddCarrierHellos(corpus);
  AddCmMads(corpus);
  AddRpcbAnswers(corpus);
  AddVersion2(corpus);
  AddOperations(corpus);
  AddExchanges(corpus);
  for (const auto& [name, file] : DecodeInputs()) {
    const ConstBytes bytes = AsBytes(file);
    corpus.Add("decode_input", name, Bytes(bytes.begin(), bytes.end()));
  }
  // What comes first counts: in whatever order a shell has them.
  std::vector<std::string> captures(argv + 2, argv + argc);
  std::sort(captures.begin(), captures.end());
  for (const std::string& path : captures) {
    const auto capture = ReadTcpCaptureFile(path);
    if (!capture.has_value()) {
      std::fprintf(stderr, "%s\n", capture.error().c_str());
      return 1;
    }
    const std::string name = std::filesystem::path(path).stem();
    AddFile(corpus, name, path);
    for (const TcpConnection& connection : capture->connections) {
      const auto iwarp = CutIwarp(connection);
      if (!iwarp.has_value()) continue;
      AddHandshake(corpus, *iwarp);
      for (const auto* direction : {&iwarp->from_client, &iwarp->from_server}) {
        AddSegments(corpus, *direction);
        AddStream(corpus, *iwarp, *direction, name + (direction == &iwarp->from_client ? "_client" : "_server"));
        // rping's Sends are no RPC.
        if (connection.server_port == 20049) AddHeaders(corpus, *direction);
      }
    }
  }
  std::printf("%zu inputs\n", corpus.size());
  return 0;
}

}  // namespace
}  // namespace stagecoach::testing

int main(int argc, char** argv) {
  return stagecoach::testing::Main(argc, argv);
}
