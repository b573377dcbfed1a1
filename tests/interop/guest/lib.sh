# Sourced by the scripts that run in the guest.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

# siw_up: the kernel's software iWARP on eth0.
siw_up() {
  modprobe ib_uverbs && modprobe rdma_ucm && modprobe libcrc32c && modprobe siw && rdma link add siw0 type siw netdev eth0
}

# rxe_up: the kernel's software RoCE on eth0.
rxe_up() {
  modprobe rdma_ucm && modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0
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
  rpc.nfsd -U 2
  echo 'rdma 20049' >/proc/fs/nfsd/portlist
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
