package ipam_test

import (
	"net/netip"
	"strings"
	"time"

	"go4.org/netipx"

	"github.com/lodestone-lb/lodestone/pkg/config"
)

var start = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

// pool is an automatic pool of prefixes and ranges; those that begin with "!"
// are withheld.
func pool(name string, addresses ...string) config.Pool {
	var free, withheld netipx.IPSetBuilder
	for _, text := range addresses {
		set := &free
		text, no := strings.CutPrefix(text, "!")
		if no {
			set = &withheld
		}
		if r, err := netipx.ParseIPRange(text); err == nil {
			set.AddRange(r)
		} else {
			set.AddPrefix(netip.MustParsePrefix(text))
		}
	}
	w, _ := withheld.IPSet()
	free.RemoveSet(w)
	f, _ := free.IPSet()
	return config.Pool{Name: name, AutoAssign: true, Free: f, Withheld: w}
}
