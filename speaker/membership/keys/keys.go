// Package keys decides which keys a speaker understands and which one it uses, so that
// the one that all speakers share can be replaced while they work.
//
// The Secret reaches the nodes at different times, up to two minutes apart. A speaker
// that reads a new key understands it from then on, beside those that it had, and says
// so on its Lease. It uses the new key when all speakers understand it, and forgets the
// others when all use it. A speaker that starts meanwhile has the new one only, and waits
// until it and all others understand each other.
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
	// minText is the shortest text that is taken for a key.
	minText = 16
	// markSize is the length of a mark in bytes.
	markSize = 8
)

// ErrNone says that there is no key.
var ErrNone = errors.New("no membership key: speakers talk to each other only encrypted; put at least 16 random characters into the Secret")

// Key is one that speakers share. Two of the same text are equal.
type Key struct {
	secret [32]byte // AES-256
	mark   string
}

// Parse derives a key from a text, white space around it aside.
func Parse(text []byte) (Key, error) {
	text = bytes.TrimSpace(text)
	switch {
	case len(text) == 0:
		return Key{}, ErrNone
	case len(text) < minText:
		return Key{}, fmt.Errorf("membership key of %d bytes, at least %d", len(text), minText)
	}
	secret, err := hkdf.Key(sha256.New, text, nil, "lodestone membership", len(Key{}.secret))
	if err != nil {
		return Key{}, err //nolint:wrapcheck // of a hash that is known there is none
	}
	mark, err := hkdf.Key(sha256.New, text, nil, "lodestone membership mark", markSize)
	return Key{[32]byte(secret), hex.EncodeToString(mark)}, err //nolint:wrapcheck // as above
}

// Mark names the key, and tells nobody what it is.
func (k Key) Mark() string { return k.mark }

// Ring are the keys that a speaker understands. It uses the first one.
type Ring []Key

// Secrets returns what encrypts and seals, in the same order.
func (r Ring) Secrets() [][]byte {
	secrets := make([][]byte, len(r))
	for i := range r {
		secrets[i] = slices.Clone(r[i].secret[:])
	}
	return secrets
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

// Meets reports whether it and a speaker that has these marks on its Lease understand
// each other. Who says nothing of its keys is taken to have the same.
func (r Ring) Meets(marks []string) bool {
	return len(marks) == 0 || slices.Contains(r.Marks(), marks[0]) && slices.Contains(marks, r[0].mark)
}

// Next returns the ring that follows r when the Secret has the key and the other
// speakers say these marks, each the one that it uses first. Who says nothing has to be
// waited for, and so has who is lost: it may be on the other side of a partition, where
// the Secret does not come.
func (r Ring) Next(secret Key, others [][]string) Ring {
	used := r[0]
	if all(others, func(marks []string) bool { return slices.Contains(marks, secret.mark) }) {
		used = secret
	}
	if used == secret && all(others, func(marks []string) bool { return len(marks) > 0 && marks[0] == secret.mark }) {
		return Ring{secret}
	}
	next := Ring{used}
	for _, k := range append(Ring{secret}, r...) {
		if !slices.Contains(next, k) && len(next) < report.MaxKeys {
			next = append(next, k)
		}
	}
	return next
}

func all(others [][]string, hold func(marks []string) bool) bool {
	return !slices.ContainsFunc(others, func(marks []string) bool { return !hold(marks) })
}
