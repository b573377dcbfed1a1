"""One source of contract tests, run in each of the worlds there are."""

load("@rules_cc//cc:defs.bzl", "cc_test")

def contract_test(name):
    for suffix, world, tags in [("", ":loopback", []), ("_in_simulation", ":simulated", ["emulated_only"])]:
        cc_test(
            name = name + suffix,
            size = "small",
            srcs = [name + ".cc"],
            tags = tags,
            deps = [
                ":harness",
                world,
                "//verbs_shim/cxx:handles",
                "@debian//:gtest_main",
            ],
        )
