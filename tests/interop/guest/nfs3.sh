# Sourced in the guest. nfs3_tree: what nfs3_check expects to find in the export.
nfs3_tree() {
  mkdir -p /export/made/many
  seq 1 100000 >/export/made/numbers
  n=1
  while [ $n -le 500 ]; do
    : >/export/made/many/entry-$n
    n=$((n + 1))
  done
}

# nfs3_compare FOLDER: whether the export has each file of /host/FOLDER as it is there.
nfs3_compare() {
  count=0
  for copy in /host/"$1"/*/*; do
    file=/export/${copy#/host/"$1"/}
    cmp "$copy" "$file" || return 1
    count=$((count + 1))
  done
  echo "$count files are in the export as they were written"
}
