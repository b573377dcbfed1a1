"""The guides do what they say: every command on the pages in docs/guides is run, in order, and prints what the page says.

Runs in a folder with what was built, where the build puts it. The commands run in namespaces of the test's own, where nothing is but loopback, in a new folder, with a new HOME, and as an ordinary user
(where the test itself is root; where it is not it may not become others). What stands in, and for what:

    bazel build             the build that this test is part of: the same files, where ./dev expects them
    sudo, apt-get install   what is installed here: what is named must be, or the test fails
    docker                  docker_stand_in.py: images and containers of real packages, without Docker
    GitHub                  workflow_stand_in.py: jobs and steps on such machines; ubuntu-latest is Debian 12 there

All else on the pages is run as it stands. Where namespaces are not allowed, and for who is not root, the page for a laptop alone is run.
"""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

import debian
import docker_stand_in
import machine
import page
import workflow_stand_in

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs/guides"
BUILT = pathlib.Path.cwd()
# Of a command of the pages, and of a server after the commands that came to it. Each takes a second or two.
PATIENCE = 120
SUDO = '#!/bin/sh\nexec "$@"\n'
OUTSIDE = machine.enter()


def somebody_listens(port):
    """On TCP's port, or on rdma_cm's, which an InfiniBand device has names for (emu/fabric/port_space.h)."""
    tcp = re.compile(rf"^\s*\d+: \S+:{port:04X} \S+ 0A ", re.M)
    listener = re.compile(rf"@stagecoach-rdma/.*/{port}/listens$", re.M)
    texts = [pathlib.Path("/proc/net", name).read_text() for name in ("tcp", "tcp6", "unix") if os.path.exists(f"/proc/net/{name}")]
    return any(tcp.search(text) for text in texts[:-1]) or bool(listener.search(texts[-1]))


class Reader:
    """Whoever follows a page: has a folder for a program, a HOME, and a checkout."""

    def __init__(self, folder, *, docker=None):
        self.folder = pathlib.Path(folder)
        self.work, self.home, programs = (self.folder / name for name in ("work", "home", "programs"))
        for each in (self.work, self.home, programs):
            each.mkdir()
        self.checkout = checkout_in(self.folder)
        machine.write_program(programs / "bazel", machine.BAZEL)
        machine.write_program(programs / "apt-get", machine.APT_GET)
        machine.write_program(programs / "sudo", SUDO)
        self.environment = {
            "BASH_ENV": str(self.home / ".bashrc"),  # as a terminal's shell has it
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
        }
        if docker:
            machine.write_program(programs / "docker", docker_stand_in.CLIENT)
            self.environment["STAGECOACH_DOCKER"] = str(docker.socket_path)
        self.become = []
        if os.geteuid() == 0 and machine.may_become_others():
            self.become = ["setpriv", f"--reuid={machine.NOBODY}", f"--regid={machine.NOBODY}", "--clear-groups", "--"]
            subprocess.run(["chown", "-R", f"{machine.NOBODY}:{machine.NOBODY}", self.folder], check=True)
        self.server = None  # what ends it, and: the process, the block, the files with its output and complaints

    def stop(self):
        if self.server:
            self.server[0].close()

    def save(self, block):
        path = self.work / block.word
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)

    def start(self, block, output, complaints):
        cwd = self.checkout if block.word == "checkout" else self.work
        return subprocess.Popen([*self.become, "bash", "-e", "-c", block.text], cwd=cwd, env=self.environment, stdin=subprocess.DEVNULL,
                                stdout=output, stderr=complaints, start_new_session=True)

    def follow(self, block, case):
        """Does what the block says. `case`: the test, which hears of what is not as the page says."""
        if block.language != "sh":
            return self.save(block)
        with contextlib.ExitStack() as ends:
            output, complaints = (ends.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2))
            process = self.start(block, output, complaints)
            ends.callback(end, process)
            if block.word.startswith("server="):
                port = int(block.word.partition("=")[2])
                deadline = time.monotonic() + PATIENCE
                while not somebody_listens(port) and process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                case.assertTrue(somebody_listens(port), f"line {block.line}: nobody listens on {port}: {said(complaints)}")
                self.server = (ends.pop_all(), process, block, output, complaints)
                return None
            self.wait(process, block, output, complaints, case)
        if self.server:
            ends, *server = self.server
            self.server = None
            with ends:
                self.wait(*server, case)
        return None

    def wait(self, process, block, output, complaints, case):
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = f"none in {PATIENCE} s"
        text = said(output)
        where = f"line {block.line}:\n{block.text}"
        case.assertEqual(code, 0, f"{where}{text}{said(complaints)}")
        if block.prints is not None:
            case.assertTrue(page.agrees(block.prints, text), f"{where}--- should print\n{block.prints}--- and prints\n{text}")


def said(output):
    output.seek(0)
    return output.read()


def end(process):
    """With what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def checkout_in(folder):
    """A checkout in which everything has been built, as far as ./dev needs one to install and to package."""
    checkout = pathlib.Path(folder) / "stagecoach"
    checkout.mkdir()
    for path in ("dev", "LICENSE"):
        shutil.copy(ROOT / path, checkout)
    shutil.copytree(ROOT / "tools/dev", checkout / "tools/dev")
    for path in ("tools/stagecoach/stagecoach", "verbs_shim/dropin"):
        target = checkout / "bazel-bin" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (BUILT / path).is_dir() else shutil.copy)(BUILT / path, target)
    return checkout


class Guides(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        # Not below the test's own folder, where an ordinary user has no way in.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="stagecoach-guides."))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.chmod(0o755)

    def blocks(self, name):
        found = page.blocks((GUIDES / name).read_text())
        self.assertGreater(sum(1 for block in found if block.language == "sh" or block.language == "yaml"), 0)
        return found

    def program(self):
        """The program that the page for a laptop shows, and the others use."""
        return next(block for block in self.blocks("laptop.md") if block.word == "hello.c")

    def docker(self):
        if OUTSIDE:
            self.skipTest(f"namespaces are not allowed here: {OUTSIDE}")
        if not machine.may_become_others():
            self.skipTest("machines have users, and this test is an ordinary one: only root may make them")
        if debian.version() != "12":
            self.skipTest("images of Debian 12 are made of this machine's packages, and it has others")
        daemon = self.folder / "docker"
        daemon.mkdir()
        (self.folder / "reader").mkdir()
        docker = docker_stand_in.Docker(daemon, debian.Packages(), ROOT)
        self.addCleanup(docker.stop)
        return docker

    def test_laptop(self):
        reader = Reader(self.folder)
        self.addCleanup(reader.stop)
        for block in self.blocks("laptop.md"):
            reader.follow(block, self)

    def test_container(self):
        docker = self.docker()
        reader = Reader(self.folder / "reader", docker=docker)
        reader.save(self.program())
        for block in self.blocks("container.md"):
            reader.follow(block, self)

    def test_github_actions(self):
        docker = self.docker()
        reader = Reader(self.folder / "reader")
        reader.save(self.program())
        for block in self.blocks("github_actions.md"):
            reader.follow(block, self)
        [path] = (reader.work / ".github/workflows").iterdir()
        sources = {"": reader.work, "stagecoach": reader.checkout}
        workflow = workflow_stand_in.Workflow(path.read_text(), docker.folder, docker, sources, ROOT)
        workflow.run()
        built = [text for text, _ in workflow.said if "dev package" in text]
        self.assertEqual(len(built), 1)
        for profile in ("iwarp", "roce"):
            captures = sorted(workflow.artifacts[f"captures-{profile}"].iterdir())
            self.assertGreater(len(captures), 1)
            for capture in captures:
                self.assertGreater(capture.stat().st_size, 500, capture)
        # Another time, what was built is taken from the cache.
        workflow.run()
        self.assertEqual(sum(1 for text, _ in workflow.said if "dev package" in text), 1)

    def test_every_page_is_run(self):
        pages = {path.name for path in GUIDES.glob("*.md")}
        self.assertEqual(pages, {"README.md", "laptop.md", "container.md", "github_actions.md"})
        self.assertEqual(page.blocks((GUIDES / "README.md").read_text()), [])


class Pages(unittest.TestCase):
    """What is not as a page says is noticed."""

    def test_blocks(self):
        text = "```sh\na\nb\n```\nprints\n```text\nc\n```\n```c a.c\nint a;\n```\n```sh server=7\nd\n```\n"
        found = [(block.line, block.language, block.word, block.text, block.prints) for block in page.blocks(text)]
        self.assertEqual(found, [(1, "sh", "", "a\nb\n", "c\n"), (9, "c", "a.c", "int a;\n", None), (12, "sh", "server=7", "d\n", None)])
        for wrong in ("```\na\n```\n", "```text\na\n```\n", "```sh now\na\n```\n", "```console\n$ a\n```\n", "```sh\na\n", "```c\n```\n"):
            with self.assertRaises(ValueError, msg=wrong):
                page.blocks(wrong)

    def test_what_is_printed(self):
        for expected, actual in (
            ("a  b\n", "a b  \n"), ("...\nb", "b"), ("...\nb", "x\n\ny\nb"), ("a ... c", "a x y c"), ("a...\n...", "abc\nd"), ("a.c", "a.c"),
        ):
            self.assertTrue(page.agrees(expected, actual), (expected, actual))
        for expected, actual in (("a", "b"), ("a", "a\nb"), ("a\nb", "a"), ("a ... c", "a x\nc"), ("a.c", "abc"), ("...\nb", "x b"), ("", "a")):
            self.assertFalse(page.agrees(expected, actual), (expected, actual))


if __name__ == "__main__":
    unittest.main()
