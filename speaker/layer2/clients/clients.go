// Package clients remembers which hosts asked for which of the VIPs that nodes
// share, and which of them send to this node. When a node is lost, the others
// know from it whom they have to tell.
//
// What a host has learnt about a VIP it may use for days without asking again:
// TCP tells it that the way is good. So nothing here expires. The book has a
// bound instead, and who asked longest ago is forgotten first.
package clients

import (
	"container/list"
	"net/netip"
	"sync"
)

// Max is how many pairs of VIP and client a Book has, at most: some 4 MB.
const Max = 1 << 14

// Client is a host that asked for a VIP.
type Client struct {
	Hardware [6]byte
	// Addr is the address that it asked from last.
	Addr netip.Addr
}

// Place is where a client sends its packets for a VIP, as far as this node knows.
type Place int

// The places.
const (
	// Elsewhere: to another node.
	Elsewhere Place = iota
	// Here: to this node, which it belongs to.
	Here
	// Lingering: to this node, though it belongs to another one now.
	Lingering
)

// Book is the memory. The zero value is an empty one.
type Book struct {
	mu    sync.Mutex
	of    map[netip.Addr]map[[6]byte]*list.Element
	order list.List // of *entry, who asked last at the back
}

type entry struct {
	Client
	vip   netip.Addr
	place Place
}

// Note notes that a client asked for the VIP, and where it will send its packets.
func (b *Book) Note(vip netip.Addr, c Client, at Place) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if known := b.of[vip][c.Hardware]; known != nil {
		e := known.Value.(*entry)
		e.Client, e.place = c, at
		b.order.MoveToBack(known)
		return
	}
	if b.order.Len() >= Max {
		b.remove(b.order.Front())
	}
	if b.of == nil {
		b.of = map[netip.Addr]map[[6]byte]*list.Element{}
	}
	if b.of[vip] == nil {
		b.of[vip] = map[[6]byte]*list.Element{}
	}
	b.of[vip][c.Hardware] = b.order.PushBack(&entry{c, vip, at})
}

// Divide divides the clients of a VIP anew. It returns those that belong to this
// node now and did not before, which are Here from now on, and those that belonged
// to it and do no more, which are Lingering until they ask.
func (b *Book) Divide(vip netip.Addr, mine func(hardware [6]byte) bool) (gained, lost []Client) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for hardware, known := range b.of[vip] {
		switch e, mine := known.Value.(*entry), mine(hardware); {
		case mine && e.place != Here: // whether one that lingered has gone nobody told
			e.place = Here
			gained = append(gained, e.Client)
		case !mine && e.place == Here:
			e.place = Lingering
			lost = append(lost, e.Client)
		}
	}
	return gained, lost
}

// Sending returns the clients that send to this node, in no order.
func (b *Book) Sending(vip netip.Addr) []Client {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []Client
	for _, known := range b.of[vip] {
		if e := known.Value.(*entry); e.place != Elsewhere {
			all = append(all, e.Client)
		}
	}
	return all
}

// Forget forgets all clients of a VIP.
func (b *Book) Forget(vip netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, known := range b.of[vip] {
		b.order.Remove(known)
	}
	delete(b.of, vip)
}

// Count returns how many clients of a VIP are known, and how many of them send to
// this node.
func (b *Book) Count(vip netip.Addr) (known, sending int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range b.of[vip] {
		if k.Value.(*entry).place != Elsewhere {
			sending++
		}
	}
	return len(b.of[vip]), sending
}

// CountAll is Count for all VIPs together.
func (b *Book) CountAll() (known, sending int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for e := b.order.Front(); e != nil; e = e.Next() {
		if e.Value.(*entry).place != Elsewhere {
			sending++
		}
	}
	return b.order.Len(), sending
}

func (b *Book) remove(known *list.Element) {
	e := known.Value.(*entry)
	b.order.Remove(known)
	delete(b.of[e.vip], e.Hardware)
	if len(b.of[e.vip]) == 0 {
		delete(b.of, e.vip)
	}
}
