# Debian packages, by what needs them. Sourced by ./dev. Names only; the list is the whole of what the project installs.
build_packages=(
  bazel-bootstrap g++ libasio-dev libbenchmark-dev libcli11-dev libexpected-dev libfmt-dev libgmock-dev libgtest-dev
  libibverbs-dev libprotobuf-dev librdmacm-dev libspdlog-dev protobuf-compiler python3
)
test_packages=(tshark)
clang_packages=(clang clang-format clang-tidy libclang-rt-dev)
bench_packages=(gcc libtirpc-dev rpcsvc-proto)
