#!/usr/bin/env bash
# Makes the Python environment that the quickstart and the tests share.
#
#   bash examples/setup_env.sh          # creates or refreshes .venv, quick when nothing changed
#
# MEGAGRPO_VENV    where the environment goes (default: .venv in the repository)
# MEGAGRPO_PYTHON  the Python 3.11 to build it with (default: the first one on PATH)
# TORCH_INDEX_URL  index with PyTorch's CPU wheels, asked only when pip's own source has none
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${MEGAGRPO_VENV:-$repo/.venv}"
index="${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
torch="torch==2.13.0+cpu"

find_python() {
    local candidate
    for candidate in ${MEGAGRPO_PYTHON:-python3.11 python3 python}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    echo "megagrpo needs Python 3.11 with venv: install python3.11 and python3.11-venv, or set" \
        "MEGAGRPO_PYTHON to one (looked for: ${MEGAGRPO_PYTHON:-python3.11 python3 python})" >&2
    exit 1
}

install() {
    local pip=("$venv/bin/python" -m pip install --quiet --quiet)
    # The "+cpu" tag cannot be served by the public registry, whose torch brings gigabytes of CUDA:
    # either pip's own source (an index or a find-links folder) has a CPU build, or PyTorch's has.
    if ! "${pip[@]}" --no-deps "$torch" 2>/dev/null; then
        echo "set-up: torch from $index"
        "${pip[@]}" --no-deps --index-url "$index" "$torch"
    fi
    "${pip[@]}" --editable "$repo[cpu,math,test]"
    # vLLM's CPU wheel asks for these without a version, so pip picks CUDA builds that cannot be
    # imported next to a CPU torch, and transformers imports them on sight. The package works with
    # them in place (it masks them); plain transformers in this environment does not.
    "$venv/bin/python" -m pip uninstall --quiet --quiet --yes torchvision torchaudio torchcodec
}

python="$(find_python)"
stamp="$venv/.megagrpo-stamp"
wanted="$("$python" -V) $(cat "$repo/setup.py" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1) $repo"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
echo "set-up: $venv with $("$python" -V); the first time takes a few minutes"
"$python" -m venv "$venv"
install
echo "$wanted" >"$stamp"
