package quarantinestore

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// simulated runs a story on a clock that starts at 2000-01-01T00:00:00Z and
// moves when everybody waits.
func simulated(t *testing.T, story func(t *testing.T, s *server, b *Store)) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{}
		b := s.open()
		require.Empty(t, loadInto(t, b), "a cluster without the ConfigMap")
		require.Zero(t, s.writes)
		story(t, s, b)
	})
}

func TestReleasesAreThereAfterARestart(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", 30*time.Second)))
		time.Sleep(1500 * time.Millisecond)
		require.NoError(t, b.Keep(t.Context(), release("2001:db8::5", "shop/cart", time.Hour), release("203.0.113.4", "shop/cart", time.Hour)))

		want := []string{
			"2000-01-01T00:00:00Z default/web 203.0.113.5 until 2000-01-01T00:00:30Z",
			"2000-01-01T00:00:01Z shop/cart 203.0.113.4 until 2000-01-01T01:00:02Z",
			"2000-01-01T00:00:01Z shop/cart 2001:db8::5 until 2000-01-01T01:00:02Z",
		}
		assert.Equal(t, want, load(t, s))
		assert.Equal(t, header+strings.Join(want, "\n")+"\n", s.text(), "for people, oldest first")
		assert.Equal(t, want, load(t, s), "reading changes nothing")
		assert.Equal(t, 2, s.writes)

		time.Sleep(time.Minute)
		assert.Equal(t, want[1:], load(t, s), "what is over is not returned")
		assert.Contains(t, s.text(), want[0], "an idle store writes nothing")
		assert.Equal(t, 2, s.writes)

		require.NoError(t, b.Keep(t.Context(), release("203.0.113.4", "default/api", 2*time.Hour)))
		assert.Equal(t, header+want[2]+"\n2000-01-01T00:01:01Z default/api 203.0.113.4 until 2000-01-01T02:01:02Z\n", s.text(),
			"the next write prunes what is over and replaces the older record")
	})
}

func TestAnAddressThatIsFreeAtOnce(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", 0)))
		assert.Zero(t, s.writes, "there is nothing to remember")

		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Hour)))
		time.Sleep(time.Second)
		s.edit(func(text string) string { return text }) // so that the write meets a conflict
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", 0)))
		assert.Equal(t, header, s.text(), "the older record goes, and does not come back from the ConfigMap")
		assert.Empty(t, load(t, s))
	})
}

// TestABurstCostsFewWrites: the first call is written at once, the others
// share writes.
func TestABurstCostsFewWrites(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		s.delay = 5 * time.Millisecond
		start := time.Now()
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/first", time.Hour)))
		assert.Equal(t, s.delay, time.Since(start))

		keepMany(t, b, 1000, 1000)
		assert.Equal(t, 2, s.writes)
		assert.Less(t, time.Since(start), 50*time.Millisecond)
		assert.Len(t, load(t, s), 1001)
	})
}

// keepMany releases n addresses, of as many Services at a time as there are
// callers.
func keepMany(t testing.TB, b *Store, n, callers int) {
	var all sync.WaitGroup
	next := make(chan int)
	for range callers {
		all.Go(func() {
			for i := range next {
				addr := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
				assert.NoError(t, b.Keep(t.Context(), release(addr.String(), fmt.Sprintf("default/web-%d", i), time.Hour)))
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	all.Wait()
}

// TestAFullStoreIsWrittenRarely: what etcd has to store a second is bounded.
func TestAFullStoreIsWrittenRarely(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		require.NoError(t, b.Keep(t.Context(), many(12_000)...))
		start, writes, bytes := time.Now(), s.writes, 0
		for time.Since(start) < 2*time.Second {
			require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", fmt.Sprint("default/web-", s.writes), time.Minute)))
			bytes += len(s.text())
		}
		assert.Less(t, s.writes-writes, 12)
		assert.Less(t, bytes, 10_000_000)
	})
}

// many returns releases of 10.0.0.0 and up; each ends a second after the one
// before.
func many(n int) []Record {
	records := make([]Record, n)
	for i := range records {
		addr := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		records[i] = release(addr.String(), "default/web", time.Hour+time.Duration(i)*time.Second)
	}
	return records
}

func TestAFullStoreDropsWhatEndsFirst(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		records := many(20_000)
		require.NoError(t, b.Keep(t.Context(), records...))
		assert.LessOrEqual(t, len(s.text()), maxText)

		kept := load(t, s)
		assert.Greater(t, len(kept), 10_000, "short names leave room for more than ten thousand")
		assert.Equal(t, records[len(records)-len(kept)].rounded().String(), kept[0])
		dropped := float64(len(records) - len(kept))
		assert.Equal(t, dropped, testutil.ToFloat64(b.metrics.dropped.WithLabelValues(string(LostFull))))

		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Second)))
		assert.NotContains(t, s.text(), "203.0.113.5", "it would end first")
		assert.Equal(t, dropped+1, testutil.ToFloat64(b.metrics.dropped.WithLabelValues(string(LostFull))), "each is dropped once")
	})
}

// A namespace that gives back as many addresses as it likes fills the store with its own. What
// others gave back before, and what they give back now, stays on record.
func TestNoNamespaceCrowdsOutOthers(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		before, now := release("203.0.113.5", "shop/web", time.Minute), release("203.0.113.6", "shop/api", time.Second)
		require.NoError(t, b.Keep(t.Context(), before))
		require.NoError(t, b.Keep(t.Context(), many(20_000)...))
		require.NoError(t, b.Keep(t.Context(), now))
		assert.Contains(t, s.text(), before.rounded().String())
		assert.Contains(t, s.text(), now.rounded().String())
	})
}

// TestLongNamesHaveRoom for as many addresses as the documentation states.
func TestLongNamesHaveRoom(t *testing.T) {
	records := make([]Record, 5000)
	long := strings.Repeat("a", 63)
	for i := range records {
		addr := netip.MustParseAddr(fmt.Sprintf("2001:db8:ffff:ffff:ffff:ffff:ffff:%x", i+0x1000))
		records[i] = Record{addr, long + "/" + long, time.Now(), time.Now().Add(time.Hour)}
	}
	_, full := format(records)
	assert.Less(t, len(full), 500)
}

func TestFaultsAreSatOut(t *testing.T) {
	unavailable := apierrors.NewServiceUnavailable("etcd is electing")
	for name, faults := range map[string][]error{
		"overload":        {apierrors.NewTooManyRequests("slow down", 0), apierrors.NewTooManyRequests("slow down", 0)},
		"no etcd":         {unavailable, unavailable, apierrors.NewInternalError(errors.New("etcd")), unavailable, unavailable},
		"server timeout":  {apierrors.NewServerTimeout(configMaps, "update", 0), apierrors.NewTimeoutError("late", 0)},
		"no answer":       {context.DeadlineExceeded, errors.New("connection refused")},
		"somebody faster": {apierrors.NewConflict(configMaps, ConfigMapName, nil), unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			simulated(t, func(t *testing.T, s *server, b *Store) {
				s.answer(faults...)
				require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Hour)))
				assert.Len(t, load(t, s), 1)
				assert.Equal(t, 1, s.writes)

				s.answer(faults...)
				assert.Len(t, load(t, s), 1, "reading at the start sits them out, too")
			})
		})
	}
}

// TestAnAnswerIsLost: the write succeeded, but nobody knows.
func TestAnAnswerIsLost(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		lost := 0
		s.meddleWith(func(verb string) (before, after error) {
			if verb != "get" && lost < 2 {
				lost++
				return nil, context.DeadlineExceeded
			}
			return nil, nil
		})
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Hour)))
		assert.Equal(t, 2, lost)
		assert.Len(t, load(t, s), 1)
	})
}

func TestWhatCannotBeSavedIsAnError(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		down := func(string) (before, after error) {
			return apierrors.NewServiceUnavailable("etcd is electing"), nil
		}
		s.meddleWith(down)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		start := time.Now()
		var second error
		var waiting sync.WaitGroup
		waiting.Go(func() {
			time.Sleep(time.Second)
			second = b.Keep(ctx, release("203.0.113.6", "default/late", time.Hour))
		})
		err := b.Keep(ctx, release("203.0.113.5", "default/web", time.Hour), release("2001:db8::5", "default/web", time.Hour))
		waiting.Wait()
		assert.Equal(t, 3*time.Second, time.Since(start))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.EqualError(t, err, "record the release of 203.0.113.5 by default/web and 1 more: "+
			"get ConfigMap lodestone-system/lodestone-quarantine: etcd is electing (gave up: context deadline exceeded)")
		require.ErrorIs(t, second, context.DeadlineExceeded)
		assert.ErrorContains(t, second, "203.0.113.6 by default/late")
		assert.ErrorContains(t, second, "etcd is electing", "who waited for their turn hears why")

		s.meddleWith(nil)
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.7", "default/next", time.Hour)))
		assert.Len(t, load(t, s), 4, "the next call saves what was left behind")
	})
}

func TestErrorsThatStay(t *testing.T) {
	forbidden := apierrors.NewForbidden(configMaps, ConfigMapName, errors.New("no RBAC rule"))
	simulated(t, func(t *testing.T, s *server, b *Store) {
		start := time.Now()
		s.answer(forbidden)
		err := b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Hour))
		assert.ErrorContains(t, err, "no RBAC rule")
		s.answer(forbidden)
		_, err = s.open().Load(t.Context())
		assert.ErrorContains(t, err, "load released addresses: get ConfigMap lodestone-system/lodestone-quarantine: ")
		assert.ErrorContains(t, err, "no RBAC rule")
		assert.Equal(t, start, time.Now(), "nobody waits for what does not change")
	})
}

func TestAnotherVersionIsNeitherReadNorOverwritten(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Hour)))
		s.edit(func(string) string { return "version 2\n{}\n" })
		_, err := s.open().Load(t.Context())
		assert.EqualError(t, err, "load released addresses: read ConfigMap lodestone-system/lodestone-quarantine: another format: version 2, "+
			"and this controller reads version 1: run the version that wrote it, or delete the ConfigMap (other Services may then get the "+
			"addresses in it at once)")
		err = b.Keep(t.Context(), release("203.0.113.6", "default/web", time.Hour))
		assert.ErrorContains(t, err, "record the release of 203.0.113.6 by default/web: read ConfigMap")
		assert.Equal(t, "version 2\n{}\n", s.text())

		s.remove()
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.6", "default/web", time.Hour)))
		assert.Len(t, load(t, s), 2, "the leader had not forgotten")
	})
}

func TestSomebodyEditsTheConfigMap(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Hour)))
		own := s.text()
		const added = "2000-01-01T00:00:00Z default/added 203.0.113.9 until 2000-01-02T00:00:00Z\n"
		s.edit(func(string) string { return "format 1\nhello\n" + added })

		time.Sleep(time.Second)
		refusals := 3 // the ConfigMap is read anew after each, and its lines are lost once
		s.meddleWith(func(verb string) (before, after error) {
			if verb != "update" || refusals == 0 {
				return nil, nil
			}
			refusals--
			return apierrors.NewInternalError(errors.New("no space")), nil
		})
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.6", "default/web", time.Hour)))
		assert.Zero(t, refusals)
		assert.Contains(t, s.text(), strings.TrimPrefix(own, header), "removed by hand: the leader's memory is the truth")
		assert.Contains(t, s.text(), added, "added by hand")
		assert.NotContains(t, s.text(), "hello", "no record")
		assert.Equal(t, 2.0, testutil.ToFloat64(b.metrics.dropped.WithLabelValues(string(LostUnreadable))))
		assert.Len(t, load(t, s), 3)

		s.remove()
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.7", "default/web", time.Hour)))
		assert.Len(t, load(t, s), 4, "deleted: written again")
	})
}

func TestOthersPartsOfTheConfigMapAreKept(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		s.object = &corev1.ConfigMap{}
		s.object.Namespace, s.object.Name, s.object.ResourceVersion = namespace, ConfigMapName, "7"
		s.object.Labels = map[string]string{"app.kubernetes.io/managed-by": "Helm"}
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Hour)))
		assert.Equal(t, "Helm", s.object.Labels["app.kubernetes.io/managed-by"])
		s.object.Data["note"] = "mine"
		s.version++
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.6", "default/web", time.Hour)))
		assert.Len(t, load(t, s), 2)
	})
}

// TestTwoLeadersLoseNothing: the old one does not know yet that it is over.
func TestTwoLeadersLoseNothing(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, old *Store) {
		require.NoError(t, old.Keep(t.Context(), release("203.0.113.1", "default/before", time.Hour)))
		young := s.open()
		require.Len(t, loadInto(t, young), 1)
		require.NoError(t, young.Keep(t.Context(), release("203.0.113.2", "default/new", time.Hour)))
		time.Sleep(time.Second)
		require.NoError(t, old.Keep(t.Context(), release("203.0.113.3", "default/old", time.Hour)))
		time.Sleep(time.Second)
		require.NoError(t, young.Keep(t.Context(), release("203.0.113.1", "default/again", 2*time.Hour)))
		time.Sleep(time.Second)
		require.NoError(t, old.Keep(t.Context(), release("203.0.113.4", "default/old", time.Hour)))
		assert.Equal(t, []string{
			"2000-01-01T00:00:00Z default/new 203.0.113.2 until 2000-01-01T01:00:00Z",
			"2000-01-01T00:00:01Z default/old 203.0.113.3 until 2000-01-01T01:00:01Z",
			"2000-01-01T00:00:02Z default/again 203.0.113.1 until 2000-01-01T02:00:03Z",
			"2000-01-01T00:00:03Z default/old 203.0.113.4 until 2000-01-01T01:00:04Z",
		}, load(t, s), "of an address the newest record counts")
		assert.Equal(t, 2.0, testutil.ToFloat64(old.metrics.writes.WithLabelValues(resultConflict)))
	})
}

// TestTheClockWasSetBack: a record from the future starts now.
func TestTheClockWasSetBack(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.6", "default/web", time.Hour)))
		s.edit(func(text string) string {
			return text + "2026-11-21T16:00:00Z default/web 203.0.113.5 until 2026-11-21T16:00:30Z\n" +
				"2026-11-21T16:00:00Z default/old 203.0.113.6 until 2026-11-21T16:00:30Z\n"
		})
		assert.Contains(t, load(t, s), "2000-01-01T00:00:00Z default/web 203.0.113.5 until 2000-01-01T00:00:30Z")

		time.Sleep(time.Second)
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.7", "default/web", time.Hour)))
		assert.NotContains(t, s.text(), "2026")
		assert.NotContains(t, s.text(), "default/old", "the ConfigMap does not contradict what the leader knows")
	})
}

func TestRecordsThatCouldNotBeReadBackAreRefused(t *testing.T) {
	now := time.Now()
	for name, r := range map[string]Record{
		"is not an address":      {netip.Addr{}, "default/web", now, now},
		"fe80::1%eth0":           {netip.MustParseAddr("fe80::1%eth0"), "default/web", now, now},
		"not namespace/name":     {netip.MustParseAddr("203.0.113.5"), "web", now, now},
		"before its beginning":   {netip.MustParseAddr("203.0.113.5"), "default/web", now, now.Add(-time.Hour)},
		"a time is out of range": {netip.MustParseAddr("203.0.113.5"), "default/web", now, now.AddDate(9000, 0, 0)},
	} {
		assert.ErrorContains(t, (&server{}).open().Keep(t.Context(), r), name)
	}
}

func TestMetrics(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Second),
			release("203.0.113.6", "default/web", time.Hour)))
		time.Sleep(time.Minute)
		reg := prometheus.NewPedanticRegistry()
		require.NoError(t, reg.Register(b))
		assert.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(fmt.Sprintf(`
# HELP lodestone_quarantine_records Addresses in quarantine that are on record.
# TYPE lodestone_quarantine_records gauge
lodestone_quarantine_records 1
# HELP lodestone_quarantine_size_bytes Size of the record of released addresses when it was last written or read.
# TYPE lodestone_quarantine_size_bytes gauge
lodestone_quarantine_size_bytes %d
`, len(s.text()))), MetricRecords, MetricSize))
		problems, err := testutil.GatherAndLint(reg)
		assert.NoError(t, err)
		assert.Empty(t, problems)
	})
}

// BenchmarkBurst is a thousand Services that are deleted at once, against an
// API server that takes 5 ms for a request.
func BenchmarkBurst(b *testing.B) {
	for _, callers := range []int{16, 1000} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			writes := 0
			for b.Loop() {
				s := &server{delay: 5 * time.Millisecond}
				keepMany(b, s.open(), 1000, callers)
				writes += s.writes
			}
			b.ReportMetric(float64(writes)/float64(b.N), "writes/op")
		})
	}
}

// BenchmarkFull is what a write of ten thousand records costs the controller.
func BenchmarkFull(b *testing.B) {
	records := many(10_000)
	for b.Loop() {
		if text, full := format(records); len(text) > maxText || full != nil {
			b.Fatalf("%d bytes, %d dropped", len(text), len(full))
		}
	}
}

// A load balancer that answers for an API server which it does not reach does not have the records forgotten.
func TestAPageIsNoAnswer(t *testing.T) {
	simulated(t, func(t *testing.T, s *server, b *Store) {
		require.NoError(t, b.Keep(t.Context(), release("203.0.113.5", "default/web", time.Hour)))
		pages := 3
		s.meddle = func(string) (before, after error) {
			if pages--; pages < 0 {
				return nil, nil
			}
			return apierrors.NewGenericServerResponse(http.StatusNotFound, "get", configMaps, ConfigMapName, "no such page", 0, true), nil
		}
		require.Len(t, load(t, s), 1)
		require.Negative(t, pages)
	})
}
