#!/usr/bin/env python3
"""stack.py CACHE WORK [rxe|siw|mixed...]: the RPC stack and the file service on the system's libibverbs and librdmacm; without a name, all.

rxe, siw: every test of tests/e2e and tests/cli that is not of the emulator alone, built with --config=rdma_core, in the VM on the kernel's
device, over IPv4 and IPv6, both ends in the guest; held against tests/e2e/deviations.tsv.

mixed: our emulated iWARP device here as one end and that build on the kernel's siw in the guest as the other, in both roles: NULL calls, a
tree of files there and back, a long listing and a long path, so that every kind of chunk is used (mixed.py).

CACHE holds the machine (tests/interop/prepare), WORK what is left to look at. When all ran, and as declared, docs/providers.md is written.
Exit status 0 only if nothing came otherwise than declared."""
import functools
import pathlib
import re
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import guest_cases  # noqa: E402
import mixed  # noqa: E402
from guest_cases import contract_table  # noqa: E402

PACKAGES = ["//tests/e2e", "//tests/cli"]
TOOL = "//tools/stagecoach:stagecoach"
DEVIATIONS = guest_cases.TOP / "tests/e2e/deviations.tsv"
PAGE = guest_cases.TOP / "docs/providers.md"
BEGIN = "<!-- As written by `./dev interop stack`. -->"
END = "<!-- End of what is written. -->"
DEVICES = ["rxe", "siw"]
# Tests of commands start many processes, each of which takes a second there.
SECONDS_PER_TEST = 120
SECONDS_PER_BOOT = 3600
# Of the table: {its head: (device, address)}.
COLUMNS = {"rxe": ("rxe", guest_cases.ADDRESS), "rxe, IPv6": ("rxe", guest_cases.ADDRESS6),
           "siw": ("siw", guest_cases.ADDRESS), "siw, IPv6": ("siw", guest_cases.ADDRESS6)}


def labels():
    everything = " + ".join(package + "/..." for package in PACKAGES)
    return guest_cases.query(f"kind(cc_test, {everything}) except attr(tags, emulated_only, {everything})")


def suite_of(_, test):
    """OfType/SuiteTest.Name/Value is of SuiteTest."""
    return test.split(".")[0].split("/")[-1]


def library_versions():
    packages = ["libibverbs1", "librdmacm1", "ibverbs-providers"]
    done = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *packages], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def commit():
    """Of what is being built: "commit 3aa9b0612345", as binaries name it."""
    said = subprocess.run([guest_cases.TOP / "tools/bazel/status"], cwd=guest_cases.TOP, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "commit " + said.split()[1]


def table_of(head, rows):
    return contract_table.table([head, ["---"] * len(head), *rows]) if rows else "- nothing"


def page_text(text, versions, columns, deviations, exchanges):
    """The page with what is written of these runs: `columns` is {head: {suite: Cell}}, `exchanges` what mixed.run returned."""
    suites = sorted({suite for column in columns.values() for suite in column})
    counts = [[f"`{suite}`"] + [contract_table.cell_text(column.get(suite)) for column in columns.values()] for suite in suites]
    skips = []
    for suite in suites:
        cells = [column.get(suite) for column in columns.values()]
        for reason in sorted({reason for cell in cells if cell for reason in cell.skipped}):
            skips.append([f"`{suite}`", reason] + [str(cell.skipped[reason]) if cell and cell.skipped[reason] else "" for cell in cells])
    differ = [[device, f"`{test}`", row.what, row.reason] for (device, test), row in sorted(deviations.items())]
    travelled = [[what] + [exchanges[role][what].detail for role in mixed.ROLES] for what in exchanges[mixed.ROLES[0]]]
    parts = [BEGIN, f"Seen with {versions}.", table_of(["suite", *columns], counts),
             "Skipped, and why:", table_of(["suite", "reason", *columns], skips),
             "Different, and why:", table_of(["device", "test", "what it does", "reason"], differ),
             "Between our emulated iWARP device and that build on the kernel's siw:", table_of(["exchange", *mixed.ROLES], travelled), END]
    head, rest = text.split(BEGIN, 1)
    return head + "\n\n".join(parts) + rest.split(END, 1)[1]


def run_devices(devices, cache, work, built, chosen, deviations):
    """{head of the column: ({(target, test): Outcome}, kernel)}."""
    folder = work / "system"
    guest_cases.copy_stripped([built / guest_cases.path_of(label) for label in chosen], folder)
    guest_cases.copy_stripped([built / guest_cases.path_of(TOOL)], work / "tool")
    runfiles = [(guest_cases.path_of(TOOL), work / "tool" / "stagecoach")]
    plan = [(binary.name, test) for binary in sorted(folder.iterdir()) for test in guest_cases.tests_in(binary)]
    calls, unsafe = {}, {}
    for head, (device, address) in COLUMNS.items():
        if device in devices:
            fine, unsafe[head] = guest_cases.safe(device, plan, deviations)
            calls[head] = functools.partial(guest_cases.run_in_guest, device, fine, folder, cache, work, address=address,
                                            name=re.sub(r"\W+", "-", head).lower(), runfiles=runfiles, seconds_per_test=SECONDS_PER_TEST,
                                            seconds_per_boot=SECONDS_PER_BOOT)
    return {head: ({**came, **unsafe[head]}, guest.kernel()) for head, (came, guest) in guest_cases.side_by_side(calls).items()}


def main():
    cache, work, names = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    unknown = [name for name in names if name not in DEVICES + ["mixed"]]
    if unknown:
        sys.exit(f"interop: neither rxe nor siw nor mixed: {' '.join(unknown)}")
    names = names or DEVICES + ["mixed"]
    devices = [name for name in DEVICES if name in names]
    deviations = contract_table.deviations(DEVIATIONS)

    guest_cases.say("building")
    emulated = None
    if "mixed" in names:
        guest_cases.copy_stripped([guest_cases.build([TOOL]) / guest_cases.path_of(TOOL)], work / "emulated")
        emulated = work / "emulated/stagecoach"
    chosen = labels() if devices else []
    built = guest_cases.build([*chosen, TOOL], "--config=rdma_core")
    built_from = commit()

    wrong = 0
    columns, exchanges, kernel = {}, {}, ""
    if devices:
        for head, (came, kernel) in run_devices(devices, cache, work, built, chosen, deviations).items():
            more, columns[head] = guest_cases.judge(head, COLUMNS[head][0], came, suite_of, deviations)
            wrong += more
    if emulated:
        exchanges = mixed.run(emulated, built / guest_cases.path_of(TOOL), cache, work)
    for head, column in columns.items():
        print(guest_cases.summary(head, column))
    for role, came in exchanges.items():
        for what, outcome in came.items():
            wrong += outcome.verdict != "passed"
            print(f"mixed, {role}: {what}: {outcome.verdict}: {outcome.detail}")
    if exchanges:
        passed = sum(outcome.verdict == "passed" for came in exchanges.values() for outcome in came.values())
        print(f"mixed: {passed} passed, {sum(map(len, exchanges.values())) - passed} failed")
    if wrong == 0 and len(columns) == len(COLUMNS) and exchanges:
        versions = ", ".join([kernel, *library_versions(), built_from])
        PAGE.write_text(page_text(PAGE.read_text(), versions, columns, deviations, exchanges))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
