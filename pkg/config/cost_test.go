//go:build long

package config

import (
	"slices"
	"strings"
	"testing"
)

// Four times the document costs about four times as much, whatever there is much
// of. BenchmarkWorst has the full size, and every shape.
func TestCostGrowsWithTheDocument(t *testing.T) {
	for _, s := range listShapes() {
		_, what, _ := strings.Cut(s.name, "/")
		if slices.Contains([]string{"among everything", "minimal", "full", "unknown", "valid 0"}, what) {
			growsAsTheDocument(t, s, 16<<10)
		}
	}
}

func TestLargestHostileDocumentsDoNotHang(t *testing.T) {
	parseHostile(t, MaxSize)
}
