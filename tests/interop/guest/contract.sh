# Sourced in the guest. contract PROVIDER PATIENCE: runs the contract tests of /host/plan ("BINARY TEST" lines) on the device PROVIDER
# (rxe or siw), each in a process of its own, because one that deviates may leave anything behind. PATIENCE multiplies all bounds in time.
# Says in /host/running what it is at, for who outlives us.
contract() {
  provider=$1
  test_seconds=$((30 * $2))
  "${provider}_up" || return 1
  # Addresses of the same interface for both ends: neither device answers on loopback.
  echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad
  ip -6 addr add fd00::15/64 dev eth0
  export STAGECOACH_TEST_ADDRESS=10.0.2.15 STAGECOACH_TEST_ADDRESS6=fd00::15
  export STAGECOACH_TEST_PATIENCE="$2" STAGECOACH_TEST_DEVIATIONS=run TEST_SRCDIR=/host/runfiles LD_LIBRARY_PATH=/tmp/lib
  mkdir -p /tmp/bin
  cp -r /host/lib /tmp/lib
  watch_for_hangs &
  while read -r binary test; do
    [ -e "/tmp/bin/$binary" ] || cp "/host/contract/$binary" /tmp/bin/
    echo "$binary $test" >/tmp/running
    cp /tmp/running /host/running
    # Busybox's timeout leaves our child the test itself, so that the status is its own.
    timeout -s KILL "$test_seconds" "/tmp/bin/$binary" --gtest_color=no "--gtest_filter=$test" </dev/null >/tmp/log 2>&1
    status=$?
    dmesg -c >>/tmp/log
    # Names of parameterised tests have slashes.
    cp /tmp/log "/host/logs/$binary.$(echo "$test" | tr / +)"
    echo "$binary $test $status" >>/host/done
  done </host/plan
  rm -f /host/running
}

# A process that the kernel does not let go of cannot be killed; only a new boot helps.
watch_for_hangs() {
  stuck=0 last=
  while sleep 5; do
    now=$(cat /tmp/running 2>/dev/null)
    if [ "$now" = "$last" ]; then stuck=$((stuck + 5)); else stuck=0; fi
    last=$now
    if [ $stuck -gt $((test_seconds + 15)) ]; then
      echo w >/proc/sysrq-trigger
      dmesg | tail -n 120 >/host/hang.txt
      sync
      reboot -f
    fi
  done
}
