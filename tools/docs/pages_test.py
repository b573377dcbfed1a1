"""The pages of this tree are true to it, and a page that is not is noticed."""

import pathlib
import unittest

import pages
from tree_of_files import tree_of

GUIDE = """# Guide

[there](#what-it-is-for) and [beyond](../README.md#the-end), [elsewhere](https://example.org/x)

## What it is for

`base/a.h`, `base/a` and `no/path`

| kinds | what |
| --- | --- |
| `kOne`, `kTwo` | both |

End
"""
FILES = {
    "README.md": "# All\n\n[guide](docs/rpc_guide.md)\n\n## The end\n",
    "docs/rpc_guide.md": GUIDE,
    "docs/life_of_a_call.md": "| where | what |\n| --- | --- |\n| `base/a.h`, `Go` | goes, to `Elsewhere::Go` |\n",
    "docs/decisions/0001.md": "`base/gone.h` was better\n",
    "base/a.h": "void Go();\n",
    "rpcrdma/api/error.h": "struct CallError {\n  enum class Kind : uint8_t {\n    // First.\n    kOne,  // kThree\n    kTwo,\n  };\n};\n",
}


def examine(**changes):
    """`changes`: a file, by its stem, and what is replaced in it."""
    files = dict(FILES)
    for path in files:
        for old, new in (changes[stem] for stem in changes if pathlib.Path(path).stem == stem):
            assert old in files[path]
            files[path] = files[path].replace(old, new)
    with tree_of(files) as root:
        return " / ".join(pages.examine(root)[0])


class ThisTree(unittest.TestCase):
    def test_pages_are_true(self):
        problems, count = pages.examine(pages.ROOT)
        self.assertEqual(problems, [])
        self.assertGreater(count, 40)


class OtherTrees(unittest.TestCase):
    def test_a_good_one(self):
        self.assertEqual(examine(), "")

    def test_links(self):
        self.assertIn("README.md: nothing is at docs/gone.md", examine(README=("docs/rpc_guide.md", "docs/gone.md")))
        self.assertIn("no such heading", examine(rpc_guide=("#what-it-is-for", "#what-it-was-for")))
        self.assertIn("no such heading", examine(README=("## The end", "## The beginning")))

    def test_paths(self):
        self.assertIn("rpc_guide.md: there is no base/b.h", examine(rpc_guide=("`base/a.h`", "`base/b.h`")))

    def test_names(self):
        self.assertIn("Run is in none of base/a.h", examine(life_of_a_call=("`Go`", "`Run`")))
        self.assertIn("there is no base/b.h", examine(life_of_a_call=("base/a.h", "base/b.h")))

    def test_kinds(self):
        self.assertIn("Kind::kTwo is not in its table", examine(rpc_guide=(", `kTwo`", "")))
        self.assertIn("no kind kThree", examine(rpc_guide=("`kTwo`", "`kTwo`, `kThree`")))


if __name__ == "__main__":
    unittest.main()
