#!/usr/bin/env bash
# Runs go test with these arguments, and shows failed, skipped and slow tests (test/report).
# The tests' files are in memory if there is enough: many tests write to edgebake's cache,
# which syncs each time. A run leaves no files, however it ends.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
gib=$((1 << 20)) # in KiB
files=
child=
end() {
	trap '' INT TERM HUP
	[ -z "$child" ] || { kill -TERM "$child" && wait "$child"; } 2>/dev/null || true
	[ -z "$files" ] || { chmod -R u+rwX "$files" && rm -rf "$files"; } 2>/dev/null || rm -rf "$files"
}
trap end EXIT
trap 'end; exit 130' INT TERM HUP # not only exit, which would end a trap of EXIT that has begun

at=${TMPDIR:-/tmp}
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ] && [ "$(df --output=avail /dev/shm | tail -n 1)" -gt $((6 * gib)) ] &&
	[ "$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)" -gt $((10 * gib)) ]; then
	at=/dev/shm
fi
# The name is always the same, because cached results of go depend on it. Other users may enter,
# because some tests run programs as another user.
files=$at/edgebake-unit-$(id -u)-$(cksum <<<"$PWD" | cut -d ' ' -f 1)
mkdir -m 755 "$files" 2>/dev/null || [ -O "$files" ] && [ ! -L "$files" ] || { files=$(mktemp -d -p "$at") && chmod 755 "$files"; }
export TMPDIR=$files

(cd "$root" && go build -o bin/ ./test/report)
"$root/bin/report" "$@" &
child=$!
status=0
wait "$child" || status=$?
child=
exit $status
