package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// run runs the plan's tests with these arguments, and adds what becomes of them to the summary. An error means
// that tests could not be run: one that fails is in the summary alone.
func run(ctx context.Context, p plan, args []string, s *summary) error {
	var aside sync.WaitGroup
	var failed error
	begin := sync.OnceFunc(func() {
		aside.Go(func() { failed = each(ctx, p.aside, args, s, true) })
	})
	s.began = func(pkg string) {
		if pkg == p.beside {
			begin()
		}
	}
	err := each(ctx, p.turns[:1], args, s, false)
	begin()
	aside.Wait()
	return errors.Join(err, failed, each(ctx, p.turns[1:], args, s, false))
}

// each runs the groups one after the other, all of them whatever becomes of one.
func each(ctx context.Context, groups []group, args []string, s *summary, aside bool) (failed error) {
	for _, g := range groups {
		cmd := g.command(ctx, args)
		if aside {
			yield(cmd)
		}
		if err := report(cmd, s); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err))
		}
	}
	return failed
}

// command is the go test of the group. `make vet` vets, and a debugger's symbols would take a third of the time that linking
// takes; compiler and linker collect garbage seldom, which saves a seventh of it.
func (g group) command(ctx context.Context, args []string) *exec.Cmd {
	test := []string{"test", "-json", "-count=1", "-vet=off", "-ldflags=-s -w", "-toolexec=env GOGC=400", "-timeout=90m"}
	env := append(os.Environ(), "CGO_ENABLED=0")
	if g.race {
		test, env = append(test, "-race"), append(env, "CGO_ENABLED=1")
	}
	for _, more := range [][]string{g.flags, args, g.packages} {
		test = append(test, more...)
	}
	cmd := exec.CommandContext(ctx, "go", test...)
	cmd.Dir, cmd.Env, cmd.Stderr = g.dir, env, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// yield gives the command the processor time that nobody else wants. Where each session has its share of the processors
// (autogroup, sched(7)), its nice value counts in its session alone: so it has one of its own, whose nice value is the lowest, too.
func yield(cmd *exec.Cmd) {
	lowest := []string{"sh", "-c", `echo 19 2>/dev/null >/proc/$$/autogroup; exec nice -n 19 "$@"`, "sh"}
	cmd.Path, cmd.Args = "/bin/sh", append(lowest, cmd.Args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) } // the terminal does not
}

// report runs a go test and adds its events to the summary.
func report(cmd *exec.Cmd, s *summary) error {
	events, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	failed, err := s.read(events)
	if ended := cmd.Wait(); err == nil && !failed { // that a test has failed is no error
		err = ended
	}
	return err
}
