package pools

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/controller/dhcp"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
)

// fake is a source that writes down what happens to it.
type fake struct {
	name string
	log  *journal

	mu      sync.Mutex
	states  map[string]dhcp.State
	changed chan struct{}
	// release, if not nil, is what the end waits for.
	release chan struct{}
}

type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) write(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, fmt.Sprintf(format, args...))
}

func (j *journal) take() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	lines := j.lines
	j.lines = nil
	return lines
}

func (f *fake) Set(want []dhcp.Client) { f.log.write("%s wants %v", f.name, want) }

func (f *fake) ExtendOnly() { f.log.write("%s extends only", f.name) }

func (f *fake) Current() map[string]dhcp.State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.states
}

func (f *fake) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

func (f *fake) become(states map[string]dhcp.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.states = states
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fake) Run(ctx context.Context) error {
	f.log.write("%s runs", f.name)
	<-ctx.Done()
	if f.release != nil {
		<-f.release
	}
	f.log.write("%s has ended", f.name)
	return nil
}

// run runs a keeper of fakes until stop.
func run(t *testing.T) (k *Keeper, fakes func(on string) *fake, log *journal, stop func()) {
	var mu sync.Mutex
	opened := map[string]*fake{}
	log = &journal{}
	k = New(slog.New(slog.DiscardHandler))
	k.open = func(on string) source {
		mu.Lock()
		defer mu.Unlock()
		opened[on] = &fake{name: on, log: log, changed: make(chan struct{})}
		return opened[on]
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); assert.NoError(t, <-ended) })
	t.Cleanup(stop)
	return k, func(on string) *fake { mu.Lock(); defer mu.Unlock(); return opened[on] }, log, stop
}

func eventually(t *testing.T, log *journal, want ...string) {
	t.Helper()
	var got []string
	require.Eventually(t, func() bool { got = append(got, log.take()...); return len(got) >= len(want) }, 30*time.Second, time.Millisecond)
	assert.ElementsMatch(t, want, got)
}

func TestClientsRunAsLongAsTheirInterfaceIsWanted(t *testing.T) {
	t.Parallel()
	k, fakes, log, stop := run(t)
	web := ledger.LeaseClient{ID: "lab/default/web", Hostname: "web", Namespace: "default", Last: netip.MustParseAddr("198.18.0.240")}
	k.Set(map[string][]ledger.LeaseClient{"eth1": {web}, "eth2": nil})
	eventually(t, log, "eth1 wants [{lab/default/web web default 198.18.0.240}]", "eth2 wants []", "eth1 runs", "eth2 runs")

	changed := k.Changed()
	first := fakes("eth1")
	first.release = make(chan struct{})
	first.become(map[string]dhcp.State{"lab/default/web": {Lease: &dhcp.Lease{Addr: web.Last}}})
	<-changed
	assert.Equal(t, map[string]map[string]ledger.LeaseState{"eth1": {"lab/default/web": {Addr: web.Last}}, "eth2": {}}, k.Current())

	k.Set(map[string][]ledger.LeaseClient{"eth2": nil})
	assert.NotContains(t, k.Current(), "eth1")
	k.Set(map[string][]ledger.LeaseClient{"eth1": {web}, "eth2": nil})
	eventually(t, log, "eth1 wants []", "eth2 wants []", "eth2 wants []", "eth1 wants [{lab/default/web web default 198.18.0.240}]")
	assert.Empty(t, k.Current()["eth1"], "the new client knows nothing yet")
	assert.NotSame(t, first, fakes("eth1"))
	close(first.release) // only now the leases are released
	eventually(t, log, "eth1 has ended", "eth1 runs")

	stop()
	eventually(t, log, "eth1 has ended", "eth2 has ended")
}

func TestNoChangeIsMissed(t *testing.T) {
	t.Parallel()
	k, fakes, log, _ := run(t)
	k.Set(map[string][]ledger.LeaseClient{"eth1": nil, "eth2": nil})
	eventually(t, log, "eth1 wants []", "eth2 wants []", "eth1 runs", "eth2 runs")
	for i := range 200 {
		on := fmt.Sprintf("eth%d", 1+i%2)
		want := ledger.LeaseState{Lost: netip.AddrFrom4([4]byte{198, 18, 0, byte(i)}), Err: errors.New("refused")}
		go fakes(on).become(map[string]dhcp.State{"x": {Lost: want.Lost, Err: want.Err}})
		for {
			changed := k.Changed()
			if k.Current()[on]["x"] == want {
				break
			}
			select {
			case <-changed:
			case <-time.After(30 * time.Second):
				t.Fatalf("change %d is missed", i)
			}
		}
	}
}
