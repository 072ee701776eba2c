// Package netstate has a live view of the network interfaces of a network namespace. It uses netlink and not
// /sys, which may be another namespace's.
//
//	netstate.go         Watcher: the interfaces and their addresses
//	gateways.go         GatewayWatcher: the default gateways
//	nexthops.go         the addresses of an interface that routers can use as next hops
//	multicastgroups.go  the multicast groups that the kernel has joined
//	counters.go         how many frames an interface has received
package netstate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/pkg/notify"
)

// Interface is a network interface at one moment.
type Interface struct {
	Index int
	Name  string
	// Kind is the kernel's name of the driver's kind: "device", "veth",
	// "bridge", "bond", "vlan", "tuntap", ...
	Kind         string
	HardwareAddr net.HardwareAddr
	// Up is set when the interface can carry packets: administratively up, with a carrier (RFC 2863
	// operational status up, or unknown if the driver does not report it).
	Up bool
	// Loopback, Ethernet and NoARP are what runs on the link.
	Loopback, Ethernet, NoARP bool
	MTU                       int
	// Master is the index of the bridge, bond or VRF that the interface is
	// enslaved to. Zero: none.
	Master int
	// Addrs are the addresses, in order.
	Addrs []netip.Prefix
	// Tentative are those of Addrs that cannot be used: duplicate address detection is still running, or
	// has found another host with the address.
	Tentative []netip.Prefix
}

// LinkLocal returns an IPv6 link-local address of the interface, and whether it can be used. It returns one that can be used if
// there is one, and no valid address if there is none at all.
func (i Interface) LinkLocal() (addr netip.Addr, usable bool) {
	for _, p := range i.Addrs {
		switch {
		case !p.Addr().Is6() || !p.Addr().IsLinkLocalUnicast():
		case slices.Contains(i.Tentative, p):
			addr = p.Addr()
		default:
			return p.Addr(), true
		}
	}
	return addr, false
}

// Interfaces is the live view of the node's interfaces; Watcher is one.
type Interfaces interface {
	Ready() <-chan struct{}
	// Changed returns a channel that is closed by the next change.
	Changed() <-chan struct{}
	Interfaces() []Interface
}

// receiveBuffer holds the notifications of a burst (a node that starts a hundred pods) until we read them. An
// overrun only costs a full resync.
const receiveBuffer = 1 << 20

const (
	// dumpAttempts is how often a list is requested that changes in the meantime. The pauses between the attempts begin with
	// twice dumpPause and double, and sum up to a quarter of a second.
	dumpAttempts = 8
	dumpPause    = time.Millisecond
	// resyncPause is the wait after the last attempt.
	resyncPause = time.Second
)

// Options are what a Watcher needs. The zero value works.
type Options struct {
	// Namespace is the network namespace to watch. Nil: this process's own.
	Namespace *netns.NsHandle
	// Log may be nil.
	Log *slog.Logger
}

// Watcher is a task that keeps the view up to date. It subscribes and never polls.
type Watcher struct {
	namespace netns.NsHandle
	log       *slog.Logger
	buffer    int
	ready     chan struct{}
	listed    sync.Once // closes ready
	view      atomic.Pointer[[]Interface]
	changed   notify.Signal
}

// New returns a Watcher that knows no interface until it runs.
func New(o Options) *Watcher {
	w := &Watcher{namespace: netns.None(), log: o.Log, buffer: receiveBuffer, ready: make(chan struct{})}
	if o.Namespace != nil {
		w.namespace = *o.Namespace
	}
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	w.view.Store(new([]Interface))
	return w
}

// String names the task.
func (w *Watcher) String() string { return "netstate" }

// Ready is closed once Interfaces returns all interfaces.
func (w *Watcher) Ready() <-chan struct{} { return w.ready }

// Interfaces returns the interfaces, ordered by index. The slice is shared:
// do not modify it.
func (w *Watcher) Interfaces() []Interface { return *w.view.Load() }

// Changed returns a channel that is closed when Interfaces returns something else. Take the channel first, then
// ask, and no change is missed.
func (w *Watcher) Changed() <-chan struct{} { return w.changed.Next() }

// Run keeps the view until ctx ends. Lost notifications cost a resync; an
// error is returned only when the kernel refuses to list or to notify.
func (w *Watcher) Run(ctx context.Context) error {
	for {
		lost, err := w.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		switch {
		case errors.Is(err, netlink.ErrDumpInterrupted): // the view stays as it is meanwhile
			lost = err
			select {
			case <-ctx.Done():
			case <-time.After(resyncPause):
			}
		case err != nil:
			return err
		}
		w.log.Debug("resyncing interfaces", "cause", lost)
	}
}

// follow subscribes, lists everything, then applies notifications until some are lost. Notifications from
// before the list are applied, too. That does no harm: each has the whole state of its object, and the last
// one wins.
func (w *Watcher) follow(ctx context.Context) (lost, err error) {
	s, err := subscribe(w.namespace, w.buffer)
	if err != nil {
		return nil, err
	}
	defer s.close()
	t, err := list(w.namespace)
	if err != nil {
		return nil, err
	}
	w.publish(t)
	for {
		changed := false
		select {
		case <-ctx.Done():
			return nil, nil
		case u, ok := <-s.links:
			if !ok {
				return <-s.lost, nil
			}
			changed = t.link(u)
		case u, ok := <-s.addrs:
			if !ok {
				return <-s.lost, nil
			}
			changed = t.addr(u)
		}
		if changed {
			w.publish(t)
		}
	}
}

// publish makes the table the current view, if it differs from it.
func (w *Watcher) publish(t table) {
	next := slices.SortedFunc(maps.Values(t), func(a, b Interface) int { return cmp.Compare(a.Index, b.Index) })
	// An address may be notified before its interface.
	next = slices.DeleteFunc(next, func(i Interface) bool { return i.Name == "" })
	if !reflect.DeepEqual(*w.view.Load(), next) {
		w.view.Store(&next)
		w.changed.Notify()
	}
	w.listed.Do(func() { close(w.ready) })
}

// subscription is a stream of notifications. Both channels are closed when their socket ends. Then lost has
// the cause.
type subscription struct {
	links chan netlink.LinkUpdate
	addrs chan netlink.AddrUpdate
	lost  chan error
	done  chan struct{}
}

func subscribe(namespace netns.NsHandle, buffer int) (*subscription, error) {
	s := &subscription{
		links: make(chan netlink.LinkUpdate),
		addrs: make(chan netlink.AddrUpdate),
		lost:  make(chan error, 2),
		done:  make(chan struct{}),
	}
	fail := func(err error) {
		select {
		case s.lost <- err:
		default: // a third error: the first shows enough
		}
	}
	err := netlink.LinkSubscribeWithOptions(s.links, s.done, netlink.LinkSubscribeOptions{
		Namespace: &namespace, ErrorCallback: fail, ReceiveBufferSize: buffer})
	if err != nil {
		return nil, fmt.Errorf("subscribe to links: %w", err)
	}
	err = netlink.AddrSubscribeWithOptions(s.addrs, s.done, netlink.AddrSubscribeOptions{
		Namespace: &namespace, ErrorCallback: fail, ReceiveBufferSize: buffer})
	if err != nil {
		close(s.done)
		drain(s.links)
		return nil, fmt.Errorf("subscribe to addresses: %w", err)
	}
	return s, nil
}

// close closes the sockets and waits for their readers.
func (s *subscription) close() {
	close(s.done)
	drain(s.links)
	drain(s.addrs)
}

func drain[T any](c <-chan T) {
	for range c {
	}
}

// table is the state by interface index.
type table map[int]Interface

func list(namespace netns.NsHandle) (table, error) {
	h, err := netlink.NewHandleAt(namespace, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	links, err := Whole(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	addrs, err := Whole(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	t := table{}
	for _, l := range links {
		t.link(netlink.LinkUpdate{Header: unix.NlMsghdr{Type: unix.RTM_NEWLINK}, Link: l})
	}
	for _, a := range addrs {
		t.addr(netlink.AddrUpdate{LinkIndex: a.LinkIndex, LinkAddress: *a.IPNet, Flags: a.Flags, NewAddr: true})
	}
	return t, nil
}

// Pause returns how long to wait after a look at a whole table of the kernel, which may be a full BGP table, that took so long. A
// program that changes the table all the time then costs a tenth of a core at most, unless a look takes longer than half a second.
// The pause has a limit because a process that was stopped in the midst of a look measures the stop, too.
func Pause(least, took time.Duration) time.Duration { return min(max(least, 9*took), 5*time.Second) }

// Whole returns the first answer of ask that is complete. If a list changes while it is read, the kernel marks it as interrupted,
// and even unchanged entries may be missing. Whole then asks again, and returns netlink.ErrDumpInterrupted after dumpAttempts.
func Whole[T any](ask func() ([]T, error)) ([]T, error) {
	for attempt := 1; ; attempt++ {
		got, err := ask()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return got, err
		}
		if attempt == dumpAttempts {
			return nil, err
		}
		time.Sleep(dumpPause << attempt)
	}
}

// link applies a notification and reports whether it changed something.
func (t table) link(u netlink.LinkUpdate) bool {
	a := u.Attrs()
	if u.Family != unix.AF_UNSPEC {
		return false // a bridge's message about a port: an AF_BRIDGE RTM_DELLINK deletes no interface
	}
	old := t[a.Index]
	if u.Header.Type == unix.RTM_DELLINK {
		// Its addresses go by messages of their own on another socket, from which those of one that is back already may have come.
		if delete(t, a.Index); len(old.Addrs) > 0 {
			t[a.Index] = Interface{Addrs: old.Addrs, Tentative: old.Tentative}
		}
		return old.Name != ""
	}
	if a.MTU == 0 && old.MTU != 0 {
		return false // a wireless driver's event, such as the end of a scan: it has the interface's name and flags alone
	}
	// The kernel sets IFF_RUNNING from the operational status.
	const up = unix.IFF_UP | unix.IFF_RUNNING
	next := Interface{
		Index:        a.Index,
		Name:         a.Name,
		Kind:         u.Type(),
		HardwareAddr: a.HardwareAddr,
		Up:           a.RawFlags&up == up,
		Loopback:     a.RawFlags&unix.IFF_LOOPBACK != 0,
		Ethernet:     a.EncapType == "ether",
		NoARP:        a.RawFlags&unix.IFF_NOARP != 0,
		MTU:          a.MTU,
		Master:       a.MasterIndex,
		Addrs:        old.Addrs,
		Tentative:    old.Tentative,
	}
	t[a.Index] = next
	return !reflect.DeepEqual(old, next)
}

// addr applies a notification and reports whether it changed something.
func (t table) addr(u netlink.AddrUpdate) bool {
	p, ok := netipx.FromStdIPNet(&u.LinkAddress)
	if !ok {
		return false
	}
	i, old := t[u.LinkIndex], t[u.LinkIndex]
	i.Addrs = with(i.Addrs, p, u.NewAddr)
	i.Tentative = with(i.Tentative, p, u.NewAddr && u.Flags&unix.IFA_F_TENTATIVE != 0)
	if t[u.LinkIndex] = i; i.Name == "" && len(i.Addrs) == 0 {
		delete(t, u.LinkIndex) // the interface went before its addresses, as often with pods
	}
	return !reflect.DeepEqual(old, i)
}

// with returns a sorted copy with p or without it. Views share the old slice.
func with(sorted []netip.Prefix, p netip.Prefix, in bool) []netip.Prefix {
	at, found := slices.BinarySearchFunc(sorted, p, netip.Prefix.Compare)
	switch {
	case found == in:
		return sorted
	case in:
		return slices.Insert(slices.Clone(sorted), at, p)
	}
	return slices.Delete(slices.Clone(sorted), at, at+1)
}
