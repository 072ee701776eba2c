// Package poolstatus writes how full the pools are into a ConfigMap, for who has kubectl and
// nothing else. Programs take the metrics, which have the same numbers.
package poolstatus

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/ipam"
	"github.com/lodestone-lb/lodestone/pkg/kube"
)

const (
	// ConfigMapName is the name of the ConfigMap, in the controller's namespace.
	ConfigMapName = "lodestone-status"
	// Key is the key of the table in it.
	Key = "pools"
	// Interval is the least time between two writes.
	Interval = 30 * time.Second
	// MaxRows bounds the table: a ConfigMap takes 1 MiB, and etcd keeps each version of it for a while.
	MaxRows = 1000
)

// Pools are the pools with their numbers; servicelb.Controller is one.
type Pools interface {
	// Primed returns a channel that is closed once Stats means something.
	Primed() <-chan struct{}
	Stats() ledger.Stats
}

// Options are what a Writer works with.
type Options struct {
	Client    kubernetes.Interface
	Namespace string
	Pools     Pools
	Log       *slog.Logger
}

// Writer is the task that writes the ConfigMap, in the controller that leads. Nothing depends on
// what it writes.
type Writer struct{ o Options }

// New returns a Writer that starts with Run.
func New(o Options) *Writer { return &Writer{o} }

// Run writes the table when the ConfigMap has another one or is gone, until ctx ends. What the controller
// that led before has written stays until this one knows better.
func (w *Writer) Run(ctx context.Context) error {
	select {
	case <-w.o.Pools.Primed():
	case <-ctx.Done():
		return nil
	}
	failing := false
	for {
		err := kube.WriteConfigMap(ctx, w.o.Client, w.o.Namespace, ConfigMapName, Key, Table(w.o.Pools.Stats()))
		if err != nil && !failing && ctx.Err() == nil {
			w.o.Log.Error("how full pools are is not written, retrying", "every", Interval, "err", err)
		}
		failing = err != nil
		select {
		case <-time.After(Interval):
		case <-ctx.Done():
			return nil
		}
	}
}

// Table returns a row for each pool and family, the fullest first, so that those without room for a
// row are the ones that nobody needs to look at. No line ends with a space: with one, kubectl would
// print the text as a single quoted line.
func Table(s ledger.Stats) string {
	pools := slices.Clone(s.Pools)
	slices.SortStableFunc(pools, func(a, b ipam.PoolStats) int {
		return cmp.Or(cmp.Compare(full(b), full(a)), cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Family, b.Family))
	})
	var rows [][]string
	for _, p := range pools {
		rows = append(rows, []string{p.Pool, string(p.Family), fmt.Sprintf("%.0f%%", math.Floor(full(p))), number(p.Size),
			number(p.Assigned), number(p.Free), number(p.Quarantined), number(p.Conflicted), number(p.Reserved)})
	}
	for _, name := range slices.Sorted(maps.Keys(s.Leases)) {
		inUse := 0.0
		for state, n := range s.Leases[name] {
			if state != ledger.LeaseWaiting {
				inUse += n
			}
		}
		rows = append(rows, []string{name, string(ipam.IPv4), "by DHCP", "-", number(inUse), "-", "-", "-", "-"})
	}
	if len(rows) == 0 {
		return "There are no pools.\n"
	}
	left := max(0, len(rows)-MaxRows)
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "POOL\tFAMILY\tFULL\tSIZE\tIN USE\tFREE\tQUARANTINED\tCONFLICTED\tRESERVED")
	for _, row := range rows[:len(rows)-left] {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush() // a strings.Builder takes everything
	if left > 0 {
		fmt.Fprintf(&b, "%d more rows have no room here: lodestone status shows all.\n", left)
	}
	return b.String()
}

// full returns the percentage of the pool's addresses that are not free.
func full(p ipam.PoolStats) float64 {
	if p.Free == 0 { // also of a pool whose addresses are all forbidden
		return 100
	}
	return (p.Size - p.Free) * 100 / p.Size
}

// number writes a count; that of a large IPv6 pool is rounded.
func number(n float64) string {
	if n >= 1e15 {
		return fmt.Sprintf("%.1e", n)
	}
	return fmt.Sprintf("%.0f", n)
}
