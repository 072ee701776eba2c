package lodestone_test

import (
	"bytes"
	"go/ast"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// parsed is what reads bytes of others, by file: the fuzz targets that send it whatever they like, or why there is none.
var parsed = map[string]struct {
	targets []string
	none    string
}{
	// What people and tenants write.
	"cmd/lodestone/internal/browse/proxy.go":  {targets: []string{"FuzzProxy"}},
	"cmd/lodestone/internal/cli/bgp.go":       {targets: []string{"FuzzPrefix"}},
	"controller/admission/review.go":          {targets: []string{"FuzzReview"}},
	"controller/quarantinestore/record.go":    {targets: []string{"FuzzParse"}},
	"controller/servicelb/ledger/request.go":  {targets: []string{"FuzzRequestOf"}},
	"controller/servicelb/ledger/takeover.go": {targets: []string{"FuzzAssignedPools"}},
	"inspect/dashboard/view.go":               {targets: []string{"FuzzParseQuery"}},
	"inspect/diagnosis/redact.go":             {targets: []string{"FuzzRedactYAML", "FuzzRedactKeepsJSON"}},
	"inspect/output/output.go":                {targets: []string{"FuzzPrint"}},
	"ipam/request.go":                         {targets: []string{"FuzzAllocate"}},
	"pkg/annotation/values.go":                {targets: []string{"FuzzParse"}},
	"pkg/compat/compat.go":                    {targets: []string{"FuzzRead"}},
	"pkg/config/address.go":                   {targets: []string{"FuzzParse", "FuzzCost"}},
	"pkg/config/bgp.go":                       {targets: []string{"FuzzParse", "FuzzCost"}},
	"pkg/config/change/change.go":             {targets: []string{"FuzzDiff"}},
	"pkg/config/parse.go":                     {targets: []string{"FuzzParse", "FuzzCost"}},
	"pkg/config/scalar.go":                    {targets: []string{"FuzzParse", "FuzzCost"}},
	"pkg/debughttp/debughttp.go":              {targets: []string{"FuzzRequest"}},
	"pkg/debughttp/limit.go":                  {targets: []string{"FuzzRequest"}},
	"pkg/kube/service.go":                     {targets: []string{"FuzzVIPs"}},
	"pkg/migrate/kubevip.go":                  {targets: []string{"FuzzMigrate", "FuzzCost"}},
	"pkg/migrate/kubevip_settings.go":         {targets: []string{"FuzzMigrate", "FuzzCost"}},
	"pkg/migrate/metallb.go":                  {targets: []string{"FuzzMigrate", "FuzzCost"}},
	"pkg/migrate/metallb_bgp.go":              {targets: []string{"FuzzMigrate", "FuzzCost"}},
	"pkg/migrate/metallb_legacy.go":           {targets: []string{"FuzzMigrate", "FuzzCost"}},
	"pkg/migrate/read.go":                     {targets: []string{"FuzzMigrate", "FuzzCost"}},
	"pkg/migrate/services.go":                 {targets: []string{"FuzzMigrate", "FuzzCost"}},
	"speaker/nodefacts/nodefacts.go":          {targets: []string{"FuzzParseQuery"}},
	// What kubelets, speakers, kube-proxy and the API server write.
	"controller/provider/nodemetadata.go": {targets: []string{"FuzzAddressesOf"}},
	"controller/provider/routes.go":       {targets: []string{"FuzzHas"}},
	"pkg/clusterfacts/facts.go":           {targets: []string{"FuzzCollect"}},
	"pkg/diagnose/diagnose.go":            {targets: []string{"FuzzFacts"}},
	"pkg/objects/stream.go":               {targets: []string{"FuzzDecode"}},
	"pkg/report/network.go":               {targets: []string{"FuzzParse"}},
	"pkg/report/lease.go":                 {targets: []string{"FuzzParse"}},
	"speaker/kubeproxy.go":                {targets: []string{"FuzzAsk"}},
	"speaker/plan/podroutes.go":           {targets: []string{"FuzzReadPodCIDR"}},
	// What comes from the network.
	"controller/dhcp/message.go":          {targets: []string{"FuzzFrame", "FuzzAnswer"}},
	"speaker/bfd/packet.go":               {targets: []string{"FuzzParse", "FuzzReceive"}},
	"speaker/bgp/message.go":              {targets: []string{"FuzzRead"}},
	"speaker/bgp/open.go":                 {targets: []string{"FuzzRead"}},
	"speaker/bgp/unnumbered.go":           {targets: []string{"FuzzAdvertisement"}},
	"speaker/detector/watch/packet.go":    {targets: []string{"FuzzPacket", "FuzzStep"}},
	"speaker/nodefacts/synprobe.go":       {targets: []string{"FuzzParseSegment"}},
	"speaker/layer2/socket.go":            {targets: []string{"FuzzARP", "FuzzNDP"}},
	"speaker/layer2/seal/seal.go":         {targets: []string{"FuzzFind"}},
	"speaker/membership/guard/form.go":    {targets: []string{"FuzzForm", "FuzzHolderOfTheKey"}},
	"speaker/membership/guard/guard.go":   {targets: []string{"FuzzHolderOfTheKey"}},
	"speaker/membership/membership.go":    {targets: []string{"FuzzStranger"}},
	"speaker/membership/metadata.go":      {targets: []string{"FuzzMetadata"}},
	"speaker/layer2/wire/arp.go":          {none: "FuzzARP in speaker/layer2 reads it"},
	"speaker/layer2/wire/ndp.go":          {none: "FuzzNDP in speaker/layer2 reads it"},
	"speaker/nodefacts/neighbourprobe.go": {none: "the libraries read it that FuzzARP and FuzzAdvertisement send to"},
	"inspect/diagnosis/ask.go":            {none: "FuzzFacts in pkg/diagnose reads it"},
	"speaker/membership/guard/sockets.go": {none: "addresses that memberlist has from messages that passed"},
	// What the kernel writes.
	"speaker/nodefacts/kernel.go":     {targets: []string{"FuzzParseListeners", "FuzzParseRoutes"}},
	"speaker/direct/kept.go":          {targets: []string{"FuzzParseFlow"}},
	"speaker/direct/kernel.go":        {targets: []string{"FuzzParseNames"}},
	"speaker/direct/rules.go":         {targets: []string{"FuzzParseNames"}},
	"speaker/limit/table.go":          {none: "a number of the kernel's"},
	"speaker/nft/nft.go":              {targets: []string{"FuzzChainOf"}},
	"controller/dhcp/socket.go":       {none: "the interface's own addresses"},
	"speaker/bfd/socket.go":           {none: "the kernel's control messages, of fixed lengths"},
	"pkg/apiclient/restored.go":       {none: "the API server's own answers, which are trusted"},
	"speaker/detector/receive.go":     {none: "the kernel's socket addresses and timestamps, of fixed lengths"},
	"speaker/direct/direct.go":        {none: "one number of the kernel's"},
	"speaker/direct/shortcutrules.go": {none: "keys that this process has made"},
	"speaker/direct/simulated.go":     {none: "keys that this process has made"},
	// No others.
	"cmd/lodestone/internal/cli/migrate.go": {none: "a document that the migration has just written"},
	"cmd/speaker/flags.go":                  {none: "the operator's own flags"},
	"controller/admission/certificate.go":   {none: "the Secret that controllers alone write, by the standard library"},
	"inspect/diagnosis/implementations.go":  {none: "one address, and what is none counts as another one's"},
	"ipam/address.go":                       {none: "arithmetic with addresses"},
	"speaker/bgp/rib.go":                    {none: "what this process has written"},
	"speaker/rendezvous/rendezvous.go":      {none: "arithmetic with addresses"},
	"speaker/layer2/segment/contest.go":     {none: "the key"},
	"speaker/layer2/segment/segment.go":     {none: "the key"},
	"speaker/layer2/wire/wire.go":           {none: "the node's own hardware address"},
	"speaker/snapshot/snapshot.go":          {none: "one address, and what is none is left out"},
}

// decodes are the calls by which a file shows that it reads bytes or texts. A parser that needs none of them is in the
// table all the same.
var decodes = regexp.MustCompile(`\b(json\.(Unmarshal|NewDecoder)|kjson\.Unmarshal|yaml\.(Unmarshal|NewDecoder)|netip\.Parse|` +
	`strconv\.(Parse|Atoi)|time\.Parse|bufio\.NewScanner|(BigEndian|NativeEndian|LittleEndian)\.Uint|binary\.ReadUvarint|` +
	`hex\.Decode|base64\.|NewAttributeDecoder|UnmarshalAttributes|UnmarshalBinary|DecodeFromBytes|ReadFrom|pem\.Decode|x509\.Parse|` +
	`url\.Parse|fmt\.Ss?can)`)

// TestParsersAreFuzzed checks that each file that parses foreign bytes has a fuzz target, or a reason in the table why not.
func TestParsersAreFuzzed(t *testing.T) {
	t.Parallel()
	exists, reads := map[string]bool{}, map[string]bool{}
	for _, s := range parseFiles(t) {
		if layerOf(s.folder()) < 0 || strings.HasPrefix(s.path, "pkg/test") || strings.Contains(s.path, "/example/") {
			continue
		}
		if !s.isTest() {
			reads[s.path] = decodes.Match(s.code())
			continue
		}
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && strings.HasPrefix(f.Name.Name, "Fuzz") {
				exists[s.folder()+" "+f.Name.Name] = true
			}
		}
	}
	used := map[string]bool{}
	for path, entry := range parsed {
		if _, ok := reads[path]; !ok || len(entry.targets) > 0 == (entry.none != "") {
			t.Errorf("%s: no such file, or both targets and a reason not to have any", path)
		}
		for _, name := range entry.targets {
			name = filepath.Dir(path) + " " + name
			if used[name] = true; !exists[name] {
				t.Errorf("%s: there is no target %s", path, name)
			}
		}
	}
	for path, decodes := range reads {
		if _, ok := parsed[path]; decodes && !ok {
			t.Errorf("%s reads bytes or texts: write a fuzz target, and name it in the table of this test, or the reason why it has none", path)
		}
	}
	for name := range exists {
		if !used[name] {
			t.Errorf("%s is named by no file of the table", name)
		}
	}
}

// code returns the file without its comments.
func (s source) code() []byte {
	text := bytes.Clone(s.text)
	for _, group := range s.file.Comments {
		from, to := s.fset.Position(group.Pos()).Offset, s.fset.Position(group.End()).Offset
		copy(text[from:to], bytes.Repeat([]byte{' '}, to-from))
	}
	return text
}
