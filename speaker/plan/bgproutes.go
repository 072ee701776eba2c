package plan

import (
	"maps"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

// router decides which sessions a node has with BGP routers, and which VIPs it announces to whom. A change of
// a VIP costs as much as the routes that change with it.
type router struct {
	node string

	// The inputs of set, and what follows from them.
	config     *config.Config
	self       Node
	obstacle   Reason // why the node announces nothing, empty if it may
	sessions   map[string]Session
	problems   map[string]Problem
	healthy    map[string]announcer // the other nodes that may announce, if this one is sick
	pods       []netip.Prefix       // the node's pod CIDRs, if they are announced
	advertised advertised
	offers     map[*config.Advertisement]*offer
	domains    map[domainKey]*domain
	united     map[[2]Silence]Silence

	vips  map[netip.Addr]place
	table routeTable
}

// offer is an advertisement with the peers to which this node makes it.
type offer struct {
	*config.Advertisement
	index int
	// peers are sorted. Nil: the node makes the offer to nobody, for the reason in silence.
	peers   []string
	silence Silence
}

// domain has the offers for the VIPs to which the same advertisements apply.
type domain struct {
	pool   *config.Pool // nil: outside all pools
	offers []*offer     // those with peers
	peers  []string     // of all offers, sorted
	// silence is why the VIPs are announced to nobody, whatever endpoints they have.
	silence Silence
}

type domainKey struct {
	pool    *config.Pool
	applied string // as of scopeKey
}

// place is the domain of a VIP.
type place struct {
	*domain
	served bool // this node announces it
}

func newRouter(node string) *router {
	r := &router{node: node, sessions: map[string]Session{}, problems: map[string]Problem{},
		table: routeTable{routes: map[netip.Prefix]Route{}}}
	r.reset()
	return r
}

// reset forgets all VIPs. Routes stay until settle.
func (r *router) reset() {
	r.advertised, r.offers, r.domains = advertised{}, map[*config.Advertisement]*offer{}, map[domainKey]*domain{}
	r.united, r.vips = map[[2]Silence]Silence{}, map[netip.Addr]place{}
	r.table.reset(r.permit())
}

// set takes over everything but the Services, and reports whether sessions or their problems change.
// Changes of other nodes and speakers change nothing here, so that a failover does not wait for routes.
func (r *router) set(s Snapshot) (changed bool) {
	self, known := s.Nodes[r.node]
	obstacle := Reason("")
	switch {
	case !known:
		obstacle = NodeUnknown
	case self.Excluded(s.Config):
		obstacle = NodeExcluded
	case !s.Speakers[r.node]:
		obstacle = SpeakerNotReady
	}
	healthy := healthierThan(r.node, s)
	sessions, problems := sessionsOf(r.node, s)
	pods := announcedPods(r.node, s)
	changed = !maps.Equal(sessions, r.sessions) || !maps.Equal(problems, r.problems)
	if !changed && s.Config == r.config && obstacle == r.obstacle && maps.Equal(self.Labels, r.self.Labels) && slices.Equal(pods, r.pods) &&
		self.NetworkUnavailable == r.self.NetworkUnavailable && maps.EqualFunc(healthy, r.healthy, announcer.equal) {
		return false
	}
	r.config, r.self, r.obstacle, r.pods, r.healthy = s.Config, self, obstacle, pods, healthy
	if changed {
		r.sessions, r.problems = sessions, problems
	}
	r.reset()
	r.makeOffers()
	r.announcePods()
	return changed
}

// look decides about a VIP: it returns the peers to which it is announced, or why there is none. The
// Silence is zero if no advertisement by BGP is for the VIP.
func (r *router) look(addr netip.Addr, pool *config.Pool, sharers []*Service, demand vip) ([]string, Silence) {
	d := r.domainOf(pool, sharers)
	silence := d.silence
	switch {
	case d.silence == Silence{} && len(d.offers) == 0, d.silence.Reason == NodeUnknown, d.silence.Reason == ServiceNotSelected:
	case !demand.serving:
		silence = silent(NoServingEndpoint)
	case len(d.offers) == 0:
	case r.permit() != nil && !r.permit().Contains(addr):
		silence = silent(NotPermitted)
	case r.obstacle != "":
		silence = silent(r.obstacle)
	case !demand.acceptedBy(r.node):
		silence = silent(NoLocalEndpoint)
	case r.servedByHealthy(d, demand):
		if silence = silent(SpeakerNotReady); r.self.NetworkUnavailable {
			silence = silent(NetworkUnavailable)
		}
	}
	served := len(d.offers) > 0 && silence == Silence{}
	r.move(addr, place{d, served})
	if !served {
		return nil, silence
	}
	return d.peers, Silence{}
}

// healthierThan returns, if the node is unfit, the other nodes that may announce and are not.
func healthierThan(node string, s Snapshot) map[string]announcer {
	if !s.Nodes[node].unfit() {
		return nil
	}
	healthy := map[string]announcer{}
	for name, n := range s.Nodes {
		if name != node && s.sound(name) && !n.unfit() {
			sessions, _ := s.sessionsAlone(name)
			healthy[name] = announcer{n.Labels, slices.Sorted(maps.Keys(sessions))}
		}
	}
	return healthy
}

// announcer is a node with sessions with some peers.
type announcer struct {
	labels map[string]string
	peers  []string
}

func (a announcer) equal(b announcer) bool {
	return maps.Equal(a.labels, b.labels) && slices.Equal(a.peers, b.peers)
}

// servedByHealthy reports whether this node is unfit and a healthy one announces the VIPs by an
// advertisement of the domain.
func (r *router) servedByHealthy(d *domain, demand vip) bool {
	for name, n := range r.healthy {
		announces := func(o *offer) bool {
			return o.BGP.NodeSelector.Matches(n.labels) && slices.ContainsFunc(n.peers, o.BGP.AdvertisesTo)
		}
		if demand.acceptedBy(name) && slices.ContainsFunc(d.offers, announces) {
			return true
		}
	}
	return false
}

// permit returns everything that may be announced. Nil: everything may.
func (r *router) permit() *netipx.IPSet {
	if r.config == nil {
		return nil
	}
	return r.config.Permit
}

func silent(r Reason) Silence { return Silence{Reason: r, Message: messages[r]} }

// unite returns why a VIP is announced neither by layer 2 nor by BGP. VIPs share the results, to save
// memory.
func (r *router) unite(layer2, bgp Silence) Silence {
	switch {
	case bgp == Silence{}:
		return layer2
	case layer2.Reason == NoAdvertisement || layer2.Reason == ServiceNotSelected:
		return bgp
	case bgp.Reason == ServiceNotSelected || bgp.Reason == layer2.Reason:
		return layer2
	}
	key := [2]Silence{layer2, bgp}
	both, ok := r.united[key]
	if !ok {
		if len(r.united) >= maxScopes {
			clear(r.united)
		}
		both = layer2
		both.Message += "; by BGP: " + bgp.Message
		r.united[key] = both
	}
	return both
}

// domainOf returns the domain that a VIP of these Services belongs to.
func (r *router) domainOf(pool *config.Pool, sharers []*Service) *domain {
	all := r.advertised.of(pool, r.config, func(a *config.Advertisement) bool { return a.BGP != nil })
	key := domainKey{pool, applied(all, sharers)}
	if d := r.domains[key]; d != nil {
		return d
	}
	if len(r.domains) >= maxScopes {
		clear(r.domains)
	}
	d := &domain{pool: key.pool}
	for i, a := range all {
		if key.applied == "" || key.applied[i] != 0 {
			d.add(r.offers[a])
		}
	}
	slices.Sort(d.peers)
	d.peers = slices.Compact(d.peers)
	if len(all) > 0 && len(d.offers) == 0 && d.silence.Reason == "" {
		d.silence = silent(ServiceNotSelected)
	}
	if len(all) > 0 && r.obstacle == NodeUnknown {
		d.silence = silent(NodeUnknown)
	}
	r.domains[key] = d
	return d
}

// add adds an offer. If no offer has peers, the domain has the silence of the offer for which the least
// is missing.
func (d *domain) add(o *offer) {
	order := []Reason{"", NodeNotSelected, NoPeer, NoSession}
	switch {
	case len(o.peers) > 0:
		d.offers, d.peers, d.silence = append(d.offers, o), append(d.peers, o.peers...), Silence{}
	case len(d.offers) == 0 && slices.Index(order, o.silence.Reason) > slices.Index(order, d.silence.Reason):
		d.silence = o.silence
	}
}

// makeOffers makes the offers of all advertisements by BGP.
func (r *router) makeOffers() {
	if r.config == nil {
		return
	}
	for i := range r.config.Advertisements {
		if a := &r.config.Advertisements[i]; a.BGP != nil {
			r.offers[a] = r.offer(a, i)
		}
	}
}

// offer returns the offer of an advertisement.
func (r *router) offer(a *config.Advertisement, index int) *offer {
	o := &offer{Advertisement: a, index: index, silence: silent(NoPeer)}
	if !a.BGP.NodeSelector.Matches(r.self.Labels) {
		o.silence = silent(NodeNotSelected)
		return o
	}
	for i := range r.config.Peers {
		name := r.config.Peers[i].Name
		if !a.BGP.AdvertisesTo(name) {
			continue
		}
		if _, ok := r.sessions[name]; ok {
			o.peers = append(o.peers, name)
		} else if problem, ok := r.problems[name]; ok && o.silence.Reason == NoPeer {
			o.silence = Silence{Reason: NoSession, Message: messages[NoSession] + ": " + problem.Message}
		}
	}
	slices.Sort(o.peers)
	return o
}

// move puts the VIP into its new place. It is called at most once for a VIP before settle.
func (r *router) move(addr netip.Addr, now place) {
	before := r.vips[addr]
	if before == now {
		return
	}
	if before.domain != nil {
		for _, o := range before.offers {
			r.table.leave(o, addr, before)
		}
		delete(r.vips, addr)
	}
	if now.domain != nil && len(now.offers) > 0 {
		for _, o := range now.offers {
			r.table.join(o, addr, now)
		}
		r.vips[addr] = now
	}
}
