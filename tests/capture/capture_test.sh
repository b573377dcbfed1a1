#!/bin/bash
# Our own traffic, captured by the tap, in the eyes of stock tshark: MPA, DDP/RDMAP and RPC-over-RDMA with nothing malformed, with and
# without CRC. One server and one client process each, a file both ways. Version 2 as well, in the eyes of tshark with our script and
# of our decoder.
set -u
stagecoach=$(readlink -f "$1")
script=$(readlink -f "$2")
command -v tshark >/dev/null || { echo "tshark is missing; ./dev test installs it"; exit 1; }
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/capture.XXXXXX")
server=
finish() {
  [ -z "$server" ] || { kill "$server"; wait "$server"; } 2>/dev/null
  rm -rf "$work"
}
trap finish EXIT
failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }
# What else tshark would see in a connection for one of its ports alone: the system chose ours.
mapfile -t others < <(command tshark -G decodes 2>/dev/null | awk '$1 == "tcp.port" && $2 >= 32768 { print "--disable-protocol"; print $3 }')
tshark() { command tshark "${others[@]}" "$@"; }
# tshark FILE FILTER: how many frames match.
frames() { tshark -r "$1" -Y "$2" 2>/dev/null | wc -l; }
at_least() { # FILE FILTER COUNT WHAT
  local n; n=$(frames "$1" "$2")
  [ "$n" -ge "$3" ] || fail "$4: $n frames, expected at least $3"
}
none() { # FILE FILTER WHAT
  local n; n=$(frames "$1" "$2")
  [ "$n" -eq 0 ] || { fail "$3: $n frames"; tshark -r "$1" -Y "$2" 2>/dev/null | head -5; }
}

serve() { # sets server and url
  : >"$work/log" # what the last server said is not what this one says
  "$stagecoach" serve --listen 127.0.0.1:0 "$@" >>"$work/log" 2>&1 &
  server=$!
  for _ in $(seq 200); do
    grep -q 'listening on' "$work/log" && break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.05 # a bounded wait for a condition, not for time to pass
  done
  url=stagecoach://$(sed -n 's/.*listening on \([^ ]*:[0-9]*\).*/\1/p' "$work/log" | head -1)
}
stop_serving() { # WHERE
  kill -TERM "$server"; wait "$server" || fail "the server ended badly, $1"
  server=
}

head -c 300001 /dev/urandom >"$work/data"
for crc in off on; do
  export STAGECOACH_CRC=$crc
  mkdir -p "$work/served$crc"
  serve --pcap "$work/server$crc.pcapng" "$work/served$crc"
  "$stagecoach" put --pcap "$work/put$crc.pcapng" "$work/data" "$url/data" || fail "put, CRC $crc"
  "$stagecoach" get --pcap "$work/get$crc.pcapng" "$url/data" "$work/back$crc" || fail "get, CRC $crc"
  "$stagecoach" ls --pcap "$work/ls$crc.pcapng" "$url/" >"$work/listing" || fail "ls, CRC $crc"
  grep -q data "$work/listing" || fail "ls does not show the file, CRC $crc"
  cmp "$work/data" "$work/back$crc" || fail "the file changed, CRC $crc"
  stop_serving "CRC $crc"
  for capture in "$work/server$crc.pcapng" "$work/put$crc.pcapng" "$work/get$crc.pcapng" "$work/ls$crc.pcapng"; do
    name=$(basename "$capture")
    least=6
    [ "$name" != "ls$crc.pcapng" ] || least=4
    at_least "$capture" iwarp_mpa.req 1 "$name: MPA Request"
    at_least "$capture" iwarp_mpa.rep 1 "$name: MPA Reply"
    at_least "$capture" 'iwarp_rdma.opcode == 3 || iwarp_rdma.opcode == 4' "$least" "$name: Sends"
    at_least "$capture" 'rpcordma.msg_type == 0' "$least" "$name: RDMA_MSG"
    none "$capture" '_ws.malformed' "$name: malformed"
    none "$capture" '_ws.expert.severity == error' "$name: expert errors"
    none "$capture" 'tcp.analysis.lost_segment || tcp.analysis.retransmission || tcp.analysis.out_of_order' "$name: holes in the stream"
    if [ "$crc" = on ]; then
      tshark -r "$capture" -V 2>/dev/null >"$work/text"
      good=$(grep -c 'Good CRC32' "$work/text") bad=$(grep -c 'Bad CRC32' "$work/text")
      [ "$good" -ge "$least" ] && [ "$bad" -eq 0 ] || fail "$name: $good good CRCs and $bad bad ones"
    fi
  done
  at_least "$work/put$crc.pcapng" 'iwarp_rdma.opcode == 1' 1 "put: Read Requests"
  at_least "$work/put$crc.pcapng" 'rpcordma.reads_count > 0' 1 "put: Read chunks"
  at_least "$work/get$crc.pcapng" 'iwarp_rdma.opcode == 0' 1 "get: Writes"
  at_least "$work/get$crc.pcapng" 'rpcordma.writes_count > 0' 1 "get: Write chunks"
done
# Stock tshark takes it for version 1.
serve "$work/servedoff"
"$stagecoach" put --rpcrdma 2 --pcap "$work/version2.pcapng" "$work/data" "$url/data2" || fail "put in version 2"
stop_serving "version 2"
"$stagecoach" decode "$work/version2.pcapng" >"$work/text" || { fail "decode finds something illegal in version 2"; grep ILLEGAL "$work/text"; }
for each in 'RDMA2_MSG, version 2: call' 'RDMA2_MSG, version 2: reply' 'RDMA2_CONNPROP, version 2'; do
  grep -q "$each" "$work/text" || fail "decode shows no '$each'"
done
tshark() { command tshark "${others[@]}" -X "lua_script:$script" "$@"; }
at_least "$work/version2.pcapng" 'rpcrdma2.htype == 0' 4 "version 2: RDMA2_MSG"
at_least "$work/version2.pcapng" 'rpcrdma2.htype == 5' 2 "version 2: RDMA2_CONNPROP"
at_least "$work/version2.pcapng" 'rpcrdma2.reads == 1' 1 "version 2: Read chunks"
none "$work/version2.pcapng" '_ws.malformed || _ws.lua.error || _ws.expert.severity == error' "version 2: what is wrong with it"
[ "$failures" -eq 0 ] && echo "tshark sees nothing wrong"
exit "$((failures > 0))"
