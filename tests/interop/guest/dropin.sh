# Sourced in the guest, behind cases.sh. A program is run by whom it is given its libraries from: "ours" by those of /host/dropin, "siw" by
# the system's, over the kernel's device. Both ends are in the guest, so that their stream is on its loopback.

dropin_up() {
  kernel_name >/host/kernel
  siw_with_settings_up || return 1
  cp -r /host/lib /host/dropin /host/programs /tmp/
  mkdir -p /host/logs
  # What the emulated device is told; what is traced of it, if anything.
  OURS= TRACED=
}

# segments large|1500: the path of all connections. Large ones have what loopback has and no offload that a wire would not have.
segments() {
  case $1 in
    large) ip link set lo mtu 65536 && ethtool -K lo tso on gso on gro on >/dev/null ;;
    *) ip link set lo mtu "$1" && ethtool -K lo tso off gso off gro off >/dev/null ;;
  esac
}

# run_as ours|siw END SECONDS COMMAND: runs it with those libraries, and leaves its process in /tmp/END.pid. Ours have the patience that
# "stagecoach run" gives them.
run_as() {
  run="echo \$\$ >/tmp/$2.pid; exec $4"
  if [ "$1" = ours ]; then
    env STAGECOACH_LISTENER_PATIENCE=1000 $OURS ${TRACED:+STAGECOACH_TRACE=/tmp/$2.trace} LD_LIBRARY_PATH=/tmp/dropin:/tmp/lib PATH="/tmp/programs:$PATH" \
      timeout -s KILL "$3" sh -c "$run"
  else
    LD_LIBRARY_PATH=/tmp/lib PATH="/tmp/programs:$PATH" timeout -s KILL "$3" sh -c "$run"
  fi
}

# listens PORT: whether somebody does, siw's own sockets included.
listens() {
  grep -q "^ *[0-9]*: [0-9A-F]*:$(printf %04X "$1") [0-9A-F]*:0000 0A" /proc/net/tcp /proc/net/tcp6
}

# digest FILE: of a trace what the host wants to know, and the longest segment that was placed.
digest() {
  [ -e "$1" ] || return 0
  grep -E ' (connected|handshake.failed|terminate.raised|terminate.received) ' "$1"
  echo "longest $(sed -n 's/.* record.placed .* length=\([0-9]*\) .*/\1/p' "$1" | sort -n | tail -n 1)"
}

# step NAME SECONDS SERVER CALLER PORT COMMAND COMMAND: runs the server's command and, when it listens at PORT, the caller's. What they said is
# in /host/logs, and a line "NAME STATUS STATUS" (the caller's first) in /host/done.
step() {
  rm -f /tmp/server.* /tmp/caller.*
  run_as "$3" server $(($2 + 10)) "$6" >/tmp/server.out 2>&1 &
  server=$!
  n=0
  until listens "$5" || ! kill -0 $server 2>/dev/null || [ $n -ge 150 ]; do
    sleep 0.1
    n=$((n + 1))
  done
  run_as "$4" caller "$2" "$7" >/tmp/caller.out 2>&1
  status=$?
  n=0
  while kill -0 $server 2>/dev/null && [ $n -lt 50 ]; do
    sleep 0.1
    n=$((n + 1))
  done
  kill -0 $server 2>/dev/null && kill -KILL "$(cat /tmp/server.pid)"
  wait $server
  echo "$1 $status $?" >>/host/done
  for end in caller server; do
    cp /tmp/$end.out "/host/logs/$1.$end"
    digest /tmp/$end.trace >"/host/logs/$1.$end.trace"
  done
}
