package diagnose

import (
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

// Paths and header of the speakers' HTTPS port.
const (
	// Path is where a speaker serves its Facts. With the parameter ParamActive it
	// probes the network first; ParamVIP, which may be repeated, is a VIP and a
	// TCP port of it to be tried ("203.0.113.7:80"; port 0: none).
	Path        = "/diagnose"
	ParamActive = "active"
	ParamVIP    = "vip"
	// TokenHeader carries a bearer token through the API server's proxy, which
	// keeps the header Authorization for itself.
	TokenHeader = "X-Lodestone-Token"
	// MaxVIPs is how many VIPs a speaker tries in one diagnosis.
	MaxVIPs = 32
)

// Facts are a speaker's, of its node. The CLI may be of another version: it ignores fields that it
// does not know, and a field that is absent is unknown.
type Facts struct {
	Node    string `json:"node"`
	Version string `json:"version"`
	// Received and Sent are when the question came and the answer went, by the
	// node's clock.
	Received time.Time `json:"received"`
	Sent     time.Time `json:"sent"`
	// Unread is why facts are not there, by name.
	Unread map[string]string `json:"unread,omitempty"`

	// Conditions are those of being ready to own VIPs.
	Conditions []Condition `json:"conditions"`
	// Alive are the nodes whose speaker this one takes for alive.
	Alive []string `json:"alive"`
	// Interfaces are those with addresses, and the ports of bonds and bridges of
	// them.
	Interfaces []Interface `json:"interfaces"`
	// Sysctls are kernel settings by name, with slashes as sysctl(8) takes them.
	Sysctls map[string]int `json:"sysctls"`
	// DefaultRoutes are the interfaces of the main table's IPv4 default routes.
	DefaultRoutes []string `json:"defaultRoutes"`
	// ProxyMode is the mode of kube-proxy; empty: not known.
	ProxyMode string `json:"proxyMode,omitempty"`
	// Capabilities are the effective ones of the speaker, a bit each
	// (capabilities(7)).
	Capabilities uint64 `json:"capabilities"`
	// Forwarding is what the node does of direct forwarding. Nil: not known.
	Forwarding *Forwarding `json:"forwarding,omitempty"`
	// Detection is how the failure detector fares. Nil: not known.
	Detection *Detection `json:"detection,omitempty"`
	// BGPListeners are the sockets that listen on TCP port 179.
	BGPListeners []Listener `json:"bgpListeners,omitempty"`

	// Active is set if the node probed the network; what follows is of that.
	Active bool `json:"active,omitempty"`
	// Members are how the other speakers answer on the membership port.
	Members []Member `json:"members,omitempty"`
	// Neighbours are how addresses of the node's segments answer ARP and NDP.
	Neighbours []Neighbour `json:"neighbours,omitempty"`
	// VIPs are how VIPs of other nodes answer.
	VIPs []Trial `json:"vips,omitempty"`
}

// Condition is one of being ready. /status shows it to those who may read that.
type Condition struct {
	Name    string `json:"name"`
	OK      bool   `json:"ok"`
	Message string `json:"message"`
	// Public is what everybody reads at /readyz in place of the message, if the message
	// has something of the configuration in it.
	Public string `json:"-"`
}

// Interface is a network interface of a node.
type Interface struct {
	Name         string         `json:"name"`
	HardwareAddr string         `json:"hardwareAddr,omitempty"`
	Up           bool           `json:"up"`
	MTU          int            `json:"mtu"`
	Addrs        []netip.Prefix `json:"addrs"`
}

// Forwarding is what keeps a node from direct forwarding, or from some of it.
type Forwarding struct {
	// Error is why the rules are not as they are to be.
	Error string `json:"error,omitempty"`
	// WithoutTable counts the Services at VIPs that have no table.
	WithoutTable int `json:"withoutTable,omitempty"`
	// ConntrackFull is set while conntrack has little room, or none.
	ConntrackFull bool `json:"conntrackFull,omitempty"`
	// Unreachable are nodes that no connections can be handed to, and why, by address.
	Unreachable []Unreachable `json:"unreachable,omitempty"`
}

// Unreachable is an address of a node that no connections can be handed to.
type Unreachable struct {
	Node    string     `json:"node"`
	Address netip.Addr `json:"address"`
	// State is one of those in /status: unknown, silent, gone, elsewhere.
	State string `json:"state"`
}

// Listener is a TCP socket that waits for connections.
type Listener struct {
	Address netip.AddrPort `json:"address"`
	// Ours is set if it is the speaker's.
	Ours bool `json:"ours,omitempty"`
}

// Member is how another speaker answers on the membership port.
type Member struct {
	Node    string         `json:"node"`
	Address netip.AddrPort `json:"address"`
	// UDP and TCP are why it does not answer by them; empty: it does.
	UDP string `json:"udp,omitempty"`
	TCP string `json:"tcp,omitempty"`
}

// Neighbour is how an address answers questions for its hardware address.
type Neighbour struct {
	// Node has the address.
	Node      string     `json:"node"`
	Address   netip.Addr `json:"address"`
	Interface string     `json:"interface"`
	// Answers are the hardware addresses in the answers.
	Answers []string `json:"answers,omitempty"`
	// Error is why nobody could be asked.
	Error string `json:"error,omitempty"`
}

// Trial is how a VIP of another node answers: to ARP or NDP, and at a TCP port
// by a packet that does not pass the asking node's own kube-proxy.
type Trial struct {
	Neighbour
	// Port is 0 if none was tried.
	Port uint16 `json:"port,omitempty"`
	// Reply is the port's.
	Reply Reply `json:"reply,omitempty"`
}

// Reply is how a TCP port answers a request for a connection.
type Reply string

// The replies.
const (
	Accepted Reply = "accepted"
	Refused  Reply = "refused"
	Silence  Reply = "silence"
)

// Cluster is all that is checked.
type Cluster struct {
	// Namespace is Lodestone's.
	Namespace string
	// Facts are those of the nodes whose speaker answered. Mute are the other nodes
	// that should have a speaker, and why it did not answer.
	Facts map[string]Facts
	Mute  map[string]string
	// Unread is what else could not be found out, one sentence each, and Undecided
	// are the checks that need it.
	Unread    []string
	Undecided []ID
	// Notices are what is wrong with the installation as a whole.
	Notices  []Notice
	Sessions []Session
	VIPs     []VIP
	// Segments are those of the nodes, from their Leases.
	Segments map[string][]report.Segment
	// Passive are, by node, the passive peers that connect to it.
	Passive map[string][]string
	// NetAdmin is what needs the capability NET_ADMIN; empty: nothing.
	NetAdmin string
	// Clocks are the offsets of the nodes' clocks, and APIServer that of the API server's, from
	// the clock of the program that asked.
	Clocks    map[string]Clock
	APIServer *Clock
	Others    []Other
	// Active is set if the network was probed.
	Active bool
}

// Notice is what a check of the whole installation found.
type Notice struct {
	Check         ID
	Severity      Severity
	Message, Hint string
}

// Session is a BGP session of a node.
type Session struct {
	Node, Peer string
	// Up is set if routes are exchanged, Leftover if there should be no session.
	Up, Leftover bool
	// Message is what is wrong with it, BFD is the state of its BFD session.
	Message, BFD string
}

// VIP is an address of a Service.
type VIP struct {
	Addr netip.Addr
	// Owner announces it by layer 2; empty: nobody does, or routers know it.
	Owner string
	// Port is a TCP port of it that answers every node; 0: none is known to.
	Port uint16
	// OffSegment is why nobody announces it although somebody should, if the
	// nodes' interfaces are the reason.
	OffSegment string
}

// Clock is how far a clock is ahead of another, and how sure that is.
type Clock struct{ Offset, Uncertainty time.Duration }

// Other is another implementation of Services of type LoadBalancer.
type Other struct {
	Name string
	// Evidence is where it shows.
	Evidence string
	// Handles is set if it handles Services that Lodestone serves. If it is not
	// set, it may.
	Handles bool
}
