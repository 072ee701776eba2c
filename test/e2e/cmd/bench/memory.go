package main

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
)

// memory reports what the processes have resident, idle and with more and
// more Services that have addresses.
func memory(ctx context.Context, installation *lodestone.Installation) error {
	if err := empty(ctx, installation); err != nil {
		return err
	}
	if err := (load{installation, 0}).restart(ctx); err != nil {
		return err
	}
	for _, services := range []int{0, 2000, manyServices} {
		l := load{installation, services}
		if err := l.populate(ctx); err != nil {
			return err
		}
		if err := l.reportMemory(ctx); err != nil {
			return err
		}
	}
	return nil
}

// restart gives fresh processes, without what earlier benchmarks left.
func (l load) restart(ctx context.Context) error {
	if err := l.ScaleController(ctx, 0); err != nil {
		return err
	}
	if err := l.ScaleController(ctx, 2); err != nil {
		return err
	}
	return l.RestartSpeakers(ctx)
}

func (l load) reportMemory(ctx context.Context) error {
	leader, err := l.Leader(ctx)
	if err != nil {
		return err
	}
	controller, err := l.Resident(leader)
	if err != nil {
		return err
	}
	speakers, err := l.Pods(ctx, "speaker")
	if err != nil {
		return err
	}
	speaker, err := l.largest(speakers)
	if err != nil {
		return err
	}
	result("memory", "services=%d controller_mb=%.0f speaker_mb=%.0f", l.services, megabytes(controller), megabytes(speaker))
	return nil
}

// largest is the largest resident size among the pods.
func (l load) largest(pods []corev1.Pod) (largest int64, err error) {
	for _, pod := range pods {
		size, err := l.Resident(&pod)
		if err != nil {
			return 0, err
		}
		largest = max(largest, size)
	}
	return largest, nil
}

func megabytes(bytes int64) float64 { return float64(bytes) / 1e6 }
