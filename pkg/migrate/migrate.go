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
	"errors"
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
	// Message is what there is, and what to do.
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

// Result is the result of a migration.
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

// migration is the state of a migration.
type migration struct {
	doc      document
	services []found
	// classes are the load balancer classes that were noted.
	classes map[string]bool
	result  Result
	errs    Errors
	// copies are how many more names and advertisements the objects may cause by naming each
	// other, comparisons how many more labels of pools may be compared.
	copies, comparisons int
}

func newMigration() migration { return migration{copies: maxCopies, comparisons: maxComparisons} }

// Objects name and select each other, so that a product of their numbers may have to be written
// or compared. More copies than maxCopies do not fit into a configuration.
const (
	maxCopies      = config.MaxSize / 4
	maxComparisons = 4 * config.MaxSize
)

// spend takes n from what is left of maxCopies or maxComparisons and reports whether there was
// enough. The first time that there is not is an error of the object.
func (m *migration) spend(o *Object, left *int, n int) bool {
	enough := *left >= 0
	if *left -= n; enough && *left < 0 {
		m.errorf(o, "", "there are more pools, peers, selectors and namespaces, and advertisements for them, than a configuration "+
			"holds: migrate them in parts")
	}
	return *left >= 0
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
	if errors.Is(err, errTooLong) {
		return nil, Errors{{Message: fmt.Sprintf("the objects make a configuration of more than %d bytes (1 MiB), the most that a "+
			"ConfigMap holds: migrate them in parts", config.MaxSize)}}
	}
	if err != nil {
		return nil, err
	}
	parsed, err := config.Parse([]byte(text))
	if err != nil {
		return nil, fmt.Errorf("the objects do not fit together; this is what is wrong with the configuration that they make:\n%w", err)
	}
	m.result.Document, m.result.Config = text, parsed
	dialects := compat.For(parsed)
	for _, f := range m.services {
		m.translate(f, c, dialects)
	}
	return &m.result, nil
}

// document is the configuration in the form in which it is written.
type document struct {
	APIVersion     string          `yaml:"apiVersion"`
	Kind           string          `yaml:"kind"`
	Compatibility  []string        `yaml:"compatibility,flow"`
	Pools          []pool          `yaml:"pools,omitempty"`
	Advertisements []advertisement `yaml:"advertisements,omitempty"`
	Peers          []peer          `yaml:"peers,omitempty"`

	IgnoreExcludeLabel bool `yaml:"ignoreExcludeLabel,omitempty"`
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

// errTooLong is the error of a document that no ConfigMap holds.
var errTooLong = errors.New("the document is too long")

// bounded keeps what is written, as much as a configuration has at most.
type bounded struct {
	bytes.Buffer
	full bool
}

// Write implements io.Writer.
func (b *bounded) Write(p []byte) (int, error) {
	if b.full = b.full || b.Len()+len(p) > config.MaxSize; b.full {
		return 0, errTooLong
	}
	return b.Buffer.Write(p) //nolint:wrapcheck // it is always nil
}

func (d *document) text() (string, error) {
	var b bounded
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	err := enc.Encode(d)
	if err == nil {
		err = enc.Close()
	}
	switch {
	case b.full: // the encoder does not wrap the error
		return "", errTooLong
	case err != nil:
		return "", fmt.Errorf("write the configuration: %w", err)
	}
	return b.String(), nil
}

// anyHops is the Multihop of a peer that may be any number of hops away.
const anyHops = 255

// names are those that are taken. Under the beginning of a name and its suffix, with a space
// between, is the last number that was added to it: many objects with one name would be counted
// anew each time.
type names map[string]int

// unique returns the name in the form of ours, or one like it if that is taken.
func (taken names) unique(name, suffix string) string {
	base := compat.PoolName(name)
	ending := func(end string) string {
		return strings.TrimRight(base[:min(len(base), config.MaxName-len(end))], "-") + end
	}
	if name = base; taken.has(name) {
		name = ending(suffix)
	}
	const digits = len("-100000")
	beginning := base[:min(len(base), config.MaxName-len(suffix)-digits)] + " " + suffix
	for i := max(2, taken[beginning]+1); taken.has(name); i++ {
		name = ending(fmt.Sprintf("%s-%d", suffix, i))
		taken[beginning] = i
	}
	taken[name] = 0
	return name
}

func (taken names) has(name string) bool {
	_, is := taken[name]
	return is
}
