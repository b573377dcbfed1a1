"""Fuzz targets: one source with LLVMFuzzerTestOneInput, NAME_fuzz.cc, two programs.

NAME_fuzzer links libFuzzer under --config=fuzz (define fuzzing=libfuzzer) and the replay program otherwise.
NAME_replay_test runs the checked-in corpus, and mutations of it from a fixed seed, as an ordinary test.
"""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")

def fuzz_target(name, deps, runs = 5000):
    """Declares both programs over tests/fuzz/corpus/NAME.

    Args:
      name: names the source and the corpus directory, too.
      deps: of the source.
      runs: mutated inputs of the replay test.
    """
    corpus = native.glob(["corpus/%s/*" % name])
    cc_library(
        name = name + "_target",
        testonly = True,
        srcs = [name + "_fuzz.cc"],
        deps = deps + ["//base", ":input"],
        alwayslink = True,
    )
    cc_binary(
        name = name + "_fuzzer",
        testonly = True,
        deps = [":%s_target" % name] + select({
            "//tests/fuzz:libfuzzer": [],
            "//conditions:default": [":replay_main"],
        }),
        linkopts = select({
            "//tests/fuzz:libfuzzer": ["-fsanitize=fuzzer"],
            "//conditions:default": [],
        }),
        tags = ["fuzz-target"],
    )
    cc_test(
        name = name + "_replay_test",
        size = "small",
        args = ["tests/fuzz/corpus/" + name, "%d" % runs],
        data = corpus,
        deps = [":%s_target" % name, ":replay_main"],
    )
