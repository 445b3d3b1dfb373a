#!/usr/bin/env bash
# Makes the virtual environment with tierfs (editable), its tools and what the tests run. Usage: make-venv.sh DIRECTORY
set -euo pipefail

cd "$(dirname "$0")/.."
venv=$1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# The first interpreter that is new enough (3.10). PYTHON=... chooses another.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python 3.10 or later with venv was found" >&2
    return 1
}

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    python=$(find_python)
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip)

"${pip[@]}" install -q -e '.[dev]'

# PyPI's torch brings gigabytes of CUDA. The CPU build has a version of its own (+cpu), which lies in PyTorch's index
# or in one that pip is already set up for. The pin is in tests/requirements.txt.
torch=$(grep '^torch==' tests/requirements.txt)
if ! "$venv/bin/python" -c "
import sys, importlib.metadata as m
sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
    "${pip[@]}" install -q "$torch+cpu" 2>/dev/null ||
        "${pip[@]}" install -q --extra-index-url https://download.pytorch.org/whl/cpu "$torch+cpu" ||
        "${pip[@]}" install -q "$torch"
fi
"${pip[@]}" install -q -r tests/requirements.txt
