#!/usr/bin/env python3
"""contract.py CACHE WORK [PROVIDER|FILE...]: the contract tests of verbs_shim/tests on the emulated devices and, in the VM, on the kernel's
rxe and siw, held against verbs_shim/tests/deviations.tsv; and the table of what came of it, in docs/verbs_coverage.md.

Providers are iwarp and roce (emulated), rxe and siw (the same sources on the system's libraries); without any, all. FILE names a test file
such as cm_test. CACHE holds the machine (tests/interop/prepare), WORK what is left to look at. The table is written when all files
were run on all providers or, for the files named, on all providers. Exit status 0 only if nothing came otherwise than declared."""
import collections
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parents[1]
sys.dont_write_bytecode = True
sys.path.insert(0, str(TOP / "verbs_shim/tests"))
import contract_table  # noqa: E402

PACKAGE = "//verbs_shim/tests"
EMULATED = ["iwarp", "roce"]
SYSTEM = ["rxe", "siw"]
# More would be no suite but a series of accidents.
MOST_BOOTS = 6
SECONDS_PER_BOOT = 1500

Outcome = collections.namedtuple("Outcome", "verdict detail")  # "passed", "skipped", "failed"


def say(text):
    print("interop: " + text, file=sys.stderr, flush=True)


def bazel(*args):
    done = subprocess.run(["bazel", *args], cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr + f"interop: bazel {args[0]} failed")
    return done.stdout.split()


def targets(expression):
    return sorted(name.rsplit(":", 1)[1] for name in bazel("query", f"kind(cc_test, {PACKAGE}/...) {expression}"))


def file_of(target, files):
    """The test file behind a target: cm_test_roce is of cm_test."""
    return max((name for name in files if target == name or target.startswith(name + "_")), key=len)


def build(names, *flags):
    """The folder where they are until the next build, which replaces those of the other provider."""
    bazel("build", "--noshow_progress", *flags, *[f"{PACKAGE}:{name}" for name in names])
    return TOP / "bazel-bin/verbs_shim/tests"


def copy_stripped(names, source, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        copy = folder / name
        shutil.copy(source / name, copy)
        copy.chmod(0o755)
        subprocess.run(["strip", "--strip-debug", str(copy)], check=True)


def tests_in(binary):
    listing = subprocess.run([binary, "--gtest_list_tests"], stdout=subprocess.PIPE, text=True, check=True).stdout
    suite = ""
    for line in listing.splitlines():
        name = line.split("#")[0].rstrip()
        if name.startswith("  "):
            yield suite + name.strip()
        elif name.endswith("."):
            suite = name


def outcome_in(log, status):
    """Of the one test of a log."""
    if re.search(r"^\[  SKIPPED \]", log, re.M):
        reason = re.search(r"^skipped: (.*)$", log, re.M)
        # Without its device a suite that skips everything would prove nothing.
        verdict = "skipped" if reason and not reason.group(1).startswith("no RDMA device") else "failed"
        return Outcome(verdict, reason.group(1) if reason else "skipped without a reason")
    if status == 0 and re.search(r"^\[       OK \]", log, re.M):
        return Outcome("passed", "")
    if status == 137:
        return Outcome("failed", "does not end")
    if not re.search(r"^\[  FAILED  \]", log, re.M):
        return Outcome("failed", f"dies: exit status {status}")
    lines = [line for line in log.splitlines() if not re.match(r"\[[-= ]|Note|Running|\s*$|\[ ", line)]
    return Outcome("failed", "\n".join(lines[:14]))


def run_emulated(profile, plan, folder):
    """{(target, test): Outcome}; each in a process of its own, as in the guest."""
    results = {}
    for target, test in plan:
        done = subprocess.run([folder / target, f"--gtest_filter={test}", "--gtest_color=no"], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", timeout=300,
                              env={**os.environ, "STAGECOACH_PROFILE": profile})
        results[target, test] = outcome_in(done.stdout, done.returncode)
    return results


def run_in_guest(provider, plan, folder, cache, work):
    """The same on the kernel's device; boots again behind what brings the kernel down."""
    shared = work / provider
    (shared / "logs").mkdir(parents=True)
    (shared / "lib").mkdir()
    shutil.copytree(folder, shared / "contract")
    libraries = set()
    for binary in folder.iterdir():
        listing = subprocess.run(["ldd", binary], stdout=subprocess.PIPE, text=True, check=True).stdout
        libraries.update(re.findall(r"=> (/\S+)", listing))
    for library in libraries:
        shutil.copy(library, shared / "lib")
    shutil.copy(HERE / "guest/contract.sh", shared)
    runfiles = shared / "runfiles/stagecoach/verbs_shim/tests"
    runfiles.mkdir(parents=True)
    shutil.copy(TOP / "verbs_shim/tests/deviations.tsv", runfiles)
    # For hosts that are slower still than a machine without KVM is.
    patience = int(os.environ.get("STAGECOACH_TEST_PATIENCE", "1"))
    (shared / "run.sh").write_text(f". /lib.sh\n. /host/contract.sh\ncontract {provider} {patience}\n")
    results = {}
    for boot in range(MOST_BOOTS):
        left = [step for step in plan if step not in results]
        if not left:
            break
        (shared / "plan").write_text("".join(f"{target} {test}\n" for target, test in left))
        for name in ("done", "running", "hang.txt"):
            (shared / name).unlink(missing_ok=True)
        say(f"{provider}: boot {boot + 1}, {len(left)} tests")
        console = work / f"vm-{provider}-{boot + 1}.log"
        with console.open("w") as out:
            subprocess.run([HERE / "run_vm", cache, shared], stdout=out, stderr=subprocess.STDOUT,
                           env={**os.environ, "VM_TIMEOUT": str(SECONDS_PER_BOOT * patience)})
        done = shared / "done"
        for line in done.read_text().splitlines() if done.exists() else []:
            target, test, status = line.split()
            log = (shared / "logs" / f"{target}.{test.replace('/', '+')}").read_text(errors="replace")
            results[target, test] = outcome_in(log, int(status))
        running = shared / "running"
        if running.exists():
            target, test = running.read_text().split()
            if (target, test) not in results:
                how = "hangs" if (shared / "hang.txt").exists() else "crashes"
                results[target, test] = Outcome("failed", f"{how} the kernel ({console})")
        elif not done.exists():
            sys.exit(f"interop: the guest did not run the tests: see {console}")
    for step in plan:
        results.setdefault(step, Outcome("failed", "was not reached"))
    return results


def judge(provider, results, files, deviations):
    """Prints what is otherwise than declared, says how often, and sorts the rest into a column of the table."""
    wrong = 0
    column = collections.defaultdict(lambda: contract_table.Cell(0, collections.Counter(), []))
    for (target, test), outcome in sorted(results.items()):
        cell = column[file_of(target, files)]
        declared = deviations.get((provider, test))
        if outcome.verdict == "failed" and not declared:
            wrong += 1
            print(f"{provider}: {test} fails, which is not declared\n  " + outcome.detail.replace("\n", "\n  "))
        elif outcome.verdict == "failed":
            cell.deviating.append(test)
        elif declared and declared.what == "varies" and outcome.verdict == "passed":
            cell.deviating.append(test)
        elif declared:
            wrong += 1
            print(f"{provider}: {test} is declared to differ and is {outcome.verdict} {outcome.detail}")
        elif outcome.verdict == "skipped":
            cell.skipped[outcome.detail] += 1
        else:
            cell = column[file_of(target, files)] = cell._replace(passed=cell.passed + 1)
    return wrong, column


def main():
    cache, work, names = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    files = contract_table.test_files()
    unknown = [name for name in names if name not in EMULATED + SYSTEM + files]
    if unknown:
        sys.exit(f"interop: no provider and no test file: {' '.join(unknown)}")
    providers = [name for name in names if name in EMULATED + SYSTEM] or EMULATED + SYSTEM
    chosen = [name for name in names if name in files] or files
    deviations = contract_table.deviations()
    fine = contract_table.Deviation("", "")

    everything = [name for name in targets("") if not name.endswith("_in_simulation") and file_of(name, files) in chosen]
    system = [name for name in targets(f"except attr(tags, emulated_only, {PACKAGE}/...)") if name in everything]
    # The device of a target is in its environment. Names beyond FILE and FILE_DEVICE are variants of these.
    emulated = {profile: [name for name in targets(f"intersect attr(env, 'STAGECOACH_PROFILE={profile}', {PACKAGE}/...)") if name in everything]
                for profile in EMULATED}
    emulated["iwarp"] += targets(f"except attr(env, 'STAGECOACH_PROFILE', {PACKAGE}/...)")
    for profile in EMULATED:
        emulated[profile] = [name for name in emulated[profile] if name in everything and name in chosen + [f"{file}_{profile}" for file in chosen]]

    wrong = 0
    columns = {}
    say("building")
    if set(providers) & set(EMULATED):
        built = build(sorted({name for profile in EMULATED for name in emulated[profile]}))
    for profile in EMULATED:
        if profile not in providers:
            continue
        plan = [(target, test) for target in emulated[profile] for test in tests_in(built / target)]
        more, columns[profile] = judge(profile, run_emulated(profile, plan, built), files, deviations)
        wrong += more
    if set(providers) & set(SYSTEM):
        copy_stripped(system, build(system, "--config=rdma_core"), work / "system")
    # Two machines at a time: tests that fail wait, and the others hardly load one processor.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ran = {}
        for provider in [name for name in SYSTEM if name in providers]:
            plan = [(target, test) for target in system for test in tests_in(work / "system" / target)]
            unsafe = {step for step in plan if deviations.get((provider, step[1]), fine).what == "unsafe"}
            plan = [step for step in plan if step not in unsafe]
            ran[provider] = unsafe, pool.submit(run_in_guest, provider, plan, work / "system", cache, work)
        for provider, (unsafe, future) in ran.items():
            results = {**future.result(), **{step: Outcome("failed", "was not run") for step in unsafe}}
            more, columns[provider] = judge(provider, results, files, deviations)
            wrong += more
    for provider, column in columns.items():
        cells = column.values()
        print(f"{provider}: {sum(cell.passed for cell in cells)} passed, {sum(sum(cell.skipped.values()) for cell in cells)} skipped, "
              f"{sum(len(cell.deviating) for cell in cells)} deviate as declared")
    if wrong == 0 and len(providers) == len(EMULATED + SYSTEM):
        contract_table.write(columns, chosen)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
