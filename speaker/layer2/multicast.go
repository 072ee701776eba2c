package layer2

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/speaker/layer2/segment"
	"github.com/lodestone-lb/lodestone/speaker/layer2/wire"
)

// GroupSocket is a membership in IPv6 multicast groups. While it is open, the kernel receives what is sent
// to the groups, and asks switches by MLD (RFC 3810) to forward it.
type GroupSocket interface {
	// Join joins a group on the interface of that index. It fails with ENOBUFS or ENOMEM when the socket
	// has no room for more groups.
	Join(index int, group netip.Addr) error
	Leave(index int, group netip.Addr) error
	// Close leaves all groups.
	Close() error
}

// OpenGroups opens a GroupSocket in this process's network namespace.
func OpenGroups() (GroupSocket, error) {
	// Bound to no port, it receives nothing.
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open IPv6 socket: %w", err)
	}
	return groupSocket(fd), nil
}

type groupSocket int

func (s groupSocket) Join(index int, group netip.Addr) error {
	return s.set(unix.IPV6_JOIN_GROUP, index, group)
}

func (s groupSocket) Leave(index int, group netip.Addr) error {
	return s.set(unix.IPV6_LEAVE_GROUP, index, group)
}

func (s groupSocket) set(option, index int, group netip.Addr) error {
	return unix.SetsockoptIPv6Mreq(int(s), unix.IPPROTO_IPV6, option, &unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(index)})
}

func (s groupSocket) Close() error { return unix.Close(int(s)) }

// groupsOf returns the groups in which hosts ask for these VIPs. VIPs with the same last 24 bits share one.
func groupsOf(vips map[netip.Addr]segment.VIP) map[netip.Addr]bool {
	groups := map[netip.Addr]bool{}
	for vip := range vips {
		if vip.Is6() {
			groups[wire.SolicitedNode(vip)] = true
		}
	}
	return groups
}

// checkGroups is how often a socket looks whether the kernel is still in its groups. Where IPv6 starts anew on an
// interface, as after an MTU below 1280, the kernel forgets them. Who joined before, and leaves later, even takes them
// from who has joined since. Older kernels notify of neither.
const checkGroups = 5 * time.Second

// join keeps the socket in the groups of its VIPs until ctx ends. It is a task of its own because the
// kernel may make it wait for others that configure interfaces.
func (s *socket) join(ctx context.Context) error {
	defer s.groups.close()
	check := time.NewTicker(checkGroups)
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.regroup:
		case <-check.C:
		}
		if err := s.groups.set(ctx, groupsOf(*s.vips.Load())); err != nil {
			s.counters.groupErrors.Inc()
			return fmt.Errorf("%w on interface %q: %w", errGroups, s.key.name, err)
		}
	}
}

// joinedGroups are the multicast groups that are joined on an interface.
type joinedGroups struct {
	index int
	open  func() (GroupSocket, error)
	// kernel returns the groups that the kernel is in. Nil: it is not known.
	kernel func(index int) (map[netip.Addr]bool, error)
	// sockets are several if there are many groups: the kernel limits the memory of a socket (sysctl
	// net.core.optmem_max), to some 300 groups before Linux 6.7.
	sockets []GroupSocket
	joined  map[netip.Addr]GroupSocket
}

// set leaves the groups that are not wanted, or that the kernel has forgotten, and joins those that are wanted. It stops
// when ctx ends.
func (g *joinedGroups) set(ctx context.Context, want map[netip.Addr]bool) error {
	forgotten := g.forgotten()
	for group, s := range g.joined {
		if want[group] && !forgotten[group] || ctx.Err() != nil {
			continue
		}
		if err := s.Leave(g.index, group); err != nil {
			return fmt.Errorf("leave %s: %w", group, err)
		}
		delete(g.joined, group)
	}
	for group := range want {
		if g.joined[group] != nil || ctx.Err() != nil {
			continue
		}
		if err := g.join(group); err != nil {
			return fmt.Errorf("join %s beside %d others: %w", group, len(g.joined), err)
		}
	}
	return nil
}

// forgotten returns the joined groups that the kernel is not in. If it does not answer, it is asked again in a moment.
func (g *joinedGroups) forgotten() map[netip.Addr]bool {
	forgotten := map[netip.Addr]bool{}
	if len(g.joined) == 0 || g.kernel == nil {
		return forgotten
	}
	there, err := g.kernel(g.index)
	for group := range g.joined {
		forgotten[group] = err == nil && !there[group]
	}
	return forgotten
}

// join joins a group by the first socket that has room.
func (g *joinedGroups) join(group netip.Addr) error {
	for _, s := range g.sockets {
		switch err := s.Join(g.index, group); {
		case err == nil:
			g.joined[group] = s
			return nil
		case !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.ENOMEM):
			return err
		}
	}
	s, err := g.open()
	if err != nil {
		return err
	}
	g.sockets = append(g.sockets, s)
	if err := s.Join(g.index, group); err != nil {
		return err
	}
	g.joined[group] = s
	return nil
}

func (g *joinedGroups) close() {
	for _, s := range g.sockets {
		s.Close()
	}
}
