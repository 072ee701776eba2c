package direct

import (
	"cmp"
	"slices"
	"strings"
)

// fair sorts claims to something that is bounded so that namespaces share it: next is always the claim whose namespace has
// the least with it. The claims of one namespace keep their order, which also decides between equals.
func fair[T any](claims []T, claim func(T) (service string, size int)) {
	type turn struct {
		of  T
		sum int // of the sizes of the namespace's claims up to this one
	}
	sums, turns := map[string]int{}, make([]turn, len(claims))
	for i, c := range claims {
		service, size := claim(c)
		namespace := namespaceOf(service)
		sums[namespace] += size
		turns[i] = turn{c, sums[namespace]}
	}
	slices.SortStableFunc(turns, func(a, b turn) int { return cmp.Compare(a.sum, b.sum) })
	for i, t := range turns {
		claims[i] = t.of
	}
}

func namespaceOf(service string) string {
	namespace, _, _ := strings.Cut(service, "/")
	return namespace
}
