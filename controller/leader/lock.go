package leader

import (
	"context"
	"errors"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// errKept is why the Lease is not given back.
var errKept = errors.New("the leader lease is kept to its end: writes may be under way")

// Lock is the Lease, and notes in the Term what the election does with it.
type Lock struct {
	resourcelock.Interface
	Term *Term
}

// Create implements resourcelock.Interface.
func (l Lock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.put(ctx, r, l.Interface.Create)
}

// Update implements resourcelock.Interface.
func (l Lock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.put(ctx, r, l.Interface.Update)
}

// put writes the Lease. The election reads the clock for RenewTime before it asks for anything.
func (l Lock) put(ctx context.Context, r resourcelock.LeaderElectionRecord,
	write func(context.Context, resourcelock.LeaderElectionRecord) error) error {
	ours := r.HolderIdentity == l.Identity()
	if !ours && !l.Term.GivesBack() {
		return errKept
	}
	if err := write(ctx, r); err != nil {
		return err
	}
	if ours {
		l.Term.Granted(r.RenewTime.Time)
	}
	return nil
}
