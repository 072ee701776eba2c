// Package keys decides which keys a speaker understands and which one it uses, so that the key that all
// speakers share can be replaced while they work.
//
// A key is derived from the Secret's text and the configuration's clusterID: clusters with the same text
// have different keys. It has one part for the messages between speakers, one for their
// heartbeats, and one for the seals on their announcements.
//
// A new Secret or configuration reaches the nodes within two minutes. A speaker that has read it
// understands the new key beside the old ones, and reports that on its Lease. It uses the new key when all
// speakers understand it, and forgets the old ones when all speakers use it. A speaker that starts in the
// meantime has only the new key, and waits until it and all others understand each other.
package keys

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/report"
)

const (
	// minText is the length of the shortest valid text.
	minText = 16
	// markSize is the length of a mark in bytes.
	markSize = 8
)

// ErrNone is the error if there is no key.
var ErrNone = errors.New("no membership key: speakers communicate only encrypted; put at least 16 random characters into the Secret")

// Secret is the text that speakers share.
type Secret struct{ text string }

// Parse returns the Secret of a text, without white space around it.
func Parse(text []byte) (Secret, error) {
	text = bytes.TrimSpace(text)
	switch {
	case len(text) == 0:
		return Secret{}, ErrNone
	case len(text) < minText:
		return Secret{}, fmt.Errorf("the membership key has %d characters, and %d are the least: put random ones into the Secret",
			len(text), minText)
	}
	return Secret{string(text)}, nil
}

// Key is a key that the speakers of a cluster share. Two keys of the same Secret and clusterID are equal.
type Key struct {
	gossip, seal, beats [32]byte
	mark                string
}

// Of returns the key that follows from the Secret and the clusterID.
func (s Secret) Of(clusterID string) (k Key, err error) {
	var mark [markSize]byte
	for purpose, to := range map[string][]byte{"gossip": k.gossip[:], "seal": k.seal[:], "beats": k.beats[:], "mark": mark[:]} {
		derived, err := hkdf.Key(sha256.New, []byte(s.text), nil, "lodestone "+purpose+" "+clusterID, len(to))
		if err != nil {
			return Key{}, fmt.Errorf("derive the membership key: %w", err)
		}
		copy(to, derived)
	}
	k.mark = hex.EncodeToString(mark[:])
	return k, nil
}

// Mark names the key, and does not disclose it.
func (k Key) Mark() string { return k.mark }

// Ring are the keys that a speaker understands. It uses the first one.
type Ring []Key

// Gossip returns the keys that encrypt messages between speakers, in the same order.
func (r Ring) Gossip() [][]byte { return r.each(func(k *Key) []byte { return k.gossip[:] }) }

// Seals returns the keys that seal announcements, in the same order.
func (r Ring) Seals() [][]byte { return r.each(func(k *Key) []byte { return k.seal[:] }) }

// Beats returns the keys that seal heartbeats, in the same order.
func (r Ring) Beats() [][]byte { return r.each(func(k *Key) []byte { return k.beats[:] }) }

func (r Ring) each(part func(*Key) []byte) [][]byte {
	parts := make([][]byte, len(r))
	for i := range r {
		parts[i] = slices.Clone(part(&r[i]))
	}
	return parts
}

// Marks returns the keys' marks, in the same order.
func (r Ring) Marks() []string {
	marks := make([]string, len(r))
	for i, k := range r {
		marks[i] = k.mark
	}
	return marks
}

// String names the keys for people.
func (r Ring) String() string { return strings.Join(r.Marks(), ",") }

// Meets reports whether a speaker with this ring and one with these marks on its Lease understand each
// other. A speaker without marks counts as one that does.
func (r Ring) Meets(marks []string) bool {
	return len(marks) == 0 || slices.Contains(r.Marks(), marks[0]) && slices.Contains(marks, r[0].mark)
}

// Next returns the ring after r when the Secret and the clusterID give the key now and the other speakers
// report these marks, the used key first. It waits for speakers that report no marks, and for lost ones:
// they may be behind a partition which the Secret does not reach.
func (r Ring) Next(now Key, others [][]string) Ring {
	used := r[0]
	if all(others, func(marks []string) bool { return slices.Contains(marks, now.mark) }) {
		used = now
	}
	if used == now && all(others, func(marks []string) bool { return len(marks) > 0 && marks[0] == now.mark }) {
		return Ring{now}
	}
	next := Ring{used}
	for _, k := range append(Ring{now}, r...) {
		if !slices.Contains(next, k) && len(next) < report.MaxKeys {
			next = append(next, k)
		}
	}
	return next
}

func all(others [][]string, hold func(marks []string) bool) bool {
	return !slices.ContainsFunc(others, func(marks []string) bool { return !hold(marks) })
}
