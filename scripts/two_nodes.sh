#!/usr/bin/env bash
# Two "nodes" on one machine: network namespaces joined by a cable of their own, each with a torchrun of N ranks (default: 1).
# The text over both must be that of one rank; then a rank on one node is killed, and the other node must end too. Needs root.
#   scripts/two_nodes.sh [N]
set -euo pipefail
cd "$(dirname "$0")/.."
ranks=${1:-1}
work=$(mktemp -d)
export OMP_NUM_THREADS=1
cleanup() {
    jobs -p | xargs -r kill 2>/dev/null || true
    ip netns del jd-a 2>/dev/null || true
    ip netns del jd-b 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
ip netns add jd-a
ip netns add jd-b
ip link add jd-va netns jd-a type veth peer name jd-vb netns jd-b
for node in a b; do
    ip -n jd-$node addr add 10.77.0.$([[ $node == a ]] && echo 1 || echo 2)/24 dev jd-v$node
    ip -n jd-$node link set lo up
    ip -n jd-$node link set jd-v$node up
done

run() { # node, its rank, options: the node's torchrun
    local node=$1 rank=$2
    shift 2
    exec env GLOO_SOCKET_IFNAME=jd-v$node ip netns exec jd-$node python -m torch.distributed.run --nnodes=2 --node_rank="$rank" \
        --nproc_per_node="$ranks" --master_addr=10.77.0.1 --master_port=29511 generate.py --no-compile --json "$@"
}

python generate.py --no-compile --json --temperature 1 >"$work/one" 2>/dev/null
run b 1 --temperature 1 >/dev/null 2>&1 &
run a 0 --temperature 1 >"$work/two" 2>/dev/null &
wait $!
python - "$work/one" "$work/two" <<'PY'
import json, sys
one, two = (json.loads(open(path).read().splitlines()[-1]) for path in sys.argv[1:])
print(f"{two['config']['ranks']} ranks on two nodes: {two['new_tokens']} tokens, the same as one rank's: {one['tokens'] == two['tokens']}")
sys.exit(one["tokens"] != two["tokens"])
PY

run b 1 --num-samples 100000 >/dev/null 2>&1 &
run a 0 --num-samples 100000 >"$work/out" 2>"$work/err" &
first=$!
until grep -q "tokens/s" "$work/err"; do sleep 0.2; done
for pid in $(ip netns pids jd-b); do
    tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q "python[0-9.]* -u generate.py" && victim=$pid
done
kill -9 "$victim"
start=$(date +%s)
wait $first && status=0 || status=$?
grep -m1 "is gone" "$work/err"
echo "the other node ended $(($(date +%s) - start)) s later, with status $status"
[[ $status != 0 ]]
