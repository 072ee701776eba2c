package scenarios

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

func TestServiceIsReachableByTCPAndUDPAndHasOneAnswerer(t *testing.T) {
	s := begin(t)
	s.echo(2)
	s.service("web", port("http", corev1.ProtocolTCP, 80), port("udp", corev1.ProtocolUDP, 80))
	vip := s.assigned("web")
	s.eventually("the VIP answers by TCP", func() error { return s.reachTCP(vip) })
	s.eventually("the VIP answers by UDP", func() error { return s.reachUDP(vip) })
	s.oneAnswerer(vip)

	s.delete("web")
	s.eventually("nobody answers for the freed address", func() error { return s.silent(vip) })
}

// A Service without endpoints is not announced, until it has one.
func TestServiceWithoutEndpointsIsNotAnnounced(t *testing.T) {
	s := begin(t)
	s.service("web")
	vip := s.assigned("web")
	s.mostly(2*time.Second, "nobody answers", func() error { return s.silent(vip) })
	s.echo(1)
	s.eventually("the VIP answers by TCP", func() error { return s.reachTCP(vip) })
}

// The owner loses its power several times. Each time another node answers soon.
func TestNodePowerLossTwentyTimes(t *testing.T) {
	s := begin(t)
	vip := s.serveUDP("web")
	s.echoAway(3, vip)
	s.losePower(vip, 20)
}

// usualOutage and longestOutage bound the outage that a client sees when a node loses its power. usualOutage is twice what
// failover: conservative takes, and less than the two seconds that memberlist alone would take. Waiting for the end of a Lease or of
// an ARP entry would take longer than longestOutage.
const usualOutage, longestOutage = 1900 * time.Millisecond, 10 * time.Second

// losePower cuts the owner of the VIP off so many times: another node takes
// over each time, alone and soon.
func (s *story) losePower(vip string, times int) {
	s.Helper()
	var outages []time.Duration
	for i := range times {
		lost := s.loseOwner(vip)
		s.Logf("loss %d: %s to %s, outage %s", i+1, lost.Old, lost.New, lost.Outage.Round(time.Millisecond))
		require.NotEqual(s, lost.Old, lost.New)
		require.Less(s, lost.Outage, longestOutage)
		outages = append(outages, lost.Outage)
		s.oneAnswerer(vip)
	}
	slices.Sort(outages)
	require.Less(s, outages[len(outages)/2], usualOutage, "the median")
}

// The VIP leaves a speaker that crashes again and again, and does
// not come back to it between the crashes.
func TestCrashLoopOfASpeakerDoesNotFlapTheVIP(t *testing.T) {
	s := begin(t)
	vip := s.serveUDP("web")
	crashing := s.owner(vip)
	s.killSpeaker(crashing)
	s.eventually("another node owns the VIP", func() error {
		if now := s.owner(vip); now == crashing {
			return fmt.Errorf("%s still does", now)
		}
		return nil
	})
	refuge := s.owner(vip)
	for range 2 {
		s.killSpeaker(crashing)
		s.mostly(time.Second, "the VIP stays where it fled to", func() error { return s.owned(vip, refuge, true) })
	}
	s.eventually("the VIP is back when the speaker has been stable for a while", func() error {
		if now := s.owner(vip); now != crashing {
			return fmt.Errorf("%s owns it", now)
		}
		return nil
	})
	s.oneAnswerer(vip)
}

// The API server's absence moves nothing and stops nobody from answering; a
// node that dies meanwhile is replaced all the same.
func TestAPIServerDownKeepsAnnouncing(t *testing.T) {
	s := begin(t)
	vip := s.serveUDP("web")
	s.echoAway(3, vip)
	before := s.owner(vip)
	thaw := s.frozenAPIServer()
	answers := func() error { return errors.Join(s.owned(vip, before, true), s.reachUDP(vip)) }
	s.mostly(5*time.Second, "the owner keeps answering", answers)
	lost := s.loseOwner(vip)
	require.NotEqual(t, lost.Old, lost.New)
	s.eventually("the node that is back has its VIP", answers)
	thaw()
	s.mostly(3*time.Second, "it keeps it when the API server is back", answers)
	s.oneAnswerer(vip)
}

// echo makes the story have that many pods to answer.
func (s *story) echo(replicas int32) {
	s.Helper()
	require.NoError(s, s.RunEcho(s.ctx, s.namespace, replicas))
}

// serveUDP makes a Service with three echo pods that is asked by UDP, and returns its
// address.
func (s *story) serveUDP(name string) (vip string) {
	s.Helper()
	s.echo(3)
	s.service(name, port("udp", corev1.ProtocolUDP, 80))
	return s.assigned(name)
}

// nodesBut returns the lab's nodes without the one.
func (s *story) nodesBut(one string) []string {
	return slices.DeleteFunc(s.Lab.Nodes(), func(node string) bool { return node == one })
}

// owner waits until one node answers for the VIP.
func (s *story) owner(vip string) (node string) {
	s.Helper()
	s.eventually("one node owns "+vip, func() (err error) {
		node, err = s.Owner(s.ctx, vip)
		return err
	})
	return node
}

// oneAnswerer waits until each request gets exactly one answer.
func (s *story) oneAnswerer(vip string) {
	s.Helper()
	s.eventually("one node answers for "+vip, func() error { return s.OneAnswerer(s.ctx, vip) })
}

// silent checks that nobody answers for the address.
func (s *story) silent(address string) error {
	macs, err := s.Ask(s.ctx, address, 1)
	if err == nil && len(macs) > 0 {
		err = fmt.Errorf("%q answered", macs)
	}
	return err
}

func target(vip string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(vip), 80) }

// reachTCP asks the VIP's port 80 once over HTTP from the client.
func (s *story) reachTCP(vip string) error {
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Second)
	defer cancel()
	_, err := probe.Get(ctx, s.Lab.Namespace(lab.Client), target(vip))
	return err
}

// reachUDP asks the VIP's port 80 by datagrams until one is answered.
func (s *story) reachUDP(vip string) error {
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Second)
	defer cancel()
	asking := probe.UDP(ctx, probe.Options{Namespace: s.Lab.Namespace(lab.Client), Target: target(vip)})
	err := asking.WaitAnswers(ctx, 1)
	_, stopped := asking.Stop()
	return errors.Join(err, stopped)
}

func (s *story) loseOwner(vip string) lodestone.Loss {
	s.Helper()
	loss, err := s.LoseOwner(s.ctx, target(vip))
	require.NoError(s, err)
	return loss
}

// echoAway moves the pods away from the VIP's owner, which is to be lost.
func (s *story) echoAway(replicas int32, vip string) {
	s.Helper()
	require.NoError(s, s.KeepEchoFromOwner(s.ctx, s.namespace, replicas, vip))
	s.steady(vip)
}

// steady waits until every node's kube-proxy serves the VIP's UDP port.
func (s *story) steady(vip string) {
	s.Helper()
	require.NoError(s, s.Steady(s.ctx, target(vip)))
}

func (s *story) killSpeaker(node string) {
	s.Helper()
	require.NoError(s, s.KillSpeaker(s.ctx, node))
}
