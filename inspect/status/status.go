// Package status shows a whole installation of Lodestone on one screen, what is wrong with it first.
//
// The files, from the outside in:
//
//	status.go    Status, with the warnings, the components, pools and Services
//	announce.go  the VIPs and the BGP sessions
//	detection.go how the speakers find out that one is lost
//	keys.go      whether the speakers are replacing their key
//	show.go      the text on the screen
package status

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/inspect/bgp"
	"github.com/lodestone-lb/lodestone/inspect/cluster"
	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/simulation"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/kube"
	"github.com/lodestone-lb/lodestone/pkg/report"
)

// Status is the state of the installation. A part that could not be read is null.
type Status struct {
	Time time.Time `json:"time"`
	// Unread is what could not be read, and why.
	Unread []string `json:"unread,omitempty"`
	// Warnings are what somebody should look at, the worst first.
	Warnings      []Warning      `json:"warnings"`
	Configuration *Configuration `json:"configuration"`
	Controller    *Controller    `json:"controller"`
	Speakers      *Speakers      `json:"speakers"`
	Detection     *Detection     `json:"detection"`
	Pools         []Pool         `json:"pools"`
	Services      *Services      `json:"services"`
	VIPs          *VIPs          `json:"vips"`
	Peers         []bgp.Peer     `json:"peers"`
	Conflicts     []Conflict     `json:"conflicts"`
}

// Warning is something that somebody should look at.
type Warning struct {
	// About is the part of the installation.
	About   string `json:"about"`
	Message string `json:"message"`
}

// Configuration is the state of the document in the cluster.
type Configuration struct {
	// State is valid, invalid or missing.
	State string `json:"state"`
	// Errors are what is wrong with it.
	Errors         []string `json:"errors,omitempty"`
	Pools          int      `json:"pools"`
	Advertisements int      `json:"advertisements"`
	Peers          int      `json:"peers"`
}

// String describes the configuration for people.
func (c *Configuration) String() string {
	if c.State != Valid {
		return c.State
	}
	return fmt.Sprintf("%s: %s, %s, %s", c.State, output.Count(c.Pools, "pool", "pools"),
		output.Count(c.Advertisements, "advertisement", "advertisements"), output.Count(c.Peers, "BGP peer", "BGP peers"))
}

// The states of a configuration.
const (
	Valid   = "valid"
	Invalid = "invalid"
	Missing = "missing"
)

// Controller is the state of the controller's replicas.
type Controller struct {
	Replicas int `json:"replicas"`
	Ready    int `json:"ready"`
	// Leader is the pod that leads, since LeaderSince; empty: none does.
	Leader      string    `json:"leader,omitempty"`
	LeaderSince time.Time `json:"leaderSince,omitzero"`
	// Versions are those of the images.
	Versions []string `json:"versions"`
}

// Speakers is the state of the speakers.
type Speakers struct {
	// Nodes counts the nodes that should have a speaker.
	Nodes    int      `json:"nodes"`
	Ready    int      `json:"ready"`
	Versions []string `json:"versions"`
	// Missing are the nodes without a ready speaker.
	Missing []NodeProblem `json:"missing,omitempty"`
	// MembershipKey is the mark of the key that all speakers use. Empty: they are changing to another key, or
	// do not report it.
	MembershipKey string `json:"membershipKey,omitempty"`
}

// NodeProblem is what is wrong on a node.
type NodeProblem struct {
	Node    string `json:"node"`
	Message string `json:"message"`
}

// Pool is how many addresses of one family of a pool are used.
type Pool struct {
	Name   string      `json:"name"`
	Family ipam.Family `json:"family,omitempty"`
	// Leased pools take their addresses from a DHCP server: only Used is known.
	Leased      bool    `json:"leased,omitempty"`
	Draining    bool    `json:"draining,omitempty"`
	Size        float64 `json:"size"`
	Used        float64 `json:"used"`
	Free        float64 `json:"free"`
	Quarantined float64 `json:"quarantined"`
	Reserved    float64 `json:"reserved"`
	// Conflicted are those that other hosts have, as far as speakers report it now.
	Conflicted float64 `json:"conflicted"`
}

// Services is the state of the Services that Lodestone serves.
type Services struct {
	Served int `json:"served"`
	// Waiting are the Services that lack an address that they ask for.
	Waiting []Waiting `json:"waiting,omitempty"`
	// Stranded are the Services that hold an address that no pool gives any more.
	Stranded []string `json:"stranded,omitempty"`
	// Messages are why each of the Waiting waits, by its name.
	Messages map[string]string `json:"-"`
}

// Waiting are Services that wait for the same reason.
type Waiting struct {
	// Reason is that of the refusal; Unassigned if there is none.
	Reason   string   `json:"reason"`
	Services []string `json:"services"`
	// Message is that of the first of them.
	Message string `json:"message"`
}

// Unassigned is the reason of a Service that the controller would give an address, but has not yet.
const Unassigned = "Unassigned"

// Conflict is a VIP that another machine has, which is not a speaker of the cluster.
type Conflict struct {
	// Node is where it was heard.
	Node         string     `json:"node"`
	VIP          netip.Addr `json:"vip"`
	HardwareAddr string     `json:"hardwareAddr"`
	// Announced is set if the VIP is announced in spite of it.
	Announced bool `json:"announced"`
}

// Of returns the status of what was read.
func Of(o *cluster.Objects) *Status { return OfNetwork(o, o.Network()) }

// OfNetwork is Of for callers that have the Network of the objects already.
func OfNetwork(o *cluster.Objects, n *simulation.Network) *Status {
	s := &Status{Time: o.Now.UTC().Truncate(time.Second), Unread: o.Unread(), Warnings: []Warning{}}
	s.configuration(o)
	s.controller(o)
	s.speakers(o)
	s.Detection = DetectionOf(o)
	s.skew()
	if o.Has(cluster.Leases) {
		s.Conflicts = ConflictsOf(n)
		for _, c := range s.Conflicts {
			s.warn("conflict", "%s", c)
		}
	}
	known := o.Unclear() == nil
	if known && o.Has(cluster.ConfigMaps, cluster.Services) {
		s.allocation(o)
	}
	if known && o.Has(cluster.ForSessions...) {
		s.sessions(n, o.Now)
	}
	if known && o.Has(cluster.ForVIPs...) {
		s.vips(n)
	}
	slices.SortStableFunc(s.Warnings, func(a, b Warning) int { return cmp.Compare(gravity(a), gravity(b)) })
	return s
}

// gravity orders warnings by what they are about.
func gravity(w Warning) int {
	return slices.Index([]string{"configuration", "controller", "VIPs", "conflict", "speaker", "BGP", "version", "Services", "pool"}, w.About)
}

func (s *Status) warn(about, format string, args ...any) {
	s.Warnings = append(s.Warnings, Warning{about, fmt.Sprintf(format, args...)})
}

func (s *Status) configuration(o *cluster.Objects) {
	if !o.Has(cluster.ConfigMaps) {
		return
	}
	c := &Configuration{State: Missing}
	s.Configuration = c
	unsure := cmp.Or(o.Absent(), o.Unclear())
	switch {
	case o.ConfigErr != nil:
		c.State, c.Errors = Invalid, strings.Split(o.ConfigErr.Error(), "\n")
		s.warn("configuration", "%v; %s", unsure, output.Count(len(c.Errors), "error", "errors"))
	case unsure != nil:
		s.warn("configuration", "%v", unsure)
	case o.Config == nil:
		s.warn("configuration", "there is no %s: no Service gets an address, and nothing is announced", o.ConfigMap())
	default:
		c.State, c.Pools, c.Advertisements, c.Peers = Valid, len(o.Config.Pools), len(o.Config.Advertisements), len(o.Config.Peers)
		if o.Has(cluster.Nodes, cluster.Leases, cluster.Services) {
			for _, w := range clusterfacts.Warnings(o.Config, o.Cluster().Facts) {
				s.warn("pool", "%s", w)
			}
		}
	}
}

// stale is how long ago the leader may have renewed its Lease. It is longer than any lease lasts, because this
// machine's clock and the leader's differ.
const stale = time.Minute

func (s *Status) controller(o *cluster.Objects) {
	if !o.Has(cluster.Pods) {
		return
	}
	c := &Controller{Replicas: len(o.Controllers), Versions: versions(o.Controllers, "controller")}
	s.Controller = c
	for _, p := range o.Controllers {
		if cluster.IsReady(p) {
			c.Ready++
		}
	}
	if e := o.Election; e != nil && e.Spec.HolderIdentity != nil {
		c.Leader, _, _ = strings.Cut(*e.Spec.HolderIdentity, "_")
		if e.Spec.AcquireTime != nil {
			c.LeaderSince = e.Spec.AcquireTime.UTC().Truncate(time.Second)
		}
	}
	switch {
	case c.Replicas == 0:
		s.warn("controller", "no pod of the controller: Services get no addresses")
	case !o.Has(cluster.Election):
	case c.Leader == "":
		s.warn("controller", "no replica leads: Services get no addresses")
	case o.Election.Spec.RenewTime != nil && o.Now.Sub(o.Election.Spec.RenewTime.Time) > stale:
		s.warn("controller", "the leader %s has not renewed its Lease for %s, by the clock of this machine: Services get no addresses",
			c.Leader, output.Age(o.Now.Sub(o.Election.Spec.RenewTime.Time)))
	}
	if c.Ready < c.Replicas {
		s.warn("controller", "%d of %d replicas are ready", c.Ready, c.Replicas)
	}
}

func (s *Status) speakers(o *cluster.Objects) {
	if !o.Has(cluster.Pods, cluster.Nodes) {
		return
	}
	s.Speakers = SpeakersOf(o)
	for _, m := range s.Speakers.Missing {
		s.warn("speaker", "node %s: %s", m.Node, m.Message)
	}
	s.membershipKeys(o.Leases)
	noRules := map[report.NoRules][]string{}
	for _, l := range o.Leases {
		node, r := strings.TrimPrefix(l.Name, annotation.SpeakerLeasePrefix), report.Of(l.Annotations)
		for _, name := range r.Unmatched {
			s.warn("speaker", "node %s: advertisement %s matches no interface of it: compare its interfaces with ip link there", node, name)
		}
		if r.NoRules != "" {
			noRules[r.NoRules] = append(noRules[r.NoRules], node)
		}
	}
	for _, why := range slices.Sorted(maps.Keys(noRules)) {
		s.warn("speaker", "%s: connections are not forwarded directly (%s), and may end when a VIP moves: lodestone explain node has why",
			output.List(noRules[why], 3), why)
	}
}

// SpeakersOf returns the state of the speakers.
func SpeakersOf(o *cluster.Objects) *Speakers {
	of := &Speakers{Versions: versions(o.Speakers, "speaker")}
	pods := o.SpeakerByNode()
	for _, n := range o.Nodes {
		p := pods[n.Name]
		switch {
		case p == nil && !wanted(n, o.Speakers):
			continue
		case p == nil:
			of.Missing = append(of.Missing, NodeProblem{n.Name, "no speaker pod"})
		case !cluster.IsReady(p):
			of.Missing = append(of.Missing, NodeProblem{n.Name, "pod " + p.Name + " is not ready: " + whyNot(p)})
		default:
			of.Ready++
		}
		of.Nodes++
	}
	slices.SortFunc(of.Missing, func(a, b NodeProblem) int { return cmp.Compare(a.Node, b.Node) })
	return of
}

// wanted reports whether the node is to have a speaker, by the nodeSelector and the tolerations of the DaemonSet, which its
// pods have.
func wanted(n *corev1.Node, speakers []*corev1.Pod) bool {
	return !slices.ContainsFunc(speakers, func(p *corev1.Pod) bool {
		return !labels.SelectorFromSet(p.Spec.NodeSelector).Matches(labels.Set(n.Labels)) || repels(n, p)
	})
}

// repels reports whether a taint of the node keeps the pod away.
func repels(n *corev1.Node, p *corev1.Pod) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(taint corev1.Taint) bool {
		tolerated := slices.ContainsFunc(p.Spec.Tolerations, func(t corev1.Toleration) bool {
			return t.ToleratesTaint(klog.Background(), &taint, true)
		})
		return taint.Effect != corev1.TaintEffectPreferNoSchedule && !tolerated
	})
}

// whyNot returns why a pod is not ready.
func whyNot(p *corev1.Pod) string {
	if p.DeletionTimestamp != nil {
		return "it is being deleted"
	}
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && w.Reason != "" {
			return w.Reason
		}
	}
	if p.Status.Phase == corev1.PodRunning {
		return "it runs: see kubectl -n " + p.Namespace + " logs " + p.Name
	}
	return "phase " + string(p.Status.Phase)
}

// versions returns the tags of the images of the pods' containers of that name, sorted, each once: other containers are
// none of ours. An image without a tag is named by its digest.
func versions(pods []*corev1.Pod, container string) []string {
	all := []string{}
	for _, p := range pods {
		for _, c := range p.Spec.Containers {
			if c.Name == container {
				all = append(all, version(c.Image))
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func version(image string) string {
	name, digest, _ := strings.Cut(image, "@")
	if i := strings.LastIndex(name, ":"); i > strings.LastIndex(name, "/") {
		return name[i+1:]
	}
	return cmp.Or(digest, "latest")
}

// skew warns of components of different versions. The digests of the two images always differ, so they
// are compared only with those of the same component.
func (s *Status) skew() {
	if s.Controller == nil || s.Speakers == nil {
		return
	}
	all := slices.Concat(s.Controller.Versions, s.Speakers.Versions)
	slices.Sort(all)
	all = slices.Compact(slices.DeleteFunc(all, func(v string) bool { return strings.Contains(v, ":") }))
	if len(all) > 1 || len(s.Controller.Versions) > 1 || len(s.Speakers.Versions) > 1 {
		s.warn("version", "controller %s, speakers %s: an upgrade is under way, or has stopped half way",
			strings.Join(s.Controller.Versions, ", "), strings.Join(s.Speakers.Versions, ", "))
	}
}

// ConflictsOf returns the conflicts that the nodes report, by VIP and node.
func ConflictsOf(n *simulation.Network) []Conflict {
	all := []Conflict{}
	for node, r := range n.Reports {
		for _, c := range r.Conflicts {
			all = append(all, Conflict{node, c.VIP, net.HardwareAddr(c.HardwareAddr[:]).String(), c.Announced})
		}
	}
	slices.SortFunc(all, func(a, b Conflict) int { return cmp.Or(a.VIP.Compare(b.VIP), cmp.Compare(a.Node, b.Node)) })
	return all
}

func (c Conflict) String() string {
	state := "it is not announced"
	if c.Announced {
		state = "it is announced all the same"
	}
	return fmt.Sprintf("another machine, %s, has %s, as heard on node %s; %s", c.HardwareAddr, c.VIP, c.Node, state)
}

func (s *Status) allocation(o *cluster.Objects) {
	a := o.Cluster().Allocation()
	s.Pools = PoolsOf(o, a)
	for _, p := range s.Pools {
		if p.Full() {
			of := fmt.Sprintf("%s assigned, %s in quarantine, %s reserved", output.Number(p.Used), output.Number(p.Quarantined),
				output.Number(p.Reserved))
			if p.Conflicted > 0 {
				of += ", " + output.Number(p.Conflicted) + " at other hosts"
			}
			s.warn("pool", "%s has no free %s address: %s of %s", p.Name, p.Family, of, output.Number(p.Size))
		}
	}
	s.Services = &Services{Served: len(a.Verdicts), Messages: map[string]string{}}
	waiting := map[string]*Waiting{}
	wait := func(reason, service, message string) {
		if waiting[reason] == nil {
			waiting[reason] = &Waiting{Reason: reason, Message: message}
		}
		waiting[reason].Services, s.Services.Messages[service] = append(waiting[reason].Services, service), message
	}
	for _, svc := range o.Services {
		name := ledger.NameOf(svc)
		v, served := a.Verdicts[name]
		refused := kube.Refused(svc)
		switch {
		case !served:
		case v.Refusal != nil:
			wait(string(v.Refusal.Reason), name, v.Refusal.Message)
		case shown(svc, v):
		case refused != nil: // it may know more than we do, as which addresses other hosts had
			wait(refused.Reason, name, refused.Message)
		default:
			wait(Unassigned, name, "the controller is to write their addresses into the Services, and has not yet")
		}
		if served && v.Stranded() {
			s.Services.Stranded = append(s.Services.Stranded, name)
		}
	}
	for _, w := range waiting {
		s.Services.Waiting = append(s.Services.Waiting, *w)
	}
	slices.SortFunc(s.Services.Waiting, func(a, b Waiting) int {
		return cmp.Or(cmp.Compare(len(b.Services), len(a.Services)), cmp.Compare(a.Reason, b.Reason))
	})
	for _, w := range s.Services.Waiting {
		s.warn("Services", "%s: %s: %s: %s", output.Count(len(w.Services), "waits for an address", "wait for an address"),
			output.List(w.Services, 3), w.Reason, w.Message)
	}
	if n := len(s.Services.Stranded); n > 0 {
		s.warn("Services", "%s an address that no pool gives any more: %s", output.Count(n, "holds", "hold"), output.List(s.Services.Stranded, 3))
	}
}

// shown reports whether the Service shows all that it holds.
func shown(svc *corev1.Service, v ledger.Verdict) bool {
	shows := kube.VIPs(svc)
	return !slices.ContainsFunc(v.Held, func(h ipam.Held) bool { return !slices.Contains(shows, h.Addr) })
}

// PoolsOf returns how the pools of the configuration are used.
func PoolsOf(o *cluster.Objects, a simulation.Allocation) []Pool {
	all := []Pool{}
	if o.Config == nil {
		return all
	}
	held := map[string]float64{}
	for _, v := range a.Verdicts {
		for _, h := range v.Held {
			held[h.Pool]++
		}
	}
	for i := range o.Config.Pools {
		p := &o.Config.Pools[i]
		if p.DHCP != nil {
			all = append(all, Pool{Name: p.Name, Family: ipam.IPv4, Leased: true, Draining: p.Draining, Used: held[p.Name]})
		}
		for _, c := range a.Pools {
			if c.Pool == p.Name {
				all = append(all, Pool{Name: c.Pool, Family: c.Family, Draining: p.Draining, Size: c.Size, Used: c.Assigned, Free: c.Free,
					Quarantined: c.Quarantined, Reserved: c.Reserved, Conflicted: c.Conflicted})
			}
		}
	}
	return all
}
