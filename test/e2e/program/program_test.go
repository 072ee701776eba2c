package program

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// write lays out a repository with one program in cmd/<name>.
func write(t *testing.T, root, name, source string) {
	t.Helper()
	dir := filepath.Join(root, "test", "e2e", "cmd", name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string]string{"go.mod": "module x\n\ngo 1.26.0\n", "main.go": source} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestKubernetesIsBuiltOncePerSource(t *testing.T) {
	root := t.TempDir()
	builds := 0
	b := Builder{Root: root, Progress: func(format string, args ...any) {
		if strings.HasPrefix(format, "built") {
			builds++
		}
	}}
	build := func() string {
		t.Helper()
		path, err := b.Kubernetes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return path
	}

	write(t, root, "kubernetes", "package main\n\nfunc main() {}\n")
	first := build()
	if again := build(); again != first || builds != 1 {
		t.Errorf("second run: %s after %d builds, want %s after 1", again, builds, first)
	}
	write(t, root, "kubernetes", "package main\n\nfunc main() { println() }\n")
	if changed := build(); changed == first || builds != 2 {
		t.Errorf("changed source: %s after %d builds, want another binary after 2", changed, builds)
	}
	if _, err := os.Stat(first); !os.IsNotExist(err) {
		t.Errorf("the old binary is still there: %v", err)
	}
	write(t, root, "kubernetes/part", "package part\n")
	build()
	write(t, root, "kubernetes/part", "package part\n\nconst Changed = true\n")
	if build(); builds != 4 {
		t.Errorf("%d builds after two changes in a folder below, want 4", builds)
	}
}

func TestKubernetesVersionIsTheModules(t *testing.T) {
	raw, err := os.ReadFile("../cmd/kubernetes/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if want := "k8s.io/kubernetes v" + kubernetesVersion + "\n"; !strings.Contains(string(raw), want) {
		t.Errorf("cmd/kubernetes/go.mod does not require %q", want)
	}
}

func TestAFailedBuildShowsTheCompilersWords(t *testing.T) {
	root := t.TempDir()
	write(t, root, "kubernetes", "package main\n\nfunc main() { undefinedThing() }\n")
	_, err := Builder{Root: root, Progress: func(string, ...any) {}}.Kubernetes(t.Context())
	if err == nil || !strings.Contains(err.Error(), "undefinedThing") {
		t.Errorf("err = %v", err)
	}
}
