package release

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/mod/semver"
)

// Source is the commit that a release is made of.
type Source struct {
	// Root is the folder of the checkout.
	Root string
	// Version has a leading v, as all our tags.
	Version string
	// Commit is the commit in full.
	Commit string
	// Date is the commit's, in UTC. It is the time of everything in the release.
	Date time.Time
	// Stamp is the same as the programs print it, in the zone of who committed.
	Stamp string
}

// Open reads the commit of the checkout. It refuses an invalid version, and uncommitted changes.
func Open(ctx context.Context, root, version string, allowDirty bool) (Source, error) {
	if err := checkVersion(version); err != nil {
		return Source{}, err
	}
	commit, err := git(ctx, root, "rev-parse", "--verify", "HEAD")
	if err != nil {
		return Source{}, err
	}
	changes, err := git(ctx, root, "status", "--porcelain", "--untracked-files=normal")
	if err != nil {
		return Source{}, err
	}
	if changes != "" && !allowDirty {
		lines := strings.Split(changes, "\n")
		if more := len(lines) - 5; more > 0 {
			lines = append(lines[:5], fmt.Sprintf("and %d more", more))
		}
		return Source{}, fmt.Errorf("the checkout %s has changes that are in no commit; commit or remove them:\n%s",
			root, strings.Join(lines, "\n"))
	}
	if err := checkIgnored(ctx, root); err != nil && !allowDirty {
		return Source{}, err
	}
	stamp, err := git(ctx, root, "log", "-1", "--format=%cI")
	if err != nil {
		return Source{}, err
	}
	date, err := time.Parse(time.RFC3339, stamp)
	if err != nil {
		return Source{}, fmt.Errorf("the time of commit %s: %w", commit, err)
	}
	return Source{Root: root, Version: version, Commit: commit, Date: date.UTC(), Stamp: stamp}, nil
}

// checkIgnored refuses files that git ignores and that Helm or Go may take into the release all the same: Go embeds any.
func checkIgnored(ctx context.Context, root string) error {
	ignored, err := git(ctx, root, "ls-files", "--others", "--ignored", "--exclude-standard", "--", chartFolder,
		"cmd", "controller", "inspect", "ipam", "pkg", "speaker")
	if err == nil && ignored != "" {
		err = fmt.Errorf("the checkout %s has files that git ignores, and that may be in the release; remove them:\n%s", root, ignored)
	}
	return err
}

// checkVersion accepts a version with all three numbers and without build metadata,
// because a tag of an image cannot have a plus sign.
func checkVersion(version string) error {
	if !semver.IsValid(version) || semver.Canonical(version) != version {
		return fmt.Errorf("the version %q is no semantic version with a leading v and without build metadata, "+
			"such as v0.2.0 or v0.3.0-rc.1: make release VERSION=v0.2.0", version)
	}
	return nil
}

// chartVersion is the version as Helm wants it.
func (s Source) chartVersion() string { return strings.TrimPrefix(s.Version, "v") }

// prerelease reports whether the version is a pre-release (SemVer 2.0.0, section 9).
func (s Source) prerelease() bool { return semver.Prerelease(s.Version) != "" }

// annotations are what OCI calls the predefined annotations, of something with a title.
func (s Source) annotations(title, description, version string) map[string]string {
	return map[string]string{
		"org.opencontainers.image.created":     s.Date.Format(time.RFC3339),
		"org.opencontainers.image.description": description,
		"org.opencontainers.image.licenses":    license,
		"org.opencontainers.image.revision":    s.Commit,
		"org.opencontainers.image.source":      project,
		"org.opencontainers.image.title":       title,
		"org.opencontainers.image.url":         project,
		"org.opencontainers.image.version":     version,
	}
}

func git(ctx context.Context, root string, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", append([]string{"-C", root}, args...)...).Output()
	if err != nil {
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(failed.Stderr)))
		}
		return "", fmt.Errorf("git %s in %s, which has to be a checkout: %w", strings.Join(args, " "), root, err)
	}
	return strings.TrimRight(string(out), "\n"), nil
}
