#!/usr/bin/env python3
"""dropin.py CACHE WORK [programs|settings|cases...]: unmodified programs on our drop-in libraries against the same programs on the system's
libraries and the kernel's siw, both in the VM; without a name, all.

programs: Debian's rping, ucmatose, rdma_client, perftest and so on, in either role, on a path with large segments and on one of 1500 bytes.

settings: rping, and Sends, Writes and Reads of all sizes (two_ends.cc), with each setting that siw has and each that our device has.

cases: what either end sees of orderly and disorderly ends (two_ends.cc), ours and siw in all four combinations; and the first message behind
the handshake, many times.

What is seen is held against dropin.tsv. CACHE holds the machine (tests/interop/prepare), WORK what is left to look at. When all ran, and as
declared, docs/interop.md is written. Exit status 0 only if nothing came otherwise than declared."""
import collections
import fnmatch
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import guest_cases  # noqa: E402
import stack  # noqa: E402
from guest_cases import ADDRESS  # noqa: E402

DROPIN = "//verbs_shim/dropin"
TWO_ENDS = "//tests/interop:two_ends"
DECLARED = guest_cases.HERE / "dropin.tsv"
PAGE = guest_cases.TOP / "docs/interop.md"
BEGIN = "<!-- As written by `./dev interop dropin`. -->"
END = "<!-- End of what is written. -->"
PARTS = ["programs", "settings", "cases"]
# Who calls whom.
ACROSS = ["ours-siw", "siw-ours"]
ALL = ["ours-ours", *ACROSS, "siw-siw"]
# Connections whose first message follows the handshake at once.
FIRST_MESSAGES = 50
SECONDS_PER_PROGRAM = 20
SECONDS_PER_CASES = 150
SECONDS_PER_BOOT = 900

# `siw` and `ours`: what each is told, beyond what it does by itself. `path`: dropin.sh's segments. `programs`: those that are run with it.
Setting = collections.namedtuple("Setting", "name siw ours path programs", defaults=["", "", "large", ("rping -V -S 65535",)])
DEFAULT = Setting("large segments")
SHORT = Setting("MTU 1500", path="1500")
SETTINGS = [
    DEFAULT,
    SHORT,
    Setting("siw asks for CRC", siw="mpa_crc_required=Y"),
    Setting("siw asks for CRC, MTU 1500", siw="mpa_crc_required=Y", path="1500"),
    Setting("we ask for CRC", ours="STAGECOACH_CRC=on"),
    Setting("siw insists on CRC", siw="mpa_crc_required=Y mpa_crc_strict=Y"),
    Setting("we ask for CRC, siw insists on none", siw="mpa_crc_strict=Y", ours="STAGECOACH_CRC=on"),
    # ucmatose: its server speaks first.
    Setting("siw asks for peer to peer", siw="peer_to_peer=Y", programs=("rping -V -S 65535", "ucmatose")),
    Setting("siw asks for peer to peer and CRC", siw="peer_to_peer=Y mpa_crc_required=Y"),
    Setting("we do not ask for peer to peer", ours="STAGECOACH_PEER_TO_PEER=off"),
    Setting("siw has MPA revision 1", siw="mpa_version=1"),
    Setting("siw has MPA revision 1 and asks for CRC", siw="mpa_version=1 mpa_crc_required=Y"),
    Setting("siw spans segments by GSO", siw="try_gso=Y"),
    Setting("siw spans segments by GSO, MTU 1500", siw="try_gso=Y", path="1500"),
    Setting("siw copies what it sends", siw="zcopy_tx=N"),
]

# {name: (server's command, caller's)}; A is the address, P the port.
PROGRAMS = {
    "rping -V": ("rping -s -a A -p P -C 50 -V", "rping -c -a A -p P -C 50 -V"),
    "rping -V -S 65535": ("rping -s -a A -p P -C 20 -V -S 65535", "rping -c -a A -p P -C 20 -V -S 65535"),
    "ucmatose": ("ucmatose -b A -p P", "ucmatose -s A -p P"),
    "ucmatose -c 10": ("ucmatose -b A -p P -c 10", "ucmatose -s A -p P -c 10"),
    "rdma_server, rdma_client": ("rdma_server -p P", "rdma_client -s A -p P"),
    "rdma_xserver, rdma_xclient": ("rdma_xserver -p P", "rdma_xclient -s A -p P"),
    **{name: (f"{name} -F -p P", f"{name} -F -p P A") for name in [
        "ib_send_lat -R -n 200",
        "ib_write_lat -R -n 200",
        "ib_read_lat -R -n 200",
        "ib_send_bw -R -n 200 -s 65536",
        "ib_send_bw -R -n 200 -e",
        "ib_send_bw -R -n 200 -b",
        "ib_write_bw -R -n 200 -s 65536",
        "ib_write_bw -R -n 200 -q 4",
        "ib_read_bw -R -n 200 -s 65536",
    ]},
}

# One server and one caller, whose kinds `between` names as "caller-server": a program of PROGRAMS, or `cases` of two_ends.
Step = collections.namedtuple("Step", "setting between program cases")
# Words of one end ("caller", "server", "wire": what our trace tells), or of both ("").
Key = collections.namedtuple("Key", "what end setting between")
OR = " | "
# Of dropin.tsv. Each of the first four is a pattern of fnmatch, and the words are such patterns, any of which may match, between OR.
Row = collections.namedtuple("Row", "what end setting between words why")


def two_ends_cases(binary):
    """Those that come to be one connection of one process."""
    names = subprocess.run([binary, "cases"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return [name for name in names if name not in ("first message", "leave", "stop")]


def plan(parts, cases):
    """The steps of a boot, ordered by setting."""
    steps = []
    for setting in SETTINGS:
        if "programs" in parts and setting in (DEFAULT, SHORT):
            betweens = ACROSS + (["siw-siw"] if setting == DEFAULT else [])
            steps += [Step(setting, between, program, None) for program in PROGRAMS for between in betweens]
        if "settings" in parts:
            if "programs" not in parts or setting not in (DEFAULT, SHORT):
                steps += [Step(setting, between, program, None) for program in setting.programs for between in ACROSS]
            steps += [Step(setting, between, None, ["send", "write", "read"]) for between in ACROSS]
        if "cases" in parts and setting == DEFAULT:
            for between in ALL:
                steps += [Step(setting, between, None, cases), Step(setting, between, None, ["leave"]),
                          Step(setting, between, None, ["first message"] * FIRST_MESSAGES)]
    return steps


def command(step, text, port):
    words = {"A": ADDRESS, "P": str(port)}
    return shlex.join(words.get(word, word) for word in text.split())


def script(steps):
    """What the guest does: dropin.sh."""
    lines = [". /host/dropin.sh", "dropin_up || exit 1"]
    setting, traced = None, None
    for number, step in enumerate(steps):
        port = 20100 + number
        if step.setting != setting:
            setting = step.setting
            lines += [f"siw_settings {setting.siw}".rstrip() + " || exit 1", f"segments {setting.path} || exit 1",
                      f"OURS={shlex.quote(setting.ours)}"]
        if (step.cases is not None) != traced:
            traced = step.cases is not None
            lines.append(f"TRACED={'yes' if traced else ''}")
        caller, server = step.between.split("-")
        if step.cases is None:
            commands = [command(step, text, port) for text in PROGRAMS[step.program]]
        else:
            # The cases and the word that ends the server; a program that just leaves has no more to say.
            call = ["two_ends", "call", ADDRESS, str(port)]
            last = f"/tmp/programs/{shlex.join([*call, 'stop'])}"
            commands = [f"two_ends serve {ADDRESS} {port}", shlex.join([*call, *step.cases, *([] if "leave" in step.cases else ["stop"])])]
            if "leave" in step.cases:
                commands[1] = f"sh -c {shlex.quote(commands[1] + '; ' + last)}"
        seconds = SECONDS_PER_PROGRAM if step.cases is None else SECONDS_PER_CASES
        lines.append(shlex.join(["step", str(number), str(seconds * guest_cases.patience()), server, caller, str(port), *commands]))
    return "\n".join(lines) + "\n"


def ending(who, status, text):
    """Of a process that did not end with status 0; None of one that did."""
    if status == 0:
        return None
    if status == 137:
        return f"{who} does not end"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    how = f"exits with {status}"
    # As a shell says it, whose last line it then is.
    if 128 < status < 128 + signal.NSIG and (name := signal.strsignal(status - 128)):
        how = f"dies ({name})"
        if lines and lines[-1] == name:
            lines.pop()
    return f"{who} {how}" + (f": {lines[-1]}" if lines else "")


def verdict(caller, server):
    """Of a program's two processes, each (status, output)."""
    failures = [said for said in (ending("the caller", *caller), ending("the server", *server)) if said]
    return "; ".join(failures) or "works"


def lines_of(output):
    """[(case, words)] of one end of two_ends."""
    return [tuple(line.split("\t", 1)) for line in output.splitlines() if "\t" in line]


Connection = collections.namedtuple("Connection", "crc rtr ird ord terminate")
# RFC 5040 section 4.8, RFC 5041 section 8, RFC 5044 section 8.
LAYERS = {"0": "RDMAP", "1": "DDP", "2": "LLP"}
TYPES = {("0", "0"): "local catastrophic error", ("0", "1"): "remote protection error", ("0", "2"): "remote operation error",
         ("1", "0"): "local catastrophic error", ("1", "1"): "tagged buffer error", ("1", "2"): "untagged buffer error", ("2", "0"): "MPA error"}


def connections_in(trace):
    """Of our device, in their order, from what dropin.sh keeps of its trace; and the longest segment it placed, 0 of none."""
    connections, terminates = {}, {}
    longest = 0
    for line in trace.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if " connected " in line:
            connections[facts["qp"]] = Connection(facts["crc"] == "1", facts["rtr"], int(facts["ird"]), int(facts["ord"]), "")
        elif found := re.search(r"/qp-(\d+) terminate\.(raised|received) ", line):
            qp, how = found.groups()
            words = f"{LAYERS.get(facts['layer'], facts['layer'])}, {TYPES.get((facts['layer'], facts['type']), facts['type'])}, code {facts['code']}"
            if how == "received":
                words = f"we read {words}" + (" in siw's order" if facts["siw"] == "1" else "")
            else:
                words = f"we send {words}"
            # Before "connected", if the peer was fast.
            terminates[qp] = words
        elif found := re.fullmatch(r"longest (\d+)", line):
            longest = int(found.group(1))
    return [one._replace(terminate=terminates.get(qp, "")) for qp, one in connections.items()], longest


def negotiated(trace):
    connections, longest = connections_in(trace)
    if not connections:
        failed = re.search(r" handshake\.failed .*?why=(.*)", trace)
        return f"handshake failed: {failed.group(1)}" if failed else "no connection"
    one = connections[0]
    rtr = {"none": "no RTR"}.get(one.rtr.lower(), f"RTR by {one.rtr}")
    return f"{'CRC' if one.crc else 'no CRC'}, {rtr}, IRD {one.ird}, ORD {one.ord}, segments of up to {longest} bytes"


def seen(step, caller, server, traces):
    """{Key: words} of one step: `caller` and `server` are (status, output), `traces` those of our ends, in that order."""
    if step.cases is None:
        return {Key(step.program, "", step.setting.name, step.between): verdict(caller, server)}
    called, served = lines_of(caller[1]), lines_of(server[1])

    def key(what, end):
        return Key(what, end, step.setting.name, step.between)

    if "first message" in step.cases:
        counts = collections.Counter(words for _, words in called if words != "")
        answered = counts["answered at once"] + counts["answered late"]
        return {key("first message", "caller"): f"{answered} of {len(step.cases)} answered, {counts['answered late']} of them late"}
    came = {}
    # Those that came to a connection, in order.
    connected = [case for case, words in called if not re.match("REJECTED|UNREACHABLE|CONNECT_ERROR|rdma_connect|not established", words)]
    connections = connections_in(traces[0])[0] if traces else []
    for case in step.cases:
        came[key(case, "caller")] = dict(called).get(case, verdict(caller, server))
        if case in connected or case in dict(served):
            came[key(case, "server")] = dict(served).get(case, "said nothing")
        if traces and case in connected and connected.index(case) < len(connections):
            if terminate := connections[connected.index(case)].terminate:
                came[key(case, "wire")] = terminate
    # By which the server is ended: it rejects, and exits at once.
    if step.setting == DEFAULT and "stop" in dict(called):
        came[key("stop", "caller")] = dict(called)["stop"]
    if traces and step.cases == ["send", "write", "read"]:
        came[key("what is negotiated", "wire")] = negotiated(traces[0])
    return came


def declared_rows(path=DECLARED):
    rows = []
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            rows.append(Row(*line.split("\t")))
    return rows


def declared_of(rows, key):
    """The rows that count of it, and the patterns of the words they accept: the last row that is about it, and those behind that add to it."""
    counting, patterns = [], []
    for row in rows:
        if not all(fnmatch.fnmatchcase(value, pattern) for value, pattern in zip(key, row)):
            continue
        if row.words.startswith(OR.lstrip()):
            counting.append(row)
            patterns += row.words.removeprefix(OR.lstrip()).split(OR)
        else:
            counting, patterns = [row], row.words.split(OR)
    return counting, patterns


def judge(came, rows, whole):
    """Prints what is otherwise than declared, and says how often. `whole`: all parts ran, so that each row must have been needed."""
    wrong = 0
    needed = set()
    for key, words in came.items():
        counting, patterns = declared_of(rows, key)
        needed.update(counting)
        if any(fnmatch.fnmatchcase(words, pattern) for pattern in patterns):
            continue
        wrong += 1
        where = ", ".join(part for part in key if part)
        print(f"dropin: {where}:\n  seen:     {words}\n  declared: {OR.join(patterns) or 'nothing'}")
    for row in rows:
        if whole and row not in needed:
            wrong += 1
            print(f"dropin: a row says something of what does not happen: {' | '.join(row[:4])}")
    return wrong


def page_text(text, versions, came, rows):
    """The page with what is written of a whole run."""
    names = {"ours-ours": "ours calls ours", "ours-siw": "ours calls siw", "siw-ours": "siw calls ours", "siw-siw": "siw calls siw"}
    columns = [(setting, between) for setting in (DEFAULT, SHORT) for between in ACROSS] + [(DEFAULT, "siw-siw")]

    def words(what, end, setting, between):
        return came.get(Key(what, end, setting.name, between), "")

    programs = [[f"`{program}`"] + [words(program, "", *column) for column in columns] for program in PROGRAMS]
    settings = []
    for setting in SETTINGS:
        for between in ACROSS:
            # A server that is read from says no more than how it ended.
            odd = [f"{case}, {end}: {said}" for case in ("send", "write", "read") for end in ("caller", "server")
                   if (said := words(case, end, setting, between)) and not fnmatch.fnmatchcase(said, "all sizes, *") and
                   (case, end, said) != ("read", "server", words("read", "server", DEFAULT, "ours-ours"))]
            programs_said = [f"`{program}` {words(program, '', setting, between)}" for program in setting.programs]
            settings.append([setting.name, names[between], "; ".join(programs_said),
                             "; ".join(odd) or "works",
                             words("what is negotiated", "wire", setting, between)])
    whats = dict.fromkeys(key.what for key in came if key.between == "ours-ours")
    cases = []
    for what in whats:
        for end in ("caller", "server", "wire"):
            row = [words(what, end, DEFAULT, between) for between in ALL]
            if any(row):
                same = ["the same" if said and said == row[0] else said for said in row[1:]]
                cases.append([what, "Terminate" if end == "wire" else end, row[0], *same])
    patterns = {"*": "any", "siw-*": "siw calls", "*-siw": "siw is called"}

    def in_words(pattern):
        return patterns.get(pattern) or names.get(pattern, pattern)

    differ = [[row.what, row.end, in_words(row.setting), in_words(row.between), row.words.replace(OR, " or ").replace("| ", "or "), row.why]
              for row in rows if row.why]
    heads = [f"{names[between]}, {setting.name}" for setting, between in columns]
    parts = [BEGIN, f"Seen with {versions}.",
             "## Programs", stack.table_of(["program", *heads], programs),
             "## Settings", stack.table_of(["setting", "who calls", "programs", "Send, Write and Read of all sizes",
                                            "what our end negotiated, and what came"], settings),
             "## Cases", stack.table_of(["case", "end", *[names[between] for between in ALL]], cases),
             "## Where they differ, and why", stack.table_of(["what", "end", "setting", "who calls", "what happens", "why"], differ), END]
    head, rest = text.split(BEGIN, 1)
    return head + "\n\n".join(parts) + rest.split(END, 1)[1]


def run(steps, binary, libraries, cache, work):
    """{Key: words}, and the guest's kernel."""
    programs = sorted({shlex.split(text)[0] for step in steps if step.program for text in PROGRAMS[step.program]})
    paths = [shutil.which(program) for program in programs]
    if None in paths:
        sys.exit(f"interop: no program {programs[paths.index(None)]}")
    stripped = work / "stripped"
    guest_cases.copy_stripped([binary], stripped / "programs")
    guest_cases.copy_stripped(libraries, stripped / "dropin")
    # The libraries that these are loaded with are the system's; those of ours find each other by their side.
    alone = [path for path in (stripped / "dropin").iterdir() if not path.name.startswith(("libibverbs", "librdmacm"))]
    guest = guest_cases.Guest("dropin", cache, work, [stripped / "programs" / binary.name, *alone, *paths])
    for path in [stripped / "programs" / binary.name, *paths]:
        shutil.copy(path, guest.shared / "programs")
    shutil.copytree(stripped / "dropin", guest.shared / "dropin")
    shutil.copy(guest_cases.HERE / "guest/dropin.sh", guest.shared)
    guest_cases.say(f"dropin: one boot, {len(steps)} steps")
    console = guest.boot(script(steps), seconds=SECONDS_PER_BOOT)
    return read(steps, guest.shared, console), guest.kernel()


def read(steps, shared, console):
    """{Key: words} of what the guest left in the folder `shared`."""
    done = shared / "done"
    statuses = {line.split()[0]: tuple(map(int, line.split()[1:])) for line in done.read_text().splitlines()} if done.exists() else {}
    came = {}
    for number, step in enumerate(steps):
        if str(number) not in statuses:
            sys.exit(f"interop: the guest did not get to step {number} ({step.program or step.cases[0]}, {step.setting.name}): see {console}")

        def said(end):
            return (shared / "logs" / f"{number}.{end}").read_text(errors="replace")

        ours = [end for end, kind in zip(("caller", "server"), step.between.split("-")) if kind == "ours"]
        caller, server = statuses[str(number)]
        came.update(seen(step, (caller, said("caller")), (server, said("server")), [said(f"{end}.trace") for end in ours]))
    return came


def main():
    cache, work, names = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"interop: neither programs nor settings nor cases: {' '.join(unknown)}")
    parts = names or PARTS
    rows = declared_rows()
    guest_cases.say("building")
    built = guest_cases.build([DROPIN, TWO_ENDS])
    libraries = [path for path in sorted((built / "verbs_shim/dropin").glob("*.so.*")) if path.suffix[1:].isdigit()]
    binary = built / guest_cases.path_of(TWO_ENDS)
    built_from = stack.commit()
    steps = plan(parts, two_ends_cases(binary))
    came, kernel = run(steps, binary, libraries, cache, work)
    wrong = judge(came, rows, set(parts) == set(PARTS))
    print(f"dropin: {len(came) - wrong} passed, {wrong} failed")
    if wrong == 0 and set(parts) == set(PARTS):
        versions = ", ".join([kernel, *stack.library_versions(), built_from])
        PAGE.write_text(page_text(PAGE.read_text(), versions, came, rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
