#!/usr/bin/env bash
# Check and measure everything that needs a GPU, on a bare CUDA machine without a network:
#
#   benchmarks/gpu.sh [ceilings|correctness|speed|tune|peer|memory|verdicts|cnn|feed ...] [--dry-run] [--out DIR] [--limit SECONDS] [--wheels DIR]
#
# Without a part the first five in that order, 25 minutes at most; each part alone at most 9. `cnn` is the kernels
# of fused_batchnorm, then convolutional networks step by step; `feed` is how much of a copy is hidden. What DIR (default
# runs/gpu) holds already is not done again, so a part that was cut off goes on where it stopped. Leaves
# results.json and results.md there. --dry-run runs every path on a CPU with tiny shapes. Exit code 1: a case
# failed, or a promise was broken.
#
# No .venv: python3 (or PYTHON=...) with torch, torchvision and scikit-learn. What Vivace needs beside them and
# is not there (usually pydantic and tomlkit) comes as wheels in --wheels DIR, or WHEELS=DIR:
#
#   python3 -m pip download -d DIR -c constraints.txt --no-deps --only-binary=:all: --python-version 3.12 \
#       --platform manylinux_2_17_x86_64 pydantic pydantic-core annotated-types typing-inspection tomlkit
set -euo pipefail
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
    *)
        arguments+=("$1")
        shift
        ;;
    esac
done

export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ]; then
    [ -d "$wheels" ] || {
        echo "gpu.sh: there is no folder '$wheels' with wheels" >&2
        exit 2
    }
    site=${TMPDIR:-/tmp}/vivace-gpu-wheels-$(id -u)
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$PYTHONPATH:$site"
fi
export PYTHONUNBUFFERED=1
exec "$python" benchmarks/gpu ${arguments[@]+"${arguments[@]}"}
