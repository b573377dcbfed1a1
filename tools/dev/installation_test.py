"""What ./dev install, uninstall and package make of a build: which files, what they need of a system, and that they work there.

Runs in a folder with what was built, where the build puts it.
"""

import os
import pathlib
import re
import subprocess
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
INSTALLATION = ROOT / "tools/dev/installation"
NOBODY = 65534
LIBRARIES = ["libibverbs.so", "libibverbs.so.1", "librdmacm.so", "librdmacm.so.1", "libstagecoach_nic.so.0"]
# The newest versions of symbols that may be asked of a system, as the guide says them: what Ubuntu 22.04 has.
NEWEST = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)}


def installation(*arguments, become=None, **environment):
    words = [] if become is None else ["setpriv", f"--reuid={become}", f"--regid={become}", "--clear-groups", "--"]
    # The build, as the script says it: here.
    return subprocess.run([*words, INSTALLATION, *map(str, arguments)], env={"PATH": "/usr/bin:/bin", **environment},
                          capture_output=True, text=True)


def content(root):
    """Path -> what is there, and who may do what with it."""
    found = {}
    for path in sorted(pathlib.Path(root).rglob("*")):
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (what, None if path.is_symlink() else path.stat().st_mode)
    return found


def dynamic_section(path):
    return subprocess.run(["readelf", "--dynamic", "--version-info", path], check=True, capture_output=True, text=True).stdout


class Installation(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="installation.")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.folder.chmod(0o755)

    def install(self, prefix, **environment):
        done = installation("install", ".", prefix, **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr

    def test_files(self):
        self.install("/opt", DESTDIR=str(self.folder))
        files = [path for path, (what, _) in content(self.folder / "opt").items() if what is not None]
        ours = [path for path in files if not path.startswith(("lib/stagecoach/private/", "share/doc/stagecoach/copyright."))]
        beside = [*LIBRARIES, "stagecoach.supp"]
        self.assertEqual(ours, ["bin/stagecoach", *(f"lib/stagecoach/{name}" for name in beside), "share/doc/stagecoach/LICENSE"])
        self.assertEqual(os.readlink(self.folder / "opt/lib/stagecoach/libibverbs.so"), "libibverbs.so.1")
        # Whose code is in there, and under which terms.
        self.assertIn("share/doc/stagecoach/copyright.libprotobuf32", files)
        self.assertIn("share/doc/stagecoach/copyright.libibverbs-dev", files)

    def test_programs_run_from_where_it_is(self):
        prefix = self.folder / "a folder"
        self.assertIn("not in PATH", self.install(prefix))
        run = subprocess.run([prefix / "bin/stagecoach", "run", "sh", "-c", 'echo "$LD_LIBRARY_PATH"; ibv_devices'],
                             env={"PATH": "/usr/bin:/bin"}, check=True, capture_output=True, text=True)
        self.assertEqual(run.stdout.splitlines()[0], f"{prefix}/lib/stagecoach")
        self.assertIn("stagecoach0", run.stdout)

    def test_what_it_needs_is_what_the_guide_says(self):
        prefix = self.folder / "usr"
        self.install(prefix)
        own = set(LIBRARIES) | {path.name for path in (prefix / "lib/stagecoach/private").iterdir()}
        needed = {"program": set(), "libraries": set()}
        for path in (path for path in prefix.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"):
            section = dynamic_section(path)
            given = {"lib/stagecoach": "libraries"}.get(str(path.parent.relative_to(prefix)), "program")
            needed[given] |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", section)) - own
            for kind, version in re.findall(r"Name: ([A-Z]+)_([\d.]+)", section):
                newest = NEWEST.get(kind)
                self.assertTrue(newest is None or tuple(map(int, version.split("."))) <= newest, f"{path.name}: {kind}_{version}")
        table = re.findall(r"^\| `([a-z0-9+-]+)` \| (.*) \|$", (ROOT / "docs/guides/container.md").read_text(), re.M)
        self.assertEqual([package for package, _ in table], ["libc6", "libgcc-s1", "libstdc++6", "zlib1g"])
        packages = {library: package for package, libraries in table for library in re.findall(r"`(lib[\w+.]*\.so\.\d+)`", libraries)}
        packages["ld-linux-x86-64.so.2"] = "libc6"
        self.assertEqual({packages.get(library, library) for library in needed["program"]}, {package for package, _ in table})
        self.assertLessEqual({packages.get(library, library) for library in needed["libraries"]}, {package for package, _ in table[:3]})
        for library, package in packages.items():
            owner = subprocess.run(["dpkg-query", "-S", f"*/{library}"], check=True, capture_output=True, text=True).stdout
            self.assertRegex(owner, rf"(?m)^{re.escape(package)}[:,]")

    def test_uninstalling_leaves_what_others_have_there(self):
        prefix = self.folder / "usr"
        for path in ("bin/other", "lib/libother.so", "share/doc/other"):
            (prefix / path).parent.mkdir(parents=True, exist_ok=True)
            (prefix / path).write_text("other")
        (prefix / "bin").chmod(0o775)
        before = content(prefix)
        self.install(prefix)
        (prefix / "lib/stagecoach/libibverbs.so.1").write_text("damaged")
        self.install(prefix)
        self.assertGreater((prefix / "lib/stagecoach/libibverbs.so.1").stat().st_size, 10000)
        done = installation("uninstall", prefix)
        self.assertEqual((done.returncode, content(prefix)), (0, before), done.stderr)
        done = installation("uninstall", prefix)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("not installed", done.stderr)

    def test_a_program_that_runs_keeps_its_libraries(self):
        prefix = self.folder / "usr"
        self.install(prefix)
        with (prefix / "lib/stagecoach/libibverbs.so.1").open("rb") as kept:
            before = kept.read()
            self.install(prefix)
            kept.seek(0)
            self.assertNotEqual(os.fstat(kept.fileno()).st_ino, (prefix / "lib/stagecoach/libibverbs.so.1").stat().st_ino)
            self.assertEqual(kept.read(), before)

    def test_a_package_unpacks_to_what_is_installed(self):
        first, second, prefix, unpacked = (self.folder / name for name in ("1.tar.gz", "2.tar.gz", "installed", "unpacked"))
        for file in (first, second):
            done = installation("package", ".", file)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(first.read_bytes(), second.read_bytes())
        self.install(prefix)
        unpacked.mkdir()
        (unpacked / "bin").mkdir(0o775)
        (unpacked / "bin").chmod(0o775)
        subprocess.run(["tar", "-xzf", first, "-C", unpacked], check=True)
        self.assertEqual((unpacked / "bin").stat().st_mode & 0o777, 0o775)
        (unpacked / "bin").chmod(0o755)
        self.assertEqual(content(unpacked), content(prefix))
        with tarfile.open(first) as archive:
            self.assertEqual({(member.uid, member.gid) for member in archive.getmembers()}, {(0, 0)})

    def test_a_build_that_lacks_something_changes_nothing(self):
        built, prefix = self.folder / "built", self.folder / "usr"
        (built / "tools/stagecoach").mkdir(parents=True)
        (built / "tools/stagecoach/stagecoach").write_text("#!/bin/sh\n")
        done = installation("install", built, prefix)
        self.assertNotEqual(done.returncode, 0)
        self.assertFalse(prefix.exists())

    @unittest.skipUnless(os.geteuid() == 0, "needs to become another user")
    def test_who_may_not_write_there_is_told(self):
        prefix = self.folder / "usr"
        # Who has sudo is asked by it instead.
        programs = self.folder / "programs"
        programs.mkdir()
        for program in os.scandir("/usr/bin"):
            if program.name != "sudo":
                (programs / program.name).symlink_to(program.path)
        done = installation("install", ".", prefix, become=NOBODY, PATH=str(programs))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(f"{prefix} cannot be written; become root, or name another place", done.stderr)
        self.assertFalse(prefix.exists())
        self.install(prefix)
        done = installation("uninstall", prefix, become=NOBODY, PATH=str(programs))
        self.assertNotEqual(done.returncode, 0)
        self.assertTrue((prefix / "bin/stagecoach").exists())


if __name__ == "__main__":
    unittest.main()
