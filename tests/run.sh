#!/usr/bin/env bash
# Sets up the environment (shared with the quickstart) and runs every check and test.
#
#   bash tests/run.sh                      # everything
#   bash tests/run.sh tests/test_losses.py -k clip   # words go to pytest; files replace the default
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash examples/setup_env.sh
bin="${MEGAGRPO_VENV:-$PWD/.venv}/bin"
export OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 PYTHONUNBUFFERED=1

echo "== ruff"
"$bin/ruff" check .
echo "== mypy"
"$bin/mypy" --config-file .mypy.ini
echo "== pytest"
paths=(tests)
for word in "$@"; do
    if [ -e "${word%%::*}" ]; then paths=(); fi
done
exec "$bin/python" -m pytest "${paths[@]}" "$@"
