//go:build long

package ipam_test

import "testing"

func TestManyRandomHistoriesAgainstModel(t *testing.T) {
	playSeeds(t, fewSeeds, manySeeds)
}
