package lab

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/lodestone-lb/lodestone/test/e2e/cgroup"
	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/lock"
)

// Places is how many labs a machine has room for. Nothing in one knows of another: they have
// the same addresses, and all that would be shared goes by the number of the place.
const Places = 3

// place is where on the machine a lab is: 1 to Places.
type place int

// suffix tells the names of one place from those of another.
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

// locks are held by a program from Up to Down, or to its end: nobody's lab is
// replaced under their feet. The files are the machine's, not the repository's,
// as the names of the namespaces and of the cgroups are.
var locks = func() (all []*lock.Lock) {
	for p := range place(Places) {
		all = append(all, lock.New("/run/lodestone-lab"+(p+1).suffix()+".lock"))
	}
	return all
}()

func (p place) lock() *lock.Lock { return locks[p-1] }

// take waits for a place: the one given, which this program may have already, or whichever
// is free first, the last one before others: programs that ask for a number ask for 1.
func take(ctx context.Context, number int, progress func(format string, args ...any)) (place, error) {
	if number > 0 {
		return place(number), place(number).lock().Acquire(ctx, progress)
	}
	backwards := slices.Clone(locks)
	slices.Reverse(backwards)
	first, err := lock.First(ctx, progress, backwards...)
	return place(1 + slices.Index(locks, first)), err
}
