// Package lab brings up a real Kubernetes cluster on one machine: etcd, the
// control plane, nodes with kubelet, containerd and kube-proxy, and a client
// host, each in a network namespace of its own on one bridge.
//
// A machine has places for labs, one at a time in each. A lab's state is in files, so that one
// brought up by one program can be used and taken down by another.
//
// The files, from the outside in:
//
//	lab.go           Up, Open and Down
//	place.go         the places, and their locks
//	topology.go      the hosts, their addresses and routes
//	hosts.go         commands on the hosts, kubectl, helm, and clients of the API
//	controlplane.go  etcd, the API servers, the controller manager and the scheduler
//	node.go          a node: containerd, kubelet and kube-proxy
//	images.go        container images, built and imported
//	stock.go         the images that nodes have from the start, unpacked once
//	install.go       Lodestone, by its chart
//	router.go        the routers: FRR and BIRD
//	faults.go        loss of nodes, partitions, and packets that are dropped
//	state.go         folders, and waiting for a condition
package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/process"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
)

// Modes of kube-proxy.
const (
	NFTables = "nftables"
	IPTables = "iptables"
)

// Routers of the lab: what speaks BGP and BFD on them.
const (
	RouterNone = "none"
	RouterFRR  = "frr"
	RouterBIRD = "bird"
	RouterBoth = "both" // FRR on Router, BIRD on Router2
)

// Options describe a lab. The zero value is three nodes, IPv4, kube-proxy in
// nftables mode, no router, with Lodestone installed.
type Options struct {
	Nodes       int    `json:"nodes"`
	ProxyMode   string `json:"proxyMode"`
	DualStack   bool   `json:"dualStack"`
	Router      string `json:"router"`
	NoLodestone bool   `json:"noLodestone"`
	// Failover is the configuration's, in which speakers start.
	Failover string `json:"failover"`
	// APIServers is how many there are, 1 to 3, each on a host of its own. Pods reach them by the
	// Service "kubernetes", and everything else the first one.
	APIServers int `json:"apiServers"`
	// OwnPodRoutes leaves out the nodes' static routes to pods: Lodestone makes
	// them.
	OwnPodRoutes bool `json:"ownPodRoutes"`

	// Place is where on the machine the lab is: 1 to Places, or 0 for whichever is free first.
	Place int `json:"place"`
	// Wait is how long Up waits for a place that other programs have; zero: as long as they do. Then Up fails with
	// context.DeadlineExceeded.
	Wait time.Duration `json:"-"`

	// Root is the repository's root; empty means to look for it from the
	// working directory upwards.
	Root string `json:"-"`
	// Progress gets messages about the progress. Nil: they are dropped.
	Progress func(format string, args ...any) `json:"-"`
}

func (o *Options) complete() error {
	if o.Nodes == 0 {
		o.Nodes = 3
	}
	if o.Nodes < 1 || o.Nodes > 80 {
		return fmt.Errorf("nodes %d: want 1 to 80", o.Nodes)
	}
	if o.APIServers == 0 {
		o.APIServers = 1
	}
	if o.APIServers < 1 || o.APIServers > 3 {
		return fmt.Errorf("API servers %d: want 1 to 3", o.APIServers)
	}
	if o.Place < 0 || o.Place > Places {
		return fmt.Errorf("place %d: want 1 to %d, or 0", o.Place, Places)
	}
	if o.ProxyMode == "" {
		o.ProxyMode = NFTables
	}
	if o.ProxyMode != NFTables && o.ProxyMode != IPTables {
		return fmt.Errorf("kube-proxy mode %q: want %s or %s", o.ProxyMode, NFTables, IPTables)
	}
	if o.Router == "" {
		o.Router = RouterNone
	}
	if routers := []string{RouterNone, RouterFRR, RouterBIRD, RouterBoth}; !slices.Contains(routers, o.Router) {
		return fmt.Errorf("router %q: want one of %s", o.Router, strings.Join(routers, ", "))
	}
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	if o.Root == "" {
		root, err := Root()
		o.Root = root
		return err
	}
	return nil
}

// Cluster is a lab that is up.
type Cluster struct {
	Options
	topology

	place     place
	lan       lan.LAN
	dir       string
	processes *process.Table
	builder   program.Builder
	// snapshotter is how containerd keeps the files of containers.
	snapshotter string
	certs       *certificates // only while coming up
}

// Up brings a lab up, in place of the one that is there, if any. Other programs that
// want the place wait until Down is called or this program ends.
func Up(ctx context.Context, options Options) (*Cluster, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("bring up the lab: needs root, for namespaces and containers")
	}
	if err := options.complete(); err != nil {
		return nil, err
	}
	p, err := take(ctx, options.Place, options.Wait, options.Progress)
	if err != nil {
		return nil, err
	}
	options.Place = int(p)
	c, err := replace(ctx, options)
	if err != nil && ctx.Err() != nil { // it failed because nobody needs it any more
		err = errors.Join(err, destroy(context.WithoutCancel(ctx), options.Root, p))
	}
	if err != nil {
		p.lock().Release()
	}
	return c, err
}

// replace brings a lab up where the one before was.
func replace(ctx context.Context, options Options) (*Cluster, error) {
	if err := destroy(ctx, options.Root, place(options.Place)); err != nil {
		return nil, err
	}
	c, err := newCluster(options)
	if err != nil {
		return nil, err
	}
	return c, c.up(ctx)
}

// Open returns the lab that an earlier Up of this repository left running in the first
// place. An empty root means to look for it from the working directory upwards.
func Open(root string) (*Cluster, error) {
	options := Options{Root: root, Place: 1}
	if err := options.complete(); err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(filepath.Join(place(1).stateDir(options.Root), "cluster.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, errors.New("open lab: none is up; see `lab up`")
	}
	if err != nil {
		return nil, fmt.Errorf("open lab: %w", err)
	}
	if err := json.Unmarshal(raw, &options); err != nil {
		return nil, fmt.Errorf("open lab: %w", err)
	}
	c, err := newCluster(options)
	if err != nil {
		return nil, err
	}
	if store, err := c.processes.Get(etcd); err != nil || !store.Alive() {
		return nil, errors.New("open lab: it was up but has ended; see `lab up`")
	}
	return c, nil
}

// Down takes the machine's labs down, in whatever state they are.
func Down(ctx context.Context, root string) error {
	options := Options{Root: root}
	if err := options.complete(); err != nil {
		return err
	}
	for p := range place(Places) {
		if err := (p + 1).down(ctx, options); err != nil {
			return err
		}
	}
	return nil
}

func (p place) down(ctx context.Context, options Options) error {
	if err := p.lock().Acquire(ctx, options.Progress); err != nil {
		return err
	}
	defer p.lock().Release()
	return destroy(ctx, options.Root, p)
}

// Down takes the lab down.
func (c *Cluster) Down(ctx context.Context) error { return c.place.down(ctx, c.Options) }

func newCluster(options Options) (*Cluster, error) {
	p := place(options.Place)
	c := &Cluster{
		Options:  options,
		topology: newTopology(options),
		place:    p,
		lan:      p.lan(),
		dir:      p.stateDir(options.Root),
		builder:  program.Builder{Root: options.Root, Progress: options.Progress},
	}
	var err error
	if c.snapshotter, err = findSnapshotter(options.Root); err != nil {
		return nil, err
	}
	c.processes, err = process.NewTable(c.dir, p.group())
	return c, err
}

// Nodes returns the names of the nodes.
func (c *Cluster) Nodes() []string { return slices.Clone(c.nodes) }

// up starts everything, side by side where it can.
func (c *Cluster) up(ctx context.Context) error {
	started := time.Now()
	programs, err := c.build(ctx)
	if err != nil {
		return err
	}
	c.Progress("programs and images ready after %s", since(started))
	if err := c.prepare(); err != nil {
		return err
	}
	if err := c.stock(ctx, programs.images); err != nil {
		return fmt.Errorf("give the nodes their images: %w", err)
	}
	group, groupCtx := errgroup.WithContext(ctx)
	controlPlane := make(chan struct{})
	group.Go(func() error {
		if err := c.startControlPlane(groupCtx, programs); err != nil {
			return err
		}
		c.Progress("API server ready after %s", since(started))
		close(controlPlane)
		return nil
	})
	for _, node := range c.nodes {
		group.Go(func() error { return c.startNode(groupCtx, node, programs, controlPlane) })
	}
	for _, r := range c.routers {
		group.Go(func() error { return c.startRouter(groupCtx, r) })
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("bring up the cluster: %w", err)
	}
	if err := c.checkProcesses(); err != nil {
		return err
	}
	c.Progress("%d nodes ready after %s", len(c.nodes), since(started))
	if err := c.save(); err != nil {
		return err
	}
	if c.NoLodestone {
		return nil
	}
	return c.Install(ctx)
}

// checkProcesses returns an error for each program that has ended, with the end
// of its log.
func (c *Cluster) checkProcesses() error {
	names, err := c.processes.Names()
	if err != nil {
		return err
	}
	var failed error
	for _, name := range names {
		p, err := c.processes.Get(name)
		if err == nil {
			err = p.Check()
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

func since(started time.Time) time.Duration { return time.Since(started).Round(100 * time.Millisecond) }

// prepare lays out what the programs need before they start.
func (c *Cluster) prepare() error {
	if err := c.place.group().Create(c.nodes); err != nil {
		return err
	}
	if err := c.lan.Build(c.hosts()); err != nil {
		return err
	}
	return c.issueIdentities()
}

// save writes what Open, scripts and people need.
func (c *Cluster) save() error {
	raw, err := json.MarshalIndent(c.Options, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.path("cluster.json"), raw, 0o644); err != nil {
		return err
	}
	return os.WriteFile(c.path("env"), []byte(c.env()), 0o644)
}

func (c *Cluster) path(elem ...string) string {
	return filepath.Join(append([]string{c.dir}, elem...)...)
}

// destroy removes every trace of a lab. Each step holds for a lab of any
// state: nothing started, half started, running, or half destroyed.
func destroy(ctx context.Context, root string, p place) error {
	// The nodes' mounts are in mount namespaces that go with the processes.
	if err := p.group().Destroy(ctx); err != nil {
		return err
	}
	if err := p.lan().Destroy(); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(p.stateDir(root)), os.RemoveAll(p.routerDir())); err != nil {
		return fmt.Errorf("remove state of the lab: %w", err)
	}
	return nil
}
