package report

import (
	"hash/fnv"
	"net/netip"
)

// Claims are the VIPs that a node owns and keeps, see config.Layer2, by buckets: a bit each,
// so that they have one size however many VIPs there are. A node whose claim is about another
// VIP of the same bucket may take a VIP over for no reason. Whatever the claims are, all nodes
// come to the same owner.
type Claims [128]byte

// Buckets is how many buckets there are, from zero on.
const Buckets = 8 * uint16(len(Claims{}))

// Bucket returns the bucket of the VIP.
func Bucket(vip netip.Addr) uint16 {
	h, raw := fnv.New32a(), vip.As16()
	h.Write(raw[:])
	return uint16(h.Sum32()>>16^h.Sum32()) % Buckets
}

// Set claims the VIPs of a bucket.
func (c *Claims) Set(bucket uint16) { c[bucket/8] |= 1 << (bucket % 8) }

// Clear ends the claim to the VIPs of a bucket.
func (c *Claims) Clear(bucket uint16) { c[bucket/8] &^= 1 << (bucket % 8) }

// Has reports whether the VIPs of a bucket are claimed.
func (c Claims) Has(bucket uint16) bool { return c[bucket/8]&(1<<(bucket%8)) != 0 }
