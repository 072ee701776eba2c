package poolstatus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"github.com/lodestone-lb/lodestone/controller/poolstatus"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/testapi"
)

const namespace = "lodestone-system"

// pool is a ledger with one pool of ten addresses.
type pool struct {
	primed chan struct{}
	mu     sync.Mutex
	used   float64
}

func (p *pool) Primed() <-chan struct{} { return p.primed }

func (p *pool) Stats() ledger.Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return ledger.Stats{Pools: []ipam.PoolStats{{Pool: "lan", Family: ipam.IPv4, Size: 10, Assigned: p.used, Free: 10 - p.used}}}
}

func (p *pool) use(n float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used = n
}

// cluster is an API server that counts writes, and refuses them while it is broken.
type cluster struct {
	*fake.Clientset
	*testing.T
	pool *pool
	log  bytes.Buffer

	mu     sync.Mutex
	writes int
	broken bool
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{Clientset: testapi.New(), T: t, pool: &pool{primed: make(chan struct{})}}
	c.PrependReactor("*", "configmaps", func(a k8stesting.Action) (bool, runtime.Object, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if a.GetVerb() == "get" {
			return false, nil, nil
		}
		c.writes++
		if c.broken {
			return true, nil, errors.New("etcd is electing")
		}
		return false, nil, nil
	})
	return c
}

func (c *cluster) setBroken(broken bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.broken = broken
}

// leads runs a Writer until the returned function is called.
func (c *cluster) leads() (ends func()) {
	w := poolstatus.New(poolstatus.Options{Client: c, Namespace: namespace, Pools: c.pool, Log: slog.New(slog.NewTextHandler(&c.log, nil))})
	ctx, cancel := context.WithCancel(c.Context())
	ended := make(chan error)
	go func() { ended <- w.Run(ctx) }()
	return func() {
		cancel()
		require.NoError(c, <-ended)
	}
}

// after lets time pass, and wants these writes since the start and this row.
func (c *cluster) after(d time.Duration, writes int, row string) {
	c.Helper()
	time.Sleep(d)
	synctest.Wait()
	c.mu.Lock()
	assert.Equal(c, writes, c.writes)
	c.mu.Unlock()
	cm, err := c.CoreV1().ConfigMaps(namespace).Get(c.Context(), poolstatus.ConfigMapName, metav1.GetOptions{})
	if row == "" {
		assert.True(c, apierrors.IsNotFound(err))
		return
	}
	require.NoError(c, err)
	assert.Contains(c, strings.Join(strings.Fields(cm.Data[poolstatus.Key]), " "), row)
}

func TestItIsWrittenRarelyAndOnlyIfItChanged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		ends := c.leads()
		c.after(time.Hour, 0, "")
		close(c.pool.primed)
		c.after(0, 1, "lan IPv4 0% 10 0 10 0 0 0")
		c.after(time.Hour, 1, "lan IPv4 0%")
		for n := range 10 { // one each eleven seconds
			c.pool.use(float64(n))
			time.Sleep(11 * time.Second)
		}
		c.after(poolstatus.Interval, 5, "lan IPv4 90% 10 9 1 0 0 0")

		t.Log("the next leader writes only what changed")
		ends()
		ends = c.leads()
		c.after(time.Hour, 5, "lan IPv4 90%")
		c.pool.use(10)
		c.after(poolstatus.Interval, 6, "lan IPv4 100%")
		ends()
	})
}

func TestItComesBackWhileTheNumbersStayTheSame(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		close(c.pool.primed)
		ends := c.leads()
		c.after(time.Second, 1, "lan IPv4 0%")
		maps := c.CoreV1().ConfigMaps(namespace)
		require.NoError(t, maps.Delete(t.Context(), poolstatus.ConfigMapName, metav1.DeleteOptions{}))
		c.after(poolstatus.Interval, 3, "lan IPv4 0%") // the deletion counts, too
		cm, err := maps.Get(t.Context(), poolstatus.ConfigMapName, metav1.GetOptions{})
		require.NoError(t, err)
		cm.Data = nil
		_, err = maps.Update(t.Context(), cm, metav1.UpdateOptions{})
		require.NoError(t, err)
		c.after(poolstatus.Interval, 5, "lan IPv4 0%")
		c.after(time.Hour, 5, "lan IPv4 0%")
		ends()
	})
}

func TestAWriteThatFailsIsRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		close(c.pool.primed)
		c.setBroken(true)
		ends := c.leads()
		c.after(9*poolstatus.Interval+time.Second, 10, "")
		assert.Equal(t, 1, strings.Count(c.log.String(), "\n"), c.log.String())
		assert.Contains(t, c.log.String(), "write ConfigMap lodestone-system/lodestone-status: etcd is electing")
		c.setBroken(false)
		c.after(poolstatus.Interval, 11, "lan IPv4 0%")
		c.after(time.Hour, 11, "lan IPv4 0%")
		ends()
	})
}

func TestTable(t *testing.T) {
	t.Parallel()
	table := poolstatus.Table(ledger.Stats{
		Pools: []ipam.PoolStats{
			{Pool: "lan", Family: ipam.IPv4, Size: 50, Free: 21, Assigned: 25, Quarantined: 2, Conflicted: 1, Reserved: 1},
			{Pool: "lan", Family: ipam.IPv6, Size: 1 << 64, Free: 1 << 64, Assigned: 5},
			{Pool: "forbidden", Family: ipam.IPv4},
			{Pool: "full", Family: ipam.IPv4, Size: 3, Assigned: 3},
			{Pool: "almost", Family: ipam.IPv4, Size: 1000, Assigned: 999, Free: 1},
		},
		Leases: map[string]map[string]float64{"office": {"leased": 3, "overdue": 1, ledger.LeaseWaiting: 7}},
	})
	assert.Equal(t, `POOL       FAMILY  FULL     SIZE     IN USE  FREE     QUARANTINED  CONFLICTED  RESERVED
forbidden  IPv4    100%     0        0       0        0            0           0
full       IPv4    100%     3        3       0        0            0           0
almost     IPv4    99%      1000     999     1        0            0           0
lan        IPv4    58%      50       25      21       2            1           1
lan        IPv6    0%       1.8e+19  5       1.8e+19  0            0           0
office     IPv4    by DHCP  -        4       -        -            -           -
`, table)
	document, err := yaml.Marshal(map[string]string{poolstatus.Key: table})
	require.NoError(t, err)
	assert.Contains(t, string(document), "pools: |\n  POOL ", "kubectl shows lines")
	assert.Equal(t, "There are no pools.\n", poolstatus.Table(ledger.Stats{}))
}

// The configuration may have 10,000 pools of two families, with names of 63 characters.
func TestTheTableIsBounded(t *testing.T) {
	t.Parallel()
	var s ledger.Stats
	for i := range 10_000 {
		name := fmt.Sprintf("%s%05d", strings.Repeat("x", 58), i)
		s.Pools = append(s.Pools, ipam.PoolStats{Pool: name, Family: ipam.IPv4, Size: 1 << 32, Free: float64(i)},
			ipam.PoolStats{Pool: name, Family: ipam.IPv6, Size: 1 << 64, Free: 1 << 64})
	}
	table := poolstatus.Table(s)
	lines := strings.Split(strings.TrimSpace(table), "\n")
	assert.Len(t, lines, poolstatus.MaxRows+2)
	assert.Contains(t, lines[1], "x00000  IPv4    100%")
	assert.Equal(t, "19000 more rows have no room here: lodestone status shows all.", lines[len(lines)-1])
	assert.Less(t, len(table), 200_000)
}
