#!/usr/bin/env bash
# Two nodes on one machine, by hand: each has its own data directory and its own ports. The second node joins with a
# pairing code, both serve a model together, and the model answers one question. The script stops both nodes at the end,
# also after a failure. Usage: two_nodes.sh [QUESTION]     (EDGEPIPE_BACKEND, EDGEPIPE_MODELS_DIR, ... count as usual)
set -euo pipefail
question=${1:-What is the capital of France?}
folder=$(mktemp -d)
gamer=$folder/gamer
studio=$folder/studio

stop_nodes() {
  edgepipe node stop --data-dir "$studio" 2>/dev/null || true
  edgepipe node stop --data-dir "$gamer" 2>/dev/null || true
  rm -rf "$folder"
}
trap stop_nodes EXIT

start_node() { # NAME DATA_DIR; port 0 is any free port
  edgepipe node start --background --name "$1" --data-dir "$2" \
    --interface 127.0.0.1 --port 0 --http-port 0 --no-discovery
}

start_node gamer "$gamer"
edgepipe models pull demo --data-dir "$gamer"

# The invitation prints "edgepipe node join --host HOST:PORT CODE" and waits for the other node.
exec 3< <(edgepipe node invite --yes --data-dir "$gamer")
while read -r line <&3 && [[ $line != *--host* ]]; do :; done
read -r where code <<<"${line##*--host }"
edgepipe node join --host "$where" "$code" --name studio --data-dir "$studio"
cat <&3

start_node studio "$studio"
edgepipe serve demo --nodes 2 --data-dir "$gamer"
edgepipe status --data-dir "$studio"
edgepipe chat demo --prompt "$question" --max-tokens 100 --data-dir "$studio"
edgepipe stop demo --data-dir "$gamer"
