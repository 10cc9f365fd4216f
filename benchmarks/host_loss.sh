#!/bin/bash
# Two torchrun agents, one rank each, stand for two hosts. The second is lost and comes back while digits is trained; the
# run shrinks, grows again and ends. Usage: benchmarks/host_loss.sh FOLDER > benchmarks/host_loss.log
set -u
folder=$1 run=$1/run
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=1
mkdir -p "$folder"

agent() {
    setsid python -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 5 --rdzv-backend c10d \
        --rdzv-endpoint 127.0.0.1:29655 --rdzv-id a --local-addr 127.0.0.1 \
        --rdzv-conf last_call_timeout=3,keep_alive_interval=1 -m hyperbatch train digits --device cpu --epochs 150 \
        --no-stop-at-target --eval-every-epochs 5 --out "$run" --resume auto >"$folder/$1.log" 2>&1 &
}
step() { tail -n 1 "$run/metrics.jsonl" 2>/dev/null | grep -o '"step":[0-9]*' | cut -d: -f2; }
say() { echo "[$(date +%T)] $*; last step $(step)"; }
after() { until [ "$(step)" ] && [ "$(step)" -gt "$1" ]; do sleep 0.1; done; }  # a line of a step later than this one

agent first; first=$!
sleep 1
agent second; second=$!
after 100; say "two hosts train"
kill -9 $second $(pgrep -P $second); lost=$(step); say "the second host is lost"
after "$lost"; say "one host trains"
after $((lost + 200)); agent again; say "the second host comes back"
until [ -f "$run/record.json" ] && grep -q '"error": "preempted' "$run/record.json"; do sleep 0.1; done
before=$(step); say "the first host has saved a checkpoint for it"
after "$before"; say "two hosts train"
wait $first; code=$?
say "over, exit code $code"
grep -h -A3 "^digits reached" "$folder"/*.log
python -c "import json, sys; print('world size at the end:', json.load(open(sys.argv[1]))['world_size'])" "$run/record.json"
