#!/usr/bin/env bash
# Check and measure everything that needs a GPU, on a bare CUDA machine without a network:
#
#   benchmarks/gpu.sh [first|second|third|PART ...] [--dry-run] [--out DIR] [--limit SECONDS] [--wheels DIR]
#
# first    is each technique for GPUs, and is each plan that a search would find, still the same model?
#          ResNet-50 step by step. Nine minutes at most, as the others.
# second   ceilings of this GPU; every kernel and counter, other networks; other techniques and pairs; feeding
# third    a whole `vivace tune`, then the jobs of the speed table
#
# Without a word these three. Each part of them may be named alone (correctness, cnn, ceilings, feed, tune, speed),
# and three more: peer, memory, verdicts. What DIR (default runs/gpu) holds already is not done again, so that a part
# which was cut off goes on where it stopped. DIR gets results.md, and cases.jsonl, to which every case is added
# as it ends. --dry-run runs every path with tiny shapes, and without a GPU too, where a stand-in takes its place:
# `python tests/cuda_stand_in benchmarks/gpu.sh --dry-run`. Exit code 1: a case failed, or a promise was broken;
# 2: something is missing, which is said in the first second.
#
# No .venv: python3 (or PYTHON=...), 3.11 or newer, with torch, torchvision and scikit-learn. What Vivace needs
# beside them and is not there (usually pydantic and tomlkit) comes as wheels in --wheels DIR, or WHEELS=DIR; torchao too,
# without which nothing is tried in float8. `python benchmarks/gpu/ahead.py wheels`, run before on any machine by
# the same Python (3.12, say) with the same torch, compiles Vivace's kernels into that folder too: minutes that no GPU
# has to wait.
#
# Where GPUs are lent by the command, DIR comes back with each; bring it along with the next:
#
#   benchmarks/gpu.sh first --wheels wheels --out DIR
#   benchmarks/gpu.sh second --wheels wheels --out DIR
#   benchmarks/gpu.sh third --wheels wheels --out DIR
#
# With fifteen minutes in all: `first`, and then `ceilings tune --limit 150`.
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
wheels=${WHEELS:-}
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --wheels)
        wheels=${2:?--wheels needs a folder}
        shift 2
        ;;
    --out)
        out=${2:?--out needs a folder}
        [ "${out#/}" != "$out" ] || out=$from/$out
        arguments+=(--out "$out")
        shift 2
        ;;
    *)
        arguments+=("$1")
        shift
        ;;
    esac
done

fail() {
    echo "gpu.sh: $*" >&2
    exit 2
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "'$python' is not Python 3.11 or newer: choose with PYTHON=... one that is, and has torch"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ]; then
    [ "${wheels#/}" != "$wheels" ] || wheels=$from/$wheels
    [ -d "$wheels" ] || fail "there is no folder '$wheels' with wheels"
    site=${TMPDIR:-/tmp}/vivace-gpu-wheels-$(id -u)
    rm -rf "$site"
    for wheel in "$wheels"/*.whl; do
        [ ! -f "$wheel" ] || "$python" -m zipfile -e "$wheel" "$site"  # not every Python has pip
    done
    export PYTHONPATH="$PYTHONPATH:$site"
fi
"$python" benchmarks/gpu/needs.py
if [ -f "${wheels:-.}/kernels.tar.gz" ]; then
    "$python" benchmarks/gpu/ahead.py "$wheels" --unpack ||
        echo "gpu.sh: '$wheels/kernels.tar.gz' cannot be used: kernels are compiled here, which takes minutes" >&2
fi
export PYTHONUNBUFFERED=1
exec "$python" benchmarks/gpu ${arguments[@]+"${arguments[@]}"}
