// Package lodestone_test holds the project to its own rules: who may import
// whom, how large a thing may grow, what must be documented.
package lodestone_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"
)

const module = "github.com/lodestone-lb/lodestone"

// layers are the top folders, from the bottom up. A package imports from its own
// folder and from layers below; controller and speaker know nothing of each other.
var layers = [][]string{{"pkg"}, {"ipam"}, {"controller", "speaker"}, {"inspect"}, {"cmd"}}

// layerOf returns the layer of a package's top folder, -1 if it has none.
func layerOf(pkg string) int {
	return slices.IndexFunc(layers, func(folder []string) bool { return slices.Contains(folder, folders(pkg, 1)) })
}

// mayImport lists, for packages that must stay small, all that they may
// import of ours.
var mayImport = []struct {
	pkg     string
	allowed []string
	reason  string
}{
	{"ipam", []string{"pkg/config", "pkg/reason"}, "the allocator is pure, so that it can be tested against a model and asked offline"},
	{"controller/admission", []string{"pkg/config"}, "it knows documents, and nothing of what is made of them"},
	{"pkg/annotation", []string{"pkg/config"},
		"names are constants that everybody shares; the annotations of a node about BGP are parsed like the configuration"},
	{"pkg/apiclient", []string{"pkg/notify"}, "it knows connections, and nothing of what goes over them"},
	{"pkg/buildinfo", nil, "every binary links it"},
	{"pkg/clusterfacts", []string{"pkg/annotation", "pkg/config", "pkg/kube", "pkg/notify", "pkg/objects", "pkg/report"},
		"the controller and the CLI come to the same facts, and the speaker links them"},
	{"pkg/compat", []string{"pkg/annotation", "pkg/config"}, "what Services ask of others is translated in one place, for controller and CLI"},
	{"pkg/config", nil, "the configuration is a leaf: allocator, plan and CLI share it"},
	{"pkg/config/change", []string{"pkg/config"}, "what an edit changes follows from two documents alone"},
	{"pkg/diagnose", []string{"pkg/report"}, "what is wrong follows from facts alone: speakers report them, the CLI runs the checks"},
	{"inspect/dashboard", []string{"pkg/annotation", "inspect/cluster", "pkg/kube", "pkg/notify", "inspect/bgp", "inspect/output",
		"controller/servicelb/ledger", "inspect/simulation", "inspect/status"}, "it shows what lodestone status shows, and knows no controller"},
	{"controller/dhcp", []string{"pkg/notify"}, "leases know nothing of pools and Services"},
	{"controller/dhcp/pools", []string{"controller/dhcp", "pkg/notify", "controller/servicelb/ledger"},
		"it is what the ledger asks for, as far as DHCP servers give it"},
	{"controller/servicelb/ledger", []string{"controller/quarantinestore", "ipam", "pkg/annotation", "pkg/clusterfacts", "pkg/compat",
		"pkg/config", "pkg/kube", "pkg/objects", "pkg/reason"}, "it decides by what it is handed, and knows none of those who act on it"},
	{"pkg/loglimit", nil, "whatever logs may use it"},
	{"pkg/migrate", []string{"pkg/annotation", "pkg/compat", "pkg/config"},
		"the configuration of others is turned into a document, and asks no cluster"},
	{"pkg/notify", nil, "whatever changes may use it"},
	{"controller/leaseevents", []string{"pkg/annotation", "pkg/kube", "pkg/objects", "pkg/reason", "pkg/report"},
		"it emits Events of what speakers report, and decides nothing"},
	{"controller/poolstatus", []string{"controller/servicelb/ledger", "ipam", "pkg/kube"},
		"it writes what the ledger counts, and decides nothing"},
	{"pkg/objects", []string{"pkg/annotation", "pkg/compat", "pkg/config"}, "what is kept of objects depends on what is read from them alone"},
	{"pkg/reason", nil, "whoever has reasons explains them"},
	{"pkg/report", []string{"pkg/annotation", "pkg/reason"}, "speaker, controller and CLI share it"},
	{"speaker/bfd", []string{"pkg/loglimit", "pkg/reason", "speaker/plan", "speaker/realtime"},
		"an announcer knows the plan's types and no other announcer"},
	{"speaker/bgp", []string{"pkg/config", "pkg/loglimit", "pkg/notify", "pkg/reason", "speaker/plan"},
		"an announcer knows the plan's types and no other announcer"},
	{"speaker/core", []string{"pkg/config", "pkg/report", "speaker/plan", "speaker/snapshot"},
		"it decides what the announcers do, and knows none of them"},
	{"speaker/nodefacts", []string{"pkg/buildinfo", "pkg/diagnose", "speaker/netstate", "speaker", "speaker/membership"},
		"it looks at the node and at the speaker, and changes neither"},
	{"speaker/rendezvous", nil, "the election is arithmetic over names and addresses"},
	{"speaker/layer2", []string{"pkg/loglimit", "pkg/notify", "pkg/reason", "pkg/report", "speaker/netstate", "speaker/layer2/seal",
		"speaker/layer2/segment", "speaker/layer2/wire", "speaker/plan"}, "an announcer knows the plan's types and no other announcer"},
	{"speaker/layer2/segment", []string{"speaker/layer2/seal", "speaker/layer2/wire"},
		"what a node does on a segment follows from frames, assignments and the time"},
	{"speaker/layer2/wire", []string{"speaker/layer2/seal"}, "a codec decides nothing"},
	{"speaker/layer2/seal", nil, "who may claim a VIP is arithmetic"},
	{"speaker/detector", []string{"speaker/detector/watch", "speaker/realtime"}, "it has a thread and sockets, and decides nothing"},
	{"speaker/detector/watch", nil, "who is alive follows from packets, members and the time"},
	{"speaker/direct", []string{"pkg/notify", "pkg/reason", "pkg/report", "speaker/netstate", "speaker/nft", "speaker/plan"},
		"it knows the plan's types and no announcer"},
	{"speaker/limit", []string{"pkg/notify", "speaker/nft", "speaker/plan"}, "it knows the plan's types and no announcer"},
	{"speaker/nft", nil, "it carries what others decide"},
	{"speaker/membership/guard", []string{"pkg/listenlimit", "speaker/detector"},
		"what may come in follows from its form and its source alone"},
	{"speaker/membership/keys", []string{"pkg/report"}, "which key is used follows from what speakers report alone"},
	{"speaker/apihealth", nil, "it knows the API server alone"},
	{"speaker/plan", []string{"pkg/annotation", "pkg/config", "pkg/reason", "pkg/report", "speaker/rendezvous"},
		"the CLI runs the plan offline; segments and claims are as speakers report them"},
	{"speaker/snapshot", []string{"pkg/annotation", "pkg/kube", "pkg/report", "speaker/plan"},
		"speakers and the CLI derive the same snapshot from the same objects"},
	{"controller/leader", nil, "whether this replica may write follows from its Lease alone"},
	{"test/world", []string{"controller/leader", "controller/quarantinestore", "controller/servicelb", "controller/servicelb/ledger",
		"ipam", "pkg/annotation", "pkg/clusterfacts", "pkg/config", "pkg/kube", "pkg/objects", "pkg/report", "speaker/core",
		"speaker/bfd", "speaker/bgp", "speaker/detector/watch", "speaker/direct", "speaker/layer2/seal", "speaker/layer2/segment",
		"speaker/layer2/wire", "speaker/membership/keys", "speaker/plan", "speaker/snapshot", "test/nft"},
		"it runs the machines, those of bfd and bgp, too, and nothing that has a clock or a socket"},
	{"speaker/podroutes", []string{"pkg/config", "pkg/loglimit", "pkg/notify", "speaker/netstate", "pkg/reason", "speaker/plan"},
		"an announcer knows the plan's types and no other announcer"},
}

// mustNotLink lists what may not be in a package's binary, through whatever
// import.
var mustNotLink = []struct {
	pkg    string
	banned []string
	reason string
}{
	{"ipam", []string{"k8s.io/", "sigs.k8s.io/", "github.com/prometheus/"}, "the allocator is pure"},
	{"pkg/config", []string{"k8s.io/", "github.com/prometheus/"}, "the configuration is a leaf that the CLI links"},
	{"speaker/rendezvous", []string{"k8s.io/", "github.com/"}, "the election is arithmetic"},
	{"speaker/plan", []string{"k8s.io/", "github.com/prometheus/", "github.com/vishvananda/", "github.com/google/nftables",
		"github.com/osrg/gobgp", "github.com/hashicorp/"}, "the CLI runs the plan offline"},
	{"cmd/controller", []string{"github.com/vishvananda/netlink", "github.com/google/nftables", "github.com/osrg/gobgp",
		"github.com/hashicorp/memberlist"}, "the controller touches no network but the API, and DHCP servers where a pool has one"},
	{"cmd/lodestone", []string{module + "/controller/dhcp", "github.com/insomniacslk/dhcp", "github.com/vishvananda/netlink",
		"github.com/google/nftables", "github.com/osrg/gobgp", "github.com/hashicorp/memberlist"}, "the CLI runs on laptops that are not Linux"},
}

// mustNotImport lists what a package's own files may not import; what they
// link through others does not count.
var mustNotImport = []struct {
	pkg    string
	banned []string
	reason string
}{
	{"ipam", []string{"net", "net/http", "os", "log", "log/slog", "context"}, "the allocator does no I/O"},
	{"speaker/rendezvous", []string{"net", "os", "log", "log/slog", "time", "context", "math/rand", "math/rand/v2"},
		"every node must come to the same answer"},
	{"speaker/snapshot", []string{"net", "os", "log", "log/slog", "time", "context"}, "the same objects must give the same snapshot"},
	{"speaker/plan", []string{"net", "os", "log", "log/slog", "context", "math/rand", "math/rand/v2"},
		"the same snapshot must give the same plan"},
}

// onlyIn lists the few places that may import a library.
var onlyIn = []struct {
	library string
	places  []string
	reason  string
}{
	{"k8s.io/client-go/", []string{"cmd/...", "controller/admission", "pkg/apiclient", "inspect/cluster", "pkg/clusterfacts",
		"inspect/dashboard/example", "inspect/diagnosis", "pkg/debughttp", "pkg/kube", "controller/leader", "controller/leaseevents",
		"pkg/objects", "pkg/testapi",
		"controller/poolstatus", "controller/provider", "controller/quarantinestore", "controller/servicelb", "speaker", "speaker/membership"},
		"what sends requests to the API server can be named at a glance"},
	{"github.com/vishvananda/netlink", []string{"speaker/netstate", "pkg/testnet", "speaker/podroutes", "speaker/direct"},
		"what touches the kernel's network can be named at a glance"},
	{"github.com/google/nftables", []string{"speaker/nft", "speaker/limit", "speaker/direct", "test/nft"},
		"what touches the kernel's packet filter can be named at a glance"},
	{"github.com/insomniacslk/dhcp", []string{"controller/dhcp"}, "how DHCP is spoken hides behind leases"},
	{"github.com/osrg/gobgp", []string{"speaker/bgp"}, "BGP hides behind a session interface of ours"},
	{"github.com/hashicorp/memberlist", []string{"speaker/membership", "speaker/membership/guard"},
		"how liveness is learnt hides behind membership"},
}

func TestImports(t *testing.T) {
	t.Parallel()
	packages := listPackages(t)
	for _, r := range mayImport {
		for _, dep := range packages[r.pkg].Imports {
			if ours, ok := strings.CutPrefix(dep, module+"/"); ok && !slices.Contains(r.allowed, ours) {
				t.Errorf("%s imports %s: %s", r.pkg, ours, r.reason)
			}
		}
	}
	for _, r := range mustNotLink {
		for _, banned := range r.banned {
			for _, dep := range packages[r.pkg].Deps {
				if strings.HasPrefix(dep, banned) {
					t.Errorf("%s links %s: %s", r.pkg, dep, r.reason)
				}
			}
		}
	}
	for _, r := range mustNotImport {
		for _, dep := range packages[r.pkg].Imports {
			if slices.Contains(r.banned, dep) {
				t.Errorf("%s imports %s: %s", r.pkg, dep, r.reason)
			}
		}
	}
	for name, p := range packages {
		for _, dep := range p.Imports {
			if ours, ok := strings.CutPrefix(dep, module+"/"); ok && layerOf(name) >= 0 && folders(ours, 1) != folders(name, 1) &&
				layerOf(ours) >= layerOf(name) {
				t.Errorf("%s imports %s: arrows go down, from %v", name, ours, layers)
			}
			if ours := strings.TrimPrefix(dep, module+"/"); strings.HasPrefix(ours, "cmd/") && folders(ours, 2) != folders(name, 2) {
				t.Errorf("%s imports %s: commands are wiring and imported by nobody", name, dep)
			}
			for _, r := range onlyIn {
				if strings.HasPrefix(dep+"/", strings.TrimSuffix(r.library, "/")+"/") && !slices.Contains(r.places, name) &&
					!slices.Contains(r.places, folders(name, 1)+"/...") {
					t.Errorf("%s imports %s, which belongs in %s: %s", name, dep, strings.Join(r.places, ", "), r.reason)
				}
			}
		}
	}
}

// TestTheDockerfileSeesWhatItBuilds: .dockerignore leaves out all that it does not name, and a
// package that moved into a new folder would be missed where nobody builds with Docker.
func TestTheDockerfileSeesWhatItBuilds(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(".dockerignore")
	if err != nil {
		t.Fatal(err)
	}
	seen := strings.Fields(string(text))
	for name, p := range listPackages(t) {
		if folders(name, 1) != "cmd" {
			continue
		}
		for _, dep := range append(p.Deps, module+"/"+name) {
			if ours, ok := strings.CutPrefix(dep, module+"/"); ok && !slices.Contains(seen, "!"+folders(ours, 1)) {
				t.Errorf("%s is in %s, and .dockerignore leaves its folder out", ours, name)
				return
			}
		}
	}
}

// folders returns the first n folders of a path.
func folders(p string, n int) string {
	all := strings.Split(p, "/")
	return strings.Join(all[:min(n, len(all))], "/")
}

// listed is what `go list` prints about a package.
type listed struct {
	ImportPath    string
	Imports, Deps []string
}

// listPackages returns the main module's packages by folder.
func listPackages(t *testing.T) map[string]listed {
	t.Helper()
	packages, err := modulePackages()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	if len(packages) < 3 {
		t.Fatalf("go list found %d packages", len(packages))
	}
	return packages
}

// modulePackages are the packages of the module. Several tests share one list, because it is most of their cost.
var modulePackages = sync.OnceValues(func() (map[string]listed, error) {
	out, err := exec.Command("go", "list", "-e", "-json=ImportPath,Imports,Deps", "./...").Output()
	if err != nil {
		return nil, err
	}
	packages := map[string]listed{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return packages, nil
		} else if err != nil {
			return nil, err
		}
		packages[strings.TrimPrefix(p.ImportPath, module+"/")] = p
	}
})

// ownLists are the packages that list objects of the API server as they are, beside the table of
// pkg/objects. None of them keeps or follows what it reads.
var ownLists = []struct{ pkg, reason string }{
	{"cmd/controller", "the framework's factory, whose informers objects.Share replaces"},
	{"cmd/lodestone/internal/browse", "the command looks once for a pod of the controller"},
	{"cmd/lodestone/internal/foreign", "the command reads objects of other load balancers once"},
	{"inspect/cluster", "the command looks once for what other implementations write on Services"},
	{"inspect/diagnosis", "the command reads once what is not watched: workloads of others, and Events"},
	{"speaker/membership", "a speaker looks for its own Node by its name, because it may not get it"},
}

// TestCachesAreOfTheTable keeps lists, watches and caches of objects in one place, which bounds
// what is kept of each. A client's List and Watch take a context and options.
func TestCachesAreOfTheTable(t *testing.T) {
	t.Parallel()
	used := map[string]bool{}
	for _, s := range parseSources(t) {
		if s.folder() == "pkg/objects" || layerOf(s.folder()) < 0 {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			what := ""
			switch n := n.(type) {
			case *ast.CallExpr:
				sel, ok := n.Fun.(*ast.SelectorExpr)
				if !ok || len(n.Args) != 2 || !slices.Contains([]string{"List", "Watch"}, sel.Sel.Name) {
					break
				}
				if x, ok := sel.X.(*ast.Ident); !ok || x.Name != "output" { // whose List joins words
					what = "a " + strings.ToLower(sel.Sel.Name)
				}
			case *ast.SelectorExpr:
				x, ok := n.X.(*ast.Ident)
				if ok && (x.Name == "cache" || strings.HasSuffix(x.Name, "informers")) &&
					(strings.Contains(n.Sel.Name, "ListWatch") || strings.HasPrefix(n.Sel.Name, "New")) {
					what = n.Sel.Name
				}
			}
			if what == "" {
				return true
			}
			used[s.folder()] = true
			if !slices.ContainsFunc(ownLists, func(o struct{ pkg, reason string }) bool { return o.pkg == s.folder() }) {
				t.Errorf("%s: %s of objects of its own: take the table of pkg/objects, or write into ownLists why not", s.at(n), what)
			}
			return true
		})
	}
	for _, o := range ownLists {
		if !used[o.pkg] {
			t.Errorf("%s does not need to be in ownLists", o.pkg)
		}
	}
}

// TestClock keeps the clock out of decisions: the time is an argument.
func TestClock(t *testing.T) {
	t.Parallel()
	for _, s := range parseSources(t) {
		if !slices.Contains([]string{"ipam", "speaker/rendezvous", "speaker/plan", "pkg/config"}, s.folder()) {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" &&
				slices.Contains([]string{"Now", "Since", "Until", "After", "Sleep"}, sel.Sel.Name) {
				t.Errorf("%s: time.%s in a package that decides", s.at(n), sel.Sel.Name)
			}
			return true
		})
	}
}

// machines are the packages that are deterministic: events and the time go in, effects come
// out. They have one owner, and wait for nothing.
var machines = []string{"controller/servicelb/ledger", "speaker/core", "speaker/detector/watch", "speaker/layer2/segment"}

// TestMachines keeps all out of the machines that does not follow from their events.
func TestMachines(t *testing.T) {
	t.Parallel()
	packages := listPackages(t)
	for _, m := range machines {
		if len(packages[m].Imports) == 0 {
			t.Errorf("%s is no package", m)
		}
		for _, dep := range packages[m].Imports {
			if slices.Contains([]string{"context", "log", "log/slog", "math/rand", "net", "os", "sync", "sync/atomic",
				module + "/pkg/notify"}, dep) {
				t.Errorf("%s imports %s: a machine has one owner, and waits for nothing", m, dep)
			}
		}
	}
	for _, s := range parseSources(t) {
		if !slices.Contains(machines, s.folder()) {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			what := ""
			switch n := n.(type) {
			case *ast.GoStmt:
				what = "a goroutine"
			case *ast.ChanType, *ast.SelectStmt, *ast.SendStmt:
				what = "a channel"
			case *ast.UnaryExpr:
				if n.Op == token.ARROW {
					what = "a channel"
				}
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains([]string{"Now", "Since", "Until", "After", "AfterFunc",
					"Sleep", "Tick", "NewTimer", "NewTicker"}, n.Sel.Name) {
					what = "the clock"
				}
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "rand" && !slices.Contains([]string{"New", "NewPCG", "Rand"}, n.Sel.Name) {
					what = "chance that has no seed"
				}
			}
			if what != "" {
				t.Errorf("%s: %s in a machine", s.at(n), what)
			}
			return true
		})
	}
}

// TestWhatIsNotRacedHasNoGoroutines: neither the packages that the Makefile has tested without the race detector have
// any, nor their tests.
func TestWhatIsNotRacedHasNoGoroutines(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(strings.ReplaceAll(string(makefile), "\\\n", ""), "\nPURE = ")
	list, _, _ = strings.Cut(list, "\n")
	pure, seen := strings.Fields(list), map[string]bool{}
	for i := range pure {
		pure[i] = filepath.Clean(pure[i])
	}
	for _, s := range parseFiles(t) {
		if !slices.Contains(pure, s.folder()) {
			continue
		}
		seen[s.folder()] = true
		ast.Inspect(s.file, func(n ast.Node) bool {
			_, goes := n.(*ast.GoStmt)
			if sel, ok := n.(*ast.SelectorExpr); goes || ok && sel.Sel.Name == "Go" {
				t.Errorf("%s: a goroutine in a package of PURE", s.at(n))
			}
			return true
		})
	}
	if len(seen) != len(pure) {
		t.Errorf("PURE is %q, and these are packages: %v", pure, seen)
	}
}

// wallClock are the places of the speaker that may take a time apart, which then
// is the wall clock's alone.
var wallClock = []struct{ path, reason string }{
	{"speaker/metrics.go", "a metric has the time"},
	{"speaker/detector/receive.go", "the kernel stamps packets by the wall clock; their age counts, within bounds"},
	{"speaker/bfd/session.go", "the status has the time of the last packet"},
	{"speaker/bfd/status.go", "the status has the time of the last packet"},
}

// TestClockJumps keeps the wall clock out of what speakers wait for: it may jump
// by an hour, and moves nothing. A time.Time has a monotonic reading until it is
// turned into a number or another form (package time, "Monotonic Clocks").
func TestClockJumps(t *testing.T) {
	t.Parallel()
	used := map[string]bool{}
	for _, s := range parseSources(t) {
		if !slices.Contains([]string{"speaker", "speaker/core", "speaker/detector", "speaker/detector/watch", "speaker/layer2",
			"speaker/layer2/segment", "speaker/membership", "speaker/bfd",
			"speaker/podroutes", "speaker/apihealth", "speaker/netstate", "pkg/notify"}, s.folder()) {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains([]string{"Unix", "UnixMilli", "UnixMicro", "UnixNano", "UTC", "Local", "Date", "Parse", "ParseInLocation",
				"AddDate"}, sel.Sel.Name) {
				return true
			}
			if x, ok := sel.X.(*ast.Ident); (!ok || x.Name != "time") && len(call.Args) > 0 && sel.Sel.Name != "AddDate" {
				return true // another package's, or a method of another type
			}
			used[s.path] = true
			if !slices.ContainsFunc(wallClock, func(w struct{ path, reason string }) bool { return w.path == s.path }) {
				t.Errorf("%s: %s makes a time of the wall clock, which may jump: keep the time.Time, or write into wallClock why not",
					s.at(n), sel.Sel.Name)
			}
			return true
		})
	}
	for _, w := range wallClock {
		if !used[w.path] {
			t.Errorf("%s does not need to be in wallClock", w.path)
		}
	}
}

// The budget of production code, in lines and parameters. Nothing bounds files and
// packages: a thing stands where it belongs, not where there is room.
const (
	maxFunction   = 100
	maxMain       = 150
	maxParameters = 4
	maxLine       = 140
)

// TestLinesAreShort bounds the lines of code and of tests, in characters. Raw strings are
// what they are.
func TestLinesAreShort(t *testing.T) {
	t.Parallel()
	for _, s := range parseFiles(t) {
		raw := map[int]bool{}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING && strings.HasPrefix(lit.Value, "`") {
				for line := s.fset.Position(lit.Pos()).Line; line <= s.fset.Position(lit.End()).Line; line++ {
					raw[line] = true
				}
			}
			return true
		})
		for i, line := range strings.Split(string(s.text), "\n") {
			if n := utf8.RuneCountInString(line); n > maxLine && !raw[i+1] {
				t.Errorf("%s:%d has %d characters, at most %d", s.path, i+1, n, maxLine)
			}
		}
	}
}

func TestBudget(t *testing.T) {
	t.Parallel()
	documented := map[string]bool{}
	for _, s := range parseSources(t) {
		documented[s.folder()] = documented[s.folder()] || s.file.Doc != nil

		if n := s.fset.File(s.file.Pos()).LineCount(); filepath.Base(s.path) == "main.go" && n > maxMain {
			t.Errorf("%s: %d lines, at most %d", s.path, n, maxMain)
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if n := s.fset.Position(f.End()).Line - s.fset.Position(f.Pos()).Line; n > maxFunction {
				t.Errorf("%s: func %s has %d lines, at most %d", s.at(f), f.Name.Name, n, maxFunction)
			}
			if n := f.Type.Params.NumFields(); strings.HasPrefix(f.Name.Name, "New") && n > maxParameters {
				t.Errorf("%s: %s takes %d arguments, at most %d: take a struct", s.at(f), f.Name.Name, n, maxParameters)
			}
		}
	}
	for folder, hasComment := range documented {
		if !hasComment {
			t.Errorf("%s: no package comment", folder)
		}
		for _, element := range strings.Split(folder, "/") {
			if slices.Contains([]string{"util", "utils", "common", "manager", "helper", "helpers", "misc"}, element) {
				t.Errorf("%s: %q does not name what is inside", folder, element)
			}
		}
	}
}

// TestPackageCommentsListFiles checks that the files exist that the list in a package comment names, as in
// "//	planner.go  what it has": a reader begins there.
func TestPackageCommentsListFiles(t *testing.T) {
	t.Parallel()
	for _, s := range parseSources(t) {
		if s.file.Doc == nil {
			continue
		}
		for _, line := range s.file.Doc.List {
			name, _, _ := strings.Cut(strings.TrimPrefix(line.Text, "//\t"), " ")
			if !strings.HasPrefix(line.Text, "//\t") || !strings.HasSuffix(name, ".go") {
				continue
			}
			if _, err := os.Stat(filepath.Join(s.folder(), name)); err != nil {
				t.Errorf("%s: the package comment lists %s, which is no file of the package", s.path, name)
			}
		}
	}
}

// maxMethods bounds the duties of a type.
const maxMethods = 30

// manyMethods are the types that have more, and how many. None may grow, and no other
// may come.
var manyMethods = map[string]int{}

// TestMethods bounds how many methods a type has. test/ is not a part of the program.
func TestMethods(t *testing.T) {
	t.Parallel()
	count := map[string]int{}
	for _, s := range parseSources(t) {
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv != nil && folders(s.path, 1) != "test" {
				count[s.folder()+"."+receiver(f.Recv.List[0].Type)]++
			}
		}
	}
	for name, n := range count {
		switch most, known := manyMethods[name]; {
		case known && n < most:
			t.Errorf("%s has %d methods: write it down in manyMethods, or nothing if it has %d at most", name, n, maxMethods)
		case n > max(most, maxMethods):
			t.Errorf("%s has %d methods, at most %d", name, n, max(most, maxMethods))
		}
	}
	for name := range manyMethods {
		if count[name] == 0 {
			t.Errorf("%s in manyMethods is no type", name)
		}
	}
}

// receiver is the name of a receiver's type.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return "?"
}

// source is a parsed file.
type source struct {
	path string
	text []byte
	fset *token.FileSet
	file *ast.File
}

func (s source) folder() string       { return filepath.ToSlash(filepath.Dir(s.path)) }
func (s source) isTest() bool         { return strings.HasSuffix(s.path, "_test.go") }
func (s source) at(n ast.Node) string { return s.fset.Position(n.Pos()).String() }

// parseSources returns every Go file of the repository, all modules, that is
// not a test.
func parseSources(t *testing.T) []source {
	t.Helper()
	return slices.DeleteFunc(slices.Clone(parseFiles(t)), source.isTest)
}

// parseFiles returns every Go file of the repository, all modules.
func parseFiles(t *testing.T) []source {
	t.Helper()
	sources, err := repositoryFiles()
	if err != nil {
		t.Fatal(err)
	}
	return sources
}

var repositoryFiles = sync.OnceValues(func() ([]source, error) {
	var sources []source
	fset := token.NewFileSet()
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && p != "." && (strings.HasPrefix(d.Name(), ".") || slices.Contains([]string{"bin", "dist", "testdata"}, d.Name())) {
			return fs.SkipDir
		}
		if !strings.HasSuffix(p, ".go") {
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(fset, p, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		sources = append(sources, source{p, text, fset, f})
		return nil
	})
	return sources, err
})
