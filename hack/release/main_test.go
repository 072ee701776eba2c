package main

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRefusalsReachWhoeverRunsIt checks that errors in the arguments are returned before anything is built.
func TestRefusalsReachWhoeverRunsIt(t *testing.T) {
	dist := filepath.Join(t.TempDir(), "dist")
	err := run(t.Context(), []string{"-version", "1.2", "-dist", dist}, io.Discard)
	require.ErrorContains(t, err, `the version "1.2" is no semantic version`)
	require.NoDirExists(t, dist)

	key := filepath.Join(t.TempDir(), "key.pem")
	err = run(t.Context(), []string{"-version", "v1.2.3", "-dist", dist, "-key", key}, io.Discard)
	require.ErrorContains(t, err, key)
	require.NoError(t, os.WriteFile(key, []byte("no key"), 0o600))
	t.Setenv("LODESTONE_RELEASE_KEY", key)
	err = run(t.Context(), []string{"-version", "v1.2.3", "-dist", dist}, io.Discard)
	require.ErrorContains(t, err, key+" is no private key")
	require.NoDirExists(t, dist)

	err = run(t.Context(), []string{"-push", "registry.example.com/lodestone", "-dist", dist}, io.Discard)
	require.ErrorContains(t, err, "make release writes it")
	err = run(t.Context(), []string{"-version", "v1.2.3", "-dist", dist, "-key", "", "-platforms", "linux/amd64,plan9/mips"}, io.Discard)
	require.ErrorContains(t, err, `the platform "plan9/mips" is none`)
}
