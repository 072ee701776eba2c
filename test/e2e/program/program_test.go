package program

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

func TestReleaseIsBuiltOnceFromItsCommit(t *testing.T) {
	root := t.TempDir()
	git := func(args ...string) string {
		t.Helper()
		as := []string{"-C", root, "-c", "user.name=x", "-c", "user.email=x@example.com"}
		cmd := exec.CommandContext(t.Context(), "git", append(as, args...)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %q: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	makefile := func(text string) string {
		t.Helper()
		rule := "build:\n\tmkdir bin; echo " + text + " >>bin/lodestone\n"
		if err := os.WriteFile(filepath.Join(root, "Makefile"), []byte(rule), 0o644); err != nil {
			t.Fatal(err)
		}
		git("add", "Makefile")
		git("commit", "--quiet", "--message", text)
		return git("rev-parse", "HEAD")
	}
	git("init", "--quiet")
	released := makefile("$(VERSION) of $(COMMIT)")
	makefile("later")

	b := Builder{Root: root, Progress: t.Logf}
	for range 2 {
		dir, err := b.Release(t.Context(), "v0.1.0", released)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(dir, "bin", "lodestone"))
		if want := "v0.1.0 of " + released + "\n"; err != nil || string(got) != want {
			t.Errorf("built %q, want %q: %v", got, want, err)
		}
	}
	_, err := b.Release(t.Context(), "v0.0.9", strings.Repeat("0", 40))
	if err == nil || !strings.Contains(err.Error(), "git fetch --unshallow") {
		t.Errorf("a commit that is not there: %v", err)
	}
}

// A package is compiled once for all programs of the tests if they have the same version of it, which
// halves the work on a new machine. MetalLB, kube-router and promtool need other versions.
func TestModulesShareVersions(t *testing.T) {
	root := filepath.Join("..", "..", "..")
	requirement := regexp.MustCompile(`(?m)^(?:require)?\s+(\S+\.\S+) (v\S+)`)
	first := map[string]string{} // where a module was first, by its name
	versions := map[string]string{}
	for _, dir := range []string{".", "test/e2e", "test/e2e/cmd/kubernetes", "test/e2e/cmd/helm"} {
		text, err := os.ReadFile(filepath.Join(root, dir, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		all := requirement.FindAllStringSubmatch(string(text), -1)
		if len(all) < 50 {
			t.Fatalf("%s: only %d requirements are understood", dir, len(all))
		}
		for _, m := range all {
			module, version := m[1], m[2]
			if version == "v0.0.0" { // Kubernetes replaces its own parts
				continue
			}
			if before, ok := versions[module]; ok && before != version {
				t.Errorf("%s: %s in %s, %s in %s", module, before, first[module], version, dir)
				continue
			}
			versions[module], first[module] = version, dir
		}
	}
}
