//go:build long

package scenarios

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// built builds what a story needs beside Lodestone, before it begins, and so before any story does: one that runs meanwhile
// would not have the processors, without which routers and nodes lose each other.
func built[T any](t *testing.T, build func(program.Builder, context.Context) (T, error)) {
	t.Helper()
	root, err := lab.Root()
	require.NoError(t, err)
	_, err = build(program.Builder{Root: root, Progress: t.Logf}, t.Context())
	require.NoError(t, err)
}
