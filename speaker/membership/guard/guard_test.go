package guard

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-msgpack/v2/codec"
	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

const testTimeout = 20 * time.Second

func theKeys() [][]byte { return [][]byte{bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)} }

func anybody(netip.Addr) bool { return true }

// member is a memberlist behind a guard.
type member struct {
	*memberlist.Memberlist
	t       testing.TB
	sockets *Sockets
	refused atomic.Int64
}

func newMember(t testing.TB, name, address string, known func(netip.Addr) bool, change ...func(*memberlist.Config)) *member {
	t.Helper()
	m := &member{t: t}
	refuse := func() { m.refused.Add(1) }
	var err error
	m.sockets, err = Listen(netip.AddrPortFrom(netip.MustParseAddr(address), 0), known, refuse)
	require.NoError(t, err)
	c := memberlist.DefaultLANConfig()
	c.Name, c.BindAddr, c.Logger, c.EnableCompression = name, address, log.New(io.Discard, "", 0), false
	c.AdvertiseAddr, c.AdvertisePort = address, int(m.sockets.Address().Port())
	c.DisableTcpPings = true
	// No answer comes too late. A ping waits for the shorter one of memberlist's interval and time-out.
	c.TCPTimeout, c.ProbeInterval, c.ProbeTimeout = testTimeout, testTimeout, testTimeout
	for _, f := range change {
		f(c)
	}
	c.Transport = New(m.sockets, theKeys, refuse)
	m.Memberlist, err = memberlist.Create(c)
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Shutdown() })
	return m
}

func (m *member) address() string { return m.sockets.Address().String() }

// isWell requires that the member answers another one, by both protocols.
func (m *member) isWell(other *member) {
	m.t.Helper()
	_, err := other.Join([]string{m.address()})
	require.NoError(m.t, err)
	_, err = other.Ping(m.LocalNode().Name, net.UDPAddrFromAddrPort(m.sockets.Address()))
	require.NoError(m.t, err)
}

// sends delivers a sealed packet.
func (m *member) sends(plain []byte) {
	m.t.Helper()
	sealed, err := seal(nil, theKeys(), plain, forPacket)
	require.NoError(m.t, err)
	m.sendsRaw(sealed)
}

func (m *member) sendsRaw(b []byte) {
	m.t.Helper()
	c, err := net.Dial("udp", m.address())
	require.NoError(m.t, err)
	defer c.Close()
	_, err = c.Write(b)
	require.NoError(m.t, err)
}

// opens opens a connection and sends something on it.
func (m *member) opens(text []byte) net.Conn {
	m.t.Helper()
	c, err := net.Dial("tcp", m.address())
	require.NoError(m.t, err)
	_, _ = c.Write(text) // it may be closed by now
	return c
}

// streamOf is the plaintext as somebody with the key sends it.
func streamOf(t testing.TB, plain []byte, length int) []byte {
	t.Helper()
	b, err := seal(nil, theKeys(), binary.BigEndian.AppendUint32(nil, uint32(length)), forHeader)
	require.NoError(t, err)
	b, err = seal(b, theKeys(), plain, b[:headerSize:headerSize])
	require.NoError(t, err)
	return b
}

// encoded is what memberlist would send.
func encoded(t testing.TB, kind byte, objects ...any) []byte {
	t.Helper()
	b := bytes.NewBuffer([]byte{kind})
	e := codec.NewEncoder(b, &codec.MsgpackHandle{})
	for _, o := range objects {
		require.NoError(t, e.Encode(o))
	}
	return b.Bytes()
}

type object = map[string]any

// with returns the object with one field changed, or without it if the value is nil.
func with(o object, key string, value any) object {
	changed := object{}
	for k, v := range o {
		changed[k] = v
	}
	if changed[key] = value; value == nil {
		delete(changed, key)
	}
	return changed
}

var (
	aliveObject = object{"Incarnation": 1, "Node": "n9", "Addr": []byte{127, 0, 0, 9}, "Port": 9744, "Meta": []byte{1, 0},
		"Vsn": []byte{1, 5, 2, 0, 0, 0}}
	stateObject = object{"Incarnation": 1, "Name": "n9", "Addr": []byte{127, 0, 0, 9}, "Port": 9744, "Meta": []byte{1, 0}, "State": 0,
		"Vsn": []byte{1, 5, 2, 0, 0, 0}}
	pingObject = object{"SeqNo": 7, "Node": "n1"}
)

func header(nodes, user int) object {
	return object{"Nodes": nodes, "UserStateLen": user, "Join": true}
}

func compoundOf(parts ...[]byte) []byte {
	b := []byte{compound, byte(len(parts))}
	for _, p := range parts {
		b = binary.BigEndian.AppendUint16(b, uint16(len(p)))
	}
	return append(b, bytes.Join(parts, nil)...)
}

// hostile are packets and messages of somebody who has the key and is no honest speaker,
// by what memberlist would do.
func hostile(t testing.TB) (packets, messages map[string][]byte) {
	ping := encoded(t, ping, pingObject)
	packets = map[string][]byte{
		"nothing":                        {},
		"a compound of itself":           compoundOf(compoundOf(compoundOf(ping))),
		"a compound that ends early":     {compound, 255, 0},
		"a compound with a part beyond":  {compound, 1, 255, 255},
		"a compound that goes on":        append(compoundOf(ping), 0),
		"a part of no bytes":             compoundOf(nil),
		"unpacks 40 MiB":                 encoded(t, 9, object{"Algo": 0, "Buf": make([]byte, 1000)}),
		"for users":                      append([]byte{8}, make([]byte, 1000)...),
		"labelled":                       []byte("\xf4\x05other\x00"),
		"a checksum of nothing":          {checksum, 0, 0, 0, 0},
		"an address for DNS":             encoded(t, alive, with(aliveObject, "Addr", []byte("a.b"))),
		"no address":                     encoded(t, alive, with(aliveObject, "Addr", nil)),
		"an empty address":               encoded(t, alive, with(aliveObject, "Addr", []byte{})),
		"one that keeps others apart":    encoded(t, alive, with(aliveObject, "Vsn", []byte{5, 5, 5, 0, 0, 0})),
		"no versions":                    encoded(t, alive, with(aliveObject, "Vsn", []byte{1})),
		"a long name":                    encoded(t, alive, with(aliveObject, "Node", strings.Repeat("n", 254))),
		"a name for terminals":           encoded(t, alive, with(aliveObject, "Node", "\x1b[2J")),
		"no name":                        encoded(t, alive, with(aliveObject, "Node", "")),
		"long metadata":                  encoded(t, alive, with(aliveObject, "Meta", make([]byte, 513))),
		"a negative number":              encoded(t, alive, with(aliveObject, "Incarnation", -1)),
		"an unknown field":               encoded(t, alive, with(aliveObject, "Else", 1)),
		"objects within":                 encoded(t, alive, with(aliveObject, "Meta", []any{[]any{[]any{1}}})),
		"something after it":             append(slices.Clone(ping), 0),
		"a list for an object":           encoded(t, 0, []any{1, "n1"}),
		"bytes of a length that it lies": {0, 0x81, 0xa4, 'N', 'o', 'd', 'e', 0xdb, 0xff, 0xff, 0xff, 0xff},
	}
	messages = map[string][]byte{
		"nothing":                       {},
		"unpacks 40 MiB":                encoded(t, 9, object{"Algo": 0, "Buf": make([]byte, 1000)}),
		"a million speakers":            encoded(t, pushPull, header(1<<20, 0)),
		"speakers below none":           encoded(t, pushPull, header(-1, 0)),
		"20 MiB of state":               encoded(t, pushPull, header(0, 20<<20)),
		"20 MiB for users":              encoded(t, 8, object{"UserMsgLen": 20 << 20}),
		"a ping, which nobody sends so": ping,
		"an address for DNS":            encoded(t, pushPull, header(1, 0), with(stateObject, "Addr", []byte("a.b"))),
		"one that keeps others apart":   encoded(t, pushPull, header(1, 0), with(stateObject, "Vsn", []byte{5, 5, 5, 0, 0, 0})),
		"a long text":                   encoded(t, failure, object{"Error": strings.Repeat("x", 1<<16)}),
	}
	return packets, messages
}

// Somebody with the key sends what ends memberlist, or costs it memory or time. Each is
// refused and counted, and the speaker goes on.
func TestHolderOfTheKey(t *testing.T) {
	t.Parallel()
	m, other := newMember(t, "n1", "127.0.0.1", anybody), newMember(t, "n2", "127.0.0.1", anybody)
	packets, messages := hostile(t)
	for what, plain := range packets {
		before := m.refused.Load()
		m.sends(plain)
		require.Eventually(t, func() bool { return m.refused.Load() == before+1 }, testTimeout, time.Millisecond, what)
	}
	for what, plain := range messages {
		before := m.refused.Load()
		c := m.opens(streamOf(t, plain, len(plain)+Overhead))
		require.Eventually(t, func() bool { return m.refused.Load() == before+1 }, testTimeout, time.Millisecond, what)
		c.Close()
	}
	for _, length := range []int{0, Overhead - 1, MaxMessage + Overhead + 1, 1<<32 - 1} {
		before := m.refused.Load()
		c := m.opens(streamOf(t, nil, length))
		require.Eventually(t, func() bool { return m.refused.Load() == before+1 }, testTimeout, time.Millisecond, "length %d", length)
		c.Close()
	}
	assert.Equal(t, 1, m.NumMembers())
	m.isWell(other)
}

// No message that memberlist itself sends is refused.
func TestHonestSpeakers(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"127.0.0.1", "::1"} {
		for _, syncs := range []time.Duration{100 * time.Millisecond, 0} {
			t.Run(fmt.Sprintf("%s, states are exchanged every %s", address, syncs), func(t *testing.T) {
				fast := func(c *memberlist.Config) {
					c.ProbeInterval, c.ProbeTimeout, c.GossipInterval = 50*time.Millisecond, 25*time.Millisecond, 20*time.Millisecond
					c.PushPullInterval, c.SuspicionMult = syncs, 2
				}
				var all []*member
				for i := range 4 {
					all = append(all, newMember(t, fmt.Sprintf("n%d", i), address, anybody, fast))
					_, err := all[i].Join([]string{all[0].address()})
					require.NoError(t, err)
				}
				for _, m := range all {
					require.Eventually(t, func() bool { return m.NumMembers() == 4 }, testTimeout, time.Millisecond)
				}
				rest := all
				if syncs > 0 { // a speaker that ends resets the connections of the others, which counts as refused
					time.Sleep(10 * syncs)
				} else {
					// One is killed: suspicions, indirect probes and the announcement of its death are sent.
					require.NoError(t, all[3].Shutdown())
					// One leaves.
					require.NoError(t, all[2].Leave(testTimeout))
					rest = all[:2]
				}
				for _, m := range rest {
					require.Eventually(t, func() bool { return m.NumMembers() == len(rest) }, testTimeout, time.Millisecond)
					assert.Zero(t, m.refused.Load())
				}
			})
		}
	}
}

// The longest message has room for 1,000 speakers whose names and metadata are as long
// as they can be, and for 4,000 usual ones.
func TestLongestMessage(t *testing.T) {
	t.Parallel()
	size := func(n int, nodeName string, meta int) int {
		o := with(with(with(stateObject, "Name", nodeName), "Meta", make([]byte, meta)), "Addr", make([]byte, 16))
		o = with(with(o, "Incarnation", uint32(1<<20)), "Port", 65535)
		all := []any{header(n, 0)}
		for range n {
			all = append(all, o)
		}
		b := encoded(t, pushPull, all...)
		require.NoError(t, checkMessage(b))
		return len(b)
	}
	assert.Less(t, size(1000, strings.Repeat("n", maxName), memberlist.MetaMaxSize), MaxMessage)
	assert.Less(t, size(4000, strings.Repeat("n", 32), 2+128+8), MaxMessage)
}

// Packets and messages cannot be taken for each other, nor a body for another one.
func TestContexts(t *testing.T) {
	t.Parallel()
	plain := encoded(t, ping, pingObject)
	packet, err := seal(nil, theKeys(), plain, forPacket)
	require.NoError(t, err)
	_, err = open(theKeys(), packet, forHeader)
	require.ErrorIs(t, err, errKey)
	opened, err := open([][]byte{theKeys()[1], theKeys()[0]}, packet, forPacket)
	require.NoError(t, err)
	assert.Equal(t, plain, opened)
	_, err = open(theKeys()[1:], packet, forPacket)
	require.ErrorIs(t, err, errKey)

	m := newMember(t, "n1", "127.0.0.1", anybody)
	state := encoded(t, pushPull, header(1, 0), stateObject)
	one, two := streamOf(t, state, len(state)+Overhead), streamOf(t, state, len(state)+Overhead)
	c := m.opens(append(slices.Clone(one[:headerSize]), two[headerSize:]...))
	defer c.Close()
	require.Eventually(t, func() bool { return m.refused.Load() == 1 }, testTimeout, time.Millisecond)
	assert.Equal(t, 1, m.NumMembers())
}

// Nobody reads any more, and Shutdown ends all the same.
func TestShutdown(t *testing.T) {
	t.Parallel()
	s, err := Listen(netip.MustParseAddrPort("127.0.0.1:0"), anybody, func() {})
	require.NoError(t, err)
	g := New(s, theKeys, func() {})
	conn, err := net.Dial("tcp", s.Address().String())
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, g.Shutdown())
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(testTimeout)))
	_, err = conn.Read(make([]byte, 1))
	require.Error(t, err)
}

// addForms adds messages of each kind to the seeds, as memberlist writes them and as somebody hostile does.
func addForms(f *testing.F) {
	packets, messages := hostile(f)
	for _, plain := range packets {
		f.Add(plain)
	}
	for _, plain := range messages {
		f.Add(plain)
	}
	for _, plain := range [][]byte{
		encoded(f, ping, pingObject), encoded(f, ack, object{"SeqNo": 7, "Payload": []byte{}}), encoded(f, nack, object{"SeqNo": 7}),
		encoded(f, suspect, object{"Incarnation": 1, "Node": "n9", "From": "n8"}),
		encoded(f, dead, object{"Incarnation": 1, "Node": "n9", "From": "n9"}), left("n9"),
		encoded(f, alive, aliveObject), compoundOf(encoded(f, alive, aliveObject), encoded(f, ping, pingObject)),
		encoded(f, pushPull, header(2, 0), stateObject, with(stateObject, "State", 1)), encoded(f, failure, object{"Error": "busy"}),
		encoded(f, indirectPing, object{"SeqNo": 7, "Target": []byte{127, 0, 0, 1}, "Port": 9, "Node": "n3", "Nack": true}),
	} {
		f.Add(plain)
	}
}

// FuzzHolderOfTheKey sends memberlist, by its guard, what somebody with the key may send
// in a packet and on a connection. It must not end the process, and not keep the speaker
// from answering.
func FuzzHolderOfTheKey(f *testing.F) {
	m := newMember(f, "n1", "127.0.0.1", anybody, func(c *memberlist.Config) { c.ProbeTimeout = time.Second }) // each indirect ping takes it
	other := newMember(f, "n2", "127.0.0.1", anybody)
	addForms(f)
	f.Fuzz(func(t *testing.T, plain []byte) {
		m.t = t
		if len(plain)+Overhead <= MaxPacket {
			m.sends(plain)
		}
		if checkMessage(plain) == nil {
			c := m.opens(streamOf(t, plain, len(plain)+Overhead))
			require.NoError(t, c.SetReadDeadline(time.Now().Add(testTimeout)))
			_, err := io.Copy(io.Discard, c)
			require.NoError(t, err)
			c.Close()
		}
		_, err := other.Ping("n1", net.UDPAddrFromAddrPort(m.sockets.Address()))
		require.NoError(t, err)
	})
}

// A message that passes is the same after memberlist has decoded and encoded it. The cost of a check is linear in the length.
func FuzzForm(f *testing.F) {
	addForms(f)
	f.Fuzz(func(t *testing.T, plain []byte) {
		passes := map[string]func([]byte) error{"packet": checkPacket, "message": checkMessage}
		for what, check := range passes {
			var err error
			testcost.Within(t, what, len(plain), func() { err = check(plain) })
			if err != nil || plain[0] == compound || plain[0] == checksum {
				continue
			}
			var objects []any
			in := bytes.NewReader(plain[1:])
			for d := codec.NewDecoder(in, &codec.MsgpackHandle{}); in.Len() > 0; {
				o := object{}
				require.NoError(t, d.Decode(&o), "memberlist does not understand it")
				objects = append(objects, o)
			}
			require.NoError(t, check(encoded(t, plain[0], objects...)), "%s %q", what, plain)
		}
	})
}
