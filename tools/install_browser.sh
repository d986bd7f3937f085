#!/usr/bin/env bash
# Installs what `make test-browser` drives: Debian's Chromium with its driver, and axe-core from npm into .venv/browser.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then
    as_root=(); [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    "${as_root[@]}" apt-get update -qq && "${as_root[@]}" apt-get install -y -qq chromium chromium-driver >/dev/null \
        || echo "Chromium could not be installed; the tests of pages are skipped" >&2
fi
axe=.venv/browser/axe.min.js
if [ ! -e "$axe" ]; then
    mkdir -p .venv/browser
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    (cd "$folder" && npm pack --silent axe-core@4.14.1 >/dev/null && tar -xzf axe-core-*.tgz package/axe.min.js) \
        && mv "$folder/package/axe.min.js" "$axe" \
        || echo "axe-core could not be downloaded; the tests of contrast are skipped" >&2
fi
