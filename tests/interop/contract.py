#!/usr/bin/env python3
"""contract.py CACHE WORK [PROVIDER|FILE...]: the contract tests of verbs_shim/tests on the emulated devices and, in the VM, on the kernel's
rxe and siw, held against verbs_shim/tests/deviations.tsv; and the table of what came of it, in docs/verbs_coverage.md.

Providers are iwarp and roce (emulated), rxe and siw (the same sources on the system's libraries); without any, all. FILE names a test file
such as cm_test. CACHE holds the machine (tests/interop/prepare), WORK what is left to look at. The table is written when all files
were run on all providers or, for the files named, on all providers. Exit status 0 only if nothing came otherwise than declared."""
import functools
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import guest_cases  # noqa: E402
from guest_cases import contract_table  # noqa: E402

PACKAGE = "//verbs_shim/tests"
EMULATED = ["iwarp", "roce"]
SYSTEM = ["rxe", "siw"]


def targets(expression):
    return sorted(label.rsplit(":", 1)[1] for label in guest_cases.query(f"kind(cc_test, {PACKAGE}/...) {expression}"))


def file_of(target, files):
    """The test file behind a target: cm_test_roce is of cm_test."""
    return max((name for name in files if target == name or target.startswith(name + "_")), key=len)


def build(names, *flags):
    return guest_cases.build([f"{PACKAGE}:{name}" for name in names], *flags) / "verbs_shim/tests"


def main():
    cache, work, names = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    files = contract_table.test_files()
    unknown = [name for name in names if name not in EMULATED + SYSTEM + files]
    if unknown:
        sys.exit(f"interop: no provider and no test file: {' '.join(unknown)}")
    providers = [name for name in names if name in EMULATED + SYSTEM] or EMULATED + SYSTEM
    chosen = [name for name in names if name in files] or files
    deviations = contract_table.deviations()

    everything = [name for name in targets("") if not name.endswith("_in_simulation") and file_of(name, files) in chosen]
    system = [name for name in targets(f"except attr(tags, emulated_only, {PACKAGE}/...)") if name in everything]
    # The device of a target is in its environment. Names beyond FILE and FILE_DEVICE are variants of these.
    emulated = {profile: [name for name in targets(f"intersect attr(env, 'STAGECOACH_PROFILE={profile}', {PACKAGE}/...)") if name in everything]
                for profile in EMULATED}
    emulated["iwarp"] += targets(f"except attr(env, 'STAGECOACH_PROFILE', {PACKAGE}/...)")
    for profile in EMULATED:
        emulated[profile] = [name for name in emulated[profile] if name in everything and name in chosen + [f"{file}_{profile}" for file in chosen]]

    results = {}
    guest_cases.say("building")
    if set(providers) & set(EMULATED):
        built = build(sorted({name for profile in EMULATED for name in emulated[profile]}))
    for profile in EMULATED:
        if profile in providers:
            plan = [(target, test) for target in emulated[profile] for test in guest_cases.tests_in(built / target)]
            results[profile] = guest_cases.run_here(profile, plan, built)
    if set(providers) & set(SYSTEM):
        built = build(system, "--config=rdma_core")
        guest_cases.copy_stripped([built / name for name in system], work / "system")
    calls, unsafe = {}, {}
    for provider in [name for name in SYSTEM if name in providers]:
        plan = [(target, test) for target in system for test in guest_cases.tests_in(work / "system" / target)]
        plan, unsafe[provider] = guest_cases.safe(provider, plan, deviations)
        # What the harness of the tests reads.
        path = "verbs_shim/tests/deviations.tsv"
        calls[provider] = functools.partial(guest_cases.run_in_guest, provider, plan, work / "system", cache, work,
                                            runfiles=[(path, guest_cases.TOP / path)])
    for provider, (came, _) in guest_cases.side_by_side(calls).items():
        results[provider] = {**came, **unsafe[provider]}

    wrong = 0
    columns = {}
    for provider, came in results.items():
        more, columns[provider] = guest_cases.judge(provider, provider, came, lambda target, test: file_of(target, files), deviations)
        wrong += more
    for provider, column in columns.items():
        print(guest_cases.summary(provider, column))
    if wrong == 0 and len(providers) == len(EMULATED + SYSTEM):
        contract_table.write(columns, chosen)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
