#!/usr/bin/env bash
# Runs the unit tests of packages many times and counts the failures: `make flaky`. Each run
# is shuffled; the runs alternate between 1, 2 and 8 processors, and between files on disk
# and in memory. Busy loops keep the machine under load.
#
#   flaky.sh RUNS PACKAGE...
#
#   LOAD=8       number of busy loops; 0 on a machine that is already busy
#   RUN=REGEXP   only these tests
#   LONG=1       the long tests too
#   OUT=DIR      directory for the logs of failed runs; build/flaky by default
set -euo pipefail
cd "$(dirname "$0")/.."

runs=$1
shift
out=$(realpath -m "${OUT:-build/flaky}")
mkdir -p "$out"
tmp=$(mktemp -d)
memory=
[ ! -w /dev/shm ] || memory=$(mktemp -d /dev/shm/flaky-XXXXXX)
chmod 755 "$tmp" ${memory:+"$memory"} # some tests run programs as another user
load=()
child=
end() {
	trap '' INT TERM HUP
	kill "${load[@]}" 2>/dev/null || true
	[ -z "$child" ] || kill -KILL -- "-$child" 2>/dev/null || true
	chmod -R u+w "$tmp" ${memory:+"$memory"} 2>/dev/null || true
	rm -rf "$tmp" ${memory:+"$memory"}
}
trap end EXIT
trap 'end; exit 130' INT TERM HUP # see test/unit.sh

for ((i = 0; i < ${LOAD:-8}; i++)); do
	(while :; do :; done) &
	load+=($!)
done

export CGO_ENABLED=0 # as `make unit`
short=true
[ -z "${LONG:-}" ] || short=false
bad=0
for dir in $(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.Dir}}{{end}}' "$@"); do
	name=${dir#"$PWD/"}
	log=$out/${name//\//-}
	go test -c -trimpath -vet=off -o "$tmp/test" "$dir"
	failed=0 && : >"$log.failures"
	for ((n = 0; n < runs; n++)); do
		cpus=(1 2 8)
		files=("$tmp" "${memory:-$tmp}")
		at=${files[n / 3 % 2]}
		mkdir -p "$at/files"
		set -m
		(cd "$dir" && TMPDIR=$at/files exec "$tmp/test" -test.cpu="${cpus[n % 3]}" -test.shuffle=on -test.timeout=60m \
			-test.short=$short ${RUN:+-test.run="$RUN"}) >"$tmp/log" 2>&1 &
		child=$!
		set +m
		if ! wait "$child"; then
			failed=$((failed + 1)) bad=1
			cp "$tmp/log" "$log.$n.log"
			grep -E '^ *--- FAIL|^panic:|DATA RACE' "$tmp/log" | sed 's/ ([0-9.]*s)$//' >>"$log.failures" || true
		fi
		child=
		chmod -R u+w "$at/files"
		rm -rf "$at/files"
	done
	echo "$name: $failed of $runs runs failed"
	sort "$log.failures" | uniq -c | sort -rn
	[ -s "$log.failures" ] || rm -f "$log.failures"
done
[ $bad = 0 ] || echo "The logs are in $out"
exit $bad
