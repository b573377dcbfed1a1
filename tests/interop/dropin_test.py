#!/usr/bin/env python3
"""What dropin.py makes of what it sees, and that dropin.tsv can be read."""
import contextlib
import io
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import dropin  # noqa: E402
from dropin import Key, Row, Step  # noqa: E402

TRACE = """1.5 stagecoach0/cm connected id=1 qp=2 ird=4 ord=4 crc=1 rtr=Write
1.6 stagecoach0/qp-7 terminate.received layer=1 type=1 code=0 siw=1
1.7 stagecoach0/cm connected id=2 qp=7 ird=4 ord=4 crc=1 rtr=Write
longest 1428
"""
CASES = Step(dropin.DEFAULT, "ours-siw", None, ["send", "nobody listens", "write to unknown memory"])


def judge(came, rows, whole=False):
    """How often something is wrong, and what is said of it."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        wrong = dropin.judge(came, rows, whole)
    return wrong, said.getvalue()


class DropinTest(unittest.TestCase):
    def test_a_program_works_if_both_ends_say_so(self):
        self.assertEqual(dropin.verdict((0, "x"), (0, "y")), "works")
        self.assertEqual(dropin.verdict((0, ""), (137, "")), "the server does not end")
        self.assertEqual(dropin.verdict((139, "refused\nSegmentation fault\n"), (0, "")), "the caller dies (Segmentation fault): refused")
        self.assertEqual(dropin.verdict((139, ""), (0, "")), "the caller dies (Segmentation fault)")
        self.assertEqual(dropin.verdict((1, "one\ntwo\n\n"), (255, "")), "the caller exits with 1: two; the server exits with 255")

    def test_the_words_of_both_ends_and_of_the_trace_are_put_together(self):
        caller = "send\tall\nnobody listens\tREJECTED\nwrite to unknown memory\tWrite: success\nstop\tREJECTED\n"
        came = dropin.seen(CASES, (0, caller), (0, "send\tall, too\nwrite to unknown memory\tuntouched\n"), [TRACE])

        def words(what, end):
            return came.get(Key(what, end, "large segments", "ours-siw"))

        self.assertEqual(words("send", "server"), "all, too")
        self.assertIsNone(words("send", "wire"))
        self.assertEqual(words("nobody listens", "caller"), "REJECTED")
        self.assertIsNone(words("nobody listens", "server"))
        self.assertEqual(words("stop", "caller"), "REJECTED")
        self.assertEqual(words("write to unknown memory", "wire"), "we read DDP, tagged buffer error, code 0 in siw's order")

    def test_an_end_that_dies_has_words_too(self):
        came = dropin.seen(CASES, (139, "send\tall\n"), (0, "send\tall\n"), [""])
        self.assertEqual(came[Key("write to unknown memory", "caller", "large segments", "ours-siw")], "the caller dies (Segmentation fault): send\tall")
        self.assertIn("said nothing", dropin.seen(CASES, (0, "send\tall\n"), (1, ""), [""]).values())

    def test_first_messages_are_counted(self):
        step = Step(dropin.DEFAULT, "siw-siw", None, ["first message"] * 4)
        answers = ["answered at once", "answered late", "no message", "answered late"]
        came = dropin.seen(step, (0, "".join(f"first message\t{words}\n" for words in answers)), (0, ""), [])
        self.assertEqual(list(came.values()), ["3 of 4 answered, 2 of them late"])

    def test_what_was_negotiated_is_read_from_the_trace(self):
        self.assertEqual(dropin.negotiated(TRACE), "CRC, RTR by Write, IRD 4, ORD 4, segments of up to 1428 bytes")
        self.assertEqual(dropin.negotiated("longest \n"), "no connection")
        self.assertEqual(dropin.negotiated("1.5 stagecoach0/cm handshake.failed id=1 why=no CRC\nlongest \n"), "handshake failed: no CRC")

    def test_the_last_row_decides(self):
        rows = [Row("send", "*", "*", "*", "fine", ""), Row("send", "caller", "*", "siw-*", "fine but *", "because")]
        key = Key("send", "caller", "MTU 1500", "siw-ours")
        self.assertEqual(judge({key: "fine but slow"}, rows)[0], 0)
        self.assertEqual(judge({key: "fine"}, rows)[0], 1)
        self.assertEqual(judge({key._replace(between="ours-siw"): "fine"}, rows)[0], 0)

    def test_any_of_the_alternatives_is_fine(self):
        rows = [Row("send", "*", "*", "*", "fine | fine but *", "")]
        key = Key("send", "caller", "MTU 1500", "siw-ours")
        self.assertEqual([judge({key: words}, rows)[0] for words in ("fine", "fine but slow", "fine | fine but *")], [0, 0, 1])

    def test_a_row_may_add_to_the_one_before(self):
        rows = [Row("send", "*", "*", "*", "fine", ""), Row("send", "*", "*", "siw-siw", "| stalls", "because")]
        key = Key("send", "caller", "MTU 1500", "siw-siw")
        self.assertEqual([judge({key: words}, rows)[0] for words in ("fine", "stalls")], [0, 0])
        self.assertEqual(judge({key._replace(between="siw-ours"): "stalls"}, rows)[0], 1)
        wrong, said = judge({key: "otherwise"}, rows, whole=True)
        self.assertEqual(wrong, 1)
        self.assertIn("declared: fine | stalls", said)

    def test_what_nothing_is_said_of_is_wrong(self):
        wrong, said = judge({Key("send", "caller", "MTU 1500", "siw-ours"): "fine"}, [])
        self.assertEqual(wrong, 1)
        self.assertIn("declared: nothing", said)

    def test_a_row_that_decides_nothing_is_wrong_when_all_ran(self):
        rows = [Row("send", "*", "*", "*", "fine", "")]
        self.assertEqual(judge({}, rows)[0], 0)
        self.assertEqual(judge({}, rows, whole=True)[0], 1)

    def test_the_page_is_written_between_its_marks(self):
        came = {Key("send", "caller", "large segments", between): "fine" for between in dropin.ALL}
        rows = [Row("send", "*", "*", "siw-siw", "fine", "so it is")]
        text = dropin.page_text(f"head\n{dropin.BEGIN}\nold\n{dropin.END}\ntail\n", "Linux", came, rows)
        self.assertTrue(text.startswith("head\n") and text.endswith("tail\n"))
        self.assertNotIn("old", text)
        self.assertIn("| send | caller | fine | the same | the same | the same |", text)
        self.assertIn("| siw calls siw | fine | so it is |", text)

    def test_steps_are_ordered_by_setting(self):
        steps = dropin.plan(dropin.PARTS, ["send", "write"])
        order = list(dict.fromkeys(step.setting for step in steps))
        self.assertEqual(order, dropin.SETTINGS)
        changes = sum(1 for one, next_one in zip(steps, steps[1:]) if one.setting != next_one.setting)
        self.assertEqual(changes, len(dropin.SETTINGS) - 1)
        written = dropin.script(steps)
        self.assertEqual(written.count("siw_settings"), len(dropin.SETTINGS))
        self.assertIn("siw_settings mpa_version=1 mpa_crc_required=Y || exit 1", written)

    def test_the_page_says_whose_words_are_not_as_usual(self):
        def key(case, end, between="ours-siw"):
            return Key(case, end, "large segments", between)

        ends = "DISCONNECTED, 3 Receives: WR_FLUSH_ERR"
        came = {key("send", "caller"): f"all sizes, {ends}", key("send", "server"): "Send: LOC_QP_OP_ERR", key("read", "server"): ends,
                key("read", "server", "ours-ours"): ends}
        text = dropin.page_text(f"{dropin.BEGIN}{dropin.END}", "Linux", came, [])
        self.assertIn("| send, server: Send: LOC_QP_OP_ERR |", text)

    def test_the_page_has_no_bars_in_cells(self):
        rows = [Row("send", "*", "*", "siw-*", "fine | late", "so it is"), Row("send", "*", "*", "siw-siw", "| never", "so it is")]
        text = dropin.page_text(f"{dropin.BEGIN}{dropin.END}", "Linux", {}, rows)
        self.assertIn("| any | siw calls | fine or late |", text)
        self.assertIn("| any | siw calls siw | or never |", text)

    def test_no_declaration_accepts_anything(self):
        for row in dropin.declared_rows():
            self.assertNotIn("*", row.words.removeprefix("| ").split(dropin.OR), row)

    def test_between_two_of_ours_there_is_one_answer(self):
        # By which //tests/dropin:two_ends_test goes.
        for row in dropin.declared_rows():
            if dropin.fnmatch.fnmatchcase("ours-ours", row.between) and row.end:
                self.assertNotIn(dropin.OR.strip(), row.words, row)

    def test_declarations_name_what_there_is(self):
        settings = {setting.name for setting in dropin.SETTINGS} | {"*"}
        for row in dropin.declared_rows():
            self.assertIn(row.end, ["caller", "server", "wire", "", "*"], row)
            self.assertTrue(row.words, row)
            self.assertTrue(any(dropin.fnmatch.fnmatchcase(name, row.setting) for name in settings), row)
            self.assertTrue(any(dropin.fnmatch.fnmatchcase(between, row.between) for between in dropin.ALL), row)


if __name__ == "__main__":
    unittest.main()
