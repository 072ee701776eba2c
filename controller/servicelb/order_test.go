package servicelb

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

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
