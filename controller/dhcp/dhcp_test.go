package dhcp

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/stretchr/testify/require"
)

const webID = "lab/default/web/0"

var web = Client{ID: webID, Hostname: "web"}

// RFC 2131 section 4.1: 4, 8, 16, 32, 64, 64 seconds, give or take one.
func TestRetransmission(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.Set([]Client{web})
		w.pass(5 * time.Minute)
		require.Greater(t, len(w.sent()), 7)
		for i, gap := range gaps(w.sent()) {
			require.InDelta(t, min(4<<i, 64), gap.Seconds(), 1.01, "gap %d", i)
			require.Equal(t, w.sent()[0].TransactionID, w.sent()[i+1].TransactionID)
			require.InDelta(t, w.sent()[i+1].at.Seconds(), w.sent()[i+1].NumSeconds, 1.01)
		}
		st := w.Current()[webID]
		require.Nil(t, st.Lease)
		require.EqualError(t, st.Err, fmt.Sprintf(`no DHCP server on interface "eth0" has offered an address since %s (VIPs waiting: 1); check that a server or a relay serves its segment`, clock(w.began)))
	})
}

// RFC 2131 table 5: which message has which fields.
func TestMessages(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(w.grants())
		w.Set([]Client{{ID: webID, Hostname: strings.Repeat("w", 80)}})
		w.pass(35 * time.Minute) // T1 is at most at 30
		w.Set(nil)
		synctest.Wait()
		require.Len(t, w.sent(), 4)
		for i, want := range []struct {
			kind              dhcpv4.MessageType
			requested, server netip.Addr
		}{
			{kind: dhcpv4.MessageTypeDiscover},
			{kind: dhcpv4.MessageTypeRequest, requested: addrA, server: serverA},
			{kind: dhcpv4.MessageTypeRequest, requested: addrA},
			{kind: dhcpv4.MessageTypeRelease, server: serverA},
		} {
			m := w.sent()[i]
			require.Equal(t, want.kind, m.MessageType())
			require.Equal(t, dhcpv4.OpcodeBootRequest, m.OpCode)
			require.Equal(t, self[:], []byte(m.ClientHWAddr))
			require.Equal(t, append([]byte{0}, webID...), m.Options.Get(dhcpv4.OptionClientIdentifier))
			require.Equal(t, want.requested.AsSlice(), m.Options.Get(dhcpv4.OptionRequestedIPAddress))
			require.Equal(t, want.server.AsSlice(), m.Options.Get(dhcpv4.OptionServerIdentifier))
			require.True(t, m.GatewayIPAddr.IsUnspecified() && m.YourIPAddr.IsUnspecified() && m.ServerIPAddr.IsUnspecified())
			if want.kind == dhcpv4.MessageTypeRelease {
				require.False(t, m.IsBroadcast())
				require.Equal(t, addrA.AsSlice(), []byte(m.ClientIPAddr))
				require.False(t, m.Options.Has(dhcpv4.OptionHostName) || m.Options.Has(dhcpv4.OptionParameterRequestList))
				require.Equal(t, []any{serverMAC, addrA, serverA}, []any{m.to, m.src, m.dst})
				continue
			}
			require.True(t, m.IsBroadcast())
			require.True(t, m.ClientIPAddr.IsUnspecified())
			require.Equal(t, strings.Repeat("w", 63), m.HostName())
			require.True(t, m.IsOptionRequested(dhcpv4.OptionRebindingTimeValue))
			require.Equal(t, []any{broadcast, "0.0.0.0", "255.255.255.255"}, []any{m.to, m.src.String(), m.dst.String()})
		}
		require.Equal(t, w.sent()[0].TransactionID, w.sent()[1].TransactionID)
		require.Equal(t, w.sent()[0].NumSeconds, w.sent()[1].NumSeconds)
		require.NotEqual(t, w.sent()[1].TransactionID, w.sent()[2].TransactionID)
	})
}

// Who only extends asks for nothing new, neither for a client without a lease nor in place of one that the server takes away.
func TestExtendOnly(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(w.grants())
		w.Set([]Client{web})
		w.pass(time.Second)
		w.server(func(sent) {})
		w.Set([]Client{web, {ID: "late"}})
		w.pass(time.Second)
		w.ExtendOnly()
		n := len(w.sent())
		w.pass(10 * time.Minute)
		require.Len(t, w.sent(), n, "the late one asks no more")
		w.server(w.grants())
		w.pass(50 * time.Minute)
		require.NotNil(t, w.Current()[webID].Lease, "it is extended")
		require.True(t, time.Now().Add(20*time.Minute).Before(w.Current()[webID].Lease.Expires))
		w.server(func(sent) {})
		w.pass(2 * time.Hour)
		require.Nil(t, w.Current()[webID].Lease)
		for _, m := range w.since(n) {
			require.Equal(t, dhcpv4.MessageTypeRequest, m.MessageType())
		}
		n = len(w.sent())
		w.pass(time.Hour)
		require.Len(t, w.sent(), n)
	})
}

// RFC 2131 section 4.4.5, with a lease of an hour and a server that is gone.
func TestExpiry(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(w.grants())
		w.Set([]Client{web})
		w.pass(time.Second)
		l := *w.Current()[webID].Lease
		at := func(t time.Time) time.Duration { return t.Sub(w.began) }
		require.Equal(t, Lease{Addr: addrA, Subnet: netip.MustParsePrefix("198.18.0.0/24"), Server: serverA,
			Acquired: l.Acquired, Renew: l.Renew, Rebind: l.Acquired.Add(52*time.Minute + 30*time.Second), Expires: l.Acquired.Add(time.Hour)}, l)
		require.InDelta(t, 28.5, l.Renew.Sub(l.Acquired).Minutes(), 1.5)

		w.server(func(sent) {})
		n := len(w.sent())
		w.pass(time.Until(l.Renew) - time.Second)
		require.Len(t, w.sent(), n, "nothing is due, nothing is sent")
		w.pass(time.Until(l.Expires) - time.Millisecond)
		for i, m := range w.since(n) {
			end := at(l.Rebind)
			if m.at >= end {
				end = at(l.Expires)
			}
			next := min(max((end-m.at)/2, time.Minute), end-m.at) + m.at
			if n+i+1 < len(w.sent()) {
				require.InDelta(t, next.Seconds(), w.sent()[n+i+1].at.Seconds(), 0.1, "half of the rest, at least a minute")
			} else {
				require.Equal(t, at(l.Expires), next)
			}
		}
		st := w.Current()[webID]
		require.Equal(t, &l, st.Lease)
		require.EqualError(t, st.Err, fmt.Sprintf(`no DHCP server on interface "eth0" has extended the lease of 198.18.0.100 since %s: it ends at %s`, clock(l.Renew), clock(l.Expires)))

		n = len(w.sent())
		changed := w.Changed()
		w.pass(time.Millisecond)
		<-changed
		st = w.Current()[webID]
		require.Nil(t, st.Lease)
		require.Equal(t, addrA, st.Lost)
		require.ErrorContains(t, st.Err, "the lease of 198.18.0.100 ended at "+clock(l.Expires))
		require.Equal(t, dhcpv4.MessageTypeDiscover, w.sent()[n].MessageType())
		require.Equal(t, addrA.String(), w.sent()[n].RequestedIPAddress().String(), "perhaps it is still free")

		w.server(w.grants())
		w.pass(10 * time.Second)
		st = w.Current()[webID]
		require.Equal(t, addrA, st.Lease.Addr)
		require.False(t, st.Lost.IsValid())
		require.NoError(t, st.Err)
	})
}

// Until T2 only the lease's server is asked, whoever else hears it.
func TestAnotherServer(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(w.grants())
		w.Set([]Client{web})
		w.pass(time.Second)
		l := *w.Current()[webID].Lease

		w.server(func(m sent) { w.answer(m, dhcpv4.MessageTypeNak, serverB, addrA) })
		w.pass(time.Until(l.Rebind) - time.Second)
		require.Greater(t, len(w.sent()), 3)
		require.Equal(t, &l, w.Current()[webID].Lease, "the refusal of another server")

		w.server(func(m sent) { w.answer(m, dhcpv4.MessageTypeAck, serverB, addrA) })
		w.pass(2 * time.Second)
		st := w.Current()[webID]
		require.NoError(t, st.Err)
		require.Equal(t, serverB, st.Lease.Server)
		require.Equal(t, l.Acquired, st.Lease.Acquired)
		require.WithinDuration(t, time.Now().Add(time.Hour), st.Lease.Expires, 3*time.Second)

		w.server(func(m sent) { w.answer(m, dhcpv4.MessageTypeNak, serverB, addrA) })
		w.pass(time.Until(st.Lease.Renew) + time.Second)
		st = w.Current()[webID]
		require.Nil(t, st.Lease)
		require.Equal(t, addrA, st.Lost)
		require.ErrorContains(t, st.Err, "DHCP server 198.18.0.3 refused 198.18.0.100")
	})
}

// The server's memory is gone: it must not answer who claims a lease that it
// does not know (RFC 2131 section 4.3.2).
func TestForgotten(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		grants := w.grants()
		w.server(func(m sent) {
			if m.MessageType() == dhcpv4.MessageTypeDiscover || m.ServerIdentifier() != nil {
				grants(m)
			}
		})
		last := netip.MustParseAddr("198.18.0.77")
		w.Set([]Client{{ID: webID, Last: last}})
		w.pass(20 * time.Second)
		st := w.Current()[webID]
		require.Nil(t, st.Lease)
		require.False(t, st.Lost.IsValid(), "nobody took it away")
		require.EqualError(t, st.Err, fmt.Sprintf(`no DHCP server on interface "eth0" has confirmed 198.18.0.77 since %s`, clock(w.began)))
		w.pass(50 * time.Second)
		for _, m := range w.sent()[:requestAttempts] {
			require.Equal(t, dhcpv4.MessageTypeRequest, m.MessageType())
			require.Equal(t, last.String(), m.RequestedIPAddress().String())
			require.Nil(t, m.ServerIdentifier())
		}
		require.Equal(t, last.String(), w.sent()[requestAttempts].RequestedIPAddress().String(), "the DISCOVER asks for it, too")
		st = w.Current()[webID]
		require.Equal(t, addrA, st.Lease.Addr)
		require.Equal(t, last, st.Lost)
		require.NoError(t, st.Err)
	})
}

// A server refuses the client's last address. It may be any server on the segment: the
// address is lost only when a server leases another one.
func TestLastIsRefused(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		grants := w.grants()
		var offers atomic.Bool
		w.server(func(m sent) {
			switch {
			case m.MessageType() == dhcpv4.MessageTypeRequest && m.ServerIdentifier() == nil:
				w.answer(m, dhcpv4.MessageTypeNak, serverB, addrA)
			case offers.Load():
				grants(m)
			}
		})
		last := netip.MustParseAddr("198.18.0.77")
		w.Set([]Client{{ID: webID, Last: last}})
		w.pass(time.Second)
		st := w.Current()[webID]
		require.Nil(t, st.Lease)
		require.False(t, st.Lost.IsValid(), "it may be somebody else's server")
		require.ErrorContains(t, st.Err, "DHCP server 198.18.0.3 refused 198.18.0.77")
		w.pass(20 * time.Second)
		for _, m := range w.sent()[:refusedAttempts] {
			require.Equal(t, dhcpv4.MessageTypeRequest, m.MessageType(), "the answer of the server that leased it may be lost once")
		}
		require.Equal(t, dhcpv4.MessageTypeDiscover, w.sent()[refusedAttempts].MessageType())
		require.False(t, w.Current()[webID].Lost.IsValid())
		offers.Store(true)
		w.pass(lastDelay)
		st = w.Current()[webID]
		require.Equal(t, addrA, st.Lease.Addr)
		require.Equal(t, last, st.Lost)
		require.NoError(t, st.Err)
	})
}

// A rogue server refuses first, and the one that leased the address confirms it.
func TestRefusalBeforeTheConfirmation(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(func(m sent) {
			w.answer(m, dhcpv4.MessageTypeNak, serverB, addrA)
			w.answer(m, dhcpv4.MessageTypeAck, serverA, addrA)
			w.answer(m, dhcpv4.MessageTypeNak, serverB, addrA)
		})
		w.Set([]Client{{ID: webID, Last: addrA}})
		w.pass(time.Second)
		st := w.Current()[webID]
		require.NoError(t, st.Err)
		require.False(t, st.Lost.IsValid())
		require.Equal(t, addrA, st.Lease.Addr)
		require.Equal(t, serverA, st.Lease.Server)
		require.Len(t, w.sent(), 1)
	})
}

// What a new leader takes over is asked for at a pace, and extended at
// different times.
func TestMany(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(func(m sent) {
			addr, _ := netip.AddrFromSlice(m.RequestedIPAddress())
			w.answer(m, dhcpv4.MessageTypeAck, serverA, addr)
		})
		many, last := clients(100), addrA
		for i := range many {
			many[i].Last, last = last, last.Next()
		}
		w.Set(many)
		w.pass(time.Second)
		require.Len(t, w.sent(), 100)
		for _, gap := range gaps(w.sent()) {
			require.Equal(t, 5*time.Millisecond, gap)
		}
		first, late := time.Time{}, time.Time{}
		for _, st := range w.Current() {
			if r := st.Lease.Renew; first.IsZero() || r.Before(first) {
				first = r
			}
			if r := st.Lease.Renew; r.After(late) {
				late = r
			}
		}
		require.Greater(t, late.Sub(first), time.Minute)
	})
}

// A server that refuses what it offers is not asked without end.
func TestRefusals(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(func(m sent) {
			kind := dhcpv4.MessageTypeNak
			if m.MessageType() == dhcpv4.MessageTypeDiscover {
				kind = dhcpv4.MessageTypeOffer
			}
			w.answer(m, kind, serverA, addrA, dhcpv4.WithOption(dhcpv4.OptMessage("no free leases")))
		})
		w.Set([]Client{web})
		w.pass(10 * time.Minute)
		require.InDelta(t, 2*14, len(w.sent()), 6)
		require.EqualError(t, w.Current()[webID].Err, `DHCP server 198.18.0.2 refused 198.18.0.100: "no free leases"`)
	})
}

// A machine on the segment answers each message many times, and each time something else is
// wrong. One error comes of a message: each is a write of the Service, and a line in the log.
func TestManyAnswersAreOneError(t *testing.T) {
	t.Parallel()
	for name, flood := range map[string]func(w *world, m sent, i byte){
		"unusable": func(w *world, m sent, i byte) {
			w.answer(m, dhcpv4.MessageTypeOffer, serverB, netip.AddrFrom4([4]byte{127, 0, 0, i}))
		},
		"refused": func(w *world, m sent, i byte) {
			why := dhcpv4.WithOption(dhcpv4.OptMessage(fmt.Sprint("no ", i)))
			w.answer(m, dhcpv4.MessageTypeNak, netip.AddrFrom4([4]byte{198, 18, 0, i}), addrA, why)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			simulate(t, func(w *world) {
				w.server(func(m sent) {
					for i := range byte(50) {
						flood(w, m, i+1)
					}
				})
				w.Set([]Client{{ID: webID, Last: addrA}})
				w.pass(10 * time.Minute)
				errors := strings.Count(w.log.String(), "no lease yet")
				require.Positive(t, errors)
				require.LessOrEqual(t, errors, len(w.sent())+1, "and that nobody has confirmed the address")
				w.server(w.grants())
				w.pass(lastDelay + time.Second)
				require.NotNil(t, w.Current()[webID].Lease)
				require.NoError(t, w.Current()[webID].Err)
			})
		})
	}
}

// A server leases an address and takes it away at once, or leases it for a second, again and
// again. The client waits longer each time, since each time its Service is written; and once it
// has had a lease for a while, it does not wait when that is over.
func TestServerThatGivesAndTakes(t *testing.T) {
	t.Parallel()
	for name, seconds := range map[string]uint32{"refuses": 8, "for a second": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			simulate(t, func(w *world) {
				w.server(func(m sent) {
					switch {
					case m.MessageType() == dhcpv4.MessageTypeDiscover:
						w.answer(m, dhcpv4.MessageTypeOffer, serverA, addrA)
					case m.ServerIdentifier() != nil:
						w.answer(m, dhcpv4.MessageTypeAck, serverA, addrA, dhcpv4.WithLeaseTime(seconds))
					case seconds > 1:
						w.answer(m, dhcpv4.MessageTypeNak, serverA, addrA)
					}
				})
				w.Set([]Client{web})
				w.pass(20 * time.Minute)
				lost := strings.Count(w.log.String(), "address lost")
				require.Greater(t, lost, 10)
				require.Less(t, lost, 40)

				w.server(w.grants())
				w.pass(2 * lastDelay)
				require.NotNil(t, w.Current()[webID].Lease)
				w.server(func(m sent) {
					if m.MessageType() == dhcpv4.MessageTypeRequest && m.ServerIdentifier() == nil {
						w.answer(m, dhcpv4.MessageTypeNak, serverA, addrA)
					}
				})
				w.pass(time.Until(w.Current()[webID].Lease.Renew))
				n := len(w.sent())
				w.pass(time.Second)
				require.Equal(t, dhcpv4.MessageTypeDiscover, w.since(n)[len(w.since(n))-1].MessageType(), "at once")
			})
		})
	}
}

// One DISCOVER at a time; who waits longest for nothing lets others go first.
func TestTurns(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		all := clients(20)
		w.Set(all)
		w.pass(time.Minute)
		for _, gap := range gaps(w.sent()) {
			require.GreaterOrEqual(t, gap, turnTime)
		}
		for _, st := range w.Current() {
			require.ErrorContains(t, st.Err, " (VIPs waiting: 20); check that a server or a relay serves its segment")
		}
		full := w.grants()
		w.server(full)
		w.pass(10 * time.Second)
		require.True(t, allLeased(w.Current()))

		// A used up range, and a client with a reservation.
		w.server(func(m sent) {
			if strings.HasPrefix(string(m.Options.Get(dhcpv4.OptionClientIdentifier)[1:]), "lab/") {
				full(m)
			}
		})
		var more []Client
		for i := range 100 {
			more = append(more, Client{ID: fmt.Sprint("none-", i)})
		}
		w.Set(append(more, all...))
		w.pass(10 * time.Minute)
		w.Set(append(append([]Client{{ID: "lab/new"}}, more...), all...))
		w.pass(turnTime + time.Second)
		states := w.Current()
		require.NotNil(t, states["lab/new"].Lease)
		require.ErrorContains(t, states["none-0"].Err, " (VIPs waiting: 100); a server answers others, so its range may be used up")
	})
}

// A namespace with many clients delays no other's, be they new, asking in vain, or taken away to come anew.
func TestNamespacesTakeTurns(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		crowd := func(round int) (many []Client) {
			for i := range 100 {
				many = append(many, Client{ID: fmt.Sprintf("lab/crowd/web-%d-%d", round, i), Namespace: "crowd"})
			}
			return many
		}
		ours := Client{ID: "lab/shop/web", Namespace: "shop"}
		asked := func(from int) bool {
			return slices.ContainsFunc(w.since(from), func(m sent) bool {
				return string(m.Options.Get(dhcpv4.OptionClientIdentifier)[1:]) == ours.ID
			})
		}
		w.Set(crowd(0))
		w.pass(time.Minute)
		n := len(w.sent())
		w.Set(append(crowd(0), ours))
		w.pass(turnTime + time.Second)
		require.True(t, asked(n))
		for round := range 40 {
			n = len(w.sent())
			for range 4 { // within what a client waits that asks in vain
				w.Set([]Client{ours})
				w.Set(append(crowd(round), ours))
				w.pass((lastDelay + 3*turnTime) / 4)
			}
			require.True(t, asked(n), "round %d", round)
		}
	})
}

// A server decides how often its leases are extended. However often that is, and however many there are, a new
// client has an address as soon as otherwise.
func TestExtensionsDelayNoNewLease(t *testing.T) {
	t.Parallel()
	for name, terms := range map[string]dhcpv4.Modifier{
		"leases of a second":      dhcpv4.WithLeaseTime(1),
		"extended after a second": with(dhcpv4.OptionRenewTimeValue, 0, 0, 0, 1),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			simulate(t, func(w *world) {
				given := map[string]netip.Addr{}
				last := addrA
				w.server(func(m sent) {
					id := string(m.Options.Get(dhcpv4.OptionClientIdentifier))
					if !given[id].IsValid() {
						given[id], last = last, last.Next()
					}
					kind := dhcpv4.MessageTypeAck
					if m.MessageType() == dhcpv4.MessageTypeDiscover {
						kind = dhcpv4.MessageTypeOffer
					}
					w.answer(m, kind, serverA, given[id], terms, dhcpv4.WithNetmask(net.CIDRMask(16, 32)))
				})
				all := clients(300)
				w.Set(all)
				w.pass(20 * time.Second)
				require.Greater(t, leased(w.Current()), 50)
				n := len(w.sent())
				w.pass(time.Second)
				require.Greater(t, len(w.since(n)), 100, "of the 200 that may be sent")

				ours := Client{ID: "lab/shop/web", Namespace: "shop"}
				w.Set(append(all, ours))
				w.pass(time.Second / 10)
				require.NotNil(t, w.Current()[ours.ID].Lease)
			})
		})
	}
}

// Servers choose the address by hardware address and offer it until it is
// taken: who is offered what another is about to take asks again.
func TestSameOffer(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		var late []sent
		w.server(func(m sent) { late = append(late, m) })
		w.Set(clients(2))
		w.pass(turnTime + time.Second/2)
		require.Len(t, late, 2)
		w.server(func(m sent) {})
		for _, m := range late {
			w.answer(m, dhcpv4.MessageTypeOffer, serverA, addrA)
		}
		synctest.Wait()
		require.Len(t, w.since(2), 1)
		require.Equal(t, dhcpv4.MessageTypeRequest, w.sent()[2].MessageType())
		require.Zero(t, w.sent()[2].NumSeconds, "as in the DISCOVER, RFC 2131 section 3.1.3")
		grants := w.grants()
		w.server(grants)
		grants(w.sent()[2])
		w.pass(5 * time.Second)
		require.True(t, allLeased(w.Current()), show(w.Current()))
		require.NotContains(t, w.log.String(), "no lease yet")
	})
}

func TestSet(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(w.grants())
		bad := []Client{{ID: ""}, {ID: strings.Repeat("x", 255)}}
		w.Set(append(clients(3), bad...))
		w.pass(time.Second)
		require.Equal(t, 3, leased(w.Current()))
		require.EqualError(t, w.Current()[""].Err, "client identifier of 0 bytes, must have 1 to 254")
		require.EqualError(t, w.Current()[bad[1].ID].Err, "client identifier of 255 bytes, must have 1 to 254")

		n, changed := len(w.sent()), w.Changed()
		for range 100 {
			w.Set(append(clients(3), bad...))
		}
		w.pass(time.Minute)
		require.Len(t, w.sent(), n)
		select {
		case <-changed:
			t.Error("changed by the same set")
		default:
		}

		w.Set(clients(2))
		<-changed
		w.pass(time.Second)
		require.Len(t, w.since(n), 1)
		require.Equal(t, dhcpv4.MessageTypeRelease, w.sent()[n].MessageType())
		require.Len(t, w.Current(), 2)

		// A client that comes back before its going was noticed keeps its lease.
		n = len(w.sent())
		w.setUp(false)
		w.Set(clients(3)) // finds the interface down
		w.pass(time.Second)
		w.Set(clients(1))
		w.Set(clients(2))
		w.setUp(true)
		w.pass(time.Minute)
		require.Equal(t, 2, leased(w.Current()))
		for _, m := range w.since(n) {
			require.NotEqual(t, dhcpv4.MessageTypeRelease, m.MessageType())
		}

		n = len(w.sent())
		w.Set(clients(1))
		w.stop()
		w.pass(time.Second)
		require.Len(t, w.since(n), 1, "nothing is released at the end but what was given up")
		require.Equal(t, clientID(clients(2)[1].ID), w.sent()[n].Options.Get(dhcpv4.OptionClientIdentifier))
		require.Equal(t, dhcpv4.MessageTypeRelease, w.sent()[n].MessageType())
	})
}

// What the client had last becomes known, or wrong, while it asks.
func TestLastChanges(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.Set([]Client{{ID: webID, Last: addrA}})
		w.pass(pace)
		w.Set([]Client{{ID: webID, Last: addrB}})
		w.pass(pace)
		w.Set([]Client{{ID: webID, Last: netip.MustParseAddr("2001:db8::1")}})
		w.pass(time.Second)
		require.Len(t, w.sent(), 3)
		require.Equal(t, addrA.String(), w.sent()[0].RequestedIPAddress().String())
		require.Equal(t, addrB.String(), w.sent()[1].RequestedIPAddress().String())
		require.Equal(t, dhcpv4.MessageTypeDiscover, w.sent()[2].MessageType())
		w.answer(w.sent()[0], dhcpv4.MessageTypeAck, serverA, addrA) // too late
		w.pass(time.Second)
		require.Nil(t, w.Current()[webID].Lease)
	})
}

// A lease ends in time also where no packet can be sent.
func TestInterfaceStaysAway(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(w.grants())
		w.Set([]Client{web})
		w.pass(time.Second)
		w.setUp(false)
		w.pass(40 * time.Minute)
		require.EqualError(t, w.Current()[webID].Err, `interface "eth0" is down`)
		require.NotNil(t, w.Current()[webID].Lease)
		w.pass(21 * time.Minute)
		st := w.Current()[webID]
		require.Nil(t, st.Lease)
		require.Equal(t, addrA, st.Lost)
		require.ErrorContains(t, st.Err, `; interface "eth0" is down`)
		require.Equal(t, 2, strings.Count(w.log.String(), "level=WARN"), w.log.String())

		w.setUp(true)
		w.pass(lastRetry + 2*settleTime)
		require.NoError(t, w.Current()[webID].Err)
	})
}

// A lease that was given up while no packet could be sent is released when the link is back: a server would keep the address
// from everybody until the lease ends.
func TestAReleaseOutlastsTheInterface(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.server(w.grants())
		other := Client{ID: "lab/default/other/0"}
		w.Set([]Client{web, other})
		w.pass(30 * time.Second)
		require.NotNil(t, w.Current()[other.ID].Lease)
		had := w.Current()[web.ID].Lease.Addr
		w.setUp(false)
		w.Set([]Client{other})
		w.pass(time.Minute)
		n := len(w.sent())
		w.setUp(true)
		w.pass(lastRetry + 2*settleTime)
		require.Len(t, w.since(n), 1)
		m := w.since(n)[0]
		require.Equal(t, dhcpv4.MessageTypeRelease, m.MessageType())
		require.Equal(t, had.AsSlice(), []byte(m.ClientIPAddr))

		w.setUp(false)
		w.Set(nil)
		w.pass(time.Minute)
		w.Set([]Client{other}) // it is back before the link is
		n = len(w.sent())
		w.setUp(true)
		w.pass(time.Minute)
		for _, m := range w.since(n) {
			require.NotEqual(t, dhcpv4.MessageTypeRelease, m.MessageType())
		}
	})
}

// Who has asked in vain for long does not wait for long when the link is back.
func TestInterfaceComesBack(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.Set([]Client{web})
		for w.pass(time.Minute); len(w.sent()) < 7; w.pass(time.Second) {
		}
		w.setUp(false)
		for w.Current()[webID].Err.Error() != `interface "eth0" is down` {
			w.pass(time.Second)
		}
		w.server(w.grants())
		w.setUp(true)
		w.pass(lastRetry + settleTime)
		require.NotNil(t, w.Current()[webID].Lease)
	})
}

func TestNotAllowed(t *testing.T) {
	t.Parallel()
	simulate(t, func(w *world) {
		w.refuse.Store(true)
		w.Set([]Client{web})
		w.pass(time.Minute)
		require.EqualError(t, w.Current()[webID].Err, `open a packet socket on interface "eth0": operation not permitted: `+
			`leases need the capability NET_RAW; with Helm, set controller.dhcp.enabled`)
		require.Equal(t, 1, strings.Count(w.log.String(), "level=WARN"))
	})
}
