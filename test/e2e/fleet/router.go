package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// RouterASN is the router's AS number.
const RouterASN = 64513

// frr takes sessions from all hosts of the segment in other ASes, and BFD.
var frr = fmt.Sprintf(`frr defaults datacenter
router bgp %d
 bgp router-id %s
 no bgp ebgp-requires-policy
 neighbor nodes peer-group
 neighbor nodes remote-as external
 neighbor nodes bfd 3 50 50
 bgp listen range 198.18.255.0/24 peer-group nodes
 bgp listen limit 250
 address-family ipv4 unicast
  maximum-paths 64
 exit-address-family
`, RouterASN, routerHost)

// Router is FRR at 198.18.255.252, a host of the segment. What its kernel sends
// to VIPs it spreads over the nodes that announce them.
type Router struct {
	// Namespace is the host's.
	Namespace string

	fleet   *Fleet
	dir     string
	daemons []*exec.Cmd
}

// startRouter starts the router, if one was asked for.
func (f *Fleet) startRouter(ctx context.Context) error {
	if !f.options.Router {
		return nil
	}
	f.Router = &Router{Namespace: f.host("router"), fleet: f, dir: f.routerDir()}
	f.closers = append(f.closers, f.Router.Kill)
	err := netns.Do(f.Router.Namespace, func() error { // by ports, too
		return os.WriteFile("/proc/sys/net/ipv4/fib_multipath_hash_policy", []byte("1"), 0)
	})
	return errors.Join(err, f.Router.Start(ctx))
}

// Start starts the daemons, again after Kill, and returns when they answer. The
// one of BFD has priority over other programs of the machine.
func (r *Router) Start(ctx context.Context) error {
	conf := filepath.Join(r.dir, "frr.conf")
	if err := os.WriteFile(conf, []byte(frr), 0o644); err != nil {
		return err
	}
	specs, err := lab.FRR(conf, r.dir)
	if err != nil {
		return err
	}
	for _, spec := range specs {
		log, err := os.Create(r.Log(spec.Name))
		if err != nil {
			return err
		}
		defer log.Close()
		if spec.Name == "bfdd" {
			spec.Args = append([]string{"chrt", "--rr", "1"}, spec.Args...)
		}
		cmd := netns.Command(context.Background(), r.Namespace, spec.Args...)
		cmd.Stdout, cmd.Stderr = log, log
		if err := cmd.Start(); err != nil {
			return fmt.Errorf("start %s: %w", spec.Name, err)
		}
		r.daemons = append(r.daemons, cmd)
		if err := r.await(ctx, spec.Name); err != nil {
			return err
		}
	}
	return nil
}

// await waits until a daemon answers.
func (r *Router) await(ctx context.Context, daemon string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for exec.CommandContext(ctx, "vtysh", "--vty_socket", r.dir, "-d", daemon, "-c", "show version").Run() != nil {
		select {
		case <-ctx.Done():
			log, _ := os.ReadFile(r.Log(daemon))
			return fmt.Errorf("%s does not answer: %s", daemon, log)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// Log is the log file of a daemon. It goes with the fleet.
func (r *Router) Log(daemon string) string { return filepath.Join(r.dir, daemon+".log") }

// Kill ends the daemons as a crash does. Their kernel keeps no routes: bgpd's go
// with zebra's next start.
func (r *Router) Kill() (failed error) {
	for _, cmd := range r.daemons {
		failed = errors.Join(failed, cmd.Process.Kill())
		_ = cmd.Wait() // killed
	}
	r.daemons = nil
	return failed
}

// Ask gives the daemons commands of vtysh and returns the answer.
func (r *Router) Ask(ctx context.Context, commands ...string) (string, error) {
	args := []string{"--vty_socket", r.dir}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	out, err := exec.CommandContext(ctx, "vtysh", args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("ask the router %q: %w: %s", commands, err, out)
	}
	return string(out), nil
}

// Configure changes the configuration of its BGP until Kill.
func (r *Router) Configure(ctx context.Context, commands ...string) error {
	_, err := r.Ask(ctx, append([]string{"configure terminal", fmt.Sprint("router bgp ", RouterASN)}, commands...)...)
	return err
}

// Session is a node's session as the router sees it.
type Session struct {
	State string `json:"bgpState"`
	// Times is how often it came up; that of a neighbour that is gone is
	// forgotten.
	Times int `json:"connectionsEstablished"`
	// Millis is how long it has been up.
	Millis   int    `json:"bgpTimerUpMsec"`
	RouterID string `json:"remoteRouterId"`
	Stats    struct {
		Updates int `json:"updatesRecv"`
	} `json:"messageStats"`
	Families map[string]struct {
		Prefixes int `json:"acceptedPrefixCounter"`
	} `json:"addressFamilyInfo"`
}

// Prefixes is how many the node has announced and not withdrawn.
func (s Session) Prefixes() int { return s.Families["ipv4Unicast"].Prefixes }

// Session returns the node's session; the zero one if there is none.
func (r *Router) Session(ctx context.Context, node string) (Session, error) {
	text, err := r.Ask(ctx, "show bgp neighbors json")
	if err != nil {
		return Session{}, err
	}
	all := map[string]json.RawMessage{} // not all of its values are sessions
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return Session{}, fmt.Errorf("read the router's sessions: %w: %s", err, text)
	}
	var s Session
	if raw, ok := all[r.fleet.Host(node).String()]; ok {
		err = json.Unmarshal(raw, &s)
	}
	return s, err
}

// NextHops returns the nodes that the router's kernel sends the VIP's packets to,
// sorted.
func (r *Router) NextHops(vip netip.Addr) ([]string, error) {
	handle, err := netns.Netlink(r.Namespace)
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	to := &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(vip.BitLen(), vip.BitLen())}
	routes, err := handle.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Dst: to}, netlink.RT_FILTER_DST)
	if err != nil {
		return nil, fmt.Errorf("list the router's routes: %w", err)
	}
	var nodes []string
	for _, route := range routes {
		hops := []net.IP{route.Gw}
		for _, hop := range route.MultiPath {
			hops = append(hops, hop.Gw)
		}
		for i, name := range r.fleet.names {
			if slices.ContainsFunc(hops, net.IP(nodeHost(i+1).AsSlice()).Equal) {
				nodes = append(nodes, name)
			}
		}
	}
	slices.Sort(nodes)
	return nodes, nil
}
