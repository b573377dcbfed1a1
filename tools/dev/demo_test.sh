#!/bin/bash
# The demo, run as `./dev demo` runs it: it ends well, the tree and the large file come back as they went, and each kind of transfer is
# seen in the statistics, so that what the README shows stays true.
set -u
demo=$(readlink -f "$1") stagecoach=$(readlink -f "$2") device=$3
shown=$(mktemp "${TEST_TMPDIR:-/tmp}/demo.XXXXXX")
trap 'rm -f "$shown"' EXIT
TMPDIR=${TEST_TMPDIR:-/tmp} "$demo" "$stagecoach" "${@:4}" >"$shown" 2>&1
status=$?
failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }
[ "$status" -eq 0 ] || fail "the demo ended with status $status"
shows() { grep -Eq -- "$1" "$shown" || fail "the demo does not show: $1"; }

shows 'listening on 127\.0\.0\.1:[0-9]+ .*'"$device"
carrier=shm
case " ${*:4} " in *' --backend tcp '*) carrier=tcp ;; esac
shows "^stagecoach: connection from .* is carried by $carrier"
shows '^1000 NULL calls of program .*: min .*, median .*, p99 '
shows '^[1-9][0-9]* files of /usr/share/common-licenses and 48 MiB of random bytes: identical after the round trip$'
# One block of statistics for each of the four copies; a MiB a call, by Read chunks there and by Write chunks back.
for line in '  calls    ' '  placed directly  ' '  credits  ' '  memory   '; do
  n=$(grep -c -- "^$line" "$shown")
  [ "$n" -eq 4 ] || fail "$n lines of '$line', expected 4"
done
shows '^  calls .*\([1-9][0-9]* inline, 48 by Read chunk, 0 by Write chunk'
shows '^  calls .*\([1-9][0-9]* inline, 0 by Read chunk, 48 by Write chunk'
shows '^  placed directly  48\.0 MiB by RDMA Read, 0 B by RDMA Write$'
shows '^  placed directly  0 B by RDMA Read, 48\.0 MiB by RDMA Write$'
shows '^  credits +[1-9][0-9]* granted$'
shows '^  memory +48 registrations, [0-9]+ invalidations here, [0-9]+ by the peer$'
[ "$failures" -eq 0 ] || cat "$shown"
exit "$((failures > 0))"
