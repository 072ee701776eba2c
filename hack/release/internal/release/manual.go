package release

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// completions are the files in which shells look for what completes the command.
func completions() map[string]string {
	return map[string]string{
		"bash": "lodestone.bash", "zsh": "_lodestone", "fish": "lodestone.fish", "powershell": "lodestone.ps1",
	}
}

// manual asks the command for its man pages and completions, and returns them as they are in
// archives. It is asked for its version on the way: linker flags that do not fit set none, and
// the linker reports nothing.
func (m *making) manual(ctx context.Context, work string, all []binary) (files []file, _ error) {
	command, err := ownCommand(all)
	if err != nil {
		return nil, err
	}
	version, err := ask(ctx, work, command, "version")
	if err != nil {
		return nil, err
	}
	want := fmt.Sprintf("lodestone %s (commit %s, date %s,", m.Version, m.source.Commit, m.source.Stamp)
	if !strings.HasPrefix(string(version), want) {
		return nil, fmt.Errorf("the command calls itself %q, and should begin with %q: the linker flags are not this commit's",
			strings.TrimSpace(string(version)), want)
	}
	for shell, name := range completions() {
		script, err := ask(ctx, work, command, "completion", shell)
		if err != nil {
			return nil, err
		}
		files = append(files, file{"completions/" + name, 0o644, script})
	}
	pages := filepath.Join(work, "man1")
	if err := os.MkdirAll(pages, 0o755); err != nil {
		return nil, fmt.Errorf("make a folder for man pages: %w", err)
	}
	if _, err := ask(ctx, work, command, "man", pages); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(pages)
	if err != nil {
		return nil, fmt.Errorf("read man pages: %w", err)
	}
	if len(entries) == 0 {
		return nil, errors.New("the command wrote no man page")
	}
	for _, e := range entries {
		page, err := os.ReadFile(filepath.Join(pages, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("read man pages: %w", err)
		}
		files = append(files, file{"man/man1/" + e.Name(), 0o644, page})
	}
	return files, nil
}

// ownCommand returns the command that this machine can run.
func ownCommand(all []binary) (string, error) {
	own := Platform{runtime.GOOS, runtime.GOARCH}
	for _, b := range all {
		if b.name == commandName && b.Platform == own {
			return b.path, nil
		}
	}
	return "", fmt.Errorf("this machine is %s, for which there is no command to ask for its man pages: "+
		"make the release on one that we build for", own)
}

// ask runs the command with nothing of this machine's but the file it is.
func ask(ctx context.Context, home, command string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, command, args...)
	cmd.Env = []string{"HOME=" + home}
	out, err := cmd.Output()
	if err != nil {
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(failed.Stderr)))
		}
		return nil, fmt.Errorf("lodestone %s: %w", strings.Join(args, " "), err)
	}
	return out, nil
}
