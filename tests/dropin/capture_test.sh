#!/bin/bash
# Captures and traces of several processes under one name, in the eyes of stock tshark: none is lost, none is written by two, and they merge.
set -u
stagecoach=$(readlink -f "$1")
for tool in tshark mergecap capinfos rping; do
  command -v "$tool" >/dev/null || { echo "$tool is missing; ./dev test installs it"; exit 1; }
done
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/capture.XXXXXX")
trap 'rm -rf "$work"' EXIT
failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }
# What else tshark would see in a connection for one of its ports alone: the system chose ours.
mapfile -t others < <(command tshark -G decodes 2>/dev/null | awk '$1 == "tcp.port" && $2 >= 32768 { print "--disable-protocol"; print $3 }')
tshark() { command tshark "${others[@]}" "$@"; }
frames() { tshark -r "$1" -Y "$2" 2>/dev/null | wc -l; }

# Both ends of $2 connections, one after the other, in one environment. rping's client tries once: it comes when the server listens.
cat >"$work/ends" <<'END'
for _ in $(seq "$1"); do
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  rping -s -a 127.0.0.1 -p "$port" -C 3 &
  for _ in $(seq 400); do
    grep -q "$(printf ':%04X 00000000:0000 0A' "$port")" /proc/net/tcp && break
    kill -0 $! || exit 1
    sleep 0.025 # a bounded wait for a condition, not for time to pass
  done
  rping -c -a 127.0.0.1 -p "$port" -C 3 || exit 1
  wait $! || exit 1
done
END
run() { # OPTIONS... CONNECTIONS
  "$stagecoach" run --profile iwarp "${@:1:$#-1}" bash "$work/ends" "${!#}" >"$work/out" 2>"$work/err" ||
    fail "run $*: $(cat "$work/out" "$work/err")"
}
whole() { # COUNT FILE...: so many files, each with a connection of its own process
  local count=$1; shift
  [ $# -eq "$count" ] || fail "$# files instead of $count: $*"
  local file
  for file; do
    capinfos "$file" >/dev/null 2>"$work/capinfos" || fail "$file: $(cat "$work/capinfos")"
    [ "$(frames "$file" iwarp_mpa.req)" -eq 1 ] || fail "$file: not one MPA Request"
    [ "$(frames "$file" iwarp_mpa.fpdu)" -ge 12 ] || fail "$file: few FPDUs"
    [ "$(frames "$file" '_ws.malformed || tcp.analysis.retransmission || tcp.analysis.lost_segment')" -eq 0 ] || fail "$file: not a whole stream"
  done
}

# One name: the first process has it, the others have files beside it, and say so.
mkdir "$work/one"
run --pcap "$work/one/all.pcapng" --trace "$work/one/trace" 2
whole 4 "$work"/one/*.pcapng
[ -s "$work/one/all.pcapng" ] || fail "nobody has the name itself"
[ "$(grep -c '^stagecoach: capture file .*: is of another process; this one writes .*/all\.[0-9]*\.pcapng$' "$work/err")" -eq 3 ] ||
  fail "not three have said where they write: $(cat "$work/err")"
[ "$(find "$work/one" -name 'trace*' -size +0 | wc -l)" -eq 4 ] || fail "not four traces: $(ls "$work/one")"
[ "$(stat -c %a "$work/one/all.pcapng")" = 600 ] || fail "others may read what was transferred"

# Merged, each process is an interface of its own.
mergecap -w "$work/merged.pcapng" "$work"/one/*.pcapng || fail "mergecap"
[ "$(tshark -r "$work/merged.pcapng" -T fields -e frame.interface_name 2>/dev/null | sort -u | grep -c '^stagecoach0 of rping ([0-9]*)$')" -eq 4 ] ||
  fail "not four processes in the merged file: $(capinfos "$work/merged.pcapng")"

# The option means a new file, and what is beside it stays.
run --pcap "$work/one/all.pcapng" 1
whole 5 "$work"/one/*.pcapng

# Who only looks at the device takes nobody's file.
mkdir "$work/looked"
"$stagecoach" run --profile iwarp --pcap "$work/looked/all.pcapng" sh -c "ibv_devinfo >/dev/null && bash $work/ends 1" >"$work/out" 2>&1 || fail "$(cat "$work/out")"
whole 2 "$work"/looked/*.pcapng

# %p: each its own, without a word.
mkdir "$work/each"
run --pcap "$work/each/%p.pcapng" 1
whole 2 "$work"/each/*.pcapng
grep -q 'another process' "$work/err" && fail "said of %p: $(cat "$work/err")"
ls "$work/each" | grep -vq '^[0-9]*\.pcapng$' && fail "names: $(ls "$work/each")"

[ "$failures" -eq 0 ] && echo "each process has its own capture"
exit "$((failures > 0))"
