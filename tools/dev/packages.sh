# Debian packages, by what needs them. Sourced by ./dev. Names only; the list is the whole of what the project installs.
build_packages=(
  bazel-bootstrap g++ libasio-dev libbenchmark-dev libcli11-dev libexpected-dev libfmt-dev libgmock-dev libgtest-dev
  libibverbs-dev libprotobuf-dev librdmacm-dev libspdlog-dev protobuf-compiler python3
)
# Debian starts rpcbind as a service when it installs it. The tests run one of their own, elsewhere: "systemctl disable --now rpcbind.socket
# rpcbind" does them no harm.
test_packages=(
  gcc ibverbs-utils iproute2 libtirpc-dev perftest python3-yaml rdmacm-utils rpcbind rpcsvc-proto tshark ucx-utils valgrind
)
clang_packages=(clang clang-format clang-tidy libclang-rt-dev)
bench_packages=(gcc libtirpc-dev rpcsvc-proto)
# What the benchmark compares with, if it is there.
rival_packages=(libfabric-bin ucx-utils)
# And the headers of the kernel that the machine runs (tests/interop/prepare).
interop_packages=(
  binutils busybox-static cpio ethtool gcc ibverbs-providers ibverbs-utils iproute2 kmod make perftest qemu-system-x86 rdma-core
  rdmacm-utils xz-utils
)
