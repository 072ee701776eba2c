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

	"github.com/lodestone-lb/lodestone/controller/quarantine"
	"github.com/lodestone-lb/lodestone/controller/servicelb"
	"github.com/lodestone-lb/lodestone/controller/servicelb/ledger"
	"github.com/lodestone-lb/lodestone/pkg/clusterfacts"
	"github.com/lodestone-lb/lodestone/pkg/config"
)

// controller is the name of its client of the API server.
const controller = "controller"

// control is the controller that leads: the real ledger, and the real patches. What package servicelb does around them
// (a queue, retries, what has to be durable before what) is done here in the time of the world.
type control struct {
	*World
	life   int // counts the leaders
	watch  *watch
	ledger *ledger.Ledger
	primed bool
	facts  *clusterfacts.Facts
	// records are the addresses in quarantine that are durable: the next leader reads them.
	records map[string]quarantine.Record
	due     map[string]bool // the Services that are to be looked at
	writing map[string]bool // those with a write under way
	failed  map[string]int  // how often the last writes failed in a row
	works   bool            // a look is due
	alarm   time.Duration   // when those that wait are looked at; zero: not set
	writes  int             // that it made, by all leaders
}

func newControl(w *World) *control {
	return &control{World: w, facts: &clusterfacts.Facts{}, records: map[string]quarantine.Record{}}
}

// clock is the controller's: leaders have the same one.
func (c *control) clock() time.Time { return epoch.Add(c.now) }

// begin has another controller lead. Writes of the one before may still be under way.
func (c *control) begin() {
	c.end()
	c.ledger, c.primed, c.works, c.alarm = ledger.New(scope), false, false, 0
	c.due, c.writing, c.failed = map[string]bool{}, map[string]bool{}, map[string]int{}
	c.watch = c.api.follow(controller, c.changed)
	c.record("controller: another one leads")
}

// end ends the controller that leads.
func (c *control) end() {
	if c.life++; c.watch != nil {
		c.watch.end()
	}
}

// noLabels are those of every namespace.
func noLabels(string) map[string]string { return nil }

// prime has the ledger import what Services have.
func (c *control) prime() {
	c.primed = true
	start := ledger.Start{Situation: c.situation(), NamespaceLabels: noLabels}
	for _, name := range named(c.watch.seen, "service") {
		start.Services = append(start.Services, c.service(name))
		c.due[name] = true
	}
	for _, key := range slices.Sorted(maps.Keys(c.records)) {
		start.Records = append(start.Records, c.records[key])
	}
	c.ledger.Prime(start, c.clock())
	c.work()
	c.tryAgain((*ledger.Ledger).Waiting)
}

func (c *control) situation() ledger.Situation {
	cfg, _ := c.watch.seen["config"].(*config.Config)
	return ledger.Situation{Config: cfg, Facts: c.facts}
}

// service returns a Service as the controller has seen it, nil if there is none.
func (c *control) service(name string) *corev1.Service {
	svc, _ := c.watch.seen["service/"+name].(*corev1.Service)
	return svc
}

// changed is called when the controller has seen an object change, and with no key after a list.
func (c *control) changed(key string) {
	switch kind, name, _ := strings.Cut(key, "/"); {
	case key == "" && !c.primed:
		c.prime()
	case !c.primed:
	case kind == "config":
		c.tryAgain((*ledger.Ledger).Waiting)
	case kind == "service":
		c.look(name)
	}
}

// look has Services looked at soon.
func (c *control) look(names ...string) {
	for _, name := range names {
		c.due[name] = true
	}
	if c.works || len(c.due) == 0 {
		return
	}
	c.works = true
	life := c.life
	c.after(c.between(time.Millisecond, 20*time.Millisecond), func() {
		if c.life == life {
			c.works = false
			c.work()
		}
	})
}

// work looks at all Services that are due, in order, and then at those that wait for what has become free.
func (c *control) work() {
	for _, name := range slices.Sorted(maps.Keys(c.due)) {
		if !c.writing[name] {
			delete(c.due, name)
			c.reconcile(name)
		}
	}
	c.follow()
}

// follow tries Services that wait, if something became free.
func (c *control) follow() {
	if c.ledger.Effects().Retry {
		c.tryAgain((*ledger.Ledger).Retry)
	}
}

// tryAgain looks at Services that wait, and again when the next address is free.
func (c *control) tryAgain(due func(*ledger.Ledger, time.Time) []string) {
	c.ledger.Follow(c.situation(), c.clock())
	c.look(due(c.ledger, c.clock())...)
	next, life := c.ledger.NextFree(), c.life
	when := c.now + max(next.Sub(c.clock()), time.Second)
	if next.IsZero() || c.alarm > c.now && c.alarm <= when {
		return
	}
	c.alarm = when
	c.after(when-c.now, func() {
		if c.life == life && c.alarm == when {
			c.alarm = 0
			c.tryAgain((*ledger.Ledger).Retry)
		}
	})
}

// reconcile brings one Service into step with the ledger.
func (c *control) reconcile(name string) {
	svc, now := c.service(name), c.clock()
	c.ledger.Follow(c.situation(), now)
	switch {
	case svc == nil:
		c.keep(c.ledger.Departing(name, "", now))
		c.ledger.Release(name, "", now)
	case scope.Serves(svc):
		v := c.ledger.Ensure(svc, nil, now)
		if len(v.Held) > 0 || !v.Unjudged {
			c.write(name, svc, &v)
		}
	default:
		c.write(name, svc, nil)
	}
}

// write has the object show the verdict, or nothing of ours, and then settles the account. The API server refuses
// what was decided on an old object.
func (c *control) write(name string, svc *corev1.Service, v *ledger.Verdict) {
	patch := servicelb.Patch(svc, v, metav1.NewTime(c.clock()))
	settle := func() {
		if c.failed[name] = 0; v == nil {
			c.ledger.Release(name, string(svc.UID), c.clock())
		} else {
			c.ledger.Settle(name, string(svc.UID), v.Held, c.clock())
		}
		c.look()
		c.follow()
	}
	if patch == nil {
		settle()
		return
	}
	records := c.ledger.Departing(name, string(svc.UID), c.clock())
	if v != nil {
		records = v.Records
	}
	c.writing[name] = true
	life := c.life
	c.after(c.between(time.Millisecond, 50*time.Millisecond), func() {
		answers := c.api.away[controller] == 0
		now := c.api.service(name)
		refused := now == nil || now.ResourceVersion != svc.ResourceVersion || now.UID != svc.UID
		if answers {
			c.keep(records)
		}
		if answers && !refused {
			c.writes++
			c.api.putService(name, patched(now, patch), ofController)
		}
		switch {
		case c.life != life:
		case answers && (!refused || now == nil || now.UID != svc.UID):
			delete(c.writing, name)
			settle()
			c.look()
		default:
			c.failed[name] = min(c.failed[name]+1, 10)
			c.after(5*time.Millisecond<<c.failed[name], func() {
				if c.life == life {
					delete(c.writing, name)
					c.look(name)
				}
			})
		}
	})
}

// keep makes records durable.
func (c *control) keep(records []quarantine.Record) {
	for _, r := range records {
		c.records[r.Addr.String()] = r
	}
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
