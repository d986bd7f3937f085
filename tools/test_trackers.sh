#!/usr/bin/env bash
# Tests of each tracker with its library, one environment per extra, and a table of which versions were tested.
#
# Some of these libraries want other versions than we test with (docs/looking.md has the table), so each gets an
# environment of its own: the library and what it depends on, before the packages of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTHON="${PYTHON:-python3}"
declare -A VERSIONS=([wandb]=0.31.0 [mlflow]=3.17.2 [trackio]=0.43.0 [swanlab]=0.10.3 [tensorboard]=2.21.0)
status=0
table=""

for kind in wandb mlflow trackio swanlab tensorboard; do
    environment=".venv-tracker-$kind"
    stamp="$environment/.installed-${VERSIONS[$kind]}"
    echo "== $kind ${VERSIONS[$kind]}"
    if ! test -e "$stamp"; then
        test -x "$environment/bin/python" || "$PYTHON" -m venv "$environment"
        if ! "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
            "$kind==${VERSIONS[$kind]}"; then
            echo "$kind is not tested: pip cannot install it here, for the reason above."
            table+="$kind | ${VERSIONS[$kind]} | not installed"$'\n'
            continue
        fi
        packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        own="$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        # Behind the library's own packages, which stand first on the path; .venv may name further folders itself.
        printf 'import site; site.addsitedir("%s")\n%s\n' "$packages" "$PWD/src" >"$own/zz_holdfast.pth"
        touch "$stamp"
    fi
    result=passed
    "$environment/bin/python" -m pytest -p no:xdist tests/features/trackers -k "$kind or connections" || { status=1; result=failed; }
    table+="$kind | ${VERSIONS[$kind]} | $result"$'\n'
done

echo
echo "tracker | version | tests"
printf '%s' "$table"
exit "$status"
