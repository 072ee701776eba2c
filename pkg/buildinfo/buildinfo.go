// Package buildinfo has the version, the commit and the date of the running program, from the linker
// or from the Go tool.
package buildinfo

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
)

// Set by the linker, for example
// -X github.com/lodestone-lb/lodestone/pkg/buildinfo.version=v1.2.3.
var version, commit, date string

// Info describes a build.
type Info struct {
	// Version is the release, such as v1.2.3, or "devel".
	Version string
	// Commit is the commit of the source, with "-dirty" when it was changed.
	// Empty: unknown.
	Commit string
	// Date is when the build, or else its commit, was made. Empty: unknown.
	Date string
}

// Get returns what the linker set. What it did not set is as the Go tool recorded it.
func Get() Info {
	recorded, _ := debug.ReadBuildInfo()
	return Info{version, commit, date}.complete(recorded)
}

// String returns the build in one line.
func (i Info) String() string {
	return fmt.Sprintf("%s (commit %s, date %s, %s %s/%s)", i.Version,
		cmp.Or(i.Commit, "unknown"), cmp.Or(i.Date, "unknown"), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

func (i Info) complete(recorded *debug.BuildInfo) Info {
	settings := map[string]string{}
	if recorded != nil {
		for _, s := range recorded.Settings {
			settings[s.Key] = s.Value
		}
		if recorded.Main.Version != "(devel)" {
			i.Version = cmp.Or(i.Version, recorded.Main.Version)
		}
	}
	revision := settings["vcs.revision"]
	if revision != "" && settings["vcs.modified"] == "true" {
		revision += "-dirty"
	}
	return Info{cmp.Or(i.Version, "devel"), cmp.Or(i.Commit, revision), cmp.Or(i.Date, settings["vcs.time"])}
}
