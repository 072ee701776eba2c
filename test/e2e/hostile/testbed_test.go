package hostile

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// killed is set in the environment of the run that is killed.
const killed = "LODESTONE_HOSTILE_KILLED"

// A run that is killed leaves its namespaces and its folder. The next one removes them, and
// takes the names for itself.
func TestTheNextRunRemovesWhatAKilledOneLeft(t *testing.T) {
	if os.Getenv(killed) != "" {
		g, err := prepare(t.Context(), t.Logf)
		require.NoError(t, err)
		require.NoError(t, g.serveAPI(t.Context()))
		fmt.Printf("\nserves %d %d\n", g.store.Process.Pid, g.api.Process.Pid)
		select {} // until it is killed
	}
	first := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	first.Env, first.Stderr = append(os.Environ(), killed+"=yes"), os.Stderr
	out, err := first.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, first.Start())
	var store, api int
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if n, _ := fmt.Sscanf(lines.Text(), "serves %d %d", &store, &api); n == 2 {
			break
		}
	}
	require.NotZero(t, api, "the first run serves")
	require.NoError(t, first.Process.Kill())
	_ = first.Wait() // killed

	left := &ground{}
	require.FileExists(t, netns.Path(left.host(control)), "a killed run leaves it")
	g, err := prepare(t.Context(), t.Logf) // makes namespaces of the same names, and none that is there
	require.NoError(t, err)
	require.FileExists(t, netns.Path(g.host(control)))
	require.NoFileExists(t, g.path("kubeconfig"), "of the killed run")
	require.NoError(t, g.end())

	for name := range hosts {
		require.NoFileExists(t, netns.Path(g.host(name)))
	}
	require.NoDirExists(t, g.dir)
	for _, pid := range []int{store, api} {
		require.Eventually(t, func() bool { return unix.Kill(pid, 0) == unix.ESRCH }, time.Minute, 10*time.Millisecond,
			"process %d of the killed run", pid)
	}
}
