"""The Lua dissectors in the eyes of the tshark that loads them: fields, expert information, and never a Lua error."""

import json
import os
import pathlib
import random
import subprocess
import tempfile
import unittest

import rpcrdma_packets as packets
from rpcrdma_packets import Iwarp, Pcap, RESPONSE, Roce, call, connprop, error, msg, mutations, nomsg, private_data, read_list, reply
from rpcrdma_packets import reply_chunk, segment, version1, version2, words, write_list

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/wireshark/stagecoach.lua"
CAPTURES = ROOT / "tests/golden/captures"
NO_CHUNKS = packets.NO_CHUNKS
CCP = 100417
# Where the test was started, what was built for it is.
DECODER = pathlib.Path("tools/stagecoach/stagecoach").resolve()


def tshark(path, *arguments):
    environment = dict(os.environ, XDG_CONFIG_HOME="/nonexistent", HOME="/nonexistent")
    done = subprocess.run(
        ["tshark", "-X", f"lua_script:{SCRIPT}", "-r", str(path), *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
    if done.returncode != 0 or "Lua" in done.stderr:
        raise AssertionError(done.stderr)
    return done.stdout


def fields(path, *names):
    """{frame: {field: [value, ...]}}, fields that a frame lacks left out."""
    asked = [argument for name in ("frame.number", *names) for argument in ("-e", name)]
    frames = {}
    for line in tshark(path, "-T", "fields", "-E", "separator=|", "-E", "occurrence=a", "-E", "aggregator=;", *asked).splitlines():
        number, *values = line.split("|")
        frames[int(number)] = {name: value.split(";") for name, value in zip(names, values) if value}
    return frames


class WiresharkTest(unittest.TestCase):
    def setUp(self):
        self.pcap = Pcap()
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name) / "packets.pcap"

    def seen(self, *names):
        self.pcap.write(self.path)
        frames = fields(self.path, "_ws.lua.error", "_ws.expert.message", *names)
        for number, frame in frames.items():
            self.assertNotIn("_ws.lua.error", frame, number)
        return frames

    def check(self, frame, **expected):
        """Fields by their names, '.' written as '__'."""
        for name, value in expected.items():
            self.assertEqual(frame.get(name.replace("__", ".")), value if value is None else [str(each) for each in value], name)

    def test_properties_and_calls_of_version_2_over_iwarp(self):
        connection = Iwarp(self.pcap)
        probe = connection.send(True, connprop(0, 0, (1, words(8192)), (2, b""), (77, b"abcde"), (77, b"")))
        answer = connection.send(False, connprop(0, RESPONSE, (1, words(4096)), (2, words(2))))
        lists = read_list((40, segment(0x1234, 100, 0xABCDEF0123))) + write_list([segment(1, 2, 3), segment(4, 5, 6)], []) + words(0)
        asked = connection.send(True, msg(7, 0, call(7), lists, invalidate=0x1234), parts=3)
        answered = connection.send(False, msg(7, RESPONSE, reply(7)))
        long_call = connection.send(True, nomsg(8, 0, read_list((0, segment(9, 4000, 0))) + words(0, 0)))
        long_reply = connection.send(False, nomsg(8, RESPONSE, words(0, 0) + reply_chunk(segment(10, 5000, 0))))
        frames = self.seen(
            "rpcrdma2.htype", "rpcrdma2.flags.response", "rpcrdma2.which", "rpcrdma2.rbsiz", "rpcrdma2.brs", "rpcrdma2.data",
            "rpcrdma2.inv_handle", "rpcrdma2.position", "rpcrdma2.handle", "rpcrdma2.length", "rpcrdma2.offset", "rpcrdma2.segments",
            "rpcrdma2.reply", "rpc.msgtyp", "rpc.program", "rpcordma.xid",
        )  # fmt: skip
        self.check(frames[probe], rpcrdma2__htype=[5], rpcrdma2__which=[1, 2, 77, 77], rpcrdma2__rbsiz=[8192], rpcrdma2__brs=None, rpcrdma2__data=["6162636465"])
        self.check(frames[answer], rpcrdma2__htype=[5], rpcrdma2__rbsiz=[4096], rpcrdma2__brs=[2], rpcordma__xid=None)
        self.check(
            frames[asked], rpcrdma2__htype=[0], rpcrdma2__inv_handle=["0x00001234"], rpcrdma2__position=[40],
            rpcrdma2__handle=["0x00001234", "0x00000001", "0x00000004"], rpcrdma2__length=[100, 2, 5],
            rpcrdma2__offset=["0x000000abcdef0123", "0x0000000000000003", "0x0000000000000006"], rpcrdma2__segments=[2, 0],
            rpc__msgtyp=[0], rpc__program=[100003],
        )  # fmt: skip
        self.check(frames[answered], rpc__msgtyp=[1])
        self.check(frames[long_call], rpcrdma2__htype=[1], rpcrdma2__position=[0])
        self.check(frames[long_reply], rpcrdma2__htype=[1], rpcrdma2__reply=[1])
        for number in (probe, answer, asked, answered, long_call, long_reply):
            self.check(frames[number], _ws__expert__message=None)

    def test_each_error_of_version_2_and_that_of_a_server_of_version_1(self):
        connection = Iwarp(self.pcap)
        errors = [(1, 2, 3), (2,), (3,), (4, 6), (5, 7), (6, 8), (7, 1, 9000), (8, 9001), (9,), (99,)]
        numbers = [connection.send(False, error(i, *each)) for i, each in enumerate(errors)]
        echoed = connection.send(False, words(5, 2, 32, 4, 1, 1, 1))
        names = ["vers_low", "vers_high", "max_chunks", "max_segments", "chunk_index", "length_needed", "err", "flags"]
        frames = self.seen(*("rpcrdma2." + name for name in names))
        for number, (code, *_) in zip(numbers, errors):
            self.check(frames[number], rpcrdma2__err=[code])
        self.check(frames[numbers[0]], rpcrdma2__vers_low=[2], rpcrdma2__vers_high=[3])
        self.check(frames[numbers[4]], rpcrdma2__max_chunks=[7])
        self.check(frames[numbers[5]], rpcrdma2__max_segments=[8])
        self.check(frames[numbers[6]], rpcrdma2__chunk_index=[1], rpcrdma2__length_needed=[9000])
        self.check(frames[numbers[7]], rpcrdma2__length_needed=[9001])
        self.check(frames[echoed], rpcrdma2__err=[1], rpcrdma2__vers_low=[1], rpcrdma2__vers_high=[1], rpcrdma2__flags=None)

    def test_what_is_illegal_is_marked(self):
        connection = Iwarp(self.pcap)
        connection.send(True, connprop(0, 0))
        cases = {
            "reserved flags are set": msg(1, 0x80000000, call(1)),
            "RESPONSE is not what the RPC message says": msg(2, RESPONSE, call(2)),
            "an error is a response": version2(3, 4, 0, words(2)),
            "none of the handles in this header": msg(4, 0, call(4), invalidate=5),
            "not a multiple of four": msg(5, 0, call(5), read_list((41, segment(1, 2, 3))) + words(0, 0)),
            "no header type of version 2": version2(6, 3, 0, b""),
            "neither 0 nor 1": msg(7, 0, b"", words(0, 2, 0, 0, 0)),
            "there is no room for as many": version2(8, 5, 0, words(1000)),
            "the property's type has 4 bytes": connprop(9, 0, (1, bytes(8))),
            "no level of support": connprop(10, 0, (2, words(3))),
            "less than the 1024 bytes": connprop(19, 0, (1, words(1023))),
            "the same property twice": connprop(20, 0, (1, b""), (1, words(4096))),
            "nothing is to follow this header": connprop(11, 0) + bytes(4),
            "the RPC message that is to follow is not there": msg(12, 0, b""),
            "the RPC message has another XID": msg(13, 0, call(14)),
            "a long call without a Position-Zero Read chunk": nomsg(15, 0, NO_CHUNKS),
            "a long reply without the Reply chunk": nomsg(16, RESPONSE, NO_CHUNKS),
            "a reply with a Read list": msg(17, RESPONSE, reply(17), read_list((40, segment(1, 4, 3))) + words(0, 0)),
            "the range has no version in it": error(18, 1, 3, 2),
        }
        numbers = {text: connection.send(True, message) for text, message in cases.items()}
        frames = self.seen("rpcrdma2.xid")
        for text, number in numbers.items():
            self.assertIn(text, " ".join(frames[number].get("_ws.expert.message", [])), text)

    def test_what_is_illegal_is_so_for_the_decoder_too(self):
        two = read_list((48, segment(9, 40, 8)), (64, segment(9, 1, 8))) + words(0, 0)
        inside = read_list((48, segment(9, 100, 8)), (64, segment(9, 1, 8))) + words(0, 0)
        messages = [
            error(1, 1, 2, 3), error(1, 1, 3, 2), error(1, 1, 0xFFFFFFFF, 0), error(1, 2), error(1, 2, 0), error(1, 7, 1, 2), error(1, 99), error(1, 99, 1),
            version2(1, 4, 0, words(2)), version2(1, 9, 0, b""), connprop(1, 0), connprop(1, 0) + bytes(4), connprop(1, 0, (1, words(1023))),
            msg(1, 0, call(1)), msg(1, 0, call(2)), msg(1, 1, call(1)), msg(1, 1, reply(1)), msg(1, 0, b""), version2(1, 0, 1, words(0) + NO_CHUNKS + reply(1), credits=0),
            version2(1, 0, 0, words(0) + NO_CHUNKS + call(1), credits=0), version2(1, 1, 1, words(0, 0, 0) + reply_chunk(segment(1, 2, 3)), credits=0),
            msg(1, 0, call(1), two), msg(1, 0, call(1), inside), msg(1, 0, call(1), read_list((400, segment(9, 4, 8))) + words(0, 0)),
            msg(1, 0, call(1), read_list((40, segment(9, 4, 8))) + words(0, 0)), msg(1, 0, call(1), read_list((44, segment(9, 4, 8))) + words(0, 0)),
            msg(1, 0, call(1), words(0, 0) + reply_chunk(segment(9, 16, (1 << 64) - 16))), msg(1, 0, call(1), words(0, 0) + reply_chunk(segment(9, 17, (1 << 64) - 16))),
            msg(1, 1, reply(1), words(0, 0) + reply_chunk(segment(9, 0, 8))), msg(1, 1, reply(1), words(0, 0) + reply_chunk(segment(9, 1, 8))),
            nomsg(1, 0, read_list((0, segment(9, 100, 8)), (100, segment(9, 4, 8))) + words(0, 0)), nomsg(1, 0, read_list((0, segment(9, 100, 8)), (104, segment(9, 4, 8))) + words(0, 0)),
            nomsg(1, 0, read_list((0, segment(9, 100, 8))) + words(0, 0)) + words(0), nomsg(1, 1, words(0, 0) + reply_chunk(segment(9, 4, 8))),
        ]  # fmt: skip
        lists = read_list((48, segment(1, 8, 3))) + write_list([segment(4, 5, 6)]) + reply_chunk(segment(7, 8, 9))
        for i, whole in enumerate([msg(1, 0, b"", lists), msg(1, 1, b"", write_list([segment(4, 5, 6)]) + words(0)), error(1, 7, 1, 2), connprop(1, 0, (1, words(4096)), (77, b"abcd"))]):
            draw = random.Random(i)
            behind = call(1) if i == 0 else reply(1) if i == 1 else b""
            for _ in range(150):
                spoilt = bytearray(whole)
                at = draw.randrange(8, len(spoilt), 4)
                spoilt[at : at + 4] = words(draw.choice([0, 1, 2, 3, 4, 5, 44, 48, 100, 0x7FFFFFFF, 0xFFFFFFFF]))
                messages.append(bytes(spoilt)[: draw.choice([len(spoilt), len(spoilt), draw.randrange(20, len(spoilt), 4)])] + behind)
        numbers = []
        for i, message in enumerate(messages):
            # A connection for each, that is one of version 2 beyond doubt.
            connection = Iwarp(self.pcap, client_port=43000 + i)
            connection.send(True, connprop(0, 0))
            numbers.append(connection.send(True, message))
        frames = self.seen("rpcrdma2.xid")
        decoded = subprocess.run([DECODER, "decode", "--json", self.path], capture_output=True, text=True, timeout=120)
        self.assertIn(decoded.returncode, (0, 1), decoded.stderr)
        remarks = {}
        for line in decoded.stdout.splitlines():
            message = json.loads(line)
            each = [remark for field in message["fields"] for remark in field.get("remarks", []) if remark["verdict"] == "illegal"]
            remarks[message["packet"]] = [(remark["document"], remark["text"]) for remark in each]
        compared = {True: 0, False: 0}
        for message, number in zip(messages, numbers):
            # Of RPC messages that are none, Wireshark's own dissector has its opinion.
            if any(document != "v2" for document, _ in remarks[number]):
                continue
            ours = [text for text in frames[number].get("_ws.expert.message", []) if "(v2 " in text or "The message ends here" in text]
            self.assertEqual(bool(ours), bool(remarks[number]), f"{message.hex()}: {ours} {remarks[number]}")
            compared[bool(ours)] += 1
        self.assertGreater(min(compared.values()), 50, compared)

    def test_a_message_that_is_cut_anywhere_is_marked_as_cut(self):
        connection = Iwarp(self.pcap)
        connection.send(True, connprop(0, 0))
        lists = read_list((48, segment(1, 2, 3))) + write_list([segment(4, 5, 6)]) + reply_chunk(segment(7, 8, 9))
        whole = [msg(1, 0, b"", lists), connprop(2, 0, (1, words(4096)), (77, b"abc")), error(3, 7, 1, 2)]
        numbers = [connection.send(True, each[:size]) for each in whole for size in range(8, len(each))]
        frames = self.seen("rpcrdma2.xid")
        for number in numbers:
            self.assertTrue(frames[number].get("_ws.expert.message"), number)

    def test_no_spoilt_message_raises_an_error_of_lua(self):
        lists = read_list((48, segment(1, 2, 3))) + write_list([segment(4, 5, 6)], [segment(4, 5, 6)]) + reply_chunk(segment(7, 8, 9))
        whole = [msg(1, 0, call(1, CCP, 1, 1, words(1, 2, 3)), lists), connprop(2, 0, (1, words(4096)), (77, b"abc")), error(3, 7, 1, 2)]
        whole += [version1(4, 0, lists + call(4, CCP, 1, 1, words(1, 2, 3))), version1(5, 2, words(4, 4) + lists + call(5, CCP, 1, 1, words(1, 2, 3)))]
        count = 0
        for i, message in enumerate(whole):
            connection = Iwarp(self.pcap, client_port=41000 + i)
            roce = Roce(self.pcap)
            connection.send(True, connprop(0, 0))
            roce.send(True, connprop(0, 0))
            for spoilt in mutations(message, 150, i):
                connection.send(True, spoilt)
                roce.send(True, spoilt, mtu=64)
                count += 1
        for i in range(13):
            Iwarp(self.pcap, client_port=42000 + i, request=private_data()[:i])
            Roce(self.pcap, request=private_data()[:i])
        frames = self.seen("rpcrdma2.xid")
        self.assertGreater(sum("rpcrdma2.xid" in frame for frame in frames.values()), count / 2)

    def test_cm_private_data_over_both_transports(self):
        plain = Iwarp(self.pcap)
        behind = Iwarp(self.pcap, client_port=40002, request=b"xyz" + private_data(0x81, 0, 255) + b"more")
        other = Iwarp(self.pcap, client_port=40003, request=b"nothing of ours", answer=private_data()[:6])
        later = Iwarp(self.pcap, client_port=40004, request=private_data_of_version(2))
        roce = Roce(self.pcap, request=private_data(1, 3, 7))
        frames = self.seen("rpcrdma_cm.version", "rpcrdma_cm.flags.r", "rpcrdma_cm.send_size", "rpcrdma_cm.receive_size")
        self.check(frames[plain.request], rpcrdma_cm__version=[1], rpcrdma_cm__flags__r=[1], rpcrdma_cm__send_size=[4096], rpcrdma_cm__receive_size=[4096])
        self.check(frames[plain.answer], rpcrdma_cm__flags__r=[0])
        self.check(frames[behind.request], rpcrdma_cm__send_size=[1024], rpcrdma_cm__receive_size=[262144])
        self.assertIn("reserved bits are set", frames[behind.request]["_ws.expert.message"][0])
        self.check(frames[other.request], rpcrdma_cm__version=None)
        self.assertIn("The message ends here", frames[other.answer]["_ws.expert.message"][0])
        self.check(frames[later.request], rpcrdma_cm__version=[2], rpcrdma_cm__send_size=None, _ws__expert__message=None)
        self.check(frames[roce.request], rpcrdma_cm__flags__r=[1], rpcrdma_cm__send_size=[4096], rpcrdma_cm__receive_size=[8192])
        self.check(frames[roce.answer], rpcrdma_cm__flags__r=[0], rpcrdma_cm__send_size=[4096])

    def test_version_2_over_roce_in_one_packet_and_in_several(self):
        connection = Roce(self.pcap)
        probe = connection.send(True, connprop(0, 0, (1, words(8192))))
        connection.send(False, connprop(0, RESPONSE, (1, words(8192))))
        long = msg(7, 0, call(7, arguments=bytes(1000)))
        first = connection.packet(True, 0, long[:256])
        middle = connection.packet(True, 1, long[256:512])
        again = connection.packet(True, 1, long[256:512], psn=connection.psn[True] - 1)
        connection.packet(True, 1, long[512:768])
        last = connection.packet(True, 2, long[768:])
        odd = connection.send(False, connprop(0, RESPONSE, (77, b"abc")) + b"x")
        lost = connection.packet(False, 2, b"the end of a message whose beginning was lost")
        frames = self.seen("rpcrdma2.xid", "rpcrdma2.htype", "rpcrdma2.fragment", "rpcrdma2.reassembled.length", "rpc.program", "infiniband.bth.opcode")
        self.check(frames[probe], rpcrdma2__htype=[5], rpcrdma2__fragment=None)
        for number in (first, middle):
            self.assertIn("rpcrdma2.fragment", frames[number])
            self.check(frames[number], rpcrdma2__xid=None)
        self.check(frames[again], rpcrdma2__xid=None)
        self.check(frames[last], rpcrdma2__htype=[0], rpcrdma2__xid=["0x00000007"], rpcrdma2__reassembled__length=[len(long)], rpc__program=[100003])
        self.assertIn("nothing is to follow", frames[odd]["_ws.expert.message"][0])
        self.check(frames[lost], rpcrdma2__xid=None, rpcrdma2__fragment=None)

    def test_connection_configuration_over_both_versions_and_transports(self):
        for i, transport in enumerate((Iwarp, Roce)):
            connection = transport(self.pcap)
            asked, answered = call(50 + i, CCP, 1, 1, words(1024, 2048, 16)), reply(50 + i, words(4096, 512, 8))
            other = reply(60 + i, words(4096, 512, 8))
            numbers = [
                connection.send(True, version1(50 + i, 0, NO_CHUNKS + asked)),
                connection.send(False, version1(50 + i, 0, NO_CHUNKS + answered)),
                connection.send(True, msg(50 + i, 0, asked)),
                connection.send(False, msg(50 + i, RESPONSE, answered)),
                connection.send(True, version1(50 + i, 2, words(64, 1024) + NO_CHUNKS + asked)),
                connection.send(False, version1(60 + i, 0, NO_CHUNKS + other)),
            ]
            if transport is Iwarp:
                # On one connection the dissector of version 1 takes all that follows, so version 2 has its own.
                second = Iwarp(self.pcap, client_port=40010)
                numbers[2] = second.send(True, msg(50 + i, 0, asked))
                numbers[3] = second.send(False, msg(50 + i, RESPONSE, answered))
            frames = self.seen("rpcrdma_ccp.maxcall_sendsize", "rpcrdma_ccp.maxreply_sendsize", "rpcrdma_ccp.align", "rpcrdma_ccp.maxrdmaread", "rpcrdma_ccp.accept_stat")
            for number in (numbers[0], numbers[2], numbers[4]):
                self.check(frames[number], rpcrdma_ccp__maxcall_sendsize=[1024], rpcrdma_ccp__maxreply_sendsize=[2048], rpcrdma_ccp__maxrdmaread=[16], rpcrdma_ccp__align=None)
            for number in (numbers[1], numbers[3]):
                self.check(frames[number], rpcrdma_ccp__accept_stat=[0], rpcrdma_ccp__maxcall_sendsize=[4096], rpcrdma_ccp__align=[512], rpcrdma_ccp__maxrdmaread=[8])
            self.check(frames[numbers[5]], rpcrdma_ccp__maxcall_sendsize=None)

    def test_a_reply_is_that_of_its_own_connections_call(self):
        configured = NO_CHUNKS + call(1, CCP, 1, 1, words(1024, 2048, 16))
        first, second = Iwarp(self.pcap), Iwarp(self.pcap, client_port=40010)
        first.send(True, version1(1, 0, configured))
        other = second.send(False, version1(1, 0, NO_CHUNKS + reply(1)))
        answered = first.send(False, version1(1, 0, NO_CHUNKS + reply(1, words(4096, 512, 8))))
        # The XID once more: of another program's call, and of none.
        again = first.send(False, version1(1, 0, NO_CHUNKS + reply(1)))
        first.send(True, version1(1, 0, configured))
        first.send(True, version1(1, 0, NO_CHUNKS + call(1)))
        nulls = first.send(False, version1(1, 0, NO_CHUNKS + reply(1)))
        frames = self.seen("rpcrdma_ccp.maxcall_sendsize", "rpcrdma_ccp.accept_stat")
        self.check(frames[answered], rpcrdma_ccp__accept_stat=[0], rpcrdma_ccp__maxcall_sendsize=[4096])
        for number in (other, again, nulls):
            self.check(frames[number], rpcrdma_ccp__accept_stat=None)

    def test_version_1_stays_with_the_dissector_that_wireshark_has(self):
        for capture in sorted(CAPTURES.glob("siw_nfs3*.pcap")):
            frames = fields(capture, "rpcordma.xid", "rpcrdma2.xid", "_ws.lua.error")
            self.assertFalse([number for number, frame in frames.items() if "rpcrdma2.xid" in frame or "_ws.lua.error" in frame], capture)
        echoes = [frame for frame in fields(CAPTURES / "siw_knfsd_pokes.pcap", "rpcrdma2.xid", "rpcrdma2.err").values() if "rpcrdma2.err" in frame]
        self.assertEqual(len(echoes), 1, "the kernel's answer to version 2")


def private_data_of_version(version):
    data = bytearray(private_data())
    data[4] = version
    return bytes(data)


if __name__ == "__main__":
    unittest.main()
