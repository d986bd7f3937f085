#!/usr/bin/env bash
# Installs Ray beside Holdfast, with which `make test-ray` runs, in an environment of its own: install_ray.sh DIRECTORY
#
# Ray brings a hundred megabytes that nothing else here needs, so it stays out of the trainer's own environment.
set -euo pipefail
cd "$(dirname "$0")/.."
directory="${1:?usage: tools/install_ray.sh DIRECTORY}"
stamp="$directory/.installed"
test ! "$stamp" -nt constraints.txt || exit 0
test -x "$directory/bin/python" || "${PYTHON:-python3}" -m venv "$directory"
pip=("$directory/bin/python" -m pip)
options=(--quiet --disable-pip-version-check)
# torch goes first and alone: beside other packages pip may choose another build of it.
"${pip[@]}" install "${options[@]}" "$(grep '^torch==' constraints.txt)"
"${pip[@]}" install "${options[@]}" -c constraints.txt -e '.[ray]'
"$directory/bin/python" -c "import ray; print('ray', ray.__version__)"
touch "$stamp"
