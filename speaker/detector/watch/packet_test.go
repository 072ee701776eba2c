package watch

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestPacketsAreReadAsWritten(t *testing.T) {
	t.Parallel()
	first, second := make([]byte, 32), []byte("another key, of 32 bytes or more")
	s := NewSealer([][]byte{first})
	for kind := Beat; kind <= lastKind; kind++ {
		p := Packet{Kind: kind, From: 1, Sequence: 2, Interval: 25 * ms, Late: 7 * ms}
		if kind.hasSubject() {
			p.Subject = 3
		}
		sealed := s.Seal(nil, p, 9)
		got, ok := s.Open(sealed, 9)
		require.True(t, ok)
		assert.Equal(t, p, got)
		for name, ok := range map[string]bool{
			"another receiver":      opens(s, sealed, 8),
			"another key":           opens(NewSealer([][]byte{second}), sealed, 9),
			"no key":                opens(NewSealer(nil), sealed, 9),
			"cut":                   opens(s, sealed[:len(sealed)-1], 9),
			"longer":                opens(s, append(sealed[:len(sealed):len(sealed)], 0), 9),
			"the key is the second": !opens(NewSealer([][]byte{second, first}), sealed, 9),
		} {
			assert.False(t, ok, name)
		}
	}
	assert.Len(t, s.Seal(nil, Packet{Kind: Beat, Interval: 25 * ms}, 9), 40)
	assert.Empty(t, NewSealer(nil).Seal(nil, Packet{Kind: Beat, Interval: 25 * ms}, 9))
	late, ok := s.Open(s.Seal(nil, Packet{Kind: Beat, Interval: 25 * ms, Late: time.Hour}, 9), 9)
	assert.True(t, ok)
	assert.Equal(t, 65535*ms, late.Late)
}

func opens(s *Sealer, sealed []byte, receiver uint64) bool {
	_, ok := s.Open(sealed, receiver)
	return ok
}

// FuzzPacket reads what anybody may send. What is read is what is written, byte for byte; nothing else passes.
func FuzzPacket(f *testing.F) {
	s := NewSealer([][]byte{make([]byte, 32)})
	for kind := Kind(0); kind <= lastKind+1; kind++ {
		f.Add(Packet{Kind: kind, From: 1, Sequence: 2, Subject: 3, Interval: 25 * ms}.encode(nil))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, ok := decode(b); ok {
			require.Equal(t, b, p.encode(nil))
		}
		_, ok := s.Open(b, 1)
		require.False(t, ok, "opened without the key")
	})
}

// FuzzStep sends a machine whatever a speaker with the key may send.
func FuzzStep(f *testing.F) {
	f.Add([]byte{0, 1, 1, 2, 2, 3, 0, 4, 1, 5, 2, 6})
	f.Fuzz(func(t *testing.T, b []byte) {
		w := newWorld(t, 4)
		x := w.nodes[0]
		for i := 0; i+1 < len(b); i += 2 {
			from, about := w.nodes[1+int(b[i])%3], w.nodes[int(b[i]>>2)%4]
			from.sequence++
			p := Packet{Kind: Kind(b[i+1]%6) + 1, From: from.Session, Sequence: from.sequence, Subject: about.Session, Interval: 25 * ms}
			x.receive(&Received{p, from.Addr, w.now})
			w.run(time.Duration(b[i+1]>>4) * ms)
		}
		require.LessOrEqual(t, len(x.doubted), 3)
		require.False(t, x.Deadline().Before(w.now.Add(-w.late)), "the loop spins")
	})
}
