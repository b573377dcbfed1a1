#include "tests/fuzz/decode_inputs.h"

#include <cstdint>

namespace stagecoach::testing {
namespace {

using namespace std::string_literals;

std::string Little(uint64_t value, int size) {
  std::string text;
  for (int i = 0; i < size; ++i) text += static_cast<char>(value >> 8 * i);
  return text;
}
std::string Big(uint64_t value, int size) {
  std::string text;
  for (int i = size; i-- > 0;) text += static_cast<char>(value >> 8 * i);
  return text;
}

// A TCP segment to the port of NFS with an MPA Request in it.
std::string Segment() {
  return Big(1000, 2) + Big(20049, 2) + Big(5, 4) + Big(0, 4) + Big(0x5018, 2) + Big(0, 6) + "MPA ID Req Frame" +
         Big(0x40010008, 4) + Big(0xf6ab0e1801000303, 8);
}
std::string Ipv4(const std::string& payload, uint16_t fragment = 0) {
  return Big(0x45000000 | (20 + payload.size()), 4) + Big(fragment, 4) + Big(0x40060000, 4) + Big(0x0a000001, 4) +
         Big(0x0a000002, 4) + payload;
}
std::string Ipv6(uint8_t next, const std::string& payload) {
  return Big(0x60000000, 4) + Big(payload.size(), 2) + Big(next, 1) + Big(64, 1) + Big(0xfd, 8) + Big(1, 8) +
         Big(0xfd, 8) + Big(2, 8) + payload;
}

// A pcap file of one packet.
std::string Pcap(uint32_t link_type, const std::string& packet, uint32_t cut = 0) {
  return Little(0xa1b2c3d4, 4) + Little(0x00040002, 4) + Little(0, 8) + Little(65536, 4) + Little(link_type, 4) +
         Little(1, 8) + Little(packet.size(), 4) + Little(packet.size() + cut, 4) + packet;
}

std::string Block(uint32_t type, std::string body) {
  body.resize((body.size() + 3) / 4 * 4);
  return Little(type, 4) + Little(body.size() + 12, 4) + body + Little(body.size() + 12, 4);
}
std::string PcapNg(const std::string& blocks) {
  return Block(0x0a0d0d0a, Little(0x1a2b3c4d, 4) + Little(1, 4) + std::string(8, '\xff')) +
         Block(1, Little(101, 4) + Little(64, 4)) + blocks;
}

}  // namespace

std::map<std::string, std::string> DecodeInputs() {
  const std::string tcp = Segment();
  const std::string ip = Ipv4(tcp);
  const std::string macs(12, '\0');
  const std::string v4 = Big(0x0800, 2);
  const std::string v6 = Big(0x86dd, 2);
  const std::string tag = Big(0x81000064, 4);
  const std::string options = Big(0x0600010400000000, 8);
  const std::string size = Little(ip.size(), 4);
  return {
      {"clothes_vlan", Pcap(1, macs + tag + v4 + ip)},
      {"clothes_qinq", Pcap(1, macs + Big(0x88a80007, 4) + tag + v4 + ip)},
      {"clothes_cooked_vlan", Pcap(113, std::string(14, '\0') + tag + v4 + ip)},
      {"clothes_cooked2_vlan", Pcap(276, Big(0x8100, 2) + std::string(18, '\0') + Big(100, 2) + v4 + ip)},
      {"clothes_loop", Pcap(108, Big(2, 4) + ip)},
      {"clothes_hop_by_hop", Pcap(1, macs + v6 + Ipv6(0, options + tcp))},
      {"clothes_authentication", Pcap(101, Ipv6(51, Big(0x0601, 2) + std::string(10, '\0') + tcp))},
      {"clothes_whole_fragment", Pcap(101, Ipv6(44, Big(0x0600000000000001, 8) + tcp))},
      {"clothes_fragment", Pcap(101, Ipv4(tcp, 0x2000))},
      {"clothes_of_length_0", Pcap(101, ip.substr(0, 2) + Big(0, 2) + ip.substr(4), 70000)},
      {"clothes_cut", Pcap(101, ip.substr(0, 50), 22)},
      {"clothes_link_type", Pcap(147, ip)},
      {"clothes_ether_type", Pcap(1, macs + Big(0x8915, 2) + ip)},
      {"clothes_packet_block", PcapNg(Block(2, Little(0, 12) + size + size + ip))},
      {"clothes_simple_block", PcapNg(Block(3, size + ip))},
      {"clothes_no_interface", PcapNg(Block(6, Little(7, 4) + Little(0, 8) + size + size + ip))},
      {"clothes_other_block", PcapNg(Block(0x80000001, "abcd"))},
      {"dump_base", "00000020  61 62 63 64 65 66 67 68  69 6a 6b 6c 6d 6e 6f 70  |abcdefghijklmnop|\n00000030\n"},
      {"dump_od_octal",
       "0000000 00 00 00 07 00 00 00 01 00 00 00 20 00 00 00 03\n0000020 41\n*\n0000061 42\n0000062\n"},
      {"dump_od_words", "0000000 000000 003400 000000 000400\n0000010\n"},
      {"dump_hexdump", "0000000 0000 0700 0000 0100\n0000008\n"},
      {"dump_od_x", "000010 07000000 01000000 20000000 03000000\n000020\n"},
      {"dump_xxd_e", "00000000: 07000000 01000000 41200000   034241  ...... A.B.\n"},
      {"dump_xxd_b", "00000000: 11001001 00101110 10011000  ...\n"},
      {"dump_xxd_d", "00000000: 0000 0007 0000 0001 0000 0020 0000 0003  ........... ....\n00000016: 41  A\n"},
      {"dump_tcpdump",
       "12:00 IP\n\t0x0000:  4500 0020 0000 0000 0001 0000 0a00 0001\n\t0x0010:  0a00 0002 0000 0000\n"},
      {"dump_gdb", "0x7ffe00:\t0x00\t0x00\t0x00\t0x07\n"},
      {"dump_offset_or_bytes", "0010 61 62 63\n"},
      {"gzip", "\x1f\x8b\x08\0\0"s},
  };
}

}  // namespace stagecoach::testing
