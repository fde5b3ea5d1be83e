# edgebake's targets for people. `make` without arguments lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
# These compile Kubernetes and boot machines.
GUESTS := ./test/cluster ./test/e2e ./test/ipvs
# -short leaves out their long tests.
LONG := ./builder ./cmd/edgebake ./ondisk/ext4 ./firstboot ./firstboot/apply ./firstboot/controlplane ./firstboot/join ./firstboot/member ./firstboot/update ./packaging
# The packages with the slowest tests run first.
SLOWEST := ./firstboot ./firstboot/controlplane ./cmd/edgebake ./builder ./builder/media ./firstboot/update ./ipvs ./test/yurthub
UNIT = $(SLOWEST) $$(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./... | grep -vE '/test/(cluster|ipvs|e2e|walls|bench/.*)$$')

# As in builder/agents.go: an image must not depend on the directory in which edgebake was
# called.
AGENT := GOOS=linux CGO_ENABLED=0 GOFLAGS=-mod=readonly GOWORK=off GOEXPERIMENT= GOAMD64=v1 GOARM64=v8.0 GOFIPS140=off go build -trimpath -buildvcs=false -ldflags='-s -w'

.PHONY: help deps need-go build install packages demo demo-cluster test check lint tidy unit oracle e2e race flaky bench fuzz nightly clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

deps: ## install the missing Debian packages that tests need
	@test/deps/install.sh

# An older go reports our go.mod as malformed; go 1.21 and later download the required release.
need-go:
	@command -v go >/dev/null || { echo "there is no go on PATH: install Go 1.21 or newer (https://go.dev/dl)"; exit 1; }
	@v=$$(GOTOOLCHAIN=local go version | grep -o '\bgo1\.[0-9]*' | head -n 1) && [ "$${v#go1.}" -ge 21 ] || \
	  { echo "$${v:-go} at $$(command -v go) is too old: at least go1.21 is required (it downloads the release that it needs): see https://go.dev/dl, or install Debian's from backports"; exit 1; }

build: need-go ## compile edgebake, firstboot, ipvscare and installer into bin/
	@echo "Compiling edgebake, firstboot, ipvscare and installer into bin/"
	@CGO_ENABLED=0 go build -trimpath -o bin/ ./cmd/edgebake
	@[ -z "$$(GOEXPERIMENT= go env GOEXPERIMENT)" ] || \
	  { echo "GOEXPERIMENT is set in go's own file, and would change the programs' bytes: remove it with \`go env -u GOEXPERIMENT\`"; exit 1; }
	@$(AGENT) -o bin/ ./cmd/firstboot ./cmd/ipvscare ./cmd/installer

# It compiles nothing, since root often has no go.
PREFIX ?= /usr/local
install: ## copy the programs from make build to PREFIX (/usr/local)/bin and PREFIX/lib/edgebake
	@[ -x bin/edgebake ] || { echo "there is no bin/edgebake: run make build first, as yourself"; exit 1; }
	@arch=$$(uname -m | sed 's/x86_64/amd64/; s/aarch64/arm64/'); \
	  for p in firstboot ipvscare installer; do install -D bin/$$p $(DESTDIR)$(PREFIX)/lib/edgebake/$$p-linux-$$arch; done
	@install -D bin/edgebake $(DESTDIR)$(PREFIX)/bin/edgebake
	@echo "installed $(DESTDIR)$(PREFIX)/bin/edgebake"

packages: ## make Debian packages and container images of edgebake in build/packages/ (amd64, arm64)
	@test/deps/install.sh packages
	@go run ./packaging

ARCH ?= amd64
demo: ## bake an image, boot it, watch it join a small real cluster (ARCH=arm64: an arm64 one)
	@test/deps/install.sh demo $(ARCH)
	@$(MAKE) --no-print-directory build
	@go build -o bin/ ./test/demo
	@bin/demo -arch $(ARCH)

demo-cluster: ## a cluster from images alone, its worker switched on first
	@test/deps/install.sh demo
	@$(MAKE) --no-print-directory build
	@go build -o bin/ ./test/demo
	@bin/demo -cluster

test: need-go ## unit tests, oracles, one machine that boots and joins: 15 minutes on two quiet cores
	@test/run.sh

check: lint unit ## lint and unit tests

lint: need-go tidy ## gofmt, vet, staticcheck, go.mod, the rules of the architecture
	@echo "gofmt, vet, staticcheck, walls"
	@bad=$$(gofmt -l $$(git ls-files '*.go' 2>/dev/null || find . -name '*.go')); \
	  [ -z "$$bad" ] || { echo "not gofmt-ed:"; echo "$$bad"; exit 1; }
	@go vet ./...
	@go run $(STATICCHECK) ./...
	@go test -count=1 ./test/walls # uncached: they run `go list`, whose inputs go's cache does not see

# With a cold module cache and no module proxy this cannot be checked; CI has both.
tidy:
	@echo "go.mod and go.sum"
	@for m in . test/oracle; do \
	  out=$$(cd $$m && go mod tidy -diff 2>&1) && continue; \
	  echo "$$out"; \
	  if grep -q '^diff ' <<<"$$out" || [ -n "$${CI:-}" ]; then exit 1; fi; \
	  echo "$$m/go.mod: not checked, modules are missing here"; \
	done

# `make lint` vets. Many tests wait, so more packages than processors run at once.
# Same flags as `make build`, so that both share compiled packages.
unit: need-go
	@CGO_ENABLED=0 test/unit.sh -trimpath -vet=off -short -p $$(($$(nproc) + 2)) -timeout 60m $(UNIT)

oracle: need-go
	@cd test/oracle && ../unit.sh -vet=off -timeout 30m ./...

e2e: need-go ## all of the long tests: every kind of node boots and joins, real clusters, ipvscare in a kernel (root)
	@go build -o bin/ ./test/report
	@bin/report -count=1 -v -p 1 -timeout 2h $(GUESTS) $(LONG)

race: need-go ## tests of the most concurrent packages under the race detector (needs a C compiler)
	@go test -race -p 1 -timeout 2h ./ipvs/... ./cluster ./builder/disk ./builder/fetch ./firstboot/...

PKG ?= ./...
RUNS ?= 30
flaky: need-go ## run tests of PKG many times (RUNS=30): shuffled, under load, with 1, 2 and 8 processors
	@test/flaky.sh $(RUNS) $(PKG)

bench: ## speed and size, as ratios to other programs in the same run
	@go test -count=1 -v -timeout 120m -run '^$$' -bench . ./test/bench/...
	@go test -count=1 -timeout 30m -run '^$$' -bench Slots ./builder/media
	@cd test/oracle && EDGEBAKE_BENCH="$$PWD/../bench/results" go test -count=1 -v -timeout 90m -run Bench .

# Without -fuzzminimizetime=1x, minimizing inputs takes nearly all of the time; without a
# file system in memory, the syncs of targets that write files do. A failing input is
# written to testdata/fuzz: commit it, since it is a test from then on.
FUZZTIME ?= 10s
fuzz: ## run every fuzz target for FUZZTIME (10s) each
	@bad=0; t=$$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d); trap 'rm -rf "$$t"' EXIT; \
	for p in $$(git grep -l '^func Fuzz' -- '*_test.go' | xargs -n1 dirname | sort -u); do \
	  for f in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' $$p/*_test.go); do \
	    echo "$$p $$f"; \
	    GOTMPDIR=$${TMPDIR:-/tmp} TMPDIR=$$t go test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime=1x ./$$p || bad=1; \
	  done; \
	done; exit $$bad

nightly: deps ## the long runs: fuzzing, the race detector, power cuts, Secure Boot, damaged disks, arm64, all packages, 1,000 joins at once
	@test/deps/install.sh nightly
	@test/deps/install.sh demo arm64
	@go build -o bin/ ./test/report
	@rc=0; EDGEBAKE_NIGHTLY=1 bin/report -count=1 -v -p 1 -timeout 8h $(GUESTS) $(LONG) || rc=1; \
	  $(MAKE) --no-print-directory fuzz FUZZTIME=10m || rc=1; \
	  $(MAKE) --no-print-directory race || rc=1; \
	  EDGEBAKE_NIGHTLY=1 go test -count=1 -v -timeout 4h -run '^$$' -bench . ./test/bench/scale || rc=1; exit $$rc

clean: ## remove the built files (the cache of inputs stays)
	rm -rf bin build
