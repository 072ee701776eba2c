// Package migrate turns the configuration of another load balancer into one of
// Lodestone: it reads the objects of MetalLB or kube-vip, writes the document,
// and notes what has no counterpart, or what somebody has to decide.
//
// The result is first read by the same code as the controller's configuration.
//
// The files, from the outside in:
//
//	migrate.go           notes and errors, and the document that comes of it
//	read.go              objects, from files and from a cluster
//	metallb.go           MetalLB's pools and advertisements
//	metallb_bgp.go       its peers, communities and BFD profiles
//	metallb_legacy.go    its ConfigMap and AddressPools, of old versions
//	kubevip.go           kube-vip's ranges of addresses
//	kubevip_settings.go  its flags and environment
//	selector.go          label selectors, into ours
//	services.go          annotations of Services, into ours
package migrate

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/lodestone-lb/lodestone/pkg/compat"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// Note is something that the document cannot express.
type Note struct {
	// Object is what it is about, such as "BGPPeer metallb-system/tor".
	Object string `json:"object"`
	// Field is the part of the object. Empty: all of it.
	Field string `json:"field,omitempty"`
	// Message says what there is, and what to do.
	Message string `json:"message"`
	// Decision is set if something would change or not work unless somebody decides about it
	// first.
	Decision bool `json:"decision"`
}

// String is the note on one line.
func (n Note) String() string {
	if n.Field == "" {
		return n.Object + ": " + n.Message
	}
	return n.Object + ": " + n.Field + ": " + n.Message
}

// Error is something in an object that makes no sense.
type Error struct {
	// From is the file and line of the object, or the cluster.
	From          string
	Object, Field string
	Message       string
}

// Error returns "file:line: object: field: message".
func (e Error) Error() string {
	parts := []string{e.From, e.Object, e.Field, e.Message}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), ": ")
}

// Errors is everything in the objects that makes no sense.
type Errors []Error

// Error returns one line per error; of very many, the first hundred.
func (e Errors) Error() string {
	return config.Lines(e, "and %d more errors")
}

// Result is what a migration comes to.
type Result struct {
	// Document is the configuration, which is valid.
	Document string
	// Config is what the document means.
	Config *config.Config
	// Services are those whose annotations have counterparts of ours.
	Services []Service
	Notes    []Note
}

// Decisions reports whether there is something to decide.
func (r *Result) Decisions() bool {
	return slices.ContainsFunc(r.Notes, func(n Note) bool { return n.Decision })
}

// migration is one that is under way.
type migration struct {
	doc      document
	services []found
	// classes are the load balancer classes that were noted.
	classes []string
	result  Result
	errs    Errors
}

// errorf records what is wrong with an object.
func (m *migration) errorf(o *Object, field, format string, args ...any) {
	m.errs = append(m.errs, Error{From: o.From, Object: o.String(), Field: field, Message: fmt.Sprintf(format, args...)})
}

// notef notes something for information.
func (m *migration) notef(o *Object, field, format string, args ...any) {
	m.result.Notes = append(m.result.Notes, Note{Object: o.String(), Field: field, Message: fmt.Sprintf(format, args...)})
}

// decidef notes something that somebody has to decide.
func (m *migration) decidef(o *Object, field, format string, args ...any) {
	m.result.Notes = append(m.result.Notes, Note{Object: o.String(), Field: field, Message: fmt.Sprintf(format, args...), Decision: true})
}

// finish writes the document, and reads it as the controller will.
func (m *migration) finish(c config.Compatibility) (*Result, error) {
	if len(m.errs) > 0 {
		return nil, m.errs
	}
	m.doc.APIVersion, m.doc.Kind, m.doc.Compatibility = config.APIVersion, config.Kind, []string{string(c)}
	text, err := m.doc.text()
	if err != nil {
		return nil, err
	}
	parsed, err := config.Parse([]byte(text))
	if err != nil {
		return nil, fmt.Errorf("the objects do not fit together; this is what is wrong with the configuration that they make:\n%w", err)
	}
	m.result.Document, m.result.Config = text, parsed
	for _, f := range m.services {
		m.translate(f, c)
	}
	return &m.result, nil
}

// document is the configuration as it is written.
type document struct {
	APIVersion     string          `yaml:"apiVersion"`
	Kind           string          `yaml:"kind"`
	Compatibility  []string        `yaml:"compatibility,flow"`
	Pools          []pool          `yaml:"pools,omitempty"`
	Advertisements []advertisement `yaml:"advertisements,omitempty"`
	Peers          []peer          `yaml:"peers,omitempty"`
}

type pool struct {
	Name              string    `yaml:"name"`
	Addresses         []string  `yaml:"addresses,omitempty"`
	DHCP              *dhcp     `yaml:"dhcp,omitempty"`
	Exclude           []string  `yaml:"exclude,omitempty"`
	UseFirstAndLast   bool      `yaml:"useFirstAndLast,omitempty"`
	AutoAssign        *bool     `yaml:"autoAssign,omitempty"`
	Priority          int       `yaml:"priority,omitempty"`
	Namespaces        []string  `yaml:"namespaces,omitempty"`
	NamespaceSelector *selector `yaml:"namespaceSelector,omitempty"`
	ServiceSelector   *selector `yaml:"serviceSelector,omitempty"`
	Advertise         []string  `yaml:"advertise,omitempty"`
}

type dhcp struct {
	Interface string `yaml:"interface"`
}

type advertisement struct {
	Name            string    `yaml:"name"`
	ServiceSelector *selector `yaml:"serviceSelector,omitempty"`
	Layer2          *layer2   `yaml:"layer2,omitempty"`
	BGP             *bgp      `yaml:"bgp,omitempty"`
}

type layer2 struct {
	Interfaces     []string     `yaml:"interfaces,omitempty"`
	NodeSelector   *selector    `yaml:"nodeSelector,omitempty"`
	PreferredNodes []preference `yaml:"preferredNodes,omitempty"`
}

type preference struct {
	Weight       int32     `yaml:"weight"`
	NodeSelector *selector `yaml:"nodeSelector"`
}

type bgp struct {
	Peers               []string  `yaml:"peers,omitempty"`
	NodeSelector        *selector `yaml:"nodeSelector,omitempty"`
	Communities         []string  `yaml:"communities,omitempty"`
	LocalPreference     uint32    `yaml:"localPreference,omitempty"`
	AggregationLength   int32     `yaml:"aggregationLength,omitempty"`
	AggregationLengthV6 int32     `yaml:"aggregationLengthV6,omitempty"`
	AggregatePartly     bool      `yaml:"aggregatePartly,omitempty"`
}

type peer struct {
	Name              string           `yaml:"name"`
	NodeSelector      *selector        `yaml:"nodeSelector,omitempty"`
	Address           string           `yaml:"address,omitempty"`
	Interface         string           `yaml:"interface,omitempty"`
	Port              uint16           `yaml:"port,omitempty"`
	LocalASN          uint32           `yaml:"localASN,omitempty"`
	PeerASN           any              `yaml:"peerASN"`
	SourceAddress     string           `yaml:"sourceAddress,omitempty"`
	RouterID          string           `yaml:"routerID,omitempty"`
	Multihop          int              `yaml:"multihop,omitempty"`
	Password          *secret          `yaml:"passwordSecretRef,omitempty"`
	HoldTime          string           `yaml:"holdTime,omitempty"`
	KeepaliveInterval string           `yaml:"keepaliveInterval,omitempty"`
	ConnectRetry      string           `yaml:"connectRetry,omitempty"`
	GracefulRestart   *gracefulRestart `yaml:"gracefulRestart,omitempty"`
	BFD               *bfd             `yaml:"bfd,omitempty"`
}

type secret struct {
	Name string `yaml:"name"`
}

type gracefulRestart struct{}

type bfd struct {
	TransmitInterval string `yaml:"transmitInterval,omitempty"`
	ReceiveInterval  string `yaml:"receiveInterval,omitempty"`
	DetectMultiplier uint32 `yaml:"detectMultiplier,omitempty"`
	MinimumTTL       uint32 `yaml:"minimumTTL,omitempty"`
}

func (d *document) text() (string, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(d); err != nil {
		return "", fmt.Errorf("write the configuration: %w", err)
	}
	return b.String(), enc.Close()
}

// anyHops is how far away a router may be without a setting.
const anyHops = 255

// maxName is the length of the longest name in a document.
const maxName = 63

// unique returns the name in the form of ours, or one like it if that is taken.
func unique(name, suffix string, taken map[string]bool) string {
	name = compat.PoolName(name)
	for i, base := 1, name; taken[name]; i++ {
		end := suffix
		if i > 1 {
			end = fmt.Sprintf("%s-%d", suffix, i)
		}
		name = strings.TrimRight(base[:min(len(base), maxName-len(end))], "-") + end
	}
	taken[name] = true
	return name
}
