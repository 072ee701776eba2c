package world

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"

	"github.com/lodestone-lb/lodestone/controller/quarantinestore"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/objects"
)

// The times of packages servicelb and quarantinestore.
const (
	firstRetry, lastRetry = 5 * time.Millisecond, 30 * time.Second
	loadRetry             = 2 * time.Second
	bookRetry             = 100 * time.Millisecond
)

// leading is the state of a replica that leads: the real ledger, and the real patches. The rest of package servicelb (a queue,
// retries, and the order of writes) is a model in the time of the world.
type leading struct {
	watch   *watch
	ledger  *ledger.Ledger
	primed  bool
	facts   *clusterfacts.Facts
	book    records
	due     map[string]bool    // the Services to reconcile
	writing map[string]bool    // those with a write under way
	failed  map[string]int     // how often the last writes failed in a row
	lessees map[string]*lessee // the clients of the DHCP server, by identifier
	works   bool               // work is scheduled
	alarm   time.Duration      // when Services that wait are tried again; zero: not set
}

// lead begins to work as the leader: the caches are filled, and nothing is given before.
func (r *replica) lead() {
	r.end()
	r.leading = leading{ledger: ledger.New(scope), facts: &clusterfacts.Facts{}, book: records{of: map[string]quarantinestore.Record{}},
		due: map[string]bool{}, writing: map[string]bool{}, failed: map[string]int{}, lessees: map[string]*lessee{}}
	r.working = true
	life := r.life
	r.watch = r.api.follow(r.name, func(key string) { r.changed(key) })
	first := objects.Shared.First(metav1.ListOptions{ResourceVersion: "0"}) // as a reflector of client-go asks
	r.watch.fresh = first.ResourceVersion == ""
	r.watch.run = func(do func()) {
		if r.life == life {
			r.run(do)
		}
	}
}

// end ends what a leader follows.
func (r *replica) end() {
	if r.watch != nil {
		r.watch.end()
		r.watch = nil
	}
}

// whenIdle calls done when no write is under way.
func (r *replica) whenIdle(done func()) {
	if len(r.writing) == 0 {
		done()
		return
	}
	r.after(10*time.Millisecond, func() { r.whenIdle(done) })
}

// noLabels are those of every namespace.
func noLabels(string) map[string]string { return nil }

// prime imports what Services hold into the ledger, once the addresses in quarantine are read.
func (r *replica) prime() {
	r.load(func(onRecord []quarantinestore.Record) {
		r.primed, r.facts = true, factsIn(r.watch.seen)
		start := ledger.Start{Situation: r.situation(), NamespaceLabels: noLabels, Records: onRecord}
		for _, name := range named(r.watch.seen, "service") {
			start.Services = append(start.Services, r.service(name))
			r.due[name] = true
		}
		r.ledger.Prime(start, r.clock())
		r.record("%s: has read what Services have", r.name)
		r.work()
		r.tryAgain((*ledger.Ledger).Due)
		r.followLeases()
	})
}

func (r *replica) situation() ledger.Situation {
	cfg, _ := r.watch.seen["config"].(*config.Config)
	return ledger.Situation{Config: cfg, Facts: r.facts}
}

// service returns a Service as the controller has seen it, nil if there is none.
func (r *replica) service(name string) *corev1.Service {
	svc, _ := r.watch.seen["service/"+name].(*corev1.Service)
	return svc
}

// changed is called when the controller has seen an object change, and with no key after a list.
func (r *replica) changed(key string) {
	switch kind, name, _ := strings.Cut(key, "/"); {
	case key == "" && !r.primed:
		r.prime()
	case !r.primed:
	case kind == "config", kind == "lease":
		if facts := factsIn(r.watch.seen); !facts.Equal(r.facts) {
			r.facts = facts
		}
		r.tryAgain((*ledger.Ledger).Due)
		r.followLeases()
	case kind == "service":
		svc, gone := r.service(name), false
		if svc == nil {
			namespace, name, _ := strings.Cut(name, "/")
			svc, gone = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}, true
		}
		r.ledger.SeeForeign(svc, gone)
		r.look(name)
	}
}

// look schedules Services to be reconciled.
func (r *replica) look(names ...string) {
	for _, name := range names {
		r.due[name] = true
	}
	if r.works || len(r.due) == 0 {
		return
	}
	r.works = true
	r.after(r.between(time.Millisecond, 20*time.Millisecond), func() {
		r.works = false
		r.work()
	})
}

// work reconciles all Services that are due, in order, and then those that wait for freed addresses.
func (r *replica) work() {
	if !r.working {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(r.due)) {
		if !r.writing[name] {
			delete(r.due, name)
			r.reconcile(name)
		}
	}
	r.follow()
}

// follow tries Services that wait, if something became free.
func (r *replica) follow() {
	effects := r.ledger.Effects()
	if effects.Leases {
		r.followLeases()
	}
	if effects.Retry {
		r.tryAgain(retry)
	}
}

func retry(l *ledger.Ledger, now time.Time) []string {
	names, _ := l.Retry(now)
	return names
}

// tryAgain tries Services that wait, and again when the next address becomes free.
func (r *replica) tryAgain(due func(*ledger.Ledger, time.Time) []string) {
	r.ledger.Follow(r.situation(), r.clock())
	r.look(due(r.ledger, r.clock())...)
	next := r.ledger.NextFree()
	when := r.now + max(r.until(next), time.Second)
	if next.IsZero() || r.alarm > r.now && r.alarm <= when {
		return
	}
	r.alarm = when
	r.after(when-r.now, func() {
		if r.alarm == when {
			r.alarm = 0
			r.tryAgain(retry)
		}
	})
}

// reconcile brings one Service into step with the ledger, as package servicelb does.
func (r *replica) reconcile(name string) {
	svc, now := r.service(name), r.clock()
	r.ledger.Follow(r.situation(), now)
	known := r.ledger.Known(name)
	switch {
	case svc == nil:
		r.release(name)
	case known != "" && known != string(svc.UID):
		r.due[name] = true // once what the former one held has been taken back
		r.release(name)
	default:
		switch v, step := r.ledger.Decide(svc, nil, now); step {
		case ledger.Publish:
			r.serve(name, svc, &v)
		case ledger.Unpublish:
			r.serve(name, svc, nil)
		case ledger.Free:
			r.release(name)
		}
	}
}

// release takes back what a Service holds that is gone, or is another load balancer's.
func (r *replica) release(name string) {
	r.writing[name] = true
	r.keep(r.ledger.Departing(name, "", r.clock()), func(ok bool) {
		if ok {
			r.ledger.Release(name, "", r.clock())
		}
		r.done(name, ok)
	})
}

// serve writes the verdict into the object, or removes all that is ours, and then settles the account. The API server
// refuses a patch that was decided on an old version.
func (r *replica) serve(name string, svc *corev1.Service, v *ledger.Verdict) {
	patch := servicelb.Patch(svc, v, r.ledger.Foreign(svc), metav1.NewTime(r.clock()))
	records := r.ledger.Departing(name, string(svc.UID), r.clock())
	if v != nil {
		records = v.Records
	}
	settle := func() {
		if v == nil {
			r.ledger.Release(name, string(svc.UID), r.clock())
		} else {
			r.ledger.Settle(name, string(svc.UID), v.Held, r.clock())
		}
		r.done(name, true)
	}
	r.writing[name] = true
	r.keep(records, func(ok bool) {
		switch {
		case !ok:
			r.done(name, false)
		case patch == nil:
			settle()
		default:
			r.write(func() answer { return r.patch(name, svc, patch) }, func(a answer) {
				if a == fine || a == missing {
					settle()
				} else {
					r.done(name, false)
				}
			})
		}
	})
}

// patch does what the API server does with a patch of a Service.
func (r *replica) patch(name string, svc *corev1.Service, patch []byte) answer {
	now := r.api.service(name)
	switch {
	case now == nil || now.UID != svc.UID:
		return missing
	case now.ResourceVersion != svc.ResourceVersion:
		return conflict
	}
	if !waitsForLease(now) {
		r.control.writes++
	}
	r.api.putService(name, patched(now, patch), ofController)
	return fine
}

// done ends the reconciliation of a Service, and schedules another one if it failed.
func (r *replica) done(name string, ok bool) {
	if ok {
		r.failed[name] = 0
		delete(r.writing, name)
		r.look()
		r.follow()
		return
	}
	delay := min(firstRetry<<min(r.failed[name], 20), lastRetry)
	r.failed[name]++
	r.after(delay, func() {
		delete(r.writing, name)
		r.look(name)
	})
}

// records is the record of addresses in quarantine: of package quarantinestore, or in the ConfigMap.
type records struct {
	of map[string]quarantinestore.Record // by address
	// edition is that of the ConfigMap as read or written last. Negative: it has to be read.
	edition int
	saved   bool // the ConfigMap has the same content
}

// load reads the record, and tries until it succeeds.
func (r *replica) load(then func([]quarantinestore.Record)) {
	r.read(func(a answer) {
		if a != fine {
			r.after(loadRetry, func() { r.load(then) })
			return
		}
		var live []quarantinestore.Record
		for _, key := range slices.Sorted(maps.Keys(r.book.of)) {
			if record := r.book.of[key]; record.Until.After(r.clock()) {
				live = append(live, record)
			}
		}
		slices.SortStableFunc(live, func(a, b quarantinestore.Record) int { return a.Since.Compare(b.Since) })
		then(live)
	})
}

// read reads the ConfigMap. Of an address the newest record counts, and one from the future as one of now.
func (r *replica) read(then func(answer)) {
	var now records
	r.ask(servicelb.PatchTimeout, func() answer { now = r.api.book; return fine }, func(a answer) {
		if a == fine {
			r.book.edition, r.book.saved = now.edition, true
			for key, record := range now.of {
				ours, known := r.book.of[key]
				future := record.Since.After(r.clock())
				switch {
				case known && (future || !record.Since.After(ours.Since)):
					r.book.saved = r.book.saved && record == ours
					continue
				case future:
					record.Since, record.Until = r.clock(), r.clock().Add(record.Until.Sub(record.Since))
				}
				r.book.of[key] = record
			}
		}
		then(a)
	})
}

// keep makes records durable, or gives up.
func (r *replica) keep(all []quarantinestore.Record, then func(ok bool)) {
	needed := false
	for _, record := range all {
		record.Since, record.Until = record.Since.Truncate(time.Second).UTC(), record.Until.Add(time.Second-1).Truncate(time.Second).UTC()
		if before, known := r.book.of[record.Addr.String()]; !known || !r.book.saved || before != record {
			r.book.of[record.Addr.String()] = record
			needed = true
		}
	}
	if !needed {
		then(true)
		return
	}
	r.book.saved = false
	until := r.clock().Add(servicelb.PatchTimeout)
	var attempt func(pause time.Duration)
	attempt = func(pause time.Duration) {
		again := func() {
			if r.clock().After(until) {
				then(false)
				return
			}
			r.after(pause, func() { attempt(2 * pause) })
		}
		if r.book.edition < 0 {
			r.read(func(a answer) {
				if a != fine {
					again()
					return
				}
				attempt(pause)
			})
			return
		}
		text, before := maps.Clone(r.book.of), r.book.edition
		r.write(func() answer {
			if r.api.book.edition != before {
				return conflict
			}
			r.api.book = records{of: text, edition: before + 1}
			return fine
		}, func(a answer) {
			if a != fine {
				r.book.edition = -1
				again()
				return
			}
			r.book.edition, r.book.saved = before+1, maps.Equal(text, r.book.of)
			then(true)
		})
	}
	attempt(bookRetry)
}

// patched returns the Service with a strategic merge patch, as the API server would.
func patched(svc *corev1.Service, patch []byte) *corev1.Service {
	original, err := json.Marshal(svc)
	if err != nil {
		panic(err)
	}
	merged, err := strategicpatch.StrategicMergePatch(original, patch, svc)
	if err != nil {
		panic(fmt.Errorf("%w: %s", err, patch))
	}
	out := &corev1.Service{}
	if err := json.Unmarshal(merged, out); err != nil {
		panic(err)
	}
	return out
}
