package config

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
)

// values reads single values, and lists of them. It checks their form and records errors.
type values struct{ *report }

// text returns the text of v if the check accepts it.
func (vs values) text(v value, check func(string) error) (string, bool) {
	if !v.present() {
		return "", false
	}
	if v.ShortTag() != "!!str" {
		vs.errorf(v, `must be text, not %s: write "%s"`, describe(v.Node), clip(v.Value))
		return "", false
	}
	err := check(v.Value)
	if err != nil {
		vs.errorf(v, "%s %v", Quote(v.Value), err)
	}
	return v.Value, err == nil
}

// text returns the text of v, empty if there is none.
func (v value) text() string {
	if !v.present() {
		return ""
	}
	return v.Value
}

// texts returns the texts of a list, which must not repeat.
func (vs values) texts(list []value, check func(string) error) []string {
	var all []string
	seen := map[string]bool{}
	for _, v := range list {
		s, ok := vs.text(v, check)
		switch {
		case !ok:
		case seen[s]:
			vs.errorf(v, "%s is listed twice", Quote(s))
		default:
			seen[s] = true
			all = append(all, s)
		}
	}
	return all
}

// oneOf refuses what is not among the accepted values.
func oneOf[T ~string](r *report, v value, accepted []T) {
	if v.present() && !slices.Contains(accepted, T(v.Value)) {
		r.errorf(v, "%s is not known here: write %s", Quote(v.Value), join(accepted))
	}
}

// manyOf returns the values of a list, which must be among the accepted ones and must not
// repeat.
func manyOf[T ~string](vs values, list []value, accepted []T) []T {
	var all []T
	for _, s := range vs.texts(list, func(s string) error {
		if !slices.Contains(accepted, T(s)) {
			return errors.New("is not known here: write " + join(accepted))
		}
		return nil
	}) {
		all = append(all, T(s))
	}
	return all
}

// flag returns a boolean.
func (vs values) flag(v value, absent bool) bool {
	if !v.present() {
		return absent
	}
	if v.ShortTag() != "!!bool" {
		vs.errorf(v, "must be true or false without quotes, not %s %s", describe(v.Node), Quote(v.Value))
		return absent
	}
	return strings.EqualFold(v.Value, "true")
}

var decimal = regexp.MustCompile(`^-?(0|[1-9][0-9]*)$`)

// integer returns a whole number between two bounds, or 0.
func (vs values) integer(v value, lowest, highest int) int {
	n, _ := vs.number(v, int64(lowest), int64(highest))
	return int(n)
}

// number returns a whole number between two bounds, if there is one.
func (vs values) number(v value, lowest, highest int64) (int64, bool) {
	if !v.present() {
		return 0, false
	}
	if v.ShortTag() == "!!str" || !decimal.MatchString(v.Value) {
		vs.errorf(v, "%s is not a whole number: write one from %d to %d, without quotes", Quote(v.Value), lowest, highest)
		return 0, false
	}
	n, err := strconv.ParseInt(v.Value, 10, 64)
	if err != nil || n < lowest || n > highest {
		vs.errorf(v, "%s is out of bounds: at least %d, at most %d", clip(v.Value), lowest, highest)
		return 0, false
	}
	return n, true
}

// uint32 returns any number of 32 bits, nil if there is none.
func (vs values) uint32(v value) *uint32 {
	n, ok := vs.number(v, 0, math.MaxUint32)
	if !ok {
		return nil
	}
	bits := uint32(n)
	return &bits
}

// duration returns a Go duration between 0 and the bound.
func (vs values) duration(v value, absent, longest time.Duration) time.Duration {
	return vs.durationFrom(v, absent, 0, longest)
}

// durationFrom returns a Go duration between two bounds.
func (vs values) durationFrom(v value, absent, shortest, longest time.Duration) time.Duration {
	if !v.present() {
		return absent
	}
	n, err := time.ParseDuration(v.Value)
	switch {
	case decimal.MatchString(v.Value):
		vs.errorf(v, "%s has no unit: write %s", clip(v.Value), withUnit(clip(v.Value), shortest, longest))
	case err == nil && strings.HasSuffix(v.Value, "0"): // Go takes +0
		vs.errorf(v, "%s has no unit: write 0s", Quote(v.Value))
	case err != nil:
		vs.errorf(v, "%s is not a duration: write one such as 500ms, 30s or 1h30m, at most %s", Quote(v.Value), brief(longest))
	case n < shortest || n > longest:
		vs.errorf(v, "%s is out of bounds: at least %s, at most %s", clip(v.Value), brief(shortest), brief(longest))
	default:
		return n
	}
	return absent
}

// withUnit is a number with the unit that was probably meant: the first of
// seconds, milliseconds, minutes and hours with which it is within the bounds.
func withUnit(number string, shortest, longest time.Duration) string {
	for _, unit := range []struct{ short, name string }{{"s", "seconds"}, {"ms", "milliseconds"}, {"m", "minutes"}, {"h", "hours"}} {
		if n, err := time.ParseDuration(number + unit.short); err == nil && n >= shortest && n <= longest {
			return fmt.Sprintf("%s%s for %s", number, unit.short, unit.name)
		}
	}
	return fmt.Sprintf("a number and a unit, from %s to %s", brief(shortest), brief(longest))
}

// seconds returns a duration in whole seconds between two bounds.
func (vs values) seconds(v value, absent, shortest, longest time.Duration) time.Duration {
	n := vs.durationFrom(v, absent, shortest, longest)
	if n%time.Second != 0 {
		vs.errorf(v, "%s is no whole number of seconds, in which BGP counts", clip(v.Value))
		return absent
	}
	return n
}

// brief writes a duration without units that are zero: 24h, not 24h0m0s.
func brief(d time.Duration) string {
	text := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// checkName accepts DNS-1123 labels.
func checkName(s string) error {
	if !dnsLabel.MatchString(s) {
		return errors.New("is not a valid name: use 1 to 63 of a-z, 0-9 and '-', with a letter or digit first and last")
	}
	return nil
}

// checkService accepts the namespace and name of a Service.
func checkService(s string) error {
	namespace, name, _ := strings.Cut(s, "/")
	if !dnsLabel.MatchString(namespace) || !dnsLabel.MatchString(name) {
		return errors.New("is not a Service: write its namespace and name, such as default/web, each of 1 to 63 of a-z, 0-9 and '-', " +
			"with a letter or digit first and last")
	}
	return nil
}

var (
	labelName    = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	dnsSubdomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
)

// checkTopology accepts label values that are not empty.
func checkTopology(s string) error {
	if s == "" {
		return errors.New("is empty: remove the key")
	}
	return checkLabelValue(s)
}

// checkLabelValue accepts what Kubernetes accepts as the value of a label.
func checkLabelValue(s string) error {
	if s != "" && !labelName.MatchString(s) {
		return errors.New("is not a valid label value: use at most 63 letters, digits, '-', '_' and '.', with a letter or " +
			"digit first and last")
	}
	return nil
}

// checkLabelKey accepts what Kubernetes accepts as the key of a label.
func checkLabelKey(s string) error {
	prefix, name, prefixed := strings.Cut(s, "/")
	if !prefixed {
		prefix, name = "x", s
	}
	if !labelName.MatchString(name) || !dnsSubdomain.MatchString(prefix) || len(prefix) > 253 {
		return errors.New("is not a valid label key: write one such as zone or topology.kubernetes.io/zone")
	}
	return nil
}

const (
	globMeta     = `*?[]\^`
	maxInterface = 15 // IFNAMSIZ without the terminating zero
)

// checkInterface accepts patterns that can match the name of an interface.
func checkInterface(s string) error {
	switch {
	case strings.ContainsAny(s, "/, \t\n"):
		return errors.New("matches no interface: a name has no '/', ',' or space (list several patterns as separate items)")
	case strings.HasPrefix(s, "^") || strings.HasSuffix(s, "$"): // [^a-z] is a pattern
		return errors.New("is a regular expression: patterns here are those of a shell, such as bond*")
	case !strings.ContainsAny(s, globMeta) && len(s) > maxInterface:
		return fmt.Errorf("matches no interface: a name has at most %d characters", maxInterface)
	}
	return checkGlob(s)
}

// checkInterfaceName accepts what the kernel accepts as the name of an interface, except
// patterns.
func checkInterfaceName(s string) error {
	switch {
	case s == "" || s == "." || s == ".." || len(s) > maxInterface:
		return fmt.Errorf("is not the name of an interface: it has 1 to %d characters", maxInterface)
	case strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsGraphic(r) || unicode.IsSpace(r) }) ||
		strings.ContainsAny(s, "/:,="+globMeta):
		return fmt.Errorf("is not the name of an interface: write one name, such as eth1, and no pattern")
	}
	return nil
}

var secretKey = regexp.MustCompile(`^[-._a-zA-Z0-9]+$`)

// checkSecretName accepts what Kubernetes accepts as the name of a Secret.
func checkSecretName(s string) error {
	if !dnsSubdomain.MatchString(s) || len(s) > 253 {
		return errors.New("is not the name of a Secret: use at most 253 of a-z, 0-9, '-' and '.', with a letter or digit first and last")
	}
	return nil
}

// checkSecretKey accepts what Kubernetes accepts as a key of a Secret.
func checkSecretKey(s string) error {
	if !secretKey.MatchString(s) || len(s) > 253 || s == "." || s == ".." {
		return errors.New("is not a key of a Secret: use at most 253 letters, digits, '-', '_' and '.'")
	}
	return nil
}

var nodePattern = regexp.MustCompile(`^[-a-z0-9.*?\[\]\\^]*$`)

// checkNode accepts patterns that can match the name of a Node.
func checkNode(s string) error {
	if !nodePattern.MatchString(s) {
		return errors.New("matches no node: a name has only a-z, 0-9, '-' and '.' (list several patterns as separate items)")
	}
	return checkGlob(s)
}

const (
	// nodeTaints is the prefix of the taints that Kubernetes sets itself.
	nodeTaints = "node.kubernetes.io/"
	// unschedulable is the one that follows from kubectl cordon.
	unschedulable = nodeTaints + "unschedulable"
)

// checkTaint accepts the keys of taints that are somebody's decision. The others of Kubernetes are
// about a node's health, which speakers know better.
func checkTaint(s string) error {
	if s != unschedulable && strings.HasPrefix(s, nodeTaints) {
		return fmt.Errorf("is set by Kubernetes, and not by somebody who wants to take the node out: of those with %s only %s can be here",
			nodeTaints, unschedulable)
	}
	if checkLabelKey(s) != nil {
		return errors.New("is not the key of a taint: write one such as example.com/maintenance")
	}
	return nil
}

var uuid = regexp.MustCompile(`^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$`)

// checkUUID accepts what a Node has as status.nodeInfo.systemUUID.
func checkUUID(s string) error {
	if !uuid.MatchString(s) {
		return errors.New("is not a UUID: write it as the Node has it in status.nodeInfo.systemUUID")
	}
	return nil
}

func checkGlob(s string) error {
	if s == "" {
		return errors.New("matches nothing: write a name or a pattern")
	}
	if _, err := path.Match(s, ""); err != nil {
		return errors.New("is not a valid pattern: close '[' with ']', and put no '\\' last")
	}
	return nil
}

// ParseASN reads an AS number in decimal digits (RFC 5396, asplain), as it is
// in the document and in annotations of nodes. The error has what the number
// has to be, and does not repeat it.
func ParseASN(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	switch {
	case err != nil || !decimal.MatchString(s):
		return 0, errors.New("is not an AS number: write one from 1 to 4294967294 in decimal digits")
	case n == 0:
		return 0, errors.New("is nobody's AS number (RFC 7607)")
	case n == 23456:
		return 0, errors.New("is AS_TRANS, which stands for numbers of four bytes (RFC 6793): write the number itself")
	case n == math.MaxUint16 || n == math.MaxUint32:
		return 0, errors.New("is reserved (RFC 7300): private AS numbers are 64512 to 65534 and 4200000000 to 4294967294")
	}
	return uint32(n), nil
}

// wellKnown are the communities that have names, without those that only routers set.
var wellKnown = map[string]Community{
	"graceful-shutdown":   0xffff0000, // RFC 8326
	"no-llgr":             0xffff0007, // RFC 9494
	"blackhole":           0xffff029a, // RFC 7999
	"no-export":           0xffffff01, // RFC 1997, here and below
	"no-advertise":        0xffffff02,
	"no-export-subconfed": 0xffffff03,
	"no-peer":             0xffffff04, // RFC 3765
}

// String returns the community as the document takes it: by its name, if it
// has one.
func (c Community) String() string {
	for name, known := range wellKnown {
		if c == known {
			return name
		}
	}
	return fmt.Sprintf("%d:%d", c>>16, c&0xffff)
}

// String returns the community as the document takes it.
func (c LargeCommunity) String() string {
	return fmt.Sprintf("%d:%d:%d", c.GlobalAdmin, c.Data1, c.Data2)
}

var errNoCommunity = sync.OnceValue(func() error {
	return errors.New("is not a community: write one such as 64512:100 (numbers to 65535, without leading zeros), 64512:1:2 (large, " +
		"numbers to 4294967295), or " +
		strings.Join(slices.Sorted(maps.Keys(wellKnown)), ", "))
})

// attach adds a community as it is written in the document.
func (b *BGP) attach(text string) error {
	parts, bits := strings.Split(text, ":"), 16
	if len(parts) == 3 {
		bits = 32
	}
	var n [3]uint32
	for i, part := range parts[:min(len(parts), 3)] {
		number, err := strconv.ParseUint(part, 10, bits)
		if n[i] = uint32(number); err != nil || len(part) > 1 && part[0] == '0' {
			parts = nil
		}
	}
	standard, named := wellKnown[text]
	large := LargeCommunity{n[0], n[1], n[2]}
	switch {
	case named:
	case len(parts) == 2:
		standard = Community(n[0]<<16 | n[1])
	case len(parts) != 3:
		return errNoCommunity()
	case slices.Contains(b.LargeCommunities, large):
		return errors.New("is listed twice")
	default:
		b.LargeCommunities = append(b.LargeCommunities, large)
		return nil
	}
	if slices.Contains(b.Communities, standard) {
		return errors.New("is listed twice")
	}
	b.Communities = append(b.Communities, standard)
	return nil
}
