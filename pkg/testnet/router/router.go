// Package router runs real routers in network namespaces for tests: FRR, BIRD and
// ExaBGP, from the packages frr, bird2 and python3-exabgp. They end with the test.
//
//	router.go  FRR and BIRD
//	exabgp.go  ExaBGP, which records the messages that it receives
package router

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/testnet"
)

// answerTimeout is how long a daemon may take to answer.
const answerTimeout = 20 * time.Second

// process is a daemon in a namespace.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	out  testnet.Log
}

func start(t testing.TB, host *testnet.Host, args ...string) *process {
	t.Helper()
	p := &process{cmd: host.Command(context.Background(), args[0], args[1:]...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", args, err)
	}
	go func() {
		p.cmd.Wait() //nolint:errcheck // it was killed
		close(p.done)
	}()
	t.Cleanup(p.kill)
	return p
}

// kill ends the process at once, as a crash does.
func (p *process) kill() {
	p.cmd.Process.Kill() //nolint:errcheck // it has ended
	<-p.done
}

// await waits until the daemon answers.
func (p *process) await(t testing.TB, name string, answers func() bool) {
	t.Helper()
	for end := time.Now().Add(answerTimeout); !answers(); time.Sleep(20 * time.Millisecond) {
		select {
		case <-p.done:
			t.Fatalf("%s ended: %s", name, &p.out)
		default:
		}
		if time.Now().After(end) {
			t.Fatalf("%s does not answer: %s", name, &p.out)
		}
	}
}

// OwnProcessor runs a program as if it had its router's processor for itself,
// whatever else the machine does: see Options.
var OwnProcessor = []string{"chrt", "--rr", "1"}

// Options are how to run a router.
type Options struct {
	// Config is the configuration. For FRR it is what vtysh would read; each of
	// the daemons gets all of it and takes its part.
	Config string
	// Daemons are those of FRR, in the order that they start in. Without one there
	// is bgpd alone, which then installs nothing in the kernel.
	Daemons []string
	// Through is a program with arguments that starts the router's.
	Through []string
}

// FRR is a router of the daemons bgpd, zebra and bfdd.
type FRR struct {
	Host      *testnet.Host
	t         testing.TB
	dir       string
	options   Options
	processes map[string]*process
}

// NewFRR starts FRR on a host.
func NewFRR(t testing.TB, host *testnet.Host, config string, daemons ...string) *FRR {
	t.Helper()
	return StartFRR(t, host, Options{Config: config, Daemons: daemons})
}

// StartFRR starts FRR on a host.
func StartFRR(t testing.TB, host *testnet.Host, o Options) *FRR {
	t.Helper()
	// Not t.TempDir, whose parent only its owner may search: FRR runs as its own
	// user.
	dir, err := os.MkdirTemp("", "ls-frr-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := &FRR{Host: host, t: t, dir: dir, options: o, processes: map[string]*process{}}
	owner, err := user.Lookup("frr")
	if err != nil {
		t.Fatalf("FRR is needed (package frr): %v", err)
	}
	id, err := strconv.Atoi(owner.Uid)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, id, -1); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if len(f.options.Daemons) == 0 {
		f.options.Daemons = []string{"bgpd"}
	}
	f.Start()
	return f
}

// Start starts the daemons, again after Kill.
func (f *FRR) Start() {
	f.t.Helper()
	conf := filepath.Join(f.dir, "frr.conf")
	if err := os.WriteFile(conf, []byte("log stdout\n"+f.options.Config), 0o644); err != nil {
		f.t.Fatal(err)
	}
	zebra := false
	for _, d := range f.options.Daemons {
		args := []string{filepath.Join("/usr/lib/frr", d), "-f", conf, "-i", filepath.Join(f.dir, d+".pid"), "--vty_socket", f.dir, "-z",
			filepath.Join(f.dir, "zserv.api"), "-P", "0"}
		switch {
		case d == "zebra":
			zebra = true
		case d == "bgpd" && !zebra:
			args = append(args, "-Z", "-n")
		}
		if d == "bfdd" {
			args = append(args, "--bfdctl", filepath.Join(f.dir, "bfdd.sock"))
		}
		f.processes[d] = start(f.t, f.Host, slices.Concat(f.options.Through, args)...)
		f.processes[d].await(f.t, d, func() bool { _, err := f.ask(d, "show version"); return err == nil })
	}
}

// Kill ends the daemons as a crash does.
func (f *FRR) Kill() {
	for _, p := range f.processes {
		p.kill()
	}
}

// Ask returns the answer of bgpd to a command.
func (f *FRR) Ask(command string) string {
	f.t.Helper()
	return f.AskDaemon("bgpd", command)
}

// AskDaemon returns the answer of a daemon to commands.
func (f *FRR) AskDaemon(daemon string, commands ...string) string {
	f.t.Helper()
	out, err := f.ask(daemon, commands...)
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

// ask uses the daemon's socket as vtysh does, which itself takes longer to start than a hundred answers do. Each command
// ends with a zero, and each answer with three and the result, which is zero, too, unless the command has failed.
func (f *FRR) ask(daemon string, commands ...string) (answers string, err error) {
	c, err := net.Dial("unix", filepath.Join(f.dir, daemon+".vty"))
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return "", err
	}
	r := bufio.NewReader(c)
	for _, command := range append([]string{"enable"}, commands...) {
		var answer string
		if _, err = io.WriteString(c, command+"\x00"); err == nil {
			answer, err = r.ReadString(0)
		}
		end := make([]byte, 3)
		if err == nil {
			_, err = io.ReadFull(r, end)
		}
		answers += strings.TrimSuffix(answer, "\x00")
		if err == nil && !bytes.Equal(end, make([]byte, 3)) {
			err = fmt.Errorf("it ends with %v: %s", end, answers)
		}
		if err != nil {
			return "", fmt.Errorf("%s: %q: %w", daemon, command, err)
		}
	}
	return answers, nil
}

// Show decodes the answer of bgpd to a command that ends in json.
func (f *FRR) Show(command string, into any) {
	f.t.Helper()
	answer := f.Ask(command)
	if err := json.Unmarshal([]byte(answer), into); err != nil {
		f.t.Fatalf("bgpd: %q: %v\n%s", command, err, answer)
	}
}

// Configure changes the configuration of bgpd.
func (f *FRR) Configure(lines ...string) {
	f.t.Helper()
	f.AskDaemon("bgpd", append([]string{"configure terminal"}, lines...)...)
}

// BIRD is a router of the daemon bird.
type BIRD struct {
	Host    *testnet.Host
	t       testing.TB
	dir     string
	through []string
	process *process
}

// NewBIRD starts BIRD on a host.
func NewBIRD(t testing.TB, host *testnet.Host, config string) *BIRD {
	t.Helper()
	return StartBIRD(t, host, Options{Config: config})
}

// StartBIRD starts BIRD on a host.
func StartBIRD(t testing.TB, host *testnet.Host, o Options) *BIRD {
	t.Helper()
	b := &BIRD{Host: host, t: t, dir: t.TempDir(), through: o.Through}
	b.write(o.Config)
	b.Start()
	return b
}

func (b *BIRD) write(config string) {
	b.t.Helper()
	if err := os.WriteFile(b.path("bird.conf"), []byte(config), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

func (b *BIRD) path(name string) string { return filepath.Join(b.dir, name) }

// Start starts the daemon, again after Kill.
func (b *BIRD) Start() {
	b.t.Helper()
	b.process = start(b.t, b.Host, append(slices.Clone(b.through), "bird", "-f", "-c", b.path("bird.conf"), "-s", b.path("bird.ctl"))...)
	b.process.await(b.t, "bird", func() bool { _, err := b.ask("show status"); return err == nil })
}

// Kill ends the daemon as a crash does.
func (b *BIRD) Kill() { b.process.kill() }

// Ask returns the answer of bird to a command.
func (b *BIRD) Ask(command string) string {
	b.t.Helper()
	out, err := b.ask(command)
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

// Configure replaces the configuration, of which sessions that it leaves as they
// are take no notice.
func (b *BIRD) Configure(config string) {
	b.t.Helper()
	b.write(config)
	if answer := b.Ask("configure"); !strings.Contains(answer, "econfigured") && !strings.Contains(answer, "econfiguration in progress") {
		b.t.Fatalf("bird does not take its configuration: %s", answer)
	}
}

func (b *BIRD) ask(command string) (string, error) {
	out, err := exec.Command("birdc", "-s", b.path("bird.ctl"), command).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("birdc %s: %w: %s", command, err, out)
	}
	return string(out), nil
}
