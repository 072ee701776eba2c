package kube

// Turns is a queue in which namespaces take turns, so that what waits of one delays nothing of
// another. What is of one namespace keeps its order. The zero value is empty.
type Turns[T any] struct {
	waits map[string][]T // by namespace
	next  []string       // the namespaces in waits
	size  int
}

// Len returns how much waits.
func (t *Turns[T]) Len() int { return t.size }

// Push adds something of the namespace.
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

// Pop takes what is next; false: nothing waits.
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
		if len(waiting) > 0 { // otherwise its last one was dropped
			t.size--
			return waiting[0], true
		}
	}
	return item, false
}

// dropLast takes away what of the namespace came last.
func (t *Turns[T]) dropLast(namespace string) (item T) {
	waiting := t.waits[namespace]
	last := len(waiting) - 1
	t.waits[namespace] = waiting[:last]
	t.size--
	return waiting[last]
}
