package buildinfo

import (
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestComplete(t *testing.T) {
	recorded := &debug.BuildInfo{
		Main: debug.Module{Version: "v0.3.1"},
		Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "abc"}, {Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"},
		},
	}
	devel := &debug.BuildInfo{Main: debug.Module{Version: "(devel)"}}

	assert.Equal(t, Info{"v0.3.1", "abc-dirty", "2026-01-02T03:04:05Z"}, Info{}.complete(recorded), "go install")
	assert.Equal(t, Info{"v1", "def", "today"}, Info{"v1", "def", "today"}.complete(recorded), "the linker knows better")
	assert.Equal(t, Info{Version: "devel"}, Info{}.complete(devel), "go build")
	assert.Equal(t, Info{Version: "devel"}, Info{}.complete(nil), "no build information at all")
}

func TestString(t *testing.T) {
	assert.Regexp(t, `^v1 \(commit abc, date unknown, go\S+ \w+/\w+\)$`, Info{Version: "v1", Commit: "abc"}.String())
	assert.NotEmpty(t, Get().Version)
}
