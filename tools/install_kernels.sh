#!/usr/bin/env bash
# Lays Triton beside the trainer's environment, with which `make test-kernels` runs: install_kernels.sh DIRECTORY
#
# The CPU build of torch brings no Triton, which takes a gigabyte; CUDA builds bring their own. Its interpreter runs the
# kernels without a GPU. The new environment sees every package of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
directory="${1:?usage: tools/install_kernels.sh DIRECTORY}"
version="${TRITON_VERSION:-3.9.0}"
stamp="$directory/.installed-$version"
test ! "$stamp" -nt constraints.txt || exit 0
test -x "$directory/bin/python" || .venv/bin/python -m venv "$directory"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$packages" >"$("$directory/bin/python" -c "$packages")/trainer.pth"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "triton==$version"
"$directory/bin/python" -c "import triton; print('triton', triton.__version__)"
touch "$stamp"
