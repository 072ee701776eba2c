package ipam

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Owner is one incarnation of a Service, which holds addresses or asks for some.
type Owner struct {
	// UID identifies the owner. A re-created Service is another owner.
	UID string
	// Name is "namespace/name" and never changes for a UID. Owners of one name never clash over
	// an address, because people see one Service that was created anew.
	Name string
}

// MaxSharers is how many Services may share an address. A decision about one of them looks at
// all of them, and without a bound a tenant could make that as slow as it likes.
const MaxSharers = 1000

// MaxJoinable is how many of the addresses that one namespace holds under a key are joined: those that have been held
// longest. A Service may ask for any other. Without a bound, a look at each of those who wait would be one at all of them.
const MaxJoinable = 100

// Sharing are the terms on which a Service shares its addresses. At most MaxSharers Services
// hold one address. They all have the same key, which is not empty, the same backends, and no
// port in common. If two are of different namespaces, each names the namespace of the other.
//
// A Service that draws an address joins the one that is held under its key,
// and is refused when it does not fit in there: the same key means the same
// address. Only addresses of pools that it could draw from count, and only
// holders who would share with its namespace.
type Sharing struct {
	// Key is what those who share an address have in common. Empty: the
	// Service shares with nobody.
	Key string
	// Ports are what the Service uses of the address.
	Ports []Port
	// Backends is, under externalTrafficPolicy Local, the Service's selector
	// in a canonical form: a node that has backends of one Service gets the
	// traffic of all. Under Cluster it is empty.
	Backends string
	// Namespaces are the other namespaces with whose Services it shares.
	Namespaces []string
}

// Port is a port of one protocol.
type Port struct {
	Protocol string // as in Kubernetes: TCP, UDP or SCTP
	Number   uint16
}

// String returns the port as in "TCP/80".
func (p Port) String() string { return fmt.Sprintf("%s/%d", p.Protocol, p.Number) }

func (p Port) compare(q Port) int {
	return cmp.Or(cmp.Compare(p.Number, q.Number), cmp.Compare(p.Protocol, q.Protocol))
}

// terms returns a copy with sorted ports. It is nil for a Service that does not share.
func (s *Sharing) terms() *Sharing {
	if s == nil || s.Key == "" {
		return nil
	}
	t := &Sharing{Key: s.Key, Ports: slices.Clone(s.Ports), Backends: s.Backends, Namespaces: slices.Clone(s.Namespaces)}
	slices.SortFunc(t.Ports, Port.compare)
	slices.Sort(t.Namespaces)
	t.Namespaces = slices.Compact(t.Namespaces)
	return t
}

// ports are sorted. A Service that does not share has none.
func (s *Sharing) ports() []Port {
	if s == nil {
		return nil
	}
	return s.Ports
}

// commonPort returns the lowest port that both use; the zero Port: there is none.
func (s *Sharing) commonPort(t *Sharing) Port {
	for i, j := 0, 0; i < len(s.Ports) && j < len(t.Ports); {
		switch c := s.Ports[i].compare(t.Ports[j]); {
		case c < 0:
			i++
		case c > 0:
			j++
		default:
			return s.Ports[i]
		}
	}
	return Port{}
}

// identity is an owner and its namespace.
type identity struct {
	owner     Owner
	namespace string
}

func identify(o Owner) identity { return identity{o, namespaceOf(o.Name)} }

// namespaceOf is the namespace in "namespace/name".
func namespaceOf(name string) string {
	namespace, _, _ := strings.Cut(name, "/")
	return namespace
}

// party is an owner that wants or holds an address, with its terms.
type party struct {
	*identity
	terms *Sharing
}

// sameService reports whether both are one Service to people.
func (p party) sameService(q party) bool {
	return p.owner.UID == q.owner.UID || p.owner.Name != "" && p.owner.Name == q.owner.Name
}

func (p party) sameKey(q party) bool {
	return p.terms != nil && q.terms != nil && p.terms.Key == q.terms.Key
}

// meets reports whether the namespaces of both let them share.
func (p party) meets(q party) bool {
	return p.namespace == q.namespace ||
		slices.Contains(p.terms.Namespaces, q.namespace) && slices.Contains(q.terms.Namespaces, p.namespace)
}

// clash is why two parties cannot share an address; the zero clash: they can.
type clash struct {
	over clashOver
	port Port // the common port
}

type clashOver uint8

const (
	noClash clashOver = iota
	overKey
	overNamespaces
	overBackends
	overPort
	overNumber
)

func (c clash) is() bool { return c.over != noClash }

// clash compares all terms but the ports, with those of another Service.
func (p party) clash(q party) clash {
	switch {
	case !p.sameKey(q):
		return clash{over: overKey}
	case !p.meets(q):
		return clash{over: overNamespaces}
	case p.terms.Backends != q.terms.Backends:
		return clash{over: overBackends}
	}
	return clash{}
}
