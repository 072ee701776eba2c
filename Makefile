# What every target does: make help. CI runs `make check` and nothing else.

SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := all

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT  ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
# The time of the commit, not of the build: the same commit gives the same binary.
DATE    ?= $(shell git log -1 --format=%cI 2>/dev/null || echo unknown)

BUILDINFO := github.com/lodestone-lb/lodestone/pkg/buildinfo
LDFLAGS   := -s -w -X $(BUILDINFO).version=$(VERSION) -X $(BUILDINFO).commit=$(COMMIT) -X $(BUILDINFO).date=$(DATE)

E2E     := test/e2e
RELEASE := hack/release
# The file of the key that signs a release. Empty: it stays unsigned, and the command prints that.
KEY     ?=
# What a release is for, as in linux/amd64,linux/arm64. Empty: all platforms.
PLATFORMS ?=
GOLANGCI_LINT := v2.15.0
# One fuzz target runs this long. Which ones, as an expression that their folder and name match: FUZZ=pkg/config.FuzzParse.
FUZZTIME ?= 10s
FUZZ     ?=
# How long `make soak` goes on.
HOURS   ?= 2
# make simulate lives through this many seeds, or through one and prints its story.
SEEDS   ?= 1000
FROM    ?= $(shell date +%s)000
SEED    ?=
# Which benchmark: make bench BENCH=l2_node_loss. Empty: all.
BENCH   ?=
# Further arguments of the test binaries: make e2e ARGS='-run TestFailover'.
ARGS    ?=

# The binaries carry what they were built from. Without the paths of this
# folder they are the same everywhere, and all clones share one build cache.
export GOFLAGS := $(GOFLAGS) -buildvcs=false -trimpath
# Static binaries; and vet, build and the end-to-end tests share one build cache.
export CGO_ENABLED := 0

.PHONY: all help build fmt vet lint unit e2e test check check-all soak simulate bench fuzz demo lab-up lab-down manifests release push clean deps root

all: build vet ## build and vet (the default)

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## the three binaries, into bin/
	go build -ldflags '$(LDFLAGS)' -o bin/lodestone-controller ./cmd/controller
	go build -ldflags '$(LDFLAGS)' -o bin/lodestone-speaker ./cmd/speaker
	go build -ldflags '$(LDFLAGS)' -o bin/lodestone ./cmd/lodestone

fmt: ## fail if a file is not formatted
	@files=$$(gofmt -l *.go cmd controller hack inspect ipam pkg speaker test); [ -z "$$files" ] || { echo "not formatted (gofmt -w mends it):"; echo "$$files"; exit 1; }

vet: ## go vet, all three modules
	go vet -tags long ./...
	cd $(E2E) && go vet -tags long ./...
	cd $(RELEASE) && go vet -tags long ./...

lint: ## golangci-lint; builds it on first use, which takes minutes
	go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT) run ./...

# What runs together, and when, is in hack/tests/plan.go.
TESTS = go run ./hack/tests $(if $(CI),-strict)

unit: root ## unit and property tests, with the race detector where there are goroutines (root)
	@$(TESTS) unit $(ARGS)

e2e: root deps ## end-to-end tests against a real cluster (root)
	@$(TESTS) e2e $(ARGS)

test: root deps build ## every test; the last line counts passed, failed and skipped (root)
	@$(TESTS) all $(ARGS)

check-all: ## before a release: make check, and the tests that take too long for CI (root)
	@$(MAKE) --no-print-directory check ARGS='-tags long $(ARGS)'

check: fmt vet ## what CI runs: gofmt, vet, make test; with CI=true a skipped test fails
	@$(MAKE) --no-print-directory test

soak: root deps build ## faults at random in the lab for HOURS=2, drawn by SEED=4711, and a verdict (root)
	@cd $(E2E) && go run ./cmd/soak -hours $(HOURS) $(if $(SEED),-seed $(SEED)) $(ARGS)

simulate: ## invented fleets with faults: SEEDS=1000 new ones, from FROM=1 on, or SEED=4711 with its story
	@go run ./hack/simulate $(if $(SEED),-seed $(SEED) $(ARGS),-seeds $(SEEDS) -from $(FROM) $(ARGS))

bench: root deps build ## benchmarks, a line for each; BENCH=name runs one (root)
	@cd $(E2E) && go run ./cmd/bench $(BENCH)

fuzz: ## every fuzz target for FUZZTIME=10s, a line for each; FUZZ=pkg/config runs some; inputs that reach more are kept
	@go run ./hack/fuzz -time $(FUZZTIME) -run '$(FUZZ)' -args '$(ARGS)'

demo: root ## a cluster with Lodestone on this machine, and a tour of it (root)
	hack/deps.sh demo
	cd $(E2E) && go run ./cmd/lab demo

lab-up: root deps ## bring the lab cluster up (root)
	cd $(E2E) && go run ./cmd/lab up $(ARGS)

lab-down: root ## take the lab cluster down (root)
	cd $(E2E) && go run ./cmd/lab down

manifests: ## render deploy/manifests, the reference of the values, and what the chart's tests compare with
	cd $(E2E) && go test -count=1 ./chart -run 'TestRender|TestReference' -update

release: ## all files of a release into dist/, published nowhere: VERSION=v0.2.0, and KEY=file to sign them
	cd $(RELEASE) && go run . -version '$(VERSION)' -ldflags '$(LDFLAGS)' $(if $(KEY),-key '$(abspath $(KEY))') \
		$(if $(PLATFORMS),-platforms '$(PLATFORMS)')

push: ## the images and the chart in dist/ into REGISTRY=registry.example.com/lodestone; PUBLIC_KEY=file: only if that has signed them
	$(if $(REGISTRY),,$(error which registry? make push REGISTRY=registry.example.com/lodestone))
	cd $(RELEASE) && go run . -push '$(REGISTRY)' $(if $(PUBLIC_KEY),-verify '$(abspath $(PUBLIC_KEY))')

clean: ## remove what was built; the lab's cache stays
	rm -rf bin dist

deps:
	hack/deps.sh

root:
	@[ "$$(id -u)" = 0 ] || { echo "this target makes network namespaces and needs root: run it with sudo" >&2; exit 1; }
