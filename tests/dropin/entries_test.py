"""Every function that programs call goes through an entry (verbs_shim/emulated/entry.h), so that no exception leaves it.

Programs call functions by their names, which are those that the maps of the libraries export, and through tables of
ibv_context, ibv_cq_ex and ibv_qp_ex, to which the sources assign them. Both kinds are looked up in the sources: the
first thing such a function does is to enter, or it calls nothing that could throw.
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "verbs_shim/emulated", ROOT / "verbs_shim/dropin"]
MAPS = [ROOT / "verbs_shim/dropin/libibverbs.map", ROOT / "verbs_shim/dropin/librdmacm.map"]
# Frames of verbs_shim/emulated/entry.h, and what work_ex.cc and addrinfo.cc make of them.
ENTERS = re.compile(r"^\s*(return )?(Pointer|Number|MinusOne|Negative|Void|Work)?Entry\(")
# First say how they fail, then enter.
ENTERS_WITH_FAILURE = re.compile(
    r"^\s*const auto (\w+) = \[\]\(int error\) \{.*?\};\s*return Entry\(\1, ", re.DOTALL)
# Of the C library, of the headers' inlines, and ours that hand a value on.
NEVER_THROW = {
    "Answer", "FailWith", "Number", "IsInherited", "Refuse", "ShimOf", "ToShim", "free", "htons", "memcpy", "memset",
    "poll", "select", "count", "time_since_epoch", "FromSockaddr", "Explain", "begin", "end", "size",
}
KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "static_cast", "reinterpret_cast", "static_assert"}
CALL = re.compile(r"([A-Za-z_]\w*)\s*(?:<[^<>()]*>)?\(")
DEFINITION = re.compile(
    r"^(?!static_assert|namespace|using|#|//|struct \w+ \{|class )[A-Za-z_][\w:<>,&* ]*?[ *&](\w+)\(([^;{}]*?)\)(?: const)?(?: noexcept)? \{",
    re.MULTILINE)
ASSIGNMENT = re.compile(r"(?:->|\.)\w+ = ([A-Z]\w+);")


def Body(text, start):
    """What stands between the brace before `start` and its partner."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    raise ValueError("a brace without a partner")


def Plain(text):
    """Without comments, characters and strings."""
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'', '""', text)


def Definitions():
    """Bodies of all functions of the sources by name."""
    found = {}
    for folder in SOURCES:
        for path in sorted(folder.glob("*.cc")):
            if path.name.endswith("_test.cc"):
                continue
            text = Plain(path.read_text())
            for match in DEFINITION.finditer(text):
                found.setdefault(match[1], []).append((str(path), Body(text, match.end())))
            for name in re.findall(r"^PROVIDERS_CALL\((\w+)\)", text, re.MULTILINE):
                found.setdefault(name, []).append((str(path), "return EOPNOTSUPP;"))
    return found


def Exported():
    names = set()
    for path in MAPS:
        text = re.sub(r"#[^\n]*", "", pathlib.Path(path).read_text())
        for block in re.findall(r"global:(.*?)(?:local:|\})", text, re.DOTALL):
            names.update(re.findall(r"(\w+);", block))
    return names


def InTables(definitions):
    """Those that are assigned in the file they stand in."""
    found = {}
    for name, places in definitions.items():
        here = [(path, body) for path, body in places
                if name in ASSIGNMENT.findall(Plain(pathlib.Path(path).read_text()))]
        if here:
            found[name] = here
    return found


def Throwing(body):
    """What it calls that may throw, unless it enters."""
    if ENTERS.match(body) or ENTERS_WITH_FAILURE.match(body):
        return []
    calls = set(CALL.findall(re.sub(r"\bstd::", "", body)))
    # What is exported lets nothing out itself.
    return sorted(calls - NEVER_THROW - KEYWORDS - Exported())


class EntriesTest(unittest.TestCase):
    def setUp(self):
        self.definitions = Definitions()

    def Check(self, functions, at_least):
        self.assertGreater(len(functions), at_least, "the reading of the sources has gone wrong")
        wrong = []
        for name, places in sorted(functions.items()):
            for path, body in places:
                calls = Throwing(body)
                if calls:
                    wrong.append(f"{path}: {name} calls {', '.join(calls)} outside of an entry")
        self.assertEqual(wrong, [], "\n" + "\n".join(wrong))

    def test_exported_functions_enter(self):
        # No function: a flag for providers.
        exported = Exported() - {"verbs_allow_disassociate_destroy"}
        self.assertEqual(sorted(exported - set(self.definitions)), [])
        self.Check({name: self.definitions[name] for name in exported}, 200)

    def test_functions_in_tables_enter(self):
        self.Check(InTables(self.definitions), 30)

    def test_what_does_not_enter_is_found(self):
        self.assertEqual(Throwing("\n  return NumberEntry([&]() -> int { return Make(); });"), [])
        self.assertEqual(Throwing("\n  auto made = Make();\n  return NumberEntry([&] { return 0; });"),
                         ["Make", "NumberEntry"])
        self.assertEqual(Throwing("\n  return Answer(EOPNOTSUPP);"), [])


if __name__ == "__main__":
    unittest.main()
