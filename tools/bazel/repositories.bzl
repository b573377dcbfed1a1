"""Repository rules that let Debian 12's Bazel 4.2.3 build this project without a network.

Bazel insists on @rules_cc and @remote_coverage_tools, and Debian's packaged rules_cc does not load with this Bazel.
The first rule re-exports built-in rules under their standard load path; the second satisfies the coverage
toolchain; the third names the Debian packages we link, and fails early, in words, when one is missing.
"""

def _native_rules_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    ctx.file("BUILD.bazel", "")
    ctx.file(ctx.attr.folder + "/BUILD.bazel", "package(default_visibility = [\"//visibility:public\"])\n")
    ctx.file(
        ctx.attr.folder + "/defs.bzl",
        "".join(["%s = native.%s\n" % (rule, rule) for rule in ctx.attr.rules]),
    )

# A repository whose //FOLDER:defs.bzl re-exports rules that Bazel 4.2.3 still has built in.
native_rules = repository_rule(
    implementation = _native_rules_impl,
    attrs = {
        "folder": attr.string(mandatory = True),
        "rules": attr.string_list(mandatory = True),
    },
)

def _empty_coverage_tools_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = \"remote_coverage_tools\")\n")
    ctx.file("BUILD.bazel", "\n".join([
        "package(default_visibility = [\"//visibility:public\"])",
        "filegroup(name = \"coverage_report_generator\", srcs = [])",
        "filegroup(name = \"lcov_merger\", srcs = [])",
        "",
    ]))

empty_coverage_tools = repository_rule(implementation = _empty_coverage_tools_impl)

# name -> (a header that proves the package is there, the Debian package, defines, link options)
_LIBRARIES = {
    # ASIO_HAS_STD_ALIGNED_ALLOC: Asio 1.22 decides by what was included before it, so that one file would allocate with
    # operator new what another frees with free().
    "asio": (
        "asio.hpp",
        "libasio-dev",
        ["ASIO_STANDALONE", "ASIO_NO_DEPRECATED", "ASIO_HAS_STD_ALIGNED_ALLOC=1"],
        ["-lpthread"],
    ),
    "benchmark": ("benchmark/benchmark.h", "libbenchmark-dev", [], ["-lbenchmark", "-lpthread"]),
    "cli11": ("CLI/CLI.hpp", "libcli11-dev", [], []),
    "expected": ("tl/expected.hpp", "libexpected-dev", [], []),
    "fmt": ("fmt/format.h", "libfmt-dev", [], ["-lfmt"]),
    "gmock": ("gmock/gmock.h", "libgmock-dev", [], ["-lgmock", "-lgtest", "-lpthread"]),
    "gtest": ("gtest/gtest.h", "libgtest-dev", [], ["-lgtest", "-lpthread"]),
    "gtest_main": ("gtest/gtest.h", "libgtest-dev", [], ["-lgtest_main", "-lgmock", "-lgtest", "-lpthread"]),
    "protobuf": ("google/protobuf/message.h", "libprotobuf-dev", [], ["-lprotobuf", "-lpthread"]),
    "rdma_core_headers": ("infiniband/verbs.h", "libibverbs-dev", [], []),
    "rdmacm_headers": ("rdma/rdma_cma.h", "librdmacm-dev", [], []),
    "rdma_core": ("infiniband/verbs.h", "libibverbs-dev", [], ["-lrdmacm", "-libverbs"]),
    "spdlog": ("spdlog/spdlog.h", "libspdlog-dev", ["SPDLOG_COMPILED_LIB", "SPDLOG_FMT_EXTERNAL"], ["-lspdlog", "-lfmt"]),
}

def _debian_package_headers_impl(ctx):
    missing = []
    build = ["package(default_visibility = [\"//visibility:public\"])"]
    for name, (header, package, defines, linkopts) in _LIBRARIES.items():
        if not ctx.path("/usr/include/" + header).exists:
            missing.append(package)
        build.append("cc_library(name = %r, defines = %r, linkopts = %r)" % (name, defines, linkopts))
    if missing:
        fail("Debian packages are missing: %s. Run ./dev setup." % " ".join(missing))
    ctx.file("WORKSPACE", "workspace(name = \"debian\")\n")
    ctx.file("BUILD.bazel", "\n".join(build) + "\n")

debian_package_headers = repository_rule(implementation = _debian_package_headers_impl, local = True)
