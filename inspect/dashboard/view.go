package dashboard

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lodestone-lb/lodestone/inspect/output"
	"github.com/lodestone-lb/lodestone/inspect/status"
)

// The most rows that a page has. The others are counted, and a search finds them.
const (
	vipsPerPage  = 25
	nodesPerPage = 24
	maxRows      = 100
	// maxNames is how many names a row lists, maxSessions how many sessions.
	maxNames    = 4
	maxSessions = 16
	// maxQuery bounds a search, in bytes.
	maxQuery = 100
)

// Query is what of the State somebody looks at.
type Query struct {
	// Text is searched for in the names of nodes, VIPs, Services and pools.
	Text string
	// Trouble asks for VIPs that nobody announces, and nodes with problems,
	// alone.
	Trouble bool
	// VIPs and Nodes are the pages, from 0.
	VIPs, Nodes int
}

// ParseQuery reads a Query from the parameters of a URL: q, trouble, vips and
// nodes. What makes no sense is ignored.
func ParseQuery(v url.Values) Query {
	number := func(name string) int {
		n, err := strconv.Atoi(v.Get(name))
		if err != nil || n < 0 {
			return 0
		}
		return min(n, 1<<20)
	}
	text := strings.ToLower(v.Get("q"))
	return Query{Text: text[:min(len(text), maxQuery)], Trouble: v.Get("trouble") == "1", VIPs: number("vips"), Nodes: number("nodes")}
}

// section is a list of rows on the page, each with a name that stays.
type section struct {
	order []string
	rows  map[string]json.RawMessage
	counts
}

// counts are of what a section shows a part of.
type counts struct {
	// Total counts what there is on all pages, Page is the one that is shown, More counts what comes after it.
	Total int `json:"total"`
	Page  int `json:"page"`
	More  int `json:"more,omitempty"`
	// Unknown is set if it is not known what there is.
	Unknown bool `json:"unknown,omitempty"`
}

// View is the page that somebody looks at: a bounded number of rows, by section.
type View map[string]*section

func (v View) add(name, id string, row any) {
	s := v.section(name)
	if _, twice := s.rows[id]; twice {
		return
	}
	text, err := json.Marshal(row) // escapes < and >, too
	if err != nil {
		panic(err) // texts and numbers
	}
	s.order, s.rows[id] = append(s.order, id), text
}

func (v View) section(name string) *section {
	if v[name] == nil {
		v[name] = &section{order: []string{}, rows: map[string]json.RawMessage{}}
	}
	return v[name]
}

// page keeps the rows of one page, or of the last if there are fewer, and notes how many rows there are.
func page[T any](s *section, all []T, n, size int) []T {
	s.Total = len(all)
	s.Page = max(0, min(n, (len(all)-1)/size))
	start := s.Page * size
	end := min(start+size, len(all))
	s.More = len(all) - end
	return all[start:end]
}

// head is the one row of the section of that name.
type head struct {
	ClusterID     string `json:"clusterID,omitempty"`
	Configuration string `json:"configuration"`
	Controller    string `json:"controller"`
	Leader        string `json:"leader,omitempty"`
	Speakers      string `json:"speakers"`
	Warnings      int    `json:"warnings"`
	// Nil: it is not known.
	Services *tally `json:"services,omitempty"`
	VIPs     *tally `json:"vips,omitempty"`
	Sessions *tally `json:"sessions,omitempty"`
}

// tally is how many there are that are as they should be, and how many that are not.
type tally struct {
	Good int `json:"good"`
	Bad  int `json:"bad"`
}

// poolRow is a family of a pool. Shares are parts of its size, in percent.
type poolRow struct {
	Name        string  `json:"name"`
	Family      string  `json:"family,omitempty"`
	Text        string  `json:"text"`
	Note        string  `json:"note,omitempty"`
	Tone        Tone    `json:"tone"`
	Used        float64 `json:"used"`
	Quarantined float64 `json:"quarantined"`
	Reserved    float64 `json:"reserved"`
}

// NewView returns what the Query asks for of the State and of what happened.
func NewView(s *State, past []Transition, q Query) View {
	v := View{}
	v.head(s)
	v.warnings(s)
	v.pools(s)
	v.nodes(s, q, v.vips(s, q))
	v.peers(s)
	v.section("events")
	for i := len(past) - 1; i >= max(0, len(past)-maxRows); i-- {
		t := past[i]
		v.add("events", fmt.Sprint(t.Time.Unix(), " ", t.Text), t)
	}
	return v
}

func (v View) head(s *State) {
	h := head{ClusterID: s.ClusterID, Configuration: s.configuration(), Controller: "not read", Speakers: "not read",
		Warnings: len(s.Warnings) + len(s.Unread)}
	if c := s.Controller; c != nil {
		h.Controller, h.Leader = fmt.Sprintf("%d of %d ready", c.Ready, c.Replicas), clip(c.Leader)
	}
	if sp := s.Speakers; sp != nil {
		h.Speakers = fmt.Sprintf("%d of %d ready", sp.Ready, sp.Nodes)
	}
	if s.Services != nil {
		h.Services = &tally{s.Services.Served, len(s.waiting())}
	}
	if s.Status.VIPs != nil {
		h.VIPs = &tally{Good: len(s.VIPs)}
		for i := range s.VIPs {
			if s.VIPs[i].Reason != "" {
				h.VIPs.Good--
				h.VIPs.Bad++
			}
		}
	}
	if s.Sessions != nil {
		h.Sessions = s.up()
	}
	v.add("head", "head", h)
}

func (v View) warnings(s *State) {
	all := []status.Warning{}
	for _, text := range s.Unread {
		all = append(all, status.Warning{About: "not read", Message: text})
	}
	if s.Configuration != nil {
		for _, text := range s.Configuration.Errors {
			all = append(all, status.Warning{About: "configuration", Message: text})
		}
	}
	all = append(all, s.Warnings...)
	for _, w := range page(v.section("warnings"), all, 0, maxRows) {
		w.Message = clip(w.Message)
		v.add("warnings", w.About+" "+w.Message, w)
	}
}

func (v View) pools(s *State) {
	v.section("pools").Unknown = s.Pools == nil
	for _, p := range page(v.section("pools"), s.Pools, 0, maxRows) {
		row := poolRow{Name: p.Name, Family: string(p.Family), Tone: Good}
		if p.Draining {
			row.Note = "draining"
		}
		if p.Leased {
			row.Text = output.Number(p.Used) + " leased by DHCP"
		} else {
			row.Text = output.Number(p.Used) + " of " + output.Number(p.Size) + " used, " + output.Number(p.Free) + " free"
			percent := func(n float64) float64 { return share(n, p.Size) }
			row.Used, row.Quarantined, row.Reserved = percent(p.Used), percent(p.Quarantined), percent(p.Reserved)
			switch {
			case p.Full():
				row.Tone = Bad
			case p.Free < p.Size/10:
				row.Tone = Note
			}
		}
		v.add("pools", p.Name+" "+string(p.Family), row)
	}
}

// share is a part of the whole in percent, with a tenth for what is there at all.
func share(part, whole float64) float64 {
	if part <= 0 || whole <= 0 {
		return 0
	}
	return max(0.1, float64(int(min(1, part/whole)*1000))/10)
}

// nodeRow is a Node, and how many VIPs it owns in percent of the most that one
// does; where nobody owns any, how many it announces by BGP.
type nodeRow struct {
	Node
	Share float64 `json:"share"`
	// More counts the sessions that are left out.
	More int `json:"more,omitempty"`
	// Unknown is set if it is not known what it announces.
	Unknown bool `json:"unknown,omitempty"`
}

// nodes shows the nodes that the Query finds by name, and those that announce a VIP that it finds.
func (v View) nodes(s *State, q Query, found []*VIP) {
	announcing := map[string]bool{}
	for _, vip := range found {
		announcing[vip.Owner] = true
		for _, node := range vip.Routers {
			announcing[node] = true
		}
	}
	owned, announced := 0, 0
	var all []Node
	for _, n := range s.Nodes {
		owned, announced = max(owned, n.Layer2), max(announced, n.BGP)
		if (strings.Contains(strings.ToLower(n.Name), q.Text) || announcing[n.Name]) && (!q.Trouble || n.bad()) {
			all = append(all, n)
		}
	}
	slices.SortStableFunc(all, func(a, b Node) int { return cmp.Compare(gravity(a), gravity(b)) })
	for _, n := range page(v.section("nodes"), all, q.Nodes, nodesPerPage) {
		row := nodeRow{Node: n, Share: share(float64(n.Layer2), float64(owned)), Unknown: s.Status.VIPs == nil}
		if owned == 0 {
			row.Share = share(float64(n.BGP), float64(announced))
		}
		row.Problem = clip(n.Problem)
		row.More = max(0, len(n.Sessions)-maxSessions)
		row.Sessions = slices.Clone(n.Sessions[:len(n.Sessions)-row.More])
		for i := range row.Sessions {
			row.Sessions[i].Node = "" // it is the row's
			row.Sessions[i].Message = clip(row.Sessions[i].Message)
		}
		v.add("nodes", n.Name, row)
	}
}

// gravity puts nodes with problems first.
func gravity(n Node) int {
	if n.bad() {
		return 0
	}
	return 1
}

// peerRow is how the sessions with a peer are.
type peerRow struct {
	Name    string `json:"name"`
	Up      int    `json:"up"`
	Nodes   int    `json:"nodes"`
	Message string `json:"message,omitempty"`
}

func (v View) peers(s *State) {
	for _, p := range page(v.section("peers"), s.Peers, 0, maxRows) {
		row := peerRow{Name: p.Name, Up: p.Up, Nodes: p.Nodes}
		if len(p.Down) > 0 {
			row.Message = clip(p.Down[0].Why())
		}
		v.add("peers", p.Name, row)
	}
}

// vipRow is a VIP with a bounded number of names.
type vipRow struct {
	VIP
	// MoreServices and MoreRouters count the names that are left out.
	MoreServices int `json:"moreServices,omitempty"`
	MoreRouters  int `json:"moreRouters,omitempty"`
}

// vips shows those that the Query finds, and returns all of them.
func (v View) vips(s *State, q Query) []*VIP {
	var found []*VIP
	for i := range s.VIPs {
		if vip := &s.VIPs[i]; (!q.Trouble || vip.Reason != "") && vip.matches(q.Text) {
			found = append(found, vip)
		}
	}
	v.section("vips").Unknown = s.Status.VIPs == nil
	for _, vip := range page(v.section("vips"), found, q.VIPs, vipsPerPage) {
		row := vipRow{VIP: *vip, MoreServices: max(0, len(vip.Services)-maxNames), MoreRouters: max(0, len(vip.Routers)-maxNames)}
		row.Services, row.Routers = vip.Services[:len(vip.Services)-row.MoreServices], vip.Routers[:len(vip.Routers)-row.MoreRouters]
		row.Message = clip(vip.Message)
		v.add("vips", vip.Addr.String(), row)
	}
	return found
}

// matches reports whether a name of the VIP contains the text.
func (v *VIP) matches(text string) bool {
	contains := func(name string) bool { return strings.Contains(strings.ToLower(name), text) }
	return text == "" || contains(v.Pool) || contains(v.Owner) || contains(v.Reason) || contains(v.Addr.String()) ||
		slices.ContainsFunc(v.Services, contains) || slices.ContainsFunc(v.Routers, contains)
}

// change is what of a section differs from what somebody has seen. Rows that
// Order does not name are gone.
type change struct {
	Order []string                   `json:"order"`
	Rows  map[string]json.RawMessage `json:"rows,omitempty"`
	counts
}

// update is what a page is sent: the sections that changed.
type update struct {
	Time     time.Time         `json:"time"`
	Sections map[string]change `json:"sections"`
}

// since returns the sections that differ from before, and whether there are any. If before is nil, all differ.
func (v View) since(seen View) (sections map[string]change, any bool) {
	sections = map[string]change{}
	for name, s := range v {
		c := change{Order: s.order, Rows: map[string]json.RawMessage{}, counts: s.counts}
		old := seen[name]
		if old == nil {
			old = &section{counts: counts{Total: -1}}
		}
		for id, row := range s.rows {
			if !bytes.Equal(row, old.rows[id]) {
				c.Rows[id] = row
			}
		}
		if len(c.Rows) > 0 || s.counts != old.counts || !slices.Equal(s.order, old.order) {
			sections[name] = c
		}
	}
	return sections, len(sections) > 0
}
