// Package v1beta1 replaces a package without which MetalLB cannot be compiled, and
// which it uses only where FRR-K8s speaks BGP for it. It is written from the way in
// which MetalLB's code uses it; the lab runs MetalLB without BGP. In the mode for
// FRR-K8s MetalLB would end at once: its scheme does not know these objects.
package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// AddToScheme registers nothing: see the package.
func AddToScheme(*runtime.Scheme) error { return nil }

const absent = "this MetalLB was built without FRR-K8s: run it in native mode"

// FRRConfiguration is what a node's FRR is to do.
type FRRConfiguration struct {
	metav1.TypeMeta
	metav1.ObjectMeta
	Spec FRRConfigurationSpec
}

// DeepCopy panics: see the package.
func (*FRRConfiguration) DeepCopy() *FRRConfiguration { panic(absent) }

// DeepCopyObject panics: see the package.
func (*FRRConfiguration) DeepCopyObject() runtime.Object { panic(absent) }

// FRRConfigurationSpec is the configuration, and for which nodes it is.
type FRRConfigurationSpec struct {
	BGP          BGPConfig
	NodeSelector metav1.LabelSelector
}

// DeepCopyInto panics: see the package.
func (*FRRConfigurationSpec) DeepCopyInto(*FRRConfigurationSpec) { panic(absent) }

// BGPConfig are the routers that FRR is.
type BGPConfig struct {
	Routers     []Router
	BFDProfiles []BFDProfile
}

// Router is one in one VRF.
type Router struct {
	ASN       uint32
	ID, VRF   string
	Neighbors []Neighbor
	Prefixes  []string
}

// BFDProfile are settings of BFD sessions.
type BFDProfile struct {
	Name                              string
	ReceiveInterval, TransmitInterval *uint32
	DetectMultiplier, EchoInterval    *uint32
	EchoMode, PassiveMode             *bool
	MinimumTTL                        *uint32
}

// DynamicASNMode is how a neighbor's ASN is determined.
type DynamicASNMode string

// Neighbor is the other end of a session.
type Neighbor struct {
	ASN                    uint32
	DynamicASN             DynamicASNMode
	Address, Interface     string
	Port                   *uint16
	Password               string
	PasswordSecret         SecretReference
	HoldTime               *metav1.Duration
	KeepaliveTime          *metav1.Duration
	ConnectTime            *metav1.Duration
	EBGPMultiHop           bool
	BFDProfile             string
	EnableGracefulRestart  bool
	ToAdvertise            Advertise
	DisableMP              bool
	DualStackAddressFamily bool
}

// SecretReference names a Secret.
type SecretReference struct{ Name, Namespace string }

// Advertise has the prefixes that are announced to a neighbor.
type Advertise struct {
	Allowed                   AllowedOutPrefixes
	PrefixesWithLocalPref     []LocalPrefPrefixes
	PrefixesWithCommunity     []CommunityPrefixes
	PrefixesWithAsPathPrepend []AsPathPrependPrefixes
}

// AllowedOutPrefixes are those that may be announced to a neighbor.
type AllowedOutPrefixes struct{ Prefixes []string }

// LocalPrefPrefixes are those that have a local preference.
type LocalPrefPrefixes struct {
	Prefixes  []string
	LocalPref uint32
}

// CommunityPrefixes are those that have a community.
type CommunityPrefixes struct {
	Prefixes  []string
	Community string
}

// AsPathPrependPrefixes are those whose AS path is made longer.
type AsPathPrependPrefixes struct {
	Prefixes      []string
	AsPathPrepend uint8
}
