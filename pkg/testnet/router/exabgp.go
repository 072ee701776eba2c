package router

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// python is Debian's, whose package python3-exabgp has ExaBGP.
const python = "/usr/bin/python3"

// ExaBGP is a BGP speaker without a table: it listens on port 179 and writes down what it
// receives.
type ExaBGP struct {
	t       testing.TB
	heard   string // the file with what it received
	process *process
}

// Message is a message that ExaBGP received: the fields of its JSON encoder, version 4, that
// tests look at.
type Message struct {
	Type     string // open, update, notification, state
	Neighbor struct {
		State   string // up, down
		Message struct {
			Update struct {
				Attribute struct {
					Origin         string
					ASPath         []uint32 `json:"as-path"`
					MED            uint32
					Community      [][2]uint32
					LargeCommunity [][3]uint32 `json:"large-community"`
				}
				// Announce has the prefixes by family ("ipv4 unicast") and next hop,
				// Withdraw by family.
				Announce map[string]map[string][]NLRI
				Withdraw map[string][]NLRI
			}
			EOR *struct{ AFI, SAFI string } // End-of-RIB (RFC 4724)
		}
		Open struct {
			ASN          uint32
			Capabilities map[string]json.RawMessage // by code
		}
		Notification struct{ Code, Subcode int }
	}
}

// NLRI is a prefix that a router announces or withdraws.
type NLRI struct{ NLRI string }

// NewExaBGP starts ExaBGP on a host, listening on the local address. The
// configuration is the section of its neighbor, which has to connect.
func NewExaBGP(t testing.TB, host *testnet.Host, local, config string) *ExaBGP {
	t.Helper()
	if out, err := exec.Command(python, "-c", "import exabgp").CombinedOutput(); err != nil {
		t.Fatalf("ExaBGP is needed (package python3-exabgp): %v\n%s", err, out)
	}
	dir := t.TempDir()
	e := &ExaBGP{t: t, heard: filepath.Join(dir, "heard")}
	config = "process heard {\n run /bin/sh -c \"cat >>" + e.heard + "\";\n encoder json;\n}\n" +
		strings.TrimSuffix(strings.TrimSpace(config), "}") +
		" passive true;\n listen 179;\n local-address " + local + ";\n" +
		" api {\n processes [ heard ];\n neighbor-changes;\n receive {\n parsed;\n open;\n update;\n notification;\n }\n }\n}\n"
	file := filepath.Join(dir, "exabgp.conf")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	e.process = start(t, host, "env", "exabgp.daemon.user=root", "exabgp.api.cli=false", "exabgp.tcp.bind="+local,
		"exabgp.log.destination=stdout",
		"exabgp.cache.attributes=false", python, "-m", "exabgp", file)
	return e
}

// Heard returns what it has received so far.
func (e *ExaBGP) Heard() (all []Message) {
	e.t.Helper()
	text, err := os.ReadFile(e.heard)
	if err != nil && !os.IsNotExist(err) {
		e.t.Fatal(err)
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	for _, line := range lines[:len(lines)-1] { // the last one may be half a line
		var m Message
		if err := json.Unmarshal(line, &m); err != nil {
			e.t.Fatalf("ExaBGP: %v\n%s", err, line)
		}
		all = append(all, m)
	}
	return all
}

// Log returns its log.
func (e *ExaBGP) Log() string { return e.process.out.String() }
