package kube

// Turns is a fair queue: namespaces take turns, so that many items of one namespace do not delay those
// of another. Items of one namespace keep their order. The zero value is empty.
type Turns[T any] struct {
	waits map[string][]T // the items, by namespace
	next  []string       // the namespaces in waits
	size  int
}

// Len returns the number of items.
func (t *Turns[T]) Len() int { return t.size }

// Push adds an item of the namespace.
func (t *Turns[T]) Push(namespace string, item T) {
	if t.waits == nil {
		t.waits = map[string][]T{}
	}
	if _, inTurn := t.waits[namespace]; !inTurn {
		t.next = append(t.next, namespace)
	}
	t.waits[namespace] = append(t.waits[namespace], item)
	t.size++
}

// Pop removes the next item; ok is false if the queue is empty.
func (t *Turns[T]) Pop() (item T, ok bool) {
	for len(t.next) > 0 {
		namespace := t.next[0]
		t.next = t.next[1:]
		waiting := t.waits[namespace]
		if len(waiting) > 1 {
			t.waits[namespace] = waiting[1:]
			t.next = append(t.next, namespace)
		} else {
			delete(t.waits, namespace)
		}
		if len(waiting) > 0 { // otherwise dropLast has removed the namespace's last item
			t.size--
			return waiting[0], true
		}
	}
	return item, false
}

// dropLast removes the newest item of the namespace, which must have one.
func (t *Turns[T]) dropLast(namespace string) (item T) {
	waiting := t.waits[namespace]
	last := len(waiting) - 1
	t.waits[namespace] = waiting[:last]
	t.size--
	return waiting[last]
}
