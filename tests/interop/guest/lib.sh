# Sourced by the scripts that run in the guest.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

# siw_up: the kernel's software iWARP on eth0.
siw_up() {
  modprobe ib_uverbs && modprobe rdma_ucm && modprobe libcrc32c && modprobe siw && rdma link add siw0 type siw netdev eth0
}

# siw_with_settings_up: the same, of which siw_settings NAME=VALUE... changes the settings for the connections that follow.
siw_with_settings_up() {
  modprobe ib_uverbs && modprobe rdma_ucm && modprobe libcrc32c && insmod /lib/siw-settings.ko && rdma link add siw0 type siw netdev eth0
}

# siw_settings NAME=VALUE...: these, and the others as they are in siw.
siw_settings() {
  for setting in zcopy_tx=Y try_gso=N mpa_crc_required=N mpa_crc_strict=N peer_to_peer=N mpa_version=2 "$@"; do
    echo "${setting#*=}" >"/sys/module/siw/parameters/${setting%%=*}" || return 1
  done
}

# rxe_up: the kernel's software RoCE on eth0.
rxe_up() {
  modprobe rdma_ucm && modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0
}

# kernel_name: "Linux 6.1.0-56-amd64 (Debian 6.1.192-2)".
kernel_name() {
  echo "$(uname -sr) ($(uname -v | grep -o 'Debian [^ ]*'))"
}

# nfsd_up: knfsd exporting a tmpfs over RDMA port 20049.
nfsd_up() {
  modprobe sunrpc; modprobe rpcrdma; modprobe nfsd; modprobe nfsv3
  mount -t nfsd nfsd /proc/fs/nfsd
  mount -t tmpfs -o size=64m tmpfs /export
  rpcbind -w
  echo '/export *(rw,fsid=0,no_root_squash,insecure,no_subtree_check)' >/etc/exports
  exportfs -ra
  rpc.mountd --no-udp --port 20048
  nfsd_start
}

nfsd_start() {
  rpc.nfsd -U 2 && echo 'rdma 20049' >/proc/fs/nfsd/portlist
}

# nfsd_restarts FILE: each time FILE appears, ends knfsd, with its connections, starts it anew, and removes FILE. Never returns.
nfsd_restarts() {
  while :; do
    if [ -e "$1" ]; then
      rpc.nfsd 0
      nfsd_start && rm "$1"
    fi
    sleep 0.1
  done
}

# wait_for FILE SECONDS: waits until FILE exists.
wait_for() {
  n=0
  while [ ! -e "$1" ]; do
    sleep 0.2
    n=$((n + 1))
    [ $n -gt $(($2 * 5)) ] && return 1
  done
  return 0
}
