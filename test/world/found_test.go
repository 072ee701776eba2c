//go:build long

package world_test

import (
	"testing"

	"github.com/lodestone-lb/lodestone/test/world"
)

// Each of the old defects, put back, is found by one of its first seeds.
func TestEveryDefectIsFound(t *testing.T) {
	t.Parallel()
	for _, d := range defects(t, proven) {
		t.Run(d.name, func(t *testing.T) { d.find(t, d.from) })
	}
}

func TestOtherSeeds(t *testing.T) {
	t.Parallel()
	for i := uint64(fewOthers); i < moreOthers; i++ {
		live(t, world.Draw(others+i))
	}
}
