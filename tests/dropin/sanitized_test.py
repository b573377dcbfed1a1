"""Programs that are built with sanitizers, or run by valgrind, hear nothing about the libraries, which are built without."""

import pathlib
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).with_name("sanitized_program.c")
STAGECOACH = "tools/stagecoach/stagecoach"
PROFILES = ["iwarp", "roce"]
PATIENCE = 120  # s
# valgrind runs one thread at a time, and not always the one that is waited for.
VALGRIND = ["valgrind", "--quiet", "--fair-sched=yes", "--error-exitcode=9", "--leak-check=full"]


class SanitizedTest(unittest.TestCase):
    def Build(self, *flags):
        program = pathlib.Path(self.folder.name) / "program"
        subprocess.run(["gcc", "-g", *flags, "-o", program, SOURCE, "-lrdmacm", "-libverbs", "-lpthread"], check=True)
        return str(program)

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def ExpectNoWord(self, command):
        for profile in PROFILES:
            with self.subTest(profile):
                ended = subprocess.run(
                    [STAGECOACH, "run", "--surroundings", "off", "--profile", profile, *command], text=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=PATIENCE)
                self.assertEqual((ended.returncode, ended.stdout, ended.stderr), (0, "done\n", ""))

    def test_address_sanitizer(self):
        self.ExpectNoWord([self.Build("-fsanitize=address")])

    def test_undefined_behavior_sanitizer(self):
        self.ExpectNoWord([self.Build("-fsanitize=undefined")])

    def test_thread_sanitizer(self):
        self.ExpectNoWord([self.Build("-fsanitize=thread")])

    def test_valgrind(self):
        self.ExpectNoWord([*VALGRIND, self.Build()])


if __name__ == "__main__":
    unittest.main()
