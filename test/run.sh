#!/usr/bin/env bash
# `make test` runs this: all tests that show within 15 minutes that edgebake works on this
# machine. It does not need root, but needs sudo if Debian packages are missing. After a
# failed step, the steps that do not depend on it still run. A run leaves no files,
# however it ends.
set -euo pipefail
cd "$(dirname "$0")/.."

summary=()
missed=
child=

# finish STATUS prints the result of each step, and exits.
finish() {
	trap '' INT TERM HUP
	trap - EXIT
	local status=$1
	if [ -n "$child" ]; then # interrupted
		kill -TERM -- "-$child" 2>/dev/null || true
		for _ in {1..300}; do
			kill -0 -- "-$child" 2>/dev/null || break
			sleep 0.1
		done
		kill -KILL -- "-$child" 2>/dev/null || true
		missed=interrupted
	fi
	echo
	printf '%s\n' ${summary[@]+"${summary[@]}"}
	if [ $status != 0 ]; then
		echo "TESTS FAILED or did not run${missed:+: $missed}"
	else
		echo "All tests passed, in $SECONDS s"
	fi
	exit $status
}
trap 'finish $?' EXIT
trap 'finish 130' INT TERM HUP # not exit, which would end a trap of EXIT that has begun

# step NAME NEEDS COMMAND... runs a command and prints its duration. Its processes are a
# group, which ends with this script.
step() {
	local name=$1 needs=$2 begun=$SECONDS status=0
	shift 2
	printf '\n[at %4d s] %s (%s)\n' "$SECONDS" "$name" "$needs"
	set -m
	"$@" </dev/null &
	child=$!
	set +m
	wait "$child" || status=$?
	child=
	end "$name" "$needs" "$begun" "$status"
}

# end NAME NEEDS BEGUN STATUS adds a step to the summary.
end() {
	if [ "$4" = 0 ]; then
		summary+=("$(printf '%5d s  %s' $((SECONDS - $3)) "$1")")
	else
		summary+=("$(printf '%5d s  FAILED: %s (%s)' $((SECONDS - $3)) "$1" "$2")")
		missed=${missed:+$missed, }$1
	fi
	return "$4"
}

# leave NAME STEP adds a step that cannot run because STEP failed.
leave() {
	summary+=("      -  NOT RUN: $1, since $2 failed")
	missed=${missed:+$missed, }$1
}

# room NAME DIR GIB fails unless the file system of DIR, which may not exist yet, has GIB free.
room() {
	local at=$2 free
	while [ ! -e "$at" ]; do at=$(dirname "$at"); done
	free=$(($(df --output=avail "$at" | tail -n 1) >> 20))
	[ "$free" -ge "$3" ] || {
		echo "$1, $2, has $free GiB of free space, and $3 are required: free some, or set $1 to another directory"
		return 1
	}
}

rooms() {
	local cache=${EDGEBAKE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgebake} first=5 ok=0
	[ -d "$cache/blobs" ] || first=15 # Kubernetes is compiled
	room EDGEBAKE_CACHE "$cache" 2 || ok=1
	room GOCACHE "$(go env GOCACHE)" $first || ok=1
	room GOMODCACHE "$(go env GOMODCACHE)" 3 || ok=1
	room TMPDIR "${TMPDIR:-/tmp}" 3 || ok=1
	return $ok
}

network="needs the network if something is missing"
echo "Packages, modules, unit tests, oracles, one machine that boots and joins: about 10 minutes"
echo "on two idle cores, 10 more if Kubernetes must be compiled"

rooms || { missed="no room"; exit 1; }
status=0
# In the foreground, since sudo may ask for a password.
begun=$SECONDS packages=0
printf '\n[at %4d s] %s (%s)\n' "$SECONDS" "Debian packages" "$network, and sudo or root then"
test/deps/install.sh || packages=$?
end "Debian packages" "$network, and sudo or root then" "$begun" "$packages" || status=1

modules() { go mod download && (cd test/oracle && go mod download); }
if step "Go modules" "$network" modules; then
	step "Unit tests" "2 to 6 minutes; no network, no root" make --no-print-directory unit || status=1
	step "Oracles: containerd's own packages and other programs check edgebake's results" "no network" make --no-print-directory oracle || status=1
	if [ "$packages" = 0 ]; then
		step "A machine that boots and joins" "$network" make --no-print-directory demo || status=1
	else
		leave "a machine that boots and joins" "Debian packages"
	fi
else
	status=1
	for s in "unit tests" "oracles" "a machine that boots and joins"; do leave "$s" "Go modules"; done
fi
exit $status
