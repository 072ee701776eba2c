package membership

import (
	"bytes"
	"encoding/binary"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/hashicorp/go-msgpack/v2/codec"
	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/report"
	"github.com/lodestone-lb/lodestone/speaker/detector/watch"
	"github.com/lodestone-lb/lodestone/speaker/membership/guard"
	"github.com/lodestone-lb/lodestone/speaker/membership/keys"
)

// The types of memberlist's messages.
const (
	suspectType = 3
	aliveType   = 4
	deadType    = 5
)

// recorder records the last packet that is sent.
type recorder struct {
	memberlist.Transport
	packet []byte
}

func (r *recorder) WriteTo(b []byte, address string) (time.Time, error) {
	r.packet = b
	return r.Transport.WriteTo(b, address)
}

// holder returns a function that sends a message of memberlist to a speaker, as somebody does who has the key, and one that sends
// the last one again, as everybody can who has recorded it.
func (c *cluster) holder() (send func(to *speaker, kind byte, message map[string]any), again func(to *speaker)) {
	c.t.Helper()
	sockets, err := guard.Listen(ownAddress(), func(netip.Addr) bool { return true }, func() {})
	require.NoError(c.t, err)
	key, err := c.secret.Of(ourCluster)
	require.NoError(c.t, err)
	record := &recorder{Transport: sockets}
	transport := guard.New(record, keys.Ring{key}.Gossip, func() {})
	c.t.Cleanup(func() { transport.Shutdown() }) //nolint:errcheck // it is nil
	send = func(to *speaker, kind byte, message map[string]any) {
		b := bytes.NewBuffer([]byte{kind})
		require.NoError(c.t, codec.NewEncoder(b, &codec.MsgpackHandle{}).Encode(message))
		_, err := transport.WriteTo(b.Bytes(), to.address())
		require.NoError(c.t, err)
	}
	again = func(to *speaker) {
		_, err := sockets.WriteTo(record.packet, to.address())
		require.NoError(c.t, err)
	}
	return send, again
}

// An attacker with the key claims again and again that a speaker is lost, suspected, or has left. The speaker is not lost, and
// its metadata still arrive afterwards, also if the attacker has published in its name.
func TestHolderOfTheKeyEndsNobody(t *testing.T) {
	for name, incarnation := range map[string]func() uint32{
		"the highest":          func() uint32 { return math.MaxUint32 },
		"the highest that may": func() uint32 { return uint32(guard.MaxIncarnation(time.Now())) },
		"a usual one":          func() uint32 { return 10 },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, "n1", "n2", "n3")
			all := []*speaker{c.start("n1", unhurried), c.start("n2", unhurried), c.start("n3", unhurried)}
			takePart(t, all...)
			others, victim := all[:2], all[2]
			ready := func(is bool) {
				victim.SetReady(is)
				for _, s := range others {
					s.wait("n3 publishes", func() bool { r, alive := s.Speakers()["n3"]; return alive && r == is })
				}
			}
			ready(true)
			send, _ := c.holder()
			for range 20 {
				for _, to := range all {
					send(to, suspectType, map[string]any{"Incarnation": incarnation(), "Node": "n3", "From": "n1"})
					send(to, deadType, map[string]any{"Incarnation": incarnation(), "Node": "n3", "From": "n1"})
					send(to, deadType, map[string]any{"Incarnation": incarnation(), "Node": "n3", "From": "n3"})
				}
				for range 20 {
					time.Sleep(5 * time.Millisecond)
					for _, s := range others {
						require.True(t, s.Speakers()["n3"])
					}
				}
			}
			ready(false)
			ready(true)

			address := victim.options.Address
			for _, to := range others {
				send(to, aliveType, map[string]any{"Incarnation": incarnation(), "Node": "n3", "Addr": address.Addr().AsSlice(),
					"Port": address.Port(), "Meta": binary.AppendUvarint(nil, 1), "Vsn": []byte{1, 5, 2, 0, 0, 0}})
			}
			time.Sleep(100 * time.Millisecond)
			ready(false)
			ready(true)
		})
	}
}

// Somebody without the key has recorded a packet of a speaker's last life. It counts once, until the speaker contradicts.
func TestRecordedPacketCountsOnce(t *testing.T) {
	c := newCluster(t, "n1", "n2", "n3")
	all := []*speaker{c.start("n1", unhurried), c.start("n2", unhurried), c.start("n3", unhurried)}
	takePart(t, all...)
	others, victim := all[:2], all[2]
	send, again := c.holder()
	is := func(ready bool) {
		for _, s := range others {
			s.wait("n3 publishes", func() bool { r, alive := s.Speakers()["n3"]; return alive && r == ready })
		}
	}
	victim.SetReady(true)
	is(true)
	at := victim.options.Address
	changed := others[0].Changed()
	send(others[0], aliveType, map[string]any{"Incarnation": 50, "Node": "n3", "Addr": at.Addr().AsSlice(), "Port": at.Port(),
		"Meta": metadata{session: 7}.encode(memberlist.MetaMaxSize), "Vsn": []byte{1, 5, 2, 0, 0, 0}})
	<-changed
	is(true)
	time.Sleep(time.Second)
	is(true)
	for range 100 {
		for _, s := range others {
			again(s)
			require.True(t, s.Speakers()["n3"])
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A speaker that memberlist takes for dead counts as long as it answers, and not longer, whether memberlist is right or not.
func TestSpeakerThatMemberlistHasLostIsAsked(t *testing.T) {
	c := newCluster(t)
	table := c.mute("n1", ownAddress()).table
	n2 := &memberlist.Node{Name: "n2", Meta: metadata{ready: true, session: 7}.encode(memberlist.MetaMaxSize)}
	table.setNetwork("n2", report.Network{})
	table.arrive(n2)
	counts := func(want bool) {
		t.Helper()
		_, alive := table.Speakers()["n2"]
		require.Equal(t, want, alive)
	}
	for _, met := range []bool{true, false} {
		table.suspect("n2")
		for range 2 * questions {
			table.unanswered("n2")
			table.admit("n2")
			counts(true)
		}
		if met {
			table.arrive(n2) // memberlist was wrong, and nobody is asked any more
			require.Empty(t, table.held())
		}
	}
	for range questions {
		counts(true)
		table.unanswered("n2")
	}
	counts(false)
	require.Empty(t, table.held())

	table.arrive(n2) // it has been lost, and has to answer first
	counts(false)
	table.admit("n2")
	counts(true)
	table.suspect("n2")
	table.declare(watch.Verdict{Member: table.peers["n2"].member("n2", netip.AddrPort{})}) // memberlist was right
	counts(false)
	require.Empty(t, table.held())
}

// A speaker that is killed and started again can answer before its new session is known. It counts with its last one then, which
// nobody who knows the new one agrees to be lost. So it is asked again, and has the new session when it answers.
func TestSpeakerThatStartsAnewIsAsked(t *testing.T) {
	c := newCluster(t)
	for node, answers := range map[string]bool{"n1": true, "n3": false} {
		table := c.mute(node, ownAddress()).table
		has := func(session uint64, ready bool) {
			t.Helper()
			require.Equal(t, session, table.peers["n2"].session)
			require.Equal(t, ready, table.Speakers()["n2"])
		}
		publishes := func(session uint64, ready bool) *memberlist.Node {
			return &memberlist.Node{Name: "n2", Meta: metadata{ready: ready, session: session}.encode(memberlist.MetaMaxSize)}
		}
		table.setNetwork("n2", report.Network{})
		table.arrive(publishes(7, true))
		table.declare(watch.Verdict{Member: table.peers["n2"].member("n2", netip.AddrPort{})})
		table.admit("n2")
		has(7, true)
		joined := table.peers["n2"].joined
		table.update(publishes(8, false))
		has(7, false)
		if !answers {
			for range questions {
				require.True(t, table.peers["n2"].alive)
				table.unanswered("n2")
			}
			require.False(t, table.peers["n2"].alive)
		}
		table.admit("n2")
		has(8, false)
		require.Greater(t, table.peers["n2"].joined, joined)
		require.Empty(t, table.held())
		table.update(publishes(9, true))
		table.update(publishes(8, true)) // it has contradicted somebody who published another session in its name
		has(8, true)
		require.Empty(t, table.held())
	}
}
