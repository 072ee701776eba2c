package lodestone

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
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
	if loss, err = i.CutOwner(ctx, target); err != nil {
		return loss, err
	}
	return loss, i.Moved(ctx, target.Addr().String(), loss.Old, true)
}

// CutOwner is LoseOwner without the wait at the end.
func (i *Installation) CutOwner(ctx context.Context, target netip.AddrPort) (loss Loss, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*Timeout)
	defer cancel()
	vip := target.Addr().String()
	if err := i.waitOwner(ctx, vip, &loss.Old); err != nil {
		return loss, err
	}
	asking := probe.UDP(ctx, probe.Options{Namespace: i.Lab.Namespace(lab.Client), Target: target})
	err = i.cut(ctx, asking, &loss, vip)
	record, stopped := asking.Stop()
	loss.Outage = record.Outage().Duration()
	return loss, errors.Join(err, stopped)
}

// cut unplugs the owner until answers are back.
func (i *Installation) cut(ctx context.Context, asking *probe.Probe, loss *Loss, vip string) (err error) {
	const steady = 100 // answers, half a second's
	if err := asking.WaitAnswers(ctx, steady); err != nil {
		return err
	}
	asking.Begin()
	if err := i.Lab.NodeLoss(loss.Old); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, i.Lab.HealNode(loss.Old)) }()
	if err := asking.WaitAnswers(ctx, steady); err != nil {
		return err
	}
	return i.waitOwner(ctx, vip, &loss.New)
}

// waitOwner waits until one node answers for the VIP. A speaker that was late may have taken another one for lost, too, and answer
// for a moment more.
func (i *Installation) waitOwner(ctx context.Context, vip string, node *string) error {
	return Wait(ctx, "one node answers for "+vip, func() (err error) { *node, err = i.Owner(ctx, vip); return err })
}

// During asks each address by UDP every 5 ms, with the options, from before do
// runs until after it has returned, and returns the record of each.
func During(ctx context.Context, options probe.Options, targets []netip.AddrPort,
	do func() error) (map[netip.AddrPort]probe.Record, error) {
	const steady = 100 // answers, half a second's
	probes, records := map[netip.AddrPort]*probe.Probe{}, map[netip.AddrPort]probe.Record{}
	var failed error
	for _, target := range targets {
		options.Target = target
		probes[target] = probe.UDP(ctx, options)
		failed = errors.Join(failed, probes[target].WaitAnswers(ctx, steady))
	}
	if failed == nil {
		failed = do()
	}
	for target, p := range probes {
		if failed == nil {
			failed = p.WaitAnswers(ctx, steady)
		}
		record, err := p.Finish()
		records[target], failed = record, errors.Join(failed, err)
	}
	return records, failed
}

// FromClient asks from the nodes' segment, in one flow for each address.
func (i *Installation) FromClient() probe.Options {
	return probe.Options{Namespace: i.Lab.Namespace(lab.Client)}
}

// FromRemote asks from behind the router, in a new flow each time: the router spreads them
// over the nodes.
func (i *Installation) FromRemote() probe.Options {
	return probe.Options{Namespace: i.Lab.Namespace(lab.Remote), NewFlows: true}
}

// Moved waits until the node owns the VIP, or until another one does.
func (i *Installation) Moved(ctx context.Context, vip, node string, here bool) error {
	return Wait(ctx, fmt.Sprintf("%s owns %s: %v", node, vip, here), func() error {
		owner, err := i.Owner(ctx, vip)
		if err == nil && (owner == node) != here {
			err = fmt.Errorf("%s owns it", owner)
		}
		return err
	})
}

// Label gives the node the label; without a value, it takes it away.
func (i *Installation) Label(ctx context.Context, node, key, value string) error {
	labels := map[string]any{key: value}
	if value == "" {
		labels[key] = nil
	}
	return i.patchNode(ctx, node, map[string]any{"metadata": map[string]any{"labels": labels}})
}

func (i *Installation) patchNode(ctx context.Context, node string, patch any) error {
	raw, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	if _, err := i.Kube.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, raw, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("change node %s: %w", node, err)
	}
	return nil
}
