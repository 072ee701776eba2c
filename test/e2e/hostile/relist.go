package hostile

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// kept is how many Services of the other tenant are there while everything is listed anew.
const kept = 4

// relist makes all watches of the programs expire while they serve, waits until they have
// listed everything anew, and checks that nobody has lost anything by that.
func (c *cluster) relist(ctx context.Context) error {
	var names []string
	for range kept {
		c.tenants++
		names = append(names, nameOf(c.tenants))
		if _, _, _, err := c.serveOne(ctx, nameOf(c.tenants)); err != nil {
			return err
		}
	}
	before, err := c.steady(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	c.front.expire()
	if err := wait(ctx, "all is listed anew", func() (missing error) {
		c.result.Lists, missing = c.front.relisted()
		return missing
	}); err != nil {
		return err
	}
	c.result.Relisting = time.Since(began)
	c.Progress("all was listed anew in %s: %v", c.result.Relisting.Round(time.Millisecond), c.result.Lists)
	after, err := c.steady(ctx)
	if err != nil {
		return err
	}
	if !maps.Equal(before, after) {
		return fmt.Errorf("VIPs came or went while all was listed anew: %v, and %v before", after, before)
	}
	for _, name := range names {
		if err := c.ask(ctx, name); err != nil {
			return err
		}
	}
	if c.result.Relisted, err = c.serve(ctx, samples); err != nil {
		return err
	}
	return c.watched.changed()
}

// ask sends a request for the VIP of a Service from a host on the segment.
func (c *cluster) ask(ctx context.Context, name string) error {
	asked := time.Now()
	vip := netip.AddrPortFrom(c.watched.address(name), 9).String()
	conn, err := netns.Dialer(c.host(control))(ctx, "udp", vip)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("x")); err != nil {
		return err
	}
	return wait(ctx, "somebody answers for "+vip, func() error {
		if _, answered := c.watched.seen(name, asked); answered.IsZero() {
			return errors.New("nobody has")
		}
		return nil
	})
}

// steady waits until no VIP has come or gone for a while, and returns how many ever have, by
// speaker.
func (c *cluster) steady(ctx context.Context) (now map[string]string, err error) {
	err = wait(ctx, "no VIP comes or goes", func() error {
		before, err := c.transitions(ctx)
		if err != nil {
			return err
		}
		if err := sleep(ctx, settle); err != nil {
			return err
		}
		if now, err = c.transitions(ctx); err == nil && !maps.Equal(before, now) {
			err = fmt.Errorf("%v, and %v before", now, before)
		}
		return err
	})
	return now, err
}

// transitions returns how many VIPs each speaker has gained and lost.
func (c *cluster) transitions(ctx context.Context) (map[string]string, error) {
	token, err := c.token(ctx, controller, "") // the chart lets it read metrics, see values
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for _, p := range c.programs {
		if p.component != speaker {
			continue
		}
		raw, err := p.get(ctx, "/metrics", token)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(raw)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			if strings.HasPrefix(name, "lodestone_speaker_ownership_transitions_total") {
				all[p.name+" "+name] = value
			}
		}
	}
	if len(all) != 2*victims {
		return nil, fmt.Errorf("the speakers' metrics have %v alone", all)
	}
	return all, nil
}
