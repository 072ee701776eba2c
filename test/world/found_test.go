//go:build long

package world_test

import "testing"

// Each of the old defects, put back, is found by one of the first seeds.
func TestEveryDefectIsFound(t *testing.T) {
	t.Parallel()
	for _, d := range defects(t, proven) {
		t.Run(d.name, func(t *testing.T) { d.find(t) })
	}
}
