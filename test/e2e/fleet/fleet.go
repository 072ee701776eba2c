// Package fleet runs speakers in network namespaces of their own, on one
// segment, without kubelets: the real program beside an API server in memory and,
// if wanted, a router. So a segment can have more nodes than the lab, VIPs by the
// thousand, and nothing else on the machine.
//
// A node's kernel takes packets for the VIPs that are served and answers them
// itself, in place of kube-proxy and pods.
//
//	fleet.go     Fleet: its hosts, objects and faults
//	speakers.go  the speakers, each a process
//	api.go       the API server
//	router.go    Router: an FRR on the segment
//	wire.go      the frames on the segment, counted
package fleet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/echo"
	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/lock"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/process"
)

// Options describe the fleet.
type Options struct {
	// Speaker is the program.
	Speaker string
	// Nodes is how many there are, at most 200: n1, n2, ..., with their name
	// as the label "node".
	Nodes int
	// Document is the configuration.
	Document string
	// VIPs are the addresses that Services have, one each. They are within
	// 198.18.0.0/17.
	VIPs []netip.Addr
	// Served are those of them that answer datagrams to port 80.
	Served []netip.Addr
	// Router asks for a router on the segment, see Router.
	Router bool
	// Management gives every node a second interface, on a segment of its own, by which it
	// reaches the API server and the other speakers.
	Management bool
}

// Fleet is nodes on a segment that run.
type Fleet struct {
	API *API
	// Client is the namespace of a host on the segment that is no node.
	Client string
	// Router is nil where none was asked for.
	Router *Router

	options  Options
	lock     *lock.Lock
	number   int // of those on this machine
	dir      string
	names    []string // of the nodes
	speakers map[string]*exec.Cmd
	services int // so far
	server   *http.Server
	wire     *wire
	done     chan struct{}
	closers  []func() error
	running  sync.WaitGroup
}

const (
	namespace = "lodestone-system"
	bridge    = "br0"
	second    = "br1" // with Options.Management
	apiPort   = 6443
)

// The segment is 198.18.0.0/16: VIPs in its lower half, then the hosts.
var (
	lower      = netip.MustParsePrefix("198.18.0.0/17")
	apiHost    = netip.MustParseAddr("198.18.255.254")
	clientHost = netip.MustParseAddr("198.18.255.253")
	routerHost = netip.MustParseAddr("198.18.255.252")
)

func nodeHost(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, 255, byte(i)}) }

// management is the host's address on the segment of Options.Management, 198.19.0.0/16.
func management(host netip.Addr) netip.Addr {
	raw := host.As4()
	raw[1] = 19
	return netip.AddrFrom4(raw)
}

// api is where the API server listens.
func (f *Fleet) api() netip.AddrPort {
	if f.options.Management {
		return netip.AddrPortFrom(management(apiHost), apiPort)
	}
	return netip.AddrPortFrom(apiHost, apiPort)
}

// Start starts a fleet. It returns as soon as the speakers run.
func Start(ctx context.Context, o Options) (f *Fleet, err error) {
	f = &Fleet{API: NewAPI(), options: o, speakers: map[string]*exec.Cmd{}, done: make(chan struct{})}
	for i := range o.Nodes {
		f.names = append(f.names, fmt.Sprint("n", i+1))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Stop())
		}
	}()
	if err := f.take(ctx, 1, most); err != nil {
		return f, err
	}
	f.Client = f.host("client")
	for _, step := range []func(context.Context) error{f.build, f.fill, f.serveAPI, f.listen, f.serve, f.startRouter, f.run} {
		if err := step(ctx); err != nil {
			return f, err
		}
	}
	return f, nil
}

// Stop ends all of it.
func (f *Fleet) Stop() error {
	var failed error
	for _, c := range f.speakers {
		failed = errors.Join(failed, c.Process.Kill())
		_ = c.Wait() // killed
	}
	close(f.done)
	for _, c := range slices.Backward(f.closers) {
		failed = errors.Join(failed, c())
	}
	f.running.Wait()
	if f.lock == nil {
		return failed
	}
	defer f.lock.Release()
	return errors.Join(failed, f.remove())
}

// most is how many fleets a machine has at a time. More wait.
const most = 16

// take gives the fleet a number that no other one has, and removes what a fleet of that number left whose program was killed.
func (f *Fleet) take(ctx context.Context, first, last int) (err error) {
	var locks []*lock.Lock
	for n := first; n <= last; n++ {
		locks = append(locks, lock.New(fmt.Sprintf("/run/lodestone-fleet-%d.lock", n)))
	}
	if f.lock, err = lock.First(ctx, func(string, ...any) {}, locks...); err != nil {
		return err
	}
	f.number = first + slices.Index(locks, f.lock)
	f.dir = fmt.Sprintf("/run/lodestone-fleet-%d", f.number)
	if err := f.remove(); err != nil {
		return fmt.Errorf("remove what a killed fleet left: %w", err)
	}
	return os.MkdirAll(f.routerDir(), 0o755)
}

// remove removes what there is of a fleet of this number.
func (f *Fleet) remove() error {
	all, failed := filepath.Glob(netns.Path(f.host("*")))
	for _, path := range all {
		name := filepath.Base(path)
		failed = errors.Join(failed, netns.Kill(name), netns.Delete(name))
	}
	return errors.Join(failed, os.RemoveAll(f.dir))
}

// routerDir is where FRR's user can get to.
func (f *Fleet) routerDir() string { return filepath.Join(f.dir, "router") }

// host is the namespace of a host. Fleets have nothing in common.
func (f *Fleet) host(name string) string { return fmt.Sprintf("ls-fleet%d-%s", f.number, name) }

// build makes the switch and plugs the hosts in.
func (f *Fleet) build(context.Context) error {
	if err := netns.Create(f.host("switch")); err != nil {
		return err
	}
	handle, err := netns.Netlink(f.host("switch"))
	if err != nil {
		return err
	}
	defer handle.Close()
	link := &netlink.Bridge{LinkAttrs: attrs(bridge), MulticastSnooping: new(false)}
	if err := errors.Join(handle.LinkAdd(link), handle.LinkSetUp(link), address(handle, link, apiHost)); err != nil {
		return fmt.Errorf("make the switch: %w", err)
	}
	hosts := map[string]netip.Addr{"client": clientHost}
	if f.options.Router {
		hosts["router"] = routerHost
	}
	for i, name := range f.names {
		hosts[name] = nodeHost(i + 1)
	}
	for name, addr := range hosts {
		if err := netns.Create(f.host(name)); err != nil {
			return err
		}
		if err := f.plug(handle, link, name, name, "eth0", addr); err != nil {
			return fmt.Errorf("plug in %s: %w", name, err)
		}
	}
	if f.options.Management {
		return f.buildManagement(handle)
	}
	return nil
}

// buildManagement gives the nodes their second interface.
func (f *Fleet) buildManagement(handle *netlink.Handle) error {
	link := &netlink.Bridge{LinkAttrs: attrs(second), MulticastSnooping: new(false)}
	if err := errors.Join(handle.LinkAdd(link), handle.LinkSetUp(link), address(handle, link, management(apiHost))); err != nil {
		return fmt.Errorf("make the second switch: %w", err)
	}
	for i, name := range f.names {
		if err := f.plug(handle, link, name, managementPort(name), "eth1", management(nodeHost(i+1))); err != nil {
			return fmt.Errorf("plug in the second interface of %s: %w", name, err)
		}
	}
	return nil
}

func managementPort(node string) string { return "m-" + node }

func attrs(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	return a
}

func address(h *netlink.Handle, link netlink.Link, addr netip.Addr) error {
	return h.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(16, 32)}})
}

// plug gives a host an interface on the port.
func (f *Fleet) plug(h *netlink.Handle, master netlink.Link, name, portName, interfaceName string, addr netip.Addr) error {
	target, err := os.Open(netns.Path(f.host(name)))
	if err != nil {
		return err
	}
	defer target.Close()
	port := &netlink.Veth{LinkAttrs: attrs(portName), PeerName: interfaceName, PeerNamespace: netlink.NsFd(target.Fd())}
	port.MasterIndex = master.Attrs().Index
	if err := errors.Join(h.LinkAdd(port), h.LinkSetUp(port)); err != nil {
		return err
	}
	inside, err := netns.Netlink(f.host(name))
	if err != nil {
		return err
	}
	defer inside.Close()
	lo, err := inside.LinkByName("lo")
	if err != nil {
		return err
	}
	link, err := inside.LinkByName(interfaceName)
	if err != nil {
		return err
	}
	return errors.Join(inside.LinkSetUp(lo), inside.LinkSetUp(link), address(inside, link, addr))
}

// object is one of the API server's.
type object interface {
	metav1.Object
	runtime.Object
}

// fill gives the API server the nodes, the configuration and the Services.
func (f *Fleet) fill(context.Context) error {
	failed := f.Configure(f.options.Document)
	for _, name := range f.names {
		failed = errors.Join(failed, f.Label(name, nil))
	}
	for _, vip := range f.options.VIPs {
		failed = errors.Join(failed, f.AddService(vip))
	}
	return failed
}

// put stores the object in the API server.
func (f *Fleet) put(resource string, object object) error {
	object.SetUID(types.UID(resource + "-" + object.GetName()))
	return f.API.Put(resource, object)
}

// Configure replaces the configuration.
func (f *Fleet) Configure(document string) error {
	return f.put("configmaps", &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "lodestone-config"},
		Data: map[string]string{"config.yaml": document}})
}

// Label replaces the node's labels but for its name.
func (f *Fleet) Label(node string, labels map[string]string) error {
	all := map[string]string{"node": node}
	maps.Copy(all, labels)
	addresses := []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: f.nodeIP(node).String()}}
	return f.put("nodes", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, Labels: all},
		Status: corev1.NodeStatus{Addresses: addresses}})
}

// AddService makes a Service that has the address, and an endpoint. With it is
// stored what an API server stores with one that people have applied.
func (f *Fleet) AddService(vip netip.Addr) error {
	name := nameOf(f.services)
	f.services++
	service := &corev1.Service{ObjectMeta: name,
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolUDP}}}}
	service.Annotations = map[string]string{"lodestone.io/assigned-addresses": vip.String(),
		corev1.LastAppliedConfigAnnotation: strings.Repeat("x", 600)}
	for range 3 {
		service.ManagedFields = append(service.ManagedFields, metav1.ManagedFieldsEntry{Manager: "kubectl", Operation: "Update", APIVersion: "v1",
			FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`"` + strings.Repeat("y", 500) + `"`)})
	}
	service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip.String(), IPMode: new(corev1.LoadBalancerIPModeVIP)}}
	return errors.Join(f.put("services", service), f.putEndpoints(name, discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}}))
}

// Ready sets whether the only endpoint of the first Service is.
func (f *Fleet) Ready(ready bool) error {
	return f.putEndpoints(nameOf(0), discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"},
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &ready}})
}

func (f *Fleet) putEndpoints(service metav1.ObjectMeta, endpoint discoveryv1.Endpoint) error {
	service.Labels = map[string]string{discoveryv1.LabelServiceName: service.Name}
	return f.put("endpointslices", &discoveryv1.EndpointSlice{ObjectMeta: service, AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{endpoint}})
}

func nameOf(service int) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("web-%05d", service)}
}

// serveAPI lets the API server listen on the switch.
func (f *Fleet) serveAPI(context.Context) error {
	var listener net.Listener
	err := netns.Do(f.host("switch"), func() (err error) {
		listener, err = net.Listen("tcp", f.api().String())
		return err
	})
	if err != nil {
		return err
	}
	f.server = &http.Server{Handler: f.API, ReadHeaderTimeout: time.Minute}
	f.closers = append(f.closers, f.server.Close)
	f.running.Go(func() { _ = f.server.Serve(listener) }) // until it is closed
	return nil
}

// StopAPI ends the API server for good.
func (f *Fleet) StopAPI() error { return f.server.Close() }

// listen records what the nodes send from now on.
func (f *Fleet) listen(context.Context) error {
	handle, err := netns.Netlink(f.host("switch"))
	if err != nil {
		return err
	}
	defer handle.Close()
	ports := map[int]string{}
	for _, name := range f.names {
		link, err := handle.LinkByName(name)
		if err != nil {
			return err
		}
		ports[link.Attrs().Index] = name
	}
	if f.wire, err = tap(f.host("switch"), ports, lower); err != nil {
		return err
	}
	f.running.Go(func() {
		defer unix.Close(f.wire.socket)
		f.wire.read(f.done)
	})
	return nil
}

// serve makes every node answer at the VIPs that are served.
func (f *Fleet) serve(context.Context) error {
	for _, name := range f.names {
		handle, err := netns.Netlink(f.host(name))
		if err != nil {
			return err
		}
		defer handle.Close()
		lo, err := handle.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, vip := range f.options.Served {
			if err := handle.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(32, 32)}}); err != nil {
				return err
			}
		}
		// The kernel neither answers for the VIPs on the segment nor claims them,
		// as kube-proxy in IPVS mode has it.
		err = netns.Do(f.host(name), func() error {
			const settings = "/proc/sys/net/ipv4/conf/all/"
			return errors.Join(os.WriteFile(settings+"arp_ignore", []byte("1"), 0), os.WriteFile(settings+"arp_announce", []byte("2"), 0))
		})
		if err != nil {
			return err
		}
		for _, vip := range f.options.Served {
			if err := f.answer(name, netip.AddrPortFrom(vip, 80)); err != nil {
				return err
			}
		}
	}
	return nil
}

// answer answers datagrams to the address on the node.
func (f *Fleet) answer(node string, at netip.AddrPort) error {
	var conn net.PacketConn
	err := netns.Do(f.host(node), func() (err error) {
		conn, err = net.ListenPacket("udp", at.String())
		return err
	})
	if err != nil {
		return err
	}
	f.closers = append(f.closers, conn.Close)
	server := &echo.Server{Node: node, Pod: node}
	f.running.Go(func() { _ = server.ServePackets(conn) }) // until it is closed
	return nil
}

// Log is the log file of a node's speaker. It goes with the fleet.
func (f *Fleet) Log(node string) string { return filepath.Join(f.dir, node+".log") }

// Unplug takes a node's port down: nothing of that node reaches anybody.
func (f *Fleet) Unplug(node string) error { return f.setPort(node, (*netlink.Handle).LinkSetDown) }

// PlugIn brings the node's port back up.
func (f *Fleet) PlugIn(node string) error { return f.setPort(node, (*netlink.Handle).LinkSetUp) }

// UnplugManagement takes the ports of the nodes' second interfaces down.
func (f *Fleet) UnplugManagement(nodes ...string) error {
	return f.setManagement(nodes, (*netlink.Handle).LinkSetDown)
}

// PlugInManagement brings them back up.
func (f *Fleet) PlugInManagement(nodes ...string) error {
	return f.setManagement(nodes, (*netlink.Handle).LinkSetUp)
}

func (f *Fleet) setManagement(nodes []string, set func(*netlink.Handle, netlink.Link) error) (failed error) {
	for _, node := range nodes {
		failed = errors.Join(failed, f.setPort(managementPort(node), set))
	}
	return failed
}

func (f *Fleet) setPort(node string, set func(*netlink.Handle, netlink.Link) error) error {
	handle, err := netns.Netlink(f.host("switch"))
	if err != nil {
		return err
	}
	defer handle.Close()
	link, err := handle.LinkByName(node)
	if err != nil {
		return fmt.Errorf("find the port of %s: %w", node, err)
	}
	return set(handle, link)
}

// Lose drops that percentage of all frames between hosts, at random, until Heal.
// The API server loses nothing.
func (f *Fleet) Lose(percent int) error { return lan.LoseOn(f.host("switch"), percent) }

// Heal ends the loss of frames.
func (f *Fleet) Heal() error { return lan.HealOn(f.host("switch")) }

// Steady waits until every VIP has been announced, and no announcement is
// repeated any more.
func (f *Fleet) Steady(ctx context.Context) error {
	const quiet = 6 * time.Second // longer than a speaker waits before it contradicts another one
	for {
		if owners := f.Owners(); len(owners) == len(f.options.VIPs) && len(f.Claims(time.Now().Add(-quiet))) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d VIPs are announced: %w", len(f.Owners()), len(f.options.VIPs), ctx.Err())
		case <-time.After(quiet / 20):
		}
	}
}

// Owners returns the node that announced each VIP last.
func (f *Fleet) Owners() map[netip.Addr]string {
	f.wire.mu.Lock()
	defer f.wire.mu.Unlock()
	return maps.Clone(f.wire.owners)
}

// Moves returns how often a VIP was announced by another node than before.
func (f *Fleet) Moves() int {
	f.wire.mu.Lock()
	defer f.wire.mu.Unlock()
	return f.wire.moves
}

// Claims returns the announcements since a moment.
func (f *Fleet) Claims(since time.Time) []Claim {
	f.wire.mu.Lock()
	defer f.wire.mu.Unlock()
	first, _ := slices.BinarySearchFunc(f.wire.claims, since, func(c Claim, t time.Time) int { return c.At.Compare(t) })
	return slices.Clone(f.wire.claims[first:])
}

// Traffic returns what the nodes have sent so far.
func (f *Fleet) Traffic() Traffic {
	f.wire.mu.Lock()
	defer f.wire.mu.Unlock()
	return f.wire.traffic
}

// CPU returns the CPU time that the speakers have used so far, together.
func (f *Fleet) CPU() (sum time.Duration, err error) {
	for name, c := range f.speakers {
		used, err := process.CPU(c.Process.Pid)
		if err != nil {
			return 0, fmt.Errorf("read CPU time of the speaker of %s: %w", name, err)
		}
		sum += used
	}
	return sum, nil
}
