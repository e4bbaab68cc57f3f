#!/usr/bin/env bash
# Installs those of the named Debian packages that are absent; with none absent, does nothing.
set -euo pipefail

absent=()
for package in "$@"; do
    if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$'; then
        absent+=("$package")
    fi
done
if [ ${#absent[@]} -eq 0 ]; then
    exit 0
fi

if ! command -v apt-get >/dev/null; then
    echo "error: this is not Debian; please install what provides: ${absent[*]}" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "error: no rights to install packages; please run: sudo apt-get install ${absent[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "installing Debian packages: ${absent[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${absent[@]}"
