package ipam

// spare holds structs to use again. It is bounded, so that memory shrinks with use.
type spare[T any] []*T

const maxSpare = 1024

func (s *spare[T]) pop() *T {
	last := len(*s) - 1
	if last < 0 {
		return new(T)
	}
	t := (*s)[last]
	*s = (*s)[:last]
	return t
}

// push empties a struct and keeps it.
func (s *spare[T]) push(t *T) {
	*t = *new(T)
	if len(*s) < maxSpare {
		*s = append(*s, t)
	}
}
