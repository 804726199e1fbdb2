#!/usr/bin/env bash
# What kvrag does on this machine's graphics card, in nine minutes at most: tools/gpu_report.sh [FOLDER]
# Every stage has its own time limit and leaves its JSON at once: FOLDER/report.jsonl, with all output in
# FOLDER/report.log. A stage that fails or takes too long tells what it has, and the next one runs.
# PYTHON runs it. WHEELS names a folder of wheels to install first, for a machine without a network.
# DEVICE=cpu SMALL=1 tries the script itself where there is no card: every stage, with small shapes.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-build/gpu}
mkdir -p "$out"
report=$out/report.jsonl log=$out/report.log
: >"$report" >"$log"
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
small=${SMALL:-}
whole=${SECONDS_AT_MOST:-$([ -n "$small" ] && echo 3600 || echo 540)}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
if [ -n "${WHEELS:-}" ]; then
	"$python" -m pip install -q --no-index --no-deps --no-compile --target /tmp/kvrag-site "$WHEELS"/*.whl >>"$log" 2>&1
	export PYTHONPATH=/tmp/kvrag-site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}
[ "$device" = cpu ] && export TRITON_INTERPRET=1

# stage NAME SECONDS COMMAND...: the command's output is one JSON document. Small shapes have more time, for
# processors that others use, too.
stage() {
	local name=$1 limit=$2 left=$((whole - SECONDS))
	shift 2
	[ -n "$small" ] && limit=300
	if [ "$left" -le 2 ]; then
		echo "{\"stage\": \"$name\", \"exit\": null, \"said\": \"no time is left\"}" >>"$report"
		return
	fi
	"$python" tools/gpu_stage.py "$name" "$((limit < left ? limit : left))" "$report" "$@" 2>>"$log"
}

bench() {
	local name=$1 limit=$2
	shift 2
	stage "$name" "$limit" "$python" -m kvrag bench "$@" --device "$device" --json
}

# ttft NAME SECONDS SHAPE CHUNK_TOKENS REPEATS POLICIES [OPTIONS...]: a prompt of ten chunks.
ttft() {
	local shape=$3 tokens=$4 repeats=$5 chunks=10
	[ -n "$small" ] && shape=test tokens=100 repeats=1 chunks=3
	bench "$1" "$2" ttft --random-shape "$shape" --chunks "$chunks" --chunk-tokens "$tokens" --repeats "$repeats" --policies "$6" "${@:7}"
}

stage rates 25 "$python" tools/gpu_rates.py "$device"
# Kernels over rows: how far they are from PyTorch, and what a layer takes.
stage kernels 45 "$python" tools/gpu_kernels.py "$device"
# All policies against the CPU, captured and not, and what is stored by each codec.
stage tests 50 "$python" -m pytest -q -x -p no:cacheprovider tests/engine/test_gpu.py
# As it is (chunks from host memory), without graphs, and from page-locked memory or the card's.
ttft ttft-8b-5k 75 llama-3.1-8b 500 3 none,boundary,two_stage
KVRAG_CUDA_GRAPHS=off ttft ttft-8b-5k-graphs-off 30 llama-3.1-8b 500 2 none,two_stage
for memory in pinned card; do
	ttft "ttft-8b-5k-$memory" 30 llama-3.1-8b 500 2 none,two_stage --memory "$memory"
done
# Prompts that wait at the same time, together and one after the other.
shape=llama-3.1-8b chunks=10 several=1,2,4,8
[ -n "$small" ] && shape=test chunks=2 several=1,2
bench batch-8b 45 batch --random-shape "$shape" --chunks "$chunks" --prompts "$several" --tokens 1 --repeats 2
# The codec of new indexes, and the smallest one.
ttft ttft-8b-5k-packed 30 llama-3.1-8b 500 2 none,two_stage --codec packed
ttft ttft-qwen-transform 15 qwen2.5-0.5b 500 2 none --codec transform:2
ttft ttft-qwen 25 qwen2.5-0.5b 500 3 none,two_stage
KVRAG_CUDA_GRAPHS=off ttft ttft-qwen-graphs-off 15 qwen2.5-0.5b 500 2 none,two_stage
ttft ttft-smollm2 20 smollm2-135m 340 3 none,two_stage
ttft ttft-8b-16k 55 llama-3.1-8b 1600 2 none,two_stage
shape=smollm2-135m chunks=10
[ -n "$small" ] && shape=test chunks=2
for graphs in on off; do
	KVRAG_CUDA_GRAPHS=$graphs bench "decode-graphs-$graphs" 15 decode --random-shape "$shape" --chunks "$chunks"
done
if "$python" -c "import vllm" 2>>"$log"; then
	stage vllm 540 "$python" -m pytest -q -x -p no:cacheprovider tests/vllm/test_writing.py
fi
