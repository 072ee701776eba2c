package lab

import (
	"context"
	"errors"
)

// Install installs Lodestone.
func (c *Cluster) Install(ctx context.Context) error { return errors.New("install: to come") }
