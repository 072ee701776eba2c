// Package demo shows what Lodestone is for: a Service gets an address that a
// client on the LAN reaches, and keeps it when the node that owns it dies.
//
//	demo.go      the steps
//	workload.go  the Service and its pods
package demo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
)

// demo is one run.
type demo struct {
	*lab.Cluster
	client kubernetes.Interface
	report func(format string, args ...any)
}

// Run brings a lab up, gives the tour and takes the lab down again, unless it
// is to be kept. It reports each result as it comes.
func Run(ctx context.Context, options lab.Options, keep bool, report func(format string, args ...any)) (err error) {
	cluster, err := lab.Up(ctx, options)
	if cluster != nil && !keep {
		defer func() { err = errors.Join(err, cluster.Down(context.WithoutCancel(ctx))) }()
	}
	if err != nil {
		return err
	}
	client, err := cluster.Clientset()
	if err != nil {
		return err
	}
	d := &demo{Cluster: cluster, client: client, report: report}
	report("nodes=%d initialized=yes", len(cluster.Nodes()))
	if err := d.tour(ctx); err != nil {
		return err
	}
	report("ok")
	return nil
}

func (d *demo) tour(ctx context.Context) error {
	if err := d.deploy(ctx); err != nil {
		return fmt.Errorf("deploy the workload: %w", err)
	}
	vip, err := d.address(ctx)
	if err != nil {
		return err
	}
	if err := d.reach(ctx, vip); err != nil {
		d.report("vip=%s reachable=no", vip)
		return err
	}
	owner, err := d.Owner(vip)
	if err != nil {
		return err
	}
	d.report("vip=%s reachable=yes owner=%s", vip, owner)

	owner, err = d.clearOwner(ctx, vip)
	if err != nil {
		return err
	}
	return d.failOver(ctx, vip, owner)
}

// address waits until the Service has one.
func (d *demo) address(ctx context.Context) (vip netip.Addr, err error) {
	err = within(ctx, time.Minute, "an address for the Service", func(ctx context.Context) error {
		service, err := d.client.CoreV1().Services(workloadNamespace).Get(ctx, workload, metav1.GetOptions{})
		if err != nil {
			return err
		}
		ingress := service.Status.LoadBalancer.Ingress
		if len(ingress) == 0 {
			return errors.New("it has none")
		}
		vip, err = netip.ParseAddr(ingress[0].IP)
		return err
	})
	return vip, err
}

// reach waits until the client is answered over TCP.
func (d *demo) reach(ctx context.Context, vip netip.Addr) error {
	return within(ctx, time.Minute, "an answer from "+vip.String(), func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := probe.Get(ctx, d.Namespace(lab.Client), netip.AddrPortFrom(vip, servicePort))
		return err
	})
}

// clearOwner moves the pods away from the node that owns the VIP and returns
// that node. The demo measures how soon the VIP moves: kube-proxy would send
// pods on the lost node their share of the traffic until Kubernetes takes the
// node for dead, some 40 seconds later, whichever node owns the VIP.
func (d *demo) clearOwner(ctx context.Context, vip netip.Addr) (owner string, err error) {
	const attempts = 5 // the VIP may move as its endpoints do
	for range attempts {
		if owner, err = d.Owner(vip); err != nil {
			return "", err
		}
		if err := d.avoid(ctx, owner); err != nil {
			return "", fmt.Errorf("move the pods away from %s: %w", owner, err)
		}
		if err := d.reach(ctx, vip); err != nil {
			return "", err
		}
		after, err := d.Owner(vip)
		if err != nil || after == owner {
			return owner, err
		}
	}
	return "", fmt.Errorf("the owner of %s changed with every move of its pods", vip)
}

// failOver cuts the owner's power while the client asks every 5 ms.
func (d *demo) failOver(ctx context.Context, vip netip.Addr, owner string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	asking := probe.UDP(ctx, probe.Options{Namespace: d.Namespace(lab.Client), Target: netip.AddrPortFrom(vip, servicePort)})
	defer asking.Stop()
	const second = 200 // answers
	if err := asking.WaitAnswers(ctx, second); err != nil {
		return err
	}
	asking.Begin() // kube-proxy may have sent the first ones to a pod that had left
	if err := d.NodeLoss(owner); err != nil {
		return err
	}
	if err := asking.WaitAnswers(ctx, 2*second); err != nil {
		return fmt.Errorf("after the loss of %s: %w", owner, err)
	}
	record, err := asking.Stop()
	if err != nil {
		return err
	}
	successor, err := d.Owner(vip)
	if err != nil {
		return err
	}
	if successor == owner {
		return fmt.Errorf("the client still sends to %s, which is lost", owner)
	}
	d.report("failover old=%s new=%s outage_ms=%d", owner, successor, record.Outage().Duration().Milliseconds())
	return d.HealNode(owner)
}

// within tries until the condition holds. Its error has what was waited for
// and the condition's last error.
func within(ctx context.Context, limit time.Duration, what string, condition func(context.Context) error) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, limit, true, func(ctx context.Context) (bool, error) {
		last = condition(ctx)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait %s for %s: %w", limit, what, errors.Join(last, err))
	}
	return nil
}
