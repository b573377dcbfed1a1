#!/bin/bash
# Traffic of InfiniBand devices, captured by the tap, in the eyes of stock tshark: RoCEv2 with every kind of packet by name and nothing
# malformed, over IPv4 and IPv6, and RC also over a network that loses and repeats packets.
set -u
traffic=$(readlink -f "$1")
command -v tshark >/dev/null || { echo "tshark is missing; ./dev test installs it"; exit 1; }
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/roce_capture.XXXXXX")
trap 'rm -rf "$work"' EXIT
# A block of ports of our own: other tests run beside this one.
export STAGECOACH_PORTS=23500+16
failures=0
fail() { echo "FAILED: $*"; failures=$((failures + 1)); }

# traffic ADDRESS ...: new captures in the place of those that there are, which a program would not overwrite.
traffic() { rm -f "$work"/*.pcapng; "$traffic" "$work" "$@"; }

# What is asked of each packet; missing fields are empty.
fields="-e frame.packet_flags_direction -e infiniband.bth.opcode -e infiniband.bth.psn -e udp.length -e infiniband.invariant.crc
  -e infiniband.aeth.syndrome.opcode -e infiniband.aeth.syndrome.error_code -e rpcordma.msg_type -e rpc.msgtyp
  -e ipv6.version -e udp.srcport -e udp.dstport -e ip.checksum.status -e udp.checksum.status -e _ws.malformed -e _ws.expert.severity
  -e infiniband.deth.srcqp -e infiniband.bth.destqp -e infiniband.mad.attributeid"
list() { # CAPTURE LIST
  # shellcheck disable=SC2086 # words are what is wanted
  tshark -r "$1" -o ip.check_checksum:TRUE -o udp.check_checksum:TRUE -T fields -E separator='|' $fields 2>"$work/words" >"$2" ||
    { fail "tshark cannot read $1"; cat "$work/words"; }
}
# In the words of awk.
names='dir=$1; op=$2; aeth=$6; nak=$7; rdma=$8; rpc=$9; v6=$10; from=$11; to=$12; ipsum=$13; udpsum=$14; bad=$15; severity=$16; fromqp=$17; toqp=$18; attribute=$19;'
count() { awk -F'|' "{ $names } $2 { n++ } END { print n + 0 }" "$1"; }
at_least() { # LIST CONDITION COUNT WHAT
  local n; n=$(count "$1" "$2")
  [ "$n" -ge "$3" ] || fail "$4: $n packets, expected at least $3"
}
none() { # LIST CONDITION WHAT
  local n; n=$(count "$1" "$2")
  [ "$n" -eq 0 ] || { fail "$3: $n packets"; awk -F'|' "{ $names } $2" "$1" | head -5; }
}

# What holds of every packet.
dissected() { # LIST ADDRESS WHAT
  none "$1" 'op == ""' "$3: not RoCE"
  none "$1" 'to != 4791 || from < 49152' "$3: ports"
  none "$1" 'bad != ""' "$3: malformed"
  none "$1" 'severity ~ /8388608/' "$3: expert errors"
  if [ "$2" = 127.0.0.1 ]; then
    none "$1" 'v6 != "" || ipsum != 1' "$3: not IPv4, or a bad checksum"
  else
    none "$1" 'v6 == "" || udpsum != 1' "$3: not IPv6, or a bad checksum"
  fi
}

addresses=127.0.0.1
[ ! -s /proc/net/if_inet6 ] || addresses="127.0.0.1 ::1"
for profile in roce hostile; do
  for address in $addresses; do
    name="$profile over $address"
    traffic "$address" "$profile" reliable || fail "$name: the traffic"
    for end in requester responder; do
      packets=$work/$end
      list "$work/$end.pcapng" "$packets"
      dissected "$packets" "$address" "$name, $end"
      at_least "$packets" 'op == 4' 1 "$name, $end: RC Send Only"
      for opcode in 0 1 2; do
        at_least "$packets" "op == $opcode" 1 "$name, $end: RC Send First, Middle, Last ($opcode)"
      done
      # The rounds of Writes, Reads and Fetch Adds. An answer that was lost in part is asked for again in part, so that its middle and
      # end come as others' First and Only.
      rounds=20
      [ "$profile" = roce ] || rounds=10
      for opcode in 6 7 8 12 13 14 15 18 20; do
        at_least "$packets" "op == $opcode" "$rounds" "$name, $end: opcode $opcode"
      done
      at_least "$packets" 'op == 17 && aeth == 0' 10 "$name, $end: ACK"
      at_least "$packets" 'op == 17 && aeth == 1' 1 "$name, $end: RNR NAK"
      at_least "$packets" 'op == 17 && aeth == 3 && nak == 2' 1 "$name, $end: NAK, remote access error"
      at_least "$packets" 'op == 4 && rdma == 0 && rpc == 0' 1 "$name, $end: the RPC call"
    done
    # What one end sent is what came to the other one: packets that were lost, and they are lost before they leave the NIC, are in
    # neither capture. What was sent last may have found nobody.
    awk -F'|' '$1 ~ /2$/ { print $2, $3, $4, $5 }' "$work/requester" >"$work/sent"
    awk -F'|' '$1 ~ /1$/ { print $2, $3, $4, $5 }' "$work/responder" >"$work/came"
    head -n "$(wc -l <"$work/came")" "$work/sent" | cmp - "$work/came" || fail "$name: not what was sent"
    [ $(($(wc -l <"$work/sent") - $(wc -l <"$work/came"))) -le 2 ] || fail "$name: more was sent than came"
    if [ "$profile" = hostile ]; then
      [ "$(sort "$work/sent" | uniq -d | wc -l)" -gt 0 ] || fail "$name: nothing was sent twice"
    fi
  done
done
# What is no RC: each once, but for the connection manager's datagrams.
for address in $addresses; do
  name="others over $address"
  traffic "$address" roce others || fail "$name: the traffic"
  for end in requester responder; do
    packets=$work/$end
    list "$work/$end.pcapng" "$packets"
    dissected "$packets" "$address" "$name, $end"
    at_least "$packets" 'op == 36' 1 "$name, $end: UC Send Only"
    at_least "$packets" 'op == 42' 1 "$name, $end: UC Write Only"
    at_least "$packets" 'op == 100 && toqp != "0x000001" && fromqp != ""' 1 "$name, $end: UD Send Only"
    # Attributes of the connection manager's messages: request, reply, ready to use, request to disconnect.
    for attribute in 0x0010 0x0013 0x0014 0x0015; do
      at_least "$packets" "op == 100 && toqp == \"0x000001\" && attribute == \"$attribute\"" 1 "$name, $end: attribute $attribute"
    done
    at_least_shown() { # FILTER COUNT WHAT
      local n; n=$(tshark -r "$work/$end.pcapng" -Y "$1" 2>/dev/null | wc -l)
      [ "$n" -ge "$2" ] || fail "$3: $n packets, expected at least $2"
    }
    at_least_shown 'infiniband.mad && infiniband.cm.req' 1 "$name, $end: ConnectRequest"
  done
done
[ "$failures" -eq 0 ] && echo "tshark sees nothing wrong"
exit "$((failures > 0))"
