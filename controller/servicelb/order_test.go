package servicelb

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

// A tenant whose thousand Services all change at once delays no Service of another one by more than
// a few places, also if they wait for the same change of the configuration.
func TestNamespacesTakeTurns(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	popped := func() (names []string) {
		for s.queue.Len() > 0 {
			name, _ := s.queue.Get()
			s.queue.Done(name)
			names = append(names, name)
		}
		return names
	}
	var many []string
	for i := range 1000 {
		many = append(many, fmt.Sprint("crowd/s", i))
	}
	for _, name := range many {
		s.queue.Add(name)
	}
	s.queue.Add("shop/web")
	s.queue.Add("shop/api")
	got := popped()
	assert.Equal(t, []string{many[0], "shop/web", many[1], "shop/api", many[2]}, got[:5])
	assert.Len(t, got, 1002)

	s.order.add(s.queue, append(many, "shop/api"))
	s.queue.Add("shop/web")
	got = popped()
	assert.Equal(t, []string{many[0], "shop/web", many[1]}, got[:3])
	assert.Equal(t, "shop/api", got[1001])
}

// Of Services that wait for one change the oldest come first, whatever their namespaces are.
func TestWhoWaitsForOneChangeKeepsItsOrder(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("pools: []\n")
	for _, name := range []string{"shop/0", "shop/1", "shop/2", "team/3", "team/4"} {
		s.server.create(name, s.clock)
		s.clock = s.clock.Add(time.Second)
		s.run()
	}
	s.configure("pools: [{name: lan, addresses: [203.0.113.10-203.0.113.12]}]\n")
	for i, name := range []string{"shop/0", "shop/1", "shop/2"} {
		assert.Equal(t, fmt.Sprint("203.0.113.1", i), kube.JoinAddrs(kube.VIPs(s.server.get(name))))
	}
}

// A tenant whose many waiting Services get another answer by one edit of its own does not delay a Service of another one that is given
// an address meanwhile.
func TestAnswersOfOneTenantDelayNobody(t *testing.T) {
	t.Parallel()
	s := newStory(t)
	s.configure("quarantine: 0s\npools: [{name: lan, addresses: [203.0.113.10]}, {name: edge, addresses: [203.0.113.20]}]\n")
	s.creates("holder", annotated(annotation.AddressPool, "edge"))
	s.creates("web", shared("k"), ports(80))
	for i := range 50 {
		s.creates(fmt.Sprint("waits-", i), shared("k"), annotated(annotation.Addresses, "203.0.113.10"), ports(80, 81))
	}
	s.server.create("shop/web", s.clock, annotated(annotation.AddressPool, "edge"))
	s.run()
	s.server.update("default/web", ports(81))
	s.see("default/web")
	assert.NoError(t, s.reconcile(t.Context(), "default/web"))
	l, now := s.ledger.open()
	l.Release("default/holder", "", now)
	s.ledger.close()
	s.tryAgain((*ledger.Ledger).Retry)
	var names []string
	for s.queue.Len() > 0 {
		name, _ := s.queue.Get()
		s.queue.Done(name)
		names = append(names, name)
	}
	assert.Greater(t, len(names), 50)
	assert.Contains(t, names[:3], "shop/web")
}
