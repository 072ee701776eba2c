package release

import (
	"bytes"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/uuid"
)

// writeSBOMs writes a bill of materials for each binary. An image is one binary and nothing
// else, so the image's bill is that of the binary for the same platform.
func (m *making) writeSBOMs(all []binary) error {
	for _, b := range all {
		text, err := sbom(b, m.source)
		if err != nil {
			return fmt.Errorf("bill of materials of %s for %s: %w", b.name, b.Platform, err)
		}
		if err := m.write(b.file(m.Version, ".cdx.json"), text); err != nil {
			return err
		}
	}
	return nil
}

// sbom lists what the Go tool recorded in the binary, which are the modules that are linked:
// fewer than go.mod has.
func sbom(b binary, s Source) ([]byte, error) {
	content, err := os.ReadFile(b.path)
	if err != nil {
		return nil, err
	}
	digest := hexSHA256(content)
	own := cdx.Component{
		BOMRef: "program", Type: cdx.ComponentTypeApplication, Name: b.name, Version: s.Version, Description: b.description,
		PackageURL: purl(module, s.Version) + "#" + strings.TrimPrefix(b.pkg, "./"),
		Licenses:   &cdx.Licenses{{License: &cdx.License{ID: license}}},
		Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: digest}},
		Properties: &[]cdx.Property{
			{Name: "lodestone:platform", Value: b.Platform.String()},
			{Name: "lodestone:commit", Value: s.Commit},
		},
	}
	// Weaknesses of Go's own packages are known by the version of Go.
	golang := strings.TrimPrefix(b.info.GoVersion, "go")
	components := []cdx.Component{{
		BOMRef: purl("stdlib", golang), Type: cdx.ComponentTypeLibrary, Name: "stdlib", Version: golang, PackageURL: purl("stdlib", golang),
	}}
	for _, dependency := range b.info.Deps {
		components = append(components, component(dependency))
	}
	bom := cdx.NewBOM()
	// Nothing in it is random: the same binary has the same bill.
	bom.SerialNumber = uuid.NewSHA1(uuid.NameSpaceURL, []byte(project+"#"+b.file(s.Version, "")+"@"+digest)).URN()
	bom.Metadata = &cdx.Metadata{
		Timestamp: s.Date.Format(time.RFC3339),
		Component: &own,
		Tools: &cdx.ToolsChoice{Components: &[]cdx.Component{
			{Type: cdx.ComponentTypeApplication, Name: module + "/hack/release", Version: s.Version},
		}},
	}
	bom.Components = &components
	var buffer bytes.Buffer
	encoder := cdx.NewBOMEncoder(&buffer, cdx.BOMFileFormatJSON).SetPretty(true)
	// 1.6 is what scanners read.
	if err := encoder.EncodeVersion(bom, cdx.SpecVersion1_6); err != nil {
		return nil, err
	}
	return buffer.Bytes(), nil
}

// component is a module as it was linked, which may be another one than the one that go.mod asks
// for. Its checksum is of Go's own kind, over a list of files, and so no hash of a file.
func component(m *debug.Module) cdx.Component {
	if m.Replace != nil {
		m = m.Replace
	}
	c := cdx.Component{
		BOMRef: purl(m.Path, m.Version), Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, PackageURL: purl(m.Path, m.Version),
	}
	if m.Sum != "" {
		c.Properties = &[]cdx.Property{{Name: "lodestone:go.sum", Value: m.Sum}}
	}
	return c
}

// purl is the package URL of a Go module.
func purl(path, version string) string {
	return "pkg:golang/" + path + "@" + strings.ReplaceAll(version, "+", "%2B")
}
