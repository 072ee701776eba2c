// Package process starts the lab's programs and finds them again: each leaves
// a record of its process id and start time, so that a later run of the lab
// signals exactly that process and never one that got its number.
package process

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/cgroup"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// Table is the set of processes of one lab, kept in files.
type Table struct {
	group   cgroup.Group
	records string // <name>.json
	logs    string // <name>.log
}

// NewTable returns the table below dir. What it starts is in the group.
func NewTable(dir string, group cgroup.Group) (*Table, error) {
	t := &Table{group: group, records: filepath.Join(dir, "run"), logs: filepath.Join(dir, "log")}
	for _, path := range []string{t.records, t.logs} {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return nil, fmt.Errorf("create process table: %w", err)
		}
	}
	return t, nil
}

// Spec is the program to run.
type Spec struct {
	Name      string   `json:"name"`
	Namespace string   `json:"namespace"`
	Args      []string `json:"args"`
	Env       []string `json:"env,omitempty"`
}

// Process is one program that was started, by this run of the lab or another.
type Process struct {
	Spec
	PID     int    `json:"pid"`
	Started uint64 `json:"started"` // in clock ticks since boot

	table *Table
}

// Start runs the program in its namespace and in the lab's cgroup. It outlives
// the caller.
func (t *Table) Start(spec Spec) (*Process, error) {
	p := &Process{Spec: spec, table: t}
	if err := p.start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Name, err)
	}
	return p, nil
}

func (p *Process) start() error {
	log, err := os.OpenFile(p.LogFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	group, err := p.table.group.Open()
	if err != nil {
		return err
	}
	defer group.Close()

	cmd := netns.Command(context.Background(), p.Namespace, p.Args...)
	cmd.Env = append(os.Environ(), p.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(group.Fd())}
	if err := cmd.Start(); err != nil {
		return err
	}
	p.PID = cmd.Process.Pid
	go cmd.Wait() // reaps it if it ends before this process
	now, err := stat(p.PID)
	if err != nil {
		return fmt.Errorf("ended at once: %w", p.withLog(err))
	}
	p.Started = now.started
	return p.record()
}

func (p *Process) record() error {
	raw, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return os.WriteFile(p.table.recordOf(p.Name), raw, 0o644)
}

func (t *Table) recordOf(name string) string { return filepath.Join(t.records, name+".json") }

// Get finds a process by the name it was started under.
func (t *Table) Get(name string) (*Process, error) {
	raw, err := os.ReadFile(t.recordOf(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("find process %q: the lab started none of that name", name)
	}
	if err != nil {
		return nil, err
	}
	p := &Process{table: t}
	if err := json.Unmarshal(raw, p); err != nil {
		return nil, fmt.Errorf("read record of process %s: %w", name, err)
	}
	return p, nil
}

// Names lists the processes that were started, in alphabetical order.
func (t *Table) Names() ([]string, error) {
	paths, err := filepath.Glob(t.recordOf("*"))
	if err != nil {
		return nil, err
	}
	names := make([]string, len(paths))
	for i, path := range paths {
		names[i] = strings.TrimSuffix(filepath.Base(path), ".json")
	}
	return names, nil
}

// LogFile is where the process's output goes.
func (p *Process) LogFile() string { return filepath.Join(p.table.logs, p.Name+".log") }

// Alive reports whether that very process still runs.
func (p *Process) Alive() bool {
	now, err := stat(p.PID)
	return err == nil && now.started == p.Started && (now.state != 'Z' || now.threads > 1)
}

// Check returns an error with the end of the log if the process is gone.
func (p *Process) Check() error {
	if p.Alive() {
		return nil
	}
	return p.withLog(fmt.Errorf("%s has ended", p.Name))
}

func (p *Process) withLog(err error) error {
	const tail = 2000
	raw, _ := os.ReadFile(p.LogFile())
	if len(raw) > tail {
		raw = raw[len(raw)-tail:]
	}
	return fmt.Errorf("%w; its log ends:\n%s", err, raw)
}

// Signal sends the signal to that very process.
func (p *Process) Signal(signal syscall.Signal) error {
	// FindProcess pins the process behind the number, so that the process
	// which Alive checks is the one that gets the signal.
	target, err := os.FindProcess(p.PID)
	if err != nil {
		return fmt.Errorf("signal %s: %w", p.Name, err)
	}
	defer target.Release()
	if !p.Alive() {
		return fmt.Errorf("signal %s: it has ended", p.Name)
	}
	if err := target.Signal(signal); err != nil {
		return fmt.Errorf("signal %s: %w", p.Name, err)
	}
	return nil
}

// Freeze stops the process where it is; Thaw lets it go on.
func (p *Process) Freeze() error { return p.Signal(syscall.SIGSTOP) }

// Thaw lets a frozen process go on.
func (p *Process) Thaw() error { return p.Signal(syscall.SIGCONT) }

// Kill ends the process as a power cut would, and waits until it is gone.
func (p *Process) Kill(ctx context.Context) error {
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	for p.Alive() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of %s: %w", p.Name, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}

// Restart starts the program again, as it was started first.
func (p *Process) Restart() error {
	if p.Alive() {
		return fmt.Errorf("restart %s: it still runs", p.Name)
	}
	if err := p.start(); err != nil {
		return fmt.Errorf("restart %s: %w", p.Name, err)
	}
	return nil
}

// clockTicks is in how many parts the kernel divides a second (USER_HZ).
const clockTicks = 100

// status is what the kernel knows of a process.
type status struct {
	started uint64 // in clock ticks since boot
	used    uint64 // time on processors, in clock ticks
	state   byte
	// threads counts those that have not ended. The first one of a process that ends is a zombie while
	// others still hold its sockets.
	threads int
}

func stat(pid int) (status, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return status{}, err
	}
	return parseStat(raw)
}

// parseStat reads a line of /proc/PID/stat. The program's name, second, is in
// parentheses and may hold anything, parentheses included.
func parseStat(line []byte) (s status, err error) {
	const user, system, threads, startTime = 14 - 3, 15 - 3, 20 - 3, 22 - 3 // proc(5) counts from 1; fields begins with the third
	fields := bytes.Fields(line[bytes.LastIndexByte(line, ')')+1:])
	if len(fields) <= startTime {
		return s, fmt.Errorf("parse process status %q: %d fields", line, len(fields))
	}
	s.state = fields[0][0]
	if s.threads, err = strconv.Atoi(string(fields[threads])); err != nil {
		return s, err
	}
	for _, f := range []int{user, system} {
		ticks, err := strconv.ParseUint(string(fields[f]), 10, 64)
		if err != nil {
			return s, err
		}
		s.used += ticks
	}
	s.started, err = strconv.ParseUint(string(fields[startTime]), 10, 64)
	return s, err
}

// CPU is the time on processors that a process has taken.
func CPU(pid int) (time.Duration, error) {
	s, err := stat(pid)
	return time.Duration(s.used) * time.Second / clockTicks, err
}
