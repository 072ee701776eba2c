package quarantinestore

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Record is a released address that no other Service may have for a while.
type Record struct {
	Addr netip.Addr
	// Service is "namespace/name" of the Service that had the address.
	Service string
	// Since is when it was released, Until when anybody may have it. The text
	// has whole seconds and rounds Until up. If both are equal, the address
	// is free at once.
	Since, Until time.Time
}

// String returns the record as it stands in the ConfigMap.
func (r Record) String() string {
	return r.Since.UTC().Format(time.RFC3339) + " " + r.Service + " " + r.Addr.String() + " until " + r.Until.UTC().Format(time.RFC3339)
}

// rounded returns the record as it is read back.
func (r Record) rounded() Record {
	since, until := r.Since.Truncate(time.Second).UTC(), r.Until.Add(time.Second-1).Truncate(time.Second).UTC()
	if r.Until.Equal(r.Since) {
		until = since
	}
	return Record{Addr: r.Addr.Unmap(), Service: r.Service, Since: since, Until: until}
}

// newer reports whether r was written after other, which is about the same
// address.
func (r Record) newer(other Record) bool {
	return cmp.Or(r.Since.Compare(other.Since), r.Until.Compare(other.Until)) > 0
}

// The text begins with its version; lines of # are for people.
const (
	version = "1"
	header  = "version " + version + "\n# released at, by the Service, the address, spoken for until\n"
)

// maxText bounds the text in bytes. The API server takes 1 MiB of data, so that there is room
// for what somebody may have added.
const maxText = 1_000_000

// errVersion is the error of a text that another version of the controller wrote.
var errVersion = errors.New("another format")

// page is the content of a text.
type page struct {
	records []Record
	// unreadable counts the lines that are no records; first is what is wrong
	// with the first of them.
	unreadable int
	first      error
}

// parse reads a text. A line that cannot be read does not harm the others; a
// text of another version is an error.
func parse(text string) (page, error) {
	var p page
	number := 0
	for line := range strings.Lines(text) {
		number++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line == "version "+version {
			continue
		}
		other, isVersion := strings.CutPrefix(line, "version ")
		if _, err := strconv.ParseUint(other, 10, 32); isVersion && err == nil {
			return page{}, fmt.Errorf("%w: version %s, and this controller reads version %s: run the version that wrote it, "+
				"or delete the ConfigMap (other Services may then get the addresses in it at once)", errVersion, other, version)
		}
		r, err := parseRecord(line)
		if err == nil {
			p.records = append(p.records, r)
			continue
		}
		if p.unreadable++; p.first == nil {
			p.first = fmt.Errorf("line %d: %.100q: %w", number, line, err)
		}
	}
	return p, nil
}

// maxLine is longer than any record, in bytes.
const maxLine = 256

func parseRecord(line string) (Record, error) {
	if len(line) > maxLine {
		return Record{}, fmt.Errorf("%d bytes, a record has at most %d", len(line), maxLine)
	}
	fields := strings.Fields(line)
	if len(fields) != 5 || fields[3] != "until" {
		return Record{}, errors.New(`not of the form "TIME NAMESPACE/NAME ADDRESS until TIME"`)
	}
	since, err := time.Parse(time.RFC3339, fields[0])
	if err != nil {
		return Record{}, err
	}
	addr, err := netip.ParseAddr(fields[2])
	if err != nil {
		return Record{}, err
	}
	until, err := time.Parse(time.RFC3339, fields[4])
	if err != nil {
		return Record{}, err
	}
	r := Record{Addr: addr, Service: fields[1], Since: since, Until: until}
	return r.rounded(), r.check()
}

// check returns what is wrong with a record, if anything.
func (r Record) check() error {
	namespace, name, _ := strings.Cut(r.Service, "/")
	switch {
	case !r.Addr.IsValid() || r.Addr.Zone() != "":
		return fmt.Errorf("%s is not an address of a Service", r.Addr)
	case len(validation.IsDNS1123Label(namespace))+len(validation.IsDNS1123Label(name)) > 0:
		return fmt.Errorf("%q is not namespace/name of a Service", r.Service)
	case r.Since.UTC().Year() < 1 || r.Until.UTC().Year() > 9998:
		return errors.New("a time is out of range, the years 1 to 9998")
	case r.Until.Before(r.Since):
		return fmt.Errorf("it ends at %s, before its beginning", r.Until.Format(time.RFC3339))
	}
	return nil
}

// format returns the text of the records, oldest first, and those that have no room in it: of the
// namespaces that have most, the ones that end first. So no namespace crowds out the records of
// another.
func format(records []Record) (text string, full []Record) {
	slices.SortFunc(records, func(a, b Record) int { return cmp.Or(b.Until.Compare(a.Until), a.Addr.Compare(b.Addr)) })
	place, of := make(map[netip.Addr]int, len(records)), map[string]int{} // in its namespace; how many a namespace has
	for _, r := range records {
		namespace, _, _ := strings.Cut(r.Service, "/")
		of[namespace]++
		place[r.Addr] = of[namespace]
	}
	slices.SortStableFunc(records, func(a, b Record) int { return cmp.Compare(place[a.Addr], place[b.Addr]) })
	lines := make(map[netip.Addr]string, len(records))
	size := len(header)
	for i, r := range records {
		line := r.String() + "\n"
		if size += len(line); size > maxText {
			records, full = records[:i], slices.Clone(records[i:])
			break
		}
		lines[r.Addr] = line
	}
	sortOldestFirst(records)
	var b strings.Builder
	b.WriteString(header)
	for _, r := range records {
		b.WriteString(lines[r.Addr])
	}
	return b.String(), full
}

func sortOldestFirst(records []Record) {
	slices.SortFunc(records, func(a, b Record) int { return cmp.Or(a.Since.Compare(b.Since), a.Addr.Compare(b.Addr)) })
}
