package lodestone

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/lan"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// Loss is what a client saw when the owner of a VIP lost its power.
type Loss struct {
	Old, New string
	// Outage is the longest time without an answer.
	Outage time.Duration
}

// LoseOwner cuts the node that owns the VIP off, as a loss of power does,
// while a client asks it by UDP every 5 ms. Once answers are back it plugs the
// node in again and waits until it has its VIP back. The pods that answer must
// be on other nodes: see KeepEchoFromOwner.
func (i *Installation) LoseOwner(ctx context.Context, target netip.AddrPort) (loss Loss, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*Patience)
	defer cancel()
	vip := target.Addr().String()
	if loss.Old, err = i.Owner(ctx, vip); err != nil {
		return loss, err
	}
	asking := probe.UDP(ctx, probe.Options{Namespace: client, Target: target})
	err = i.cut(ctx, asking, &loss, vip)
	record, stopped := asking.Stop()
	loss.Outage = record.Outage().Duration()
	if err := errors.Join(err, stopped); err != nil {
		return loss, err
	}
	return loss, Wait(ctx, loss.Old+" has its VIP back", func() error {
		if owner, err := i.Owner(ctx, vip); err != nil || owner != loss.Old {
			return fmt.Errorf("%q owns it, %w", owner, err)
		}
		return nil
	})
}

// cut unplugs the owner until answers are back.
func (i *Installation) cut(ctx context.Context, asking *probe.Probe, loss *Loss, vip string) (err error) {
	const steady = 100 // answers, half a second's
	if err := asking.WaitAnswers(ctx, steady); err != nil {
		return err
	}
	if err := lan.Unplug(loss.Old); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lan.PlugIn(loss.Old)) }()
	if err := asking.WaitAnswers(ctx, steady); err != nil {
		return err
	}
	loss.New, err = i.Owner(ctx, vip)
	return err
}
