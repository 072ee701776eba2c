package process

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A process of the test whose first thread ends before the others: they end with its input.
func init() {
	if os.Getenv("FIRST_THREAD_ENDS") == "" {
		return
	}
	runtime.LockOSThread() // it is the first one
	go func() {
		os.Stdout.Write([]byte{0})    //nolint:errcheck // the test waits for it in vain then
		io.Copy(io.Discard, os.Stdin) //nolint:errcheck // it is its end that counts
		os.Exit(0)
	}()
	unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
}

func TestParseStatSurvivesAHostileName(t *testing.T) {
	line := []byte("42 (a) (b 7) S 1 42 42 0 -1 4194560 0 0 0 0 30 12 0 0 20 0 1 0 123456 0 0\n")
	if s, err := parseStat(line); err != nil || s != (status{123456, 42, 'S', 1}) {
		t.Errorf("parseStat = %+v, %v; want 123456, 42, S, 1, nil", s, err)
	}
}

func TestParseStatRefusesAShortLine(t *testing.T) {
	if _, err := parseStat([]byte("42 (a) S 1")); err == nil {
		t.Error("a truncated line was accepted")
	}
}

func TestAliveDistinguishesProcessesWithOneNumber(t *testing.T) {
	now, err := stat(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	self := &Process{PID: os.Getpid(), Started: now.started}
	if !self.Alive() {
		t.Error("a running process is not alive")
	}
	other := &Process{PID: os.Getpid(), Started: now.started - 1}
	if other.Alive() {
		t.Error("a process that started at another time passes for ours")
	}
}

// A process lives for as long as one of its threads, which may hold a port.
func TestAliveWhileThreadsAre(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "FIRST_THREAD_ENDS=1")
	input, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := output.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	now, err := stat(cmd.Process.Pid)
	for err == nil && now.state != 'Z' {
		now, err = stat(cmd.Process.Pid)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := &Process{PID: cmd.Process.Pid, Started: now.started}
	if !p.Alive() {
		t.Error("it has threads, and is not alive")
	}
	if err := errors.Join(input.Close(), cmd.Wait()); err != nil {
		t.Fatal(err)
	}
	if p.Alive() {
		t.Error("it has ended, and is alive")
	}
}

func TestGetNamesWhatIsMissing(t *testing.T) {
	table, err := NewTable(t.TempDir(), "ls-none")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := table.Get("etcd"); err == nil || err.Error() != `find process "etcd": the lab started none of that name` {
		t.Errorf("err = %v", err)
	}
}
