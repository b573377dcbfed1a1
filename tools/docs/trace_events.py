"""docs/trace.md lists the trace events of the product, and nothing else.

A section of the page is about the files that its heading names, in back quotes; each file that emits belongs to one
section. A row has the event, when it is emitted, and its facts; the test compares events and facts with what the code
emits, both ways. An event is emitted by Trace() (base/trace.h), or by a helper that hands one on to it.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRODUCT = ["emu", "rpcrdma", "verbs_shim"]
# Functions that emit, and which of their arguments is the event's name. The facts follow it.
EMITTERS = {"Trace": 3, "Tell": 0, "TraceEvent": 0, "TraceEnd": 1}
CALL = re.compile(r"(?<![\w:~])(" + "|".join(EMITTERS) + r")\(")
# A token of C++, as far as this needs to know them: literals are taken whole.
TOKEN = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)+'|[(){}\[\],]|[^\"'(){}\[\],]+", re.S)
LITERAL = re.compile(r"\"((?:[^\"\\]|\\.)*)\"")
KEY = re.compile(r"\{\s*\"([^\"]+)\"\s*,")
COMMENT = re.compile(r"//[^\n]*")


def arguments(text, start):
    """The arguments of the call whose parenthesis opens before `start`."""
    depth, out, current = 0, [], ""
    for token in TOKEN.finditer(text, start):
        piece = token[0]
        if piece in "([{":
            depth += 1
        elif piece in ")]}":
            if depth == 0:
                return [each.strip() for each in out + [current]]
            depth -= 1
        elif piece == "," and depth == 0:
            out.append(current)
            current = ""
            continue
        current += piece
    return []


def emitted_by(text):
    """Event -> its facts, in one file; and calls whose event is not known here."""
    events, unknown = {}, []
    text = COMMENT.sub("", text)
    for call in CALL.finditer(text):
        given = arguments(text, call.end())
        at = EMITTERS[call[1]]
        if len(given) <= at or given[at].startswith(("std::string_view ", "const ")):
            continue  # another function of that name, or the definition of a helper
        names = LITERAL.findall(given[at])
        if not names:
            # A helper hands on what it was given; other things are told, too.
            if given[at] != "event" and call[1] != "Tell":
                unknown.append(f"{call[1]}(... {given[at]} ...)")
            continue
        facts = {key for argument in given[at + 1:] for key in KEY.findall("{" + argument if argument[:1] != "{" else argument)}
        for name in names:
            events.setdefault(name, set()).update(facts)
    return events, unknown


def sections(page):
    """[(files of the heading, {event: facts})]"""
    found = []
    for part in re.split(r"^## ", page, flags=re.M)[1:]:
        heading, body = part.split("\n", 1)
        rows = {}
        for line in body.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("| `") and len(cells) >= 3:
                for event in re.findall(r"`([^`]+)`", cells[0]):
                    rows.setdefault(event, set()).update(re.findall(r"`([^`]+)`", cells[2]))
        found.append((re.findall(r"`([^`]+)`", heading), rows))
    return found


def examine(root):
    problems = []
    listed = sections((root / "docs/trace.md").read_text())
    emitted = [{} for _ in listed]
    for path in sorted(path for folder in PRODUCT for path in (root / folder).rglob("*")):
        if path.suffix not in (".h", ".cc") or path.stem.endswith("_test") or "tests" in path.parts:
            continue
        name = str(path.relative_to(root))
        events, unknown = emitted_by(path.read_text())
        problems += [f"{name}: {call}: which event is this?" for call in unknown]
        homes = [i for i, (files, _) in enumerate(listed) if any(name.startswith(each) for each in files)]
        if events and len(homes) != 1:
            problems.append(f"{name} emits events and belongs to {len(homes)} sections of docs/trace.md")
            continue
        for event, facts in events.items():
            emitted[homes[0]].setdefault(event, set()).update(facts)
    for (files, rows), events in zip(listed, emitted):
        where = " ".join(files)
        for event in sorted(set(events) - set(rows)):
            problems.append(f"{where}: {event} is emitted and not listed ({' '.join(sorted(events[event]))})")
        for event in sorted(set(rows) - set(events)):
            problems.append(f"{where}: {event} is listed and not emitted")
        for event in sorted(set(rows) & set(events)):
            if events[event] - rows[event]:
                problems.append(f"{where}: {event} has facts that are not listed: {sorted(events[event] - rows[event])}")
            if rows[event] - events[event]:
                problems.append(f"{where}: {event} has no facts {sorted(rows[event] - events[event])}")
    return problems, sum(len(events) for events in emitted)


def main():
    problems, events = examine(ROOT)
    print("\n".join(problems) if problems else f"{events} events, as docs/trace.md lists them")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
