"""What `serve` says when the system has too little for it: each limit of address space ends it with a message, or it serves."""

import os
import resource
import selectors
import subprocess
import tempfile
import unittest

STAGECOACH = "tools/stagecoach/stagecoach"
STEP = 1 << 20  # bytes
MOST = 512 << 20  # by then it serves
LOADER_FAILED = 127
PATIENCE = 30  # s, for what must come


def Limit(size):
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size))


class WantTest(unittest.TestCase):
    def Serve(self, folder, size):
        """(exit code, what it complained of); None for the code: it serves."""
        process = subprocess.Popen(
            [STAGECOACH, "serve", "--listen", "127.0.0.1:0", folder], preexec_fn=Limit(size), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            selector = selectors.DefaultSelector()
            selector.register(process.stdout, selectors.EVENT_READ)
            self.assertTrue(selector.select(PATIENCE), f"it says nothing with {size} bytes")
            if process.stdout.readline():
                return None, ""
            _, complaint = process.communicate(timeout=PATIENCE)
            return process.returncode, complaint
        finally:
            process.kill()
            process.communicate()

    def test_serve_says_what_it_lacked(self):
        complaints = set()
        with tempfile.TemporaryDirectory() as folder:
            for size in range(STEP, MOST, STEP):
                code, complaint = self.Serve(folder, size)
                if code is None:
                    break
                if code == LOADER_FAILED or (code < 0 and not complaints):
                    continue  # the program has not begun yet
                self.assertEqual(code, 1, f"with {size} bytes: {complaint}")
                self.assertRegex(complaint, r"(?s)^stagecoach: .*(memory|thread|unavailable)")
                complaints.add(complaint)
            else:
                self.fail("it never serves")
        self.assertTrue(complaints, "no limit was too small for it")


if __name__ == "__main__":
    unittest.main()
