// Package notify signals a change to any number of goroutines. It carries no value: who is woken reads the
// state of the sender again.
package notify

import "sync"

// Signal wakes all goroutines that wait for a change. Take the channel first and look at what
// may have changed then: no change is missed. A slow goroutine may see several changes as one.
// The zero Signal is ready for use.
type Signal struct {
	mu   sync.Mutex
	next chan struct{}
}

// Next returns a channel that the next Notify closes.
func (s *Signal) Next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next = make(chan struct{})
	}
	return s.next
}

// Notify closes the channel that Next has returned. It does not wait.
func (s *Signal) Notify() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != nil {
		close(s.next)
		s.next = nil
	}
}

// Wake makes one receive from the channel, which has room for one value, succeed now or later.
func Wake(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default: // it was woken already, and has not looked yet
	}
}

// Replace sends a value to a channel, which has room for one, in place of one that nobody has received
// yet. It is for one goroutine.
func Replace[T any](ch chan T, value T) {
	select {
	case <-ch:
	default:
	}
	ch <- value
}

// Closed reports whether the channel, on which nobody sends, is closed.
func Closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
