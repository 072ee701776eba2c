// Package compat reads what Services ask of other load balancers: Lodestone
// understands their annotations where the configuration allows it, so that no
// Service has to be edited on the day that it changes hands.
package compat

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/annotation"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// The annotations that MetalLB reads from a Service: their names since v0.13 first, then the
// names before. MetalLB uses the first one that is there.
var (
	metalLBAddressPool   = []string{"metallb.io/address-pool", "metallb.universe.tf/address-pool"}
	metalLBAddresses     = []string{"metallb.io/loadBalancerIPs", "metallb.universe.tf/loadBalancerIPs"}
	metalLBAllowSharedIP = []string{"metallb.io/allow-shared-ip", "metallb.universe.tf/allow-shared-ip"}
)

// KubeVIPAddresses is the annotation that kube-vip reads from a Service. Its cloud provider
// writes it, too.
const KubeVIPAddresses = "kube-vip.io/loadbalancerIPs"

// Annotations returns the names of the annotations of others that are understood.
func Annotations() []string {
	return slices.Concat(metalLBAddresses, metalLBAddressPool, metalLBAllowSharedIP, []string{KubeVIPAddresses})
}

// specIP is the field by which a Service asks for an address without any annotation.
const specIP = "spec.loadBalancerIP"

// Dialects are the load balancers whose annotations are understood, in one
// configuration. The zero value understands none.
type Dialects struct {
	metalLB, kubeVIP bool
	// leasing names the pools that lease their addresses, as an annotation does.
	leasing string
}

// For returns the dialects of the configuration. Without a configuration (nil), or without
// pools, these are all dialects: no address is given then, and Services keep theirs on the
// terms on which they may have them.
func For(c *config.Config) Dialects {
	if c == nil || len(c.Pools) == 0 {
		return Dialects{metalLB: true, kubeVIP: true}
	}
	d := Dialects{metalLB: slices.Contains(c.Compatibility, config.MetalLB), kubeVIP: slices.Contains(c.Compatibility, config.KubeVIP)}
	var leasing []string
	for _, p := range c.Pools {
		if d.kubeVIP && p.DHCP != nil {
			leasing = append(leasing, p.Name)
		}
	}
	d.leasing = strings.Join(leasing, ",")
	return d
}

// Wish is something that a Service asks for, as text, with the name of its annotation. The
// zero Wish asks for nothing.
type Wish struct{ Annotation, Text string }

// Wishes are what a Service asks for, each in the form of our annotation.
type Wishes struct {
	Pools, Addresses, SharingKey Wish
	// LoadBalancerIP is spec.loadBalancerIP, unless that asks for a lease.
	LoadBalancerIP string
}

// Read returns what the Service asks for. Our annotations win over others. The error names
// where the others contradict each other, or ask for something that does not exist. The Wishes
// are then those that are understood.
func (d Dialects) Read(svc *corev1.Service) (Wishes, error) {
	w := Wishes{
		Pools: first(svc, annotation.AddressPool), Addresses: first(svc, annotation.Addresses), SharingKey: first(svc, annotation.SharingKey),
		LoadBalancerIP: svc.Spec.LoadBalancerIP,
	}
	if d.metalLB && w.SharingKey == (Wish{}) {
		w.SharingKey = first(svc, metalLBAllowSharedIP...)
	}
	if d.metalLB && w.Pools == (Wish{}) {
		w.Pools = first(svc, metalLBAddressPool...)
		w.Pools.Text = PoolName(w.Pools.Text)
	}
	theirs := d.addresses(svc)
	if w.Addresses == (Wish{}) && len(theirs) > 0 {
		w.Addresses = theirs[0]
		if len(theirs) > 1 && !same(theirs[0].Text, theirs[1].Text) {
			return w, fmt.Errorf("annotation %s asks for %s, annotation %s for %s: remove one of them, or write %s, which is stronger",
				theirs[0].Annotation, config.Quote(theirs[0].Text), theirs[1].Annotation, config.Quote(theirs[1].Text), annotation.Addresses)
		}
	}
	if !d.kubeVIP {
		return w, nil
	}
	err := d.lease(&w)
	d.share(&w)
	return w, err
}

// addresses returns the addresses that the annotations of others ask for.
func (d Dialects) addresses(svc *corev1.Service) (theirs []Wish) {
	if w := first(svc, metalLBAddresses...); d.metalLB && w != (Wish{}) {
		theirs = append(theirs, w)
	}
	if w := first(svc, KubeVIPAddresses); d.kubeVIP && w != (Wish{}) {
		theirs = append(theirs, w)
	}
	return theirs
}

// lease turns kube-vip's wish for an address from a DHCP server into one for the
// pools that lease theirs.
func (d Dialects) lease(w *Wishes) error {
	if anyAddress(w.LoadBalancerIP) {
		if w.Addresses == (Wish{}) {
			w.Addresses = Wish{specIP, w.LoadBalancerIP}
		}
		w.LoadBalancerIP = ""
	}
	from := w.Addresses
	if from.Annotation != KubeVIPAddresses && from.Annotation != specIP {
		return nil
	}
	switch texts := strings.Split(from.Text, ","); {
	case !slices.ContainsFunc(texts, anyAddress):
		return nil
	case len(texts) > 1 || strings.TrimSpace(texts[0]) != "0.0.0.0":
		return fmt.Errorf("%s is %s, which asks kube-vip for addresses from DHCP: Lodestone leases one IPv4 address (0.0.0.0) for a "+
			"Service, and that alone; write %s or %s",
			from.Annotation, config.Quote(from.Text), annotation.AddressPool, annotation.Addresses)
	case w.Pools != (Wish{}):
	case d.leasing == "":
		return fmt.Errorf("%s is %s, which asks kube-vip for an address from DHCP, and no pool has dhcp: add one, or remove the wish",
			from.Annotation, config.Quote(from.Text))
	default:
		w.Pools = Wish{from.Annotation, d.leasing}
	}
	w.Addresses = Wish{}
	return nil
}

// share makes Services that ask for the same addresses share them, as they do with kube-vip.
// Nothing on such a Service shows that it shares.
func (d Dialects) share(w *Wishes) {
	asked := w.Addresses
	if asked.Annotation != KubeVIPAddresses || w.SharingKey != (Wish{}) {
		return
	}
	w.SharingKey = Wish{asked.Annotation, "kube-vip " + strings.Join(sorted(asked.Text), ",")}
}

// anyAddress reports whether the text asks kube-vip for an address from a DHCP server.
func anyAddress(text string) bool {
	a, err := netip.ParseAddr(strings.TrimSpace(text))
	return err == nil && a.IsUnspecified()
}

// PoolName returns the name under which Lodestone knows a pool of MetalLB, whose
// names may be longer and have dots, and before v0.13 any characters. Capitals
// become small, other characters '-'. A name that is too long, or has no letter
// or digit left, ends with a part of its hash, so that similar names stay apart.
func PoolName(theirs string) string {
	theirs = strings.TrimSpace(theirs)
	name := strings.Trim(strings.Map(nameCharacter, theirs), "-")
	if theirs == "" || name != "" && len(name) <= config.MaxName {
		return name
	}
	hash := fmt.Sprintf("%x", sha256.Sum256([]byte(theirs)))[:8]
	kept := strings.TrimRight(name[:min(len(name), config.MaxName-1-len(hash))], "-")
	return strings.TrimLeft(kept+"-"+hash, "-")
}

func nameCharacter(r rune) rune {
	switch {
	case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
		return r
	case r >= 'A' && r <= 'Z':
		return r - 'A' + 'a'
	default:
		return '-'
	}
}

// first returns the wish of the first of these annotations that the Service has.
func first(svc *corev1.Service, names ...string) Wish {
	for _, name := range names {
		if text, ok := svc.Annotations[name]; ok {
			if text = strings.TrimSpace(text); text == "" {
				return Wish{}
			}
			return Wish{name, text}
		}
	}
	return Wish{}
}

// same reports whether two lists name the same addresses.
func same(list, other string) bool { return slices.Equal(sorted(list), sorted(other)) }

// sorted returns the members of a list, addresses in canonical form.
func sorted(list string) []string {
	var all []string
	for text := range strings.SplitSeq(list, ",") {
		text = strings.TrimSpace(text)
		if a, err := netip.ParseAddr(text); err == nil {
			text = a.Unmap().String()
		}
		all = append(all, text)
	}
	slices.Sort(all)
	return all
}
