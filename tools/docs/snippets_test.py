"""What the guide and the headers quote is what the examples are, and what is not is noticed."""

import unittest

import snippets
from tree_of_files import tree_of

EXAMPLE = """int main() {
  // [snippet: all]
  if (true) {

    return 0;
  }
  // [end]
}
"""
PAGE = """# Guide

```cpp examples/a.cc#all
if (true) {

  return 0;
}
```

    text, no code
"""
HEADER = """// A class.
//
// From examples/a.cc#all:
//
//   if (true) {
//
//     return 0;
//   }
//
// More of it.
#pragma once
"""


def examine(example=EXAMPLE, page=PAGE, header=HEADER, write=False):
    """The problems, and the page and the header afterwards."""
    with tree_of({"examples/a.cc": example, "docs/a.md": page, "rpcrdma/api/a.h": header}) as root:
        problems, _ = snippets.examine(root, write)
        return " / ".join(problems), (root / "docs/a.md").read_text(), (root / "rpcrdma/api/a.h").read_text()


class ThisTree(unittest.TestCase):
    def test_quotations_are_equal_to_their_sources(self):
        problems, quotations = snippets.examine(snippets.ROOT, False)
        self.assertEqual(problems, [])
        self.assertGreater(quotations, 30)


class OtherTrees(unittest.TestCase):
    def problems(self, **files):
        return examine(**files)[0]

    def test_a_good_one(self):
        self.assertEqual(self.problems(), "")

    def test_a_page_or_header_that_differs(self):
        self.assertIn("docs/a.md: differs from examples/a.cc#all", self.problems(page=PAGE.replace("0;", "1;")))
        self.assertIn("rpcrdma/api/a.h: differs from", self.problems(header=HEADER.replace("0;", "1;")))

    def test_writing_makes_them_equal(self):
        _, page, header = examine(page=PAGE.replace("0;", "1;"), header=HEADER.replace("//   if (true) {\n", ""), write=True)
        self.assertEqual(page, PAGE)
        self.assertEqual(header, HEADER)

    def test_writing_fills_what_is_empty(self):
        code = "if (true) {\n\n  return 0;\n}\n"
        _, page, header = examine(page=PAGE.replace(code, ""), header="// From examples/a.cc#all:\n#pragma once\n", write=True)
        self.assertEqual(page, PAGE)
        self.assertIn("//   if (true) {\n//\n//     return 0;\n//   }\n//\n#pragma once\n", header)

    def test_sources_that_are_not_there(self):
        self.assertIn("there is no examples/a.cc#none", self.problems(page=PAGE.replace("#all", "#none")))

    def test_code_that_is_no_quotation(self):
        self.assertIn("docs/a.md: a block of C++", self.problems(page=PAGE + "```cpp\nint a;\n```\n"))
        self.assertIn("rpcrdma/api/a.h:2: code in a comment",
                      self.problems(header=HEADER.replace("//\n", "//   int a;\n", 1)))

    def test_pieces_that_nothing_quotes(self):
        piece = "// [snippet: rest]\nint a;\n// [end]\n"
        self.assertIn("examples/a.cc#rest: nothing quotes it", self.problems(example=EXAMPLE + piece))

    def test_markers_that_do_not_pair(self):
        self.assertIn("has no end", self.problems(example=EXAMPLE.replace("  // [end]\n", "")))
        self.assertIn("an end without a beginning", self.problems(example=EXAMPLE + "// [end]\n"))
        self.assertIn("a second time", self.problems(example=EXAMPLE + EXAMPLE))


if __name__ == "__main__":
    unittest.main()
