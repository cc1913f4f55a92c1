#!/usr/bin/env bash
# Make a virtual environment and install Octavo with the extras named, e.g.  tools/install.sh .venv demo
# torch comes first and as a CPU build (200 MB), unless an NVIDIA GPU is present: PyPI's default build for Linux
# is the CUDA one, several gigabytes that a machine without a GPU has no use for.
set -euo pipefail
venv=${1:-.venv}; extras=${2:-demo}
torch_version=2.13.0
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
"$python" - <<'PY' || { echo "Octavo needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
import sys; sys.exit(sys.version_info < (3, 11))
PY
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

has_torch() { "$venv/bin/python" -c 'import torch' 2>/dev/null; }
if ! has_torch; then
  echo "installing torch $torch_version …"
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    pip install "torch==$torch_version"
  elif [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
    # A "+cpu" build from wherever pip is set up to look, else from PyTorch's own index of CPU builds.
    pip install "torch==$torch_version+cpu" 2>/dev/null ||
      pip install "torch==$torch_version" --index-url https://download.pytorch.org/whl/cpu
  else
    pip install "torch==$torch_version"  # macOS and Arm: the default build is a CPU build
  fi
fi

# Reinstall only when something that the build reads has changed.
stamp="$venv/.octavo-installed"
sum=$(cat pyproject.toml CMakeLists.txt csrc/* tools/install.sh 2>/dev/null | cksum)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$extras $sum" ]; then
  echo "building and installing octavo[$extras] …"
  pip install --upgrade-strategy only-if-needed -e ".[$extras]"
  echo "$extras $sum" > "$stamp"
fi

# The tests of the block map need a browser: Debian's Chromium, where it can be had; they say so loudly where it cannot.
case " $extras " in *dev*)
  if [ -z "${OCTAVO_CHROMIUM:-}" ] && ! command -v chromium >/dev/null 2>&1 && ! command -v google-chrome >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
      echo "installing chromium for the tests of the block map …"
      { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } >/dev/null ||
        echo "NO CHROMIUM: apt-get could not install it; the browser tests will be skipped" >&2
    else
      echo "NO CHROMIUM: the browser tests will be skipped; install it or set OCTAVO_CHROMIUM=/path/to/it" >&2
    fi
  fi ;;
esac
