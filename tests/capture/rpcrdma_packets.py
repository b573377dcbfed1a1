"""Packets with RPC-over-RDMA in them, made from nothing: messages, iWARP and RoCEv2 around them, pcap files around those."""

import random
import struct

CLIENT, SERVER = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
CLIENT_PORT, SERVER_PORT = 40001, 20049


def words(*values):
    return b"".join(struct.pack(">I", value & 0xFFFFFFFF) for value in values)


# --- Messages ---

AUTH_NONE = words(0, 0)
NO_CHUNKS = words(0, 0, 0)
RESPONSE = 1


def call(xid, program=100003, version=3, procedure=0, arguments=b""):
    return words(xid, 0, 2, program, version, procedure) + AUTH_NONE + AUTH_NONE + arguments


def reply(xid, results=b"", status=0):
    return words(xid, 1, 0) + AUTH_NONE + words(status) + results


def segment(handle, length, offset):
    return words(handle, length) + struct.pack(">Q", offset)


def read_list(*entries):
    return b"".join(words(1, position) + each for position, each in entries) + words(0)


def write_list(*chunks):
    return b"".join(words(1, len(chunk)) + b"".join(chunk) for chunk in chunks) + words(0)


def reply_chunk(*segments):
    return words(1, len(segments)) + b"".join(segments)


def version1(xid, message_type, rest, credits=32):
    return words(xid, 1, credits, message_type) + rest


def version2(xid, header_type, flags, rest, credits=32):
    return words(xid, 2, credits, header_type, flags) + rest


def msg(xid, flags, message, lists=NO_CHUNKS, invalidate=0):
    return version2(xid, 0, flags, words(invalidate) + lists + message)


def nomsg(xid, flags, lists, invalidate=0):
    return version2(xid, 1, flags, words(invalidate) + lists)


def error(xid, code, *information):
    return version2(xid, 4, RESPONSE, words(code, *information))


def opaque(value):
    return words(len(value)) + value + bytes(-len(value) % 4)


def connprop(xid, flags, *properties):
    return version2(xid, 5, flags, words(len(properties)) + b"".join(words(which) + opaque(value) for which, value in properties))


def private_data(flags=1, send=3, receive=3):
    return struct.pack(">IBBBB", 0xF6AB0E18, 1, flags, send, receive)


# --- Files ---


class Pcap:
    """Raw IP packets, a millisecond apart."""

    def __init__(self):
        self.packets = []

    def ip(self, source, destination, protocol, payload):
        header = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0x4000, 64, protocol, 0)
        self.packets.append(header + source + destination + payload)
        return len(self.packets)

    def write(self, path):
        with open(path, "wb") as file:
            file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262144, 101))
            for i, packet in enumerate(self.packets):
                file.write(struct.pack("<IIII", 1700000000, 1000 * (i + 1), len(packet), len(packet)))
                file.write(packet)


class Iwarp:
    """One connection. What sends returns the number of the frame in the file."""

    def __init__(self, pcap, client_port=CLIENT_PORT, request=private_data(), answer=private_data(0)):
        self.pcap = pcap
        self.ends = {True: (CLIENT, client_port), False: (SERVER, SERVER_PORT)}
        self.sequence = {True: 1000, False: 9000}
        self.msn = {True: 1, False: 1}
        self._tcp(True, 0x02, b"")
        self._tcp(False, 0x12, b"")
        self.request = self._frame(True, b"MPA ID Req Frame", request)
        self.answer = self._frame(False, b"MPA ID Rep Frame", answer)

    def _tcp(self, from_client, flags, payload):
        (source, port), (destination, other) = self.ends[from_client], self.ends[not from_client]
        header = struct.pack(">HHIIBBHHH", port, other, self.sequence[from_client], self.sequence[not from_client], 0x50, flags, 65535, 0, 0)
        self.sequence[from_client] += len(payload) + (1 if flags & 2 else 0)
        return self.pcap.ip(source, destination, 6, header + payload)

    def _frame(self, from_client, key, private):
        enhanced = struct.pack(">HH", 1, 1)
        return self._tcp(from_client, 0x18, key + struct.pack(">BBH", 0x10, 2, 4 + len(private)) + enhanced + private)

    def send(self, from_client, message, parts=1):
        """A Send in this many DDP segments, each in a TCP segment of its own."""
        size = max(4, -(-len(message) // parts + 3) // 4 * 4)
        pieces = [message[i : i + size] for i in range(0, len(message), size)] or [b""]
        number = None
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            ulpdu = struct.pack(">BBIIII", 0x41 if last else 0x01, 0x43, 0, 0, self.msn[from_client], i * size) + piece
            fpdu = struct.pack(">H", len(ulpdu)) + ulpdu
            number = self._tcp(from_client, 0x18, fpdu + bytes(-len(fpdu) % 4) + bytes(4))
        self.msn[from_client] += 1
        return number


class Roce:
    """One connection between queue pairs 17 (the client's) and 18."""

    def __init__(self, pcap, request=private_data(), answer=private_data(0)):
        self.pcap = pcap
        self.psn = {True: 100, False: 200}
        self.qp = {True: 18, False: 17}
        self.request = self._mad(True, 0x10, self._connect_request(request))
        self.answer = self._mad(False, 0x13, self._connect_reply(answer))

    def _udp(self, from_client, packet):
        source, destination = (CLIENT, SERVER) if from_client else (SERVER, CLIENT)
        udp = struct.pack(">HHHH", 49152, 4791, 8 + len(packet) + 4, 0)
        return self.pcap.ip(source, destination, 17, udp + packet + bytes(4))

    @staticmethod
    def _bth(opcode, pad, qp, psn):
        return struct.pack(">BBHII", opcode, 0x40 | pad << 4, 0xFFFF, qp, psn)

    def _mad(self, from_client, attribute, body):
        mad = struct.pack(">BBBBHHQHHI", 1, 7, 2, 3, 0, 0, 77, attribute, 0, 0) + body
        assert len(mad) == 256
        return self._udp(from_client, self._bth(100, 0, 1, 1) + words(0x80010000, 1) + mad)

    @staticmethod
    def _connect_request(private):
        body = bytearray(232)
        body[0:4] = words(5)  # communication ID
        body[8:16] = struct.pack(">Q", 0x01060000 | SERVER_PORT)  # service of IP's TCP port space
        body[32:35] = (17).to_bytes(3, "big")
        body[44:47] = (100).to_bytes(3, "big")
        ip = bytes([0, 0x40]) + struct.pack(">H", CLIENT_PORT) + bytes(12) + CLIENT + bytes(12) + SERVER
        data = ip + private
        body[140 : 140 + len(data)] = data
        return bytes(body)

    @staticmethod
    def _connect_reply(private):
        body = bytearray(232)
        body[0:8] = words(6, 5)
        body[12:15] = (18).to_bytes(3, "big")
        body[20:23] = (200).to_bytes(3, "big")
        body[36 : 36 + len(private)] = private
        return bytes(body)

    def packet(self, from_client, opcode, payload, psn=None):
        if psn is None:
            psn = self.psn[from_client]
            self.psn[from_client] = psn + 1
        pad = -len(payload) % 4
        return self._udp(from_client, self._bth(opcode, pad, self.qp[from_client], psn) + payload + bytes(pad))

    def send(self, from_client, message, mtu=256):
        pieces = [message[i : i + mtu] for i in range(0, len(message), mtu)] or [b""]
        if len(pieces) == 1:
            return self.packet(from_client, 4, message)
        number = None
        for i, piece in enumerate(pieces):
            number = self.packet(from_client, 0 if i == 0 else 2 if i == len(pieces) - 1 else 1, piece)
        return number


def mutations(message, count, seed):
    """The message with some of its words replaced, or with its end cut off or doubled."""
    draw = random.Random(seed)
    for _ in range(count):
        spoilt = bytearray(message)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(8, max(12, len(spoilt)), 4)
            if at + 4 <= len(spoilt):
                spoilt[at : at + 4] = words(draw.choice([0, 1, 2, 3, 5, 16, 0x7FFFFFFF, 0xFFFFFFFF, draw.getrandbits(32)]))
        kind = draw.randrange(3)
        if kind == 0:
            del spoilt[draw.randrange(8, len(spoilt)) :]
        elif kind == 1:
            spoilt += spoilt[-draw.randrange(1, 40) :]
        yield bytes(spoilt)
