"""Tests in Python of the source tree itself."""

def python_test(name, data = [], size = "small", tags = []):
    """Runs NAME.py where it stands in the source tree, of which it may read anything: hence never cached ("external").

    Args:
      name: of the script, without its ending.
      data: what is built that it looks at, below the working directory.
      size: as of other tests.
      tags: further ones.
    """
    native.sh_test(
        name = name,
        size = size,
        srcs = ["//tools/bazel:run_python_test.sh"],
        args = ["$(location %s.py)" % name],
        data = [name + ".py"] + data,
        tags = tags + [
            "external",
            "no-sanitizer",
        ],
    )
