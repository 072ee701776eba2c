package direct

import (
	"errors"
	"maps"
	"time"
)

// The shortcut hands packets over where they come in, at the interface (ingress.go). The rules after
// conntrack would hand over the same ones. But conntrack makes an entry for each packet that it does not
// know, and forgets it: that costs more than all the rest, and a full conntrack drops the packet.
//
// A packet that the shortcut leaves alone comes to the rules after conntrack. So a Service may be without
// the shortcut at any time. It is while its table changes: then this node may keep connections that the
// new table has at another node. From when the table is in force, those connections only become fewer:
// new ones go to the other node. So the Director looks them up in conntrack (kept.go), excepts them, and
// gives the Service the shortcut. The ring finds a connection that was missed.

const (
	// keptInterval is how often the excepted connections are looked up again, so that those that have
	// ended go.
	keptInterval = time.Minute
	// lookFactor is how many times as long as the last look took the Director waits for the next one, a
	// keptInterval at most: conntrack may have a million entries.
	lookFactor = 20
)

// detour takes the shortcut from the Services that a change concerns, before the change. Nil: there will
// be no rules.
func (d *Director) detour(i int, want *ruleset) error {
	f, have := shortcuts[i], d.short[i]
	if have == nil && d.began {
		return nil
	}
	k, err := dial()
	if err != nil {
		return err
	}
	defer k.close()
	if have == nil || want == nil {
		d.short[i] = nil
		if k.exists(f) {
			return k.remove(f)
		}
		return nil
	}
	rest := *have
	rest.services = map[string]served{}
	if maps.Equal(want.interfaces, have.interfaces) && maps.Equal(want.hardware, have.hardware) {
		for key, s := range have.services {
			if want.services[key] == s && want.tables[s.table] == have.tables[s.table] {
				rest.services[key] = s
			}
		}
	}
	if len(rest.services) == len(have.services) {
		return nil
	}
	return d.shorten(k, i, &rest)
}

// shorten brings rules of the shortcut into force. If that fails there are none.
func (d *Director) shorten(k kernel, i int, want *ruleset) error {
	if err := k.change(shortcuts[i], d.short[i], want, d.Guard); err != nil {
		d.short[i] = nil
		again, dialed := dial() // answers to what has failed may still come
		if dialed != nil {
			return errors.Join(err, dialed)
		}
		defer again.close()
		return errors.Join(err, again.remove(shortcuts[i]))
	}
	d.short[i] = want
	return nil
}

// shortcut gives the shortcut to the Services that have none.
func (d *Director) shortcut(now time.Time) {
	if now.Before(d.nextLook) {
		return
	}
	var errs error
	var took time.Duration
	looked := false
	for i, want := range d.have {
		if want == nil || d.short[i].covers(want) && (len(d.short[i].kept) == 0 || now.Before(d.nextKept)) {
			continue
		}
		start := time.Now()
		kept, err := keptBy(shortcuts[i], want)
		took += time.Since(start)
		if err == nil {
			err = d.shortcutTo(i, want, kept)
		}
		errs, looked = errors.Join(errs, err), true
	}
	if !looked {
		return
	}
	d.nextLook, d.nextKept = now.Add(min(keptInterval, lookFactor*took)), now.Add(keptInterval)
	if errs != nil {
		d.nextLook = d.nextKept
		if d.shortErr == nil {
			d.Log.Warn("packets are handed over after conntrack, which costs more", "err", errs,
				"hint", "the kernel needs the module nft_fwd_netdev")
		}
	}
	d.shortErr = errs
	d.publish()
}

// covers reports whether all Services that may have the shortcut have it.
func (r *ruleset) covers(want *ruleset) bool {
	if r == nil {
		return false
	}
	for key, s := range want.services {
		if _, has := r.services[key]; !has && !s.drains {
			return false
		}
	}
	return true
}

// shortcutTo gives the shortcut to the Services of a family, but for those that have too many connections
// that are excepted.
func (d *Director) shortcutTo(i int, all *ruleset, kept *kept) error {
	want := newRuleset()
	want.interfaces, want.hardware, want.kept = all.interfaces, all.hardware, kept.flows()
	for key, s := range all.services {
		if !s.drains && !kept.crowded[key] {
			want.services[key], want.tables[s.table] = s, all.tables[s.table]
		}
	}
	k, err := dial()
	if err != nil {
		return err
	}
	defer k.close()
	return d.shorten(k, i, want)
}
