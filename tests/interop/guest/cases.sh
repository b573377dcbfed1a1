# Sourced in the guest. cases PROVIDER PATIENCE ADDRESS SECONDS: runs the tests of /host/plan ("BINARY TEST" lines) on the device PROVIDER
# (rxe or siw), each in a process of its own, because one that deviates may leave anything behind, for SECONDS at most. PATIENCE multiplies
# all bounds in time; ADDRESS is the one of ours that the tests use for both ends. Says in /host/running what it is at, for who outlives us.
cases() {
  provider=$1
  test_seconds=$(($4 * $2))
  device_up "$provider" || return 1
  export STAGECOACH_TEST_ADDRESS="$3" STAGECOACH_TEST_ADDRESS6=fd00::15
  export STAGECOACH_TEST_PATIENCE="$2" STAGECOACH_TEST_DEVIATIONS=run TEST_SRCDIR=/tmp/runfiles
  # From memory: the shared folder is slow.
  mkdir -p /tmp/bin /tmp/runfiles/stagecoach
  cp -r /host/runfiles /tmp/
  cd /tmp/runfiles/stagecoach
  watch_for_hangs &
  while read -r binary test; do
    [ -e "/tmp/bin/$binary" ] || cp "/host/binaries/$binary" /tmp/bin/
    echo "$binary $test" >/tmp/running
    cp /tmp/running /host/running
    rm -f /tmp/unread
    watch_for_unread &
    watcher=$!
    # Busybox's timeout leaves our child the test itself, so that the status is its own.
    timeout -s KILL "$test_seconds" "/tmp/bin/$binary" --gtest_color=no "--gtest_filter=$test" </dev/null >/tmp/log 2>&1
    status=$?
    kill $watcher 2>/dev/null
    [ -e /tmp/unread ] && cat /tmp/unread >>/tmp/log
    dmesg -c >>/tmp/log
    # Names of parameterised tests have slashes.
    cp /tmp/log "/host/logs/$binary.$(echo "$test" | tr / +)"
    echo "$binary $test $status" >>/host/done
  done </host/plan
  rm -f /host/running
}

# device_up PROVIDER: the kernel's device, two addresses of the interface it is on, and the libraries of what the host has built.
device_up() {
  kernel_name >/host/kernel
  "${1}_up" || return 1
  # Addresses of the same interface for both ends: neither device answers on loopback.
  echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad
  ip -6 addr add fd00::15/64 dev eth0
  cp -r /host/lib /tmp/lib
  mkdir -p /tmp/programs
  cp /host/programs/* /tmp/programs/
  export LD_LIBRARY_PATH=/tmp/lib PATH="$PATH:/tmp/programs"
}

# Of a test that takes long: TCP connections with bytes that their owner, siw for one, has left unread. Before the bounds of tests are over.
watch_for_unread() {
  sleep 20
  awk '$4 == "01" && $5 !~ /:00000000$/ {print "left unread: from " $3 " to " $2 ", bytes " $5}' /proc/net/tcp /proc/net/tcp6 >/tmp/unread
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

# obey: carries out what the host orders, one script after another (mixed.py), until it orders to stop.
obey() {
  touch /host/ready
  order=1
  while :; do
    while [ ! -e "/host/order.$order" ]; do
      [ -e /host/order.stop ] && return 0
      sleep 0.2
    done
    sh "/host/order.$order" </dev/null >"/host/said.$order" 2>&1
    echo $? >/host/status.new
    mv /host/status.new "/host/status.$order"
    order=$((order + 1))
  done
}
