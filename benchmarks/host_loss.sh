#!/bin/bash
# Two torchrun agents, one rank each, stand for two hosts. The second is lost and comes back while digits is trained; the
# run shrinks, grows again and ends. Usage: benchmarks/host_loss.sh FOLDER [SEED ...] > benchmarks/host_loss.log
# A run for each seed, 0 by default. The same config without a disturbance: records/2026-11-16_host_loss_seeds/plan.toml
set -u
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=1

agent() {
    setsid python -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 5 --rdzv-backend c10d \
        --rdzv-endpoint 127.0.0.1:29655 --rdzv-id a --local-addr 127.0.0.1 \
        --rdzv-conf last_call_timeout=3,keep_alive_interval=1 -m hyperbatch train digits --device cpu --epochs 150 \
        --no-stop-at-target --eval-every-epochs 5 --seed "$seed" --out "$run" --resume auto >"$folder/$1.log" 2>&1 &
}
step() { tail -n 1 "$run/metrics.jsonl" 2>/dev/null | grep -o '"step":[0-9]*' | cut -d: -f2; }
say() { echo "[$(date +%T)] $*; last step $(step)"; }
after() { until [ "$(step)" ] && [ "$(step)" -gt "$1" ]; do sleep 0.1; done; }  # a line of a step later than this one

for seed in "${@:2}" $([ $# -gt 1 ] || echo 0); do
    folder=$1/$seed run=$1/$seed/run
    mkdir -p "$folder"
    echo "seed $seed"
    agent first; first=$!
    sleep 1
    agent second; second=$!
    after 150; say "two hosts train"  # the first checkpoint is that of step 112
    kill -9 $second $(pgrep -P $second); lost=$(step); say "the second host is lost"
    after "$lost"; say "one host trains"
    after $((lost + 200)); agent again; say "the second host comes back"
    until [ -f "$run/record.json" ] && grep -q '"error": "preempted' "$run/record.json"; do sleep 0.1; done
    before=$(step); say "the first host has saved a checkpoint for it"
    after "$before"; say "two hosts train"
    wait $first; code=$?
    say "over, exit code $code"
    wait
    grep -h -A3 "^digits reached" "$folder"/*.log
    python - "$run/record.json" "$seed" <<'PYTHON'
import json, sys
record = json.load(open(sys.argv[1]))
names = ("top1", "val_loss", "steps", "epochs")
print(json.dumps({"seed": int(sys.argv[2]), "ranks_at_the_end": record["world_size"]} | {name: record["result"][name] for name in names}))
PYTHON
done
