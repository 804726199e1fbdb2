#!/usr/bin/env bash
# What kvrag does on this machine's graphics card, in nine minutes at most: tools/gpu_report.sh [FOLDER]
# Every stage has its own time limit and leaves its JSON at once: FOLDER/report.jsonl, with all output in
# FOLDER/report.log. A stage that fails or takes too long is named, and the next one runs.
# PYTHON runs it. WHEELS names a folder of wheels to install first, for a machine without a network.
# DEVICE=cpu SMALL=1 tries the script itself where there is no card.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-build/gpu}
mkdir -p "$out"
report=$out/report.jsonl log=$out/report.log
: >"$report" >"$log"
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
small=${SMALL:-}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
if [ -n "${WHEELS:-}" ]; then
	"$python" -m pip install -q --no-index --no-deps --no-compile --target /tmp/kvrag-site "$WHEELS"/*.whl >>"$log" 2>&1
	export PYTHONPATH=/tmp/kvrag-site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}

# stage NAME SECONDS COMMAND...: the command's output is one JSON document.
stage() {
	local name=$1 limit=$2 began=$SECONDS status
	shift 2
	echo "== $name: $*" >>"$log"
	timeout -k 5 "$limit" "$@" >"$out/stage.json" 2>>"$log"
	status=$?
	"$python" - "$name" "$status" "$((SECONDS - began))" "$out/stage.json" >>"$report" <<'PY'
import json, sys
name, status, seconds, path = sys.argv[1:]
text = open(path).read()
try:
    found = json.loads(text)
except ValueError:
    found = text[-2000:]
print(json.dumps({"stage": name, "exit": int(status), "seconds": int(seconds), "found": found}))
PY
	cat "$out/stage.json" >>"$log"
	echo "$name: exit $status, $((SECONDS - began)) s"
}

bench() {
	local name=$1 limit=$2
	shift 2
	stage "$name" "$limit" "$python" -m kvrag bench "$@" --device "$device" --json
}

# Rates of the card: what the floors in docs/results/speed.md are made of.
cat >"$out/rates.py" <<'PY'
import json, platform, sys, time
import torch, transformers
device = torch.device(sys.argv[1])
size = 512 if device.type == "cpu" else 8192
wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
def rate(run, amount):
    run(); run(); wait()
    began = time.perf_counter()
    for _ in range(5): run()
    wait()
    return amount * 5 / (time.perf_counter() - began)
one = torch.randn(size, size, dtype=torch.bfloat16, device=device)
number = size * size * 2
host = torch.empty(size, size, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
there, other = torch.empty_like(one), torch.randn_like(one)
found = {
    "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
    "card": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
    "matrix_tflops": rate(lambda: one @ other, 2 * size**3) / 1e12,
    "memory_gb_s": rate(lambda: there.copy_(one), 2 * number) / 1e9,
    "host_to_card_gb_s": rate(lambda: there.copy_(host, non_blocking=True), number) / 1e9,
}
if device.type == "cuda":
    begun = torch.zeros(1, device=device)
    found["launch_us"] = 1e6 / rate(lambda: begun.add_(1), 1)
print(json.dumps(found))
PY
stage rates 30 "$python" "$out/rates.py" "$device"
# Kernels over rows: how far they are from PyTorch, and what a layer takes.
[ "$device" = cpu ] && export TRITON_INTERPRET=1
stage kernels "$([ -n "$small" ] && echo 200 || echo 35)" "$python" tools/gpu_kernels.py "$device"
# Chunks from host memory, from page-locked memory, from the card's.
tiers() {
	local name=$1 limit=$2
	shift 2
	for memory in none pinned card; do
		bench "$name-$memory" "$limit" ttft --memory "$memory" --policies none,two_stage "$@"
	done
}
if [ -n "$small" ]; then
	tiers tiers-small 100 --random-shape test --chunk-tokens 40 --chunks 3 --repeats 1
	for codec in transform:2 packed; do
		bench "ttft-small-$codec" 100 ttft --codec $codec --random-shape test --chunk-tokens 400 --chunks 3 --repeats 1 --policies none,two_stage
	done
	for graphs in on off; do
		export KVRAG_CUDA_GRAPHS=$graphs
		bench "ttft-small-graphs-$graphs" 200 ttft --random-shape test --chunk-tokens 40 --chunks 3 --repeats 1 --policies none,two_stage
		bench "decode-small-graphs-$graphs" 120 decode --random-shape test
	done
	exit 0
fi
stage tests 40 "$python" -m pytest -q -x -p no:cacheprovider tests/engine/test_gpu.py
# As it is, without graphs, and with codecs: that of new indexes first.
bench ttft-8b-5k 70 ttft --random-shape llama-3.1-8b --chunk-tokens 500 --repeats 3 --policies none,boundary,two_stage
KVRAG_CUDA_GRAPHS=off bench ttft-8b-5k-graphs-off 35 ttft --random-shape llama-3.1-8b --chunk-tokens 500 --repeats 2 --policies none,two_stage
tiers tiers-8b-5k 35 --random-shape llama-3.1-8b --chunk-tokens 500 --repeats 2
bench ttft-8b-5k-packed 35 ttft --codec packed --random-shape llama-3.1-8b --chunk-tokens 500 --repeats 2 --policies none,two_stage
bench ttft-qwen-transform 15 ttft --codec transform:2 --random-shape qwen2.5-0.5b --chunk-tokens 500 --repeats 2 --policies none
bench ttft-qwen 30 ttft --random-shape qwen2.5-0.5b --chunk-tokens 500 --repeats 3 --policies none,two_stage
KVRAG_CUDA_GRAPHS=off bench ttft-qwen-graphs-off 20 ttft --random-shape qwen2.5-0.5b --chunk-tokens 500 --repeats 2 --policies none,two_stage
bench ttft-smollm2 25 ttft --random-shape smollm2-135m --chunk-tokens 340 --repeats 3 --policies none,two_stage
bench ttft-8b-16k 60 ttft --random-shape llama-3.1-8b --chunk-tokens 1600 --repeats 2 --policies none,two_stage
for graphs in on off; do
	KVRAG_CUDA_GRAPHS=$graphs bench "decode-graphs-$graphs" 20 decode --random-shape smollm2-135m
done
