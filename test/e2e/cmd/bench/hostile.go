package main

import (
	"context"
	"fmt"
	"os"

	"github.com/lodestone-lb/lodestone/test/e2e/hostile"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// hostileCluster fills an API server with the worst objects that it takes, as many as etcd
// holds, and reports what speakers and controller need, and how long another tenant waits.
func hostileCluster(ctx context.Context, _ *lodestone.Installation) error {
	r, err := hostile.Run(ctx, hostile.Options{Small: 10_000, Large: 1000, Slices: 250, Leases: 200,
		Progress: func(format string, args ...any) {
			fmt.Fprintf(os.Stderr, "hostile: "+format+"\n", args...)
		}})
	if err != nil {
		return err
	}
	result("hostile_cluster", "speaker_mb=%.0f controller_mb=%.0f other_tenant_p99_ms=%.0f", megabytes(r.Speaker.Max()),
		megabytes(r.Controller.Max()),
		ms(hostile.Quantile(r.Quiet.Announced, 0.99)))
	for _, phase := range []string{hostile.Filling, hostile.Start, hostile.Service, hostile.Relist} {
		took := r.Processor[phase]
		result("hostile_cluster", "phase=%s speaker_mb=%.0f controller_mb=%.0f renewals=%d renewal_p99_ms=%.0f renewal_max_ms=%.0f "+
			"speaker_cpu_s=%.0f controller_cpu_s=%.0f apiserver_cpu_s=%.0f etcd_cpu_s=%.0f ended=%d", phase,
			megabytes(r.Speaker[phase]), megabytes(r.Controller[phase]), len(r.Renewals[phase]),
			ms(hostile.Quantile(r.Renewals[phase], 0.99)), ms(hostile.Quantile(r.Renewals[phase], 1)),
			took["lodestone-speaker-n1"].Seconds(), took["lodestone-controller-control"].Seconds(), took["kube-apiserver"].Seconds(),
			took["etcd"].Seconds(), r.Ended[phase])
	}
	for _, tenant := range []struct {
		when  string
		waits hostile.Waits
	}{{"before", r.Usual}, {"quiet", r.Quiet}, {"busy", r.Busy}, {"relisted", r.Relisted}} {
		result("hostile_cluster", "tenant=%s created_p99_ms=%.0f address_p99_ms=%.0f announced_p99_ms=%.0f", tenant.when,
			ms(hostile.Quantile(tenant.waits.Created, 0.99)), ms(hostile.Quantile(tenant.waits.Address, 0.99)),
			ms(hostile.Quantile(tenant.waits.Announced, 0.99)))
	}
	lists := 0
	for _, n := range r.Lists {
		lists += n
	}
	result("hostile_cluster", "relist lists=%d lists_of_services=%d until_listed_ms=%.0f", lists, r.Lists["/api/v1/services"], ms(r.Relisting))
	ended := 0
	for _, n := range r.Ended {
		ended += n
	}
	result("hostile_cluster", "objects_mb=%.0f ended=%d half_speaker_limit_mb=%.0f half_controller_limit_mb=%.0f",
		megabytes(r.Bytes), ended, megabytes(r.SpeakerLimit/2), megabytes(r.ControllerLimit/2))
	return nil
}
