"""The libraries for unmodified programs export what Debian's do: the same names, of the same versions, and no other."""

import os
import re
import subprocess
import unittest

OURS = "verbs_shim/dropin"


def debians():
    """The folder of Debian's libraries."""
    files = subprocess.run(["dpkg", "-L", "libibverbs1"], check=True, capture_output=True, text=True).stdout.split()
    return os.path.dirname(next(name for name in files if name.endswith("/libibverbs.so.1")))


# Names that Debian's libraries have and ours have not.
LEFT_OUT = [
    # Functions as they were before 2008, each of which is there as it is now. No program of Debian asks for them, and a program that does is
    # told so by the dynamic loader, instead of by what it finds in structures of another layout.
    (r"libibverbs\.so\.1", r"ibv_\w+@IBVERBS_1\.0"),
    # How providers of that time registered.
    (r"libibverbs\.so\.1", r"ibv_register_driver@IBVERBS_1\.1"),
]

# Names that later libraries have for providers, without which theirs do not load. No program calls them.
LATER = {("ibv_cmd_create_cq_ex2@@IBVERBS_PRIVATE_34", "function")}


def exported(path):
    listing = subprocess.run(["nm", "-D", "--with-symbol-versions", "--defined-only", path], check=True, capture_output=True, text=True)
    kinds_and_names = (line.split()[1:3] for line in listing.stdout.splitlines())
    # The versions themselves are listed, too, as absolute symbols.
    return {(name, "data" if kind in "BDR" else "function") for kind, name in kinds_and_names if kind != "A"}


def needed(path):
    listing = subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True)
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", listing.stdout))


class Symbols(unittest.TestCase):
    def check(self, library):
        ours, stock = exported(f"{OURS}/{library}"), exported(f"{debians()}/{library}")
        self.assertGreater(len(stock), 60)
        left_out = {
            symbol for symbol in stock
            if any(re.fullmatch(of, library) and re.fullmatch(name, symbol[0]) for of, name in LEFT_OUT)
        }
        self.assertEqual(stock - ours - left_out, set(), "missing")
        self.assertEqual(ours - stock - LATER, set(), "more than Debian's")
        self.assertEqual(left_out & ours, set(), "said to be left out, and there")
        return ours

    def test_libibverbs(self):
        self.assertLessEqual(LATER, self.check("libibverbs.so.1"))

    def test_librdmacm(self):
        self.check("librdmacm.so.1")

    def test_the_emulators_library_exports_what_is_its_own(self):
        listing = subprocess.run(["nm", "-DC", "--defined-only", f"{OURS}/libstagecoach_nic.so.0"], check=True, capture_output=True, text=True)
        symbols = [line.split(maxsplit=2)[1:] for line in listing.stdout.splitlines()]
        symbols = [(kind, name) for kind, name in symbols if kind != "A"]
        self.assertGreater(len(symbols), 60)
        self.assertEqual([name for _, name in symbols if not name.startswith("stagecoach::")], [])
        # Those the dynamic loader makes one of across a process, whatever version they are of.
        self.assertEqual([name for kind, name in symbols if kind == "u"], [])

    def test_they_stay_when_they_are_closed(self):
        for library in ("libibverbs.so.1", "librdmacm.so.1", "libstagecoach_nic.so.0"):
            dynamic = subprocess.run(["readelf", "-d", f"{OURS}/{library}"], check=True, capture_output=True, text=True).stdout
            self.assertRegex(dynamic, r"FLAGS_1\).*NODELETE", library)

    def test_nothing_is_loaded_but_the_emulator_and_the_language(self):
        allowed = {
            "libstagecoach_nic.so.0", "libibverbs.so.1", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6",
        }
        for library in ("libibverbs.so.1", "librdmacm.so.1", "libstagecoach_nic.so.0"):
            others = {name for name in needed(f"{OURS}/{library}") - allowed if not name.startswith("ld-linux")}
            self.assertEqual(others, set(), library)

    def test_the_name_without_a_version_is_the_same_library(self):
        for library in ("libibverbs.so", "librdmacm.so"):
            self.assertTrue(os.path.samefile(f"{OURS}/{library}", f"{OURS}/{library}.1"))


if __name__ == "__main__":
    unittest.main()
