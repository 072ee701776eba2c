package lab

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/cgroup"
	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/lock"
)

// Places is how many labs a machine has room for. They are independent: they have the same
// addresses, and the names of all shared resources have the number of the place.
const Places = 4

// place is where on the machine a lab is: 1 to Places.
type place int

// suffix distinguishes the names of one place from those of others.
func (p place) suffix() string {
	if p == 1 {
		return ""
	}
	return fmt.Sprint(int(p))
}

func (p place) lan() lan.LAN { return lan.New("ls" + p.suffix()) }

func (p place) group() cgroup.Group { return cgroup.Group("ls" + p.suffix() + "-lab") }

func (p place) stateDir(root string) string { return filepath.Join(root, ".lab"+p.suffix()) }

// routerDir holds what the routing daemons write. It is not in the lab's folder:
// FRR's run as a user of their own, who may not be able to get there.
func (p place) routerDir() string { return "/run/lodestone-lab-routers" + p.suffix() }

// locks are held by a program from Up to Down, or to its end, so that no other
// program replaces its lab. The files are the machine's, not the repository's,
// like the names of the namespaces and of the cgroups.
var locks = func() (all []*lock.Lock) {
	for p := range place(Places) {
		all = append(all, lock.New("/run/lodestone-lab"+(p+1).suffix()+".lock"))
	}
	return all
}()

func (p place) lock() *lock.Lock { return locks[p-1] }

// take waits for a place: the given one, which this program may have already, or the first
// free one. It prefers the last place, because programs that ask for a number ask for 1.
func take(ctx context.Context, number int, wait time.Duration, progress func(format string, args ...any)) (place, error) {
	if wait > 0 {
		waiting, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		ctx = waiting
	}
	if number > 0 {
		return place(number), place(number).lock().Acquire(ctx, progress)
	}
	backwards := slices.Clone(locks)
	slices.Reverse(backwards)
	first, err := lock.First(ctx, progress, backwards...)
	return place(1 + slices.Index(locks, first)), err
}
