"""Tests in Python of the source tree itself."""

def python_test(name, tags = []):
    """Runs NAME.py where it stands in the source tree, of which it may read anything: hence never cached ("external").

    Args:
      name: of the script, without its ending.
      tags: further ones.
    """
    native.sh_test(
        name = name,
        size = "small",
        srcs = ["//tools/bazel:run_python_test.sh"],
        args = ["$(location %s.py)" % name],
        data = [name + ".py"],
        tags = tags + [
            "external",
            "no-sanitizer",
        ],
    )
