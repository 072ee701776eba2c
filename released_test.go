package lodestone_test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

const releasedFile = "hack/released.txt"

// TestReleases holds that the list of releases can be read by those who test upgrades: a line
// for each release, oldest first, with a commit that the one at hand comes after.
func TestReleases(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(releasedFile)
	if err != nil {
		t.Fatal(err)
	}
	var commits []string
	for line := range strings.Lines(string(text)) {
		form := regexp.MustCompile(`^v\d+\.\d+\.\d+ ([0-9a-f]{40})\n$`).FindStringSubmatch(line)
		if form == nil {
			t.Fatalf("%s: %q is not a version, a space, and a commit: v0.1.0 and 40 hexadecimal digits", releasedFile, line)
		}
		commits = append(commits, form[1])
	}
	if len(commits) == 0 {
		t.Fatalf("%s has no release", releasedFile)
	}
	shallow, err := exec.CommandContext(t.Context(), "git", "rev-parse", "--is-shallow-repository").Output()
	if err != nil || strings.TrimSpace(string(shallow)) != "false" {
		t.Log("the history is not here: whether the commits are in it, and in this order, is left to a whole clone")
		return
	}
	for i, commit := range commits {
		after := "HEAD"
		if i+1 < len(commits) {
			after = commits[i+1]
		}
		if out, err := exec.CommandContext(t.Context(), "git", "merge-base", "--is-ancestor", commit, after).CombinedOutput(); err != nil {
			t.Errorf("%s: %s does not come before %s: %v %s", releasedFile, commit, after, err, out)
		}
	}
}
