package quarantinestore

import (
	"strings"
	"testing"

	"github.com/lodestone-lb/lodestone/pkg/testcost"
)

// FuzzParse: whatever somebody wrote into the ConfigMap, reading it does no
// harm, and what is read can be written and read back.
func FuzzParse(f *testing.F) {
	const record = "2026-11-21T16:00:00Z default/web 203.0.113.5 until 2026-11-21T16:00:30Z\n"
	for _, text := range []string{
		"", header, header + record, record + record, record[:40], header + record[:len(record)-10],
		header + record + "2026-11-21T16:00:01Z shop/cart 2001:db8::5 until 2026-12-21T16:00:01Z\n",
		"version 2\n" + record, "version one\n" + record, "version 1\r\n" + strings.ReplaceAll(record, "\n", "\r\n"),
		strings.Repeat("x", maxLine+1), strings.Repeat(record, 20), strings.Repeat("\n", 100), strings.Repeat("x\n", 100),
		"2026-11-21T16:00:00Z default/web ::ffff:203.0.113.5 until 2026-11-21T16:00:00.5Z\n",
		"2026-11-21T16:00:00Z default/web fe80::1%eth0 until 2026-11-21T16:00:30Z\n",
		"2026-11-21T16:00:00Z default/web/a 203.0.113.5 until 2026-11-21T16:00:30Z\n",
		"2026-11-21T16:00:00Z /web 203.0.113.5 until 2026-11-21T16:00:30Z\n",
		"2026-11-21T16:00:30Z default/web 203.0.113.5 until 2026-11-21T16:00:00Z\n",
		"0000-01-01T00:00:00+14:00 default/web 203.0.113.5 until 9999-12-31T23:59:59.9Z\n",
		"2026-13-41T16:00:00Z default/web 203.0.113.5 until tomorrow\n", "\x00\xff\xfe version 2",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var p page
		var err error
		testcost.Within(t, "a record", len(text), func() { p, err = parse(text) })
		if err != nil {
			if len(p.records) > 0 {
				t.Fatalf("an error, and yet %d records", len(p.records))
			}
			return
		}
		if lines := strings.Count(text, "\n") + 1; len(p.records)+p.unreadable > lines {
			t.Fatalf("%d records and %d unreadable lines of %d", len(p.records), p.unreadable, lines)
		}
		if (p.unreadable > 0) != (p.first != nil) || p.first != nil && len(p.first.Error()) > 2000 {
			t.Fatalf("%d unreadable lines: %v", p.unreadable, p.first)
		}
		for _, r := range p.records {
			again, err := parse(r.String())
			if err != nil || len(again.records) != 1 || again.records[0] != r {
				t.Fatalf("%s is read back as %v, %v", r, again, err)
			}
		}
	})
}
