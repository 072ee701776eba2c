package program

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// In a speaker made by JumpingSpeaker the wall clock is ahead by an offset in seconds,
// which these two pieces of source add to package time and to the program.
const (
	// readClock is the line of package time in which Now reads the clocks.
	readClock = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	jumpClock = "var wallOffset atomic.Int64\n\n// SetWallOffset sets the wall clock so many seconds ahead.\n" +
		"func SetWallOffset(seconds int64) { wallOffset.Store(seconds) }\n\n" + readClock + "\tsec += wallOffset.Load()\n"
	jumpOnSignal = `package main

import (
	"os"
	"os/signal"
	"syscall"
	"time"
)

func init() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		for s := range signals {
			time.SetWallOffset(map[os.Signal]int64{syscall.SIGUSR1: 3600, syscall.SIGUSR2: -3600}[s])
		}
	}()
}
`
)

// JumpingSpeaker returns a speaker whose wall clock jumps: to an hour ahead of the
// machine's at SIGUSR1, to an hour behind it at SIGUSR2. The machine has one wall clock,
// which tests leave alone, and Linux gives no process one of its own. So package time is
// replaced as this speaker is built. Its monotonic clock is as it was, as when an
// operator or an NTP client sets the time.
func (b Builder) JumpingSpeaker(ctx context.Context) (binary string, err error) {
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return "", fmt.Errorf("find the Go release: %w", err)
	}
	original := filepath.Join(strings.TrimSpace(string(root)), "src", "time", "time.go")
	clock, err := os.ReadFile(original)
	if err != nil {
		return "", fmt.Errorf("read package time: %w", err)
	}
	text := string(clock)
	const imports = "import (\n"
	if strings.Count(text, readClock) != 1 || strings.Count(text, imports) != 1 {
		return "", fmt.Errorf("replace package time: Now in %s is not as expected; adapt readClock", original)
	}
	text = strings.Replace(text, readClock, jumpClock, 1)
	text = strings.Replace(text, imports, imports+"\t\"sync/atomic\"\n", 1)
	dir, err := os.MkdirTemp("", "lodestone-jump-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	replace := map[string]string{
		original: filepath.Join(dir, "time.go"),
		filepath.Join(b.Root, "cmd", "speaker", "jump.go"): filepath.Join(dir, "jump.go"),
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	for name, content := range map[string][]byte{"time.go": []byte(text), "jump.go": []byte(jumpOnSignal), "overlay.json": overlay} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return "", err
		}
	}
	binary = filepath.Join(b.cache(), "jumping-speaker")
	return binary, b.run(b.goBuild(ctx, b.Root, binary, "-overlay="+filepath.Join(dir, "overlay.json"), "-ldflags=-s -w", "./cmd/speaker"))
}
