package release

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-containerregistry/pkg/v1/static"
	"go.yaml.in/yaml/v3"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	jsonyaml "sigs.k8s.io/yaml"
)

const (
	chartFolder = "deploy/chart"
	chartLayout = "chart"
	// chartsPlace is below the registry: the command's image has the name of the chart.
	chartsPlace = "charts"
	valuesName  = "values.yaml"
	// hubFile shows Artifact Hub who owns the repository of the chart.
	hubFile   = "deploy/artifacthub-repo.yml"
	hubLayout = "artifacthub"
	hubTag    = "artifacthub.io"
)

// The media types of Helm, and of Artifact Hub.
const (
	helmConfigType = "application/vnd.cncf.helm.config.v1+json"
	helmChartType  = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
	hubConfigType  = "application/vnd.cncf.artifacthub.config.v1+yaml"
	hubLayerType   = "application/vnd.cncf.artifacthub.repository-metadata.layer.v1.yaml"
)

// values are the chart's as text, and those of them that name images.
type values struct {
	text []byte
	chartValues
}

// chartValues are those values of the chart that name images.
type chartValues struct {
	Image struct {
		Registry string `yaml:"registry"`
	} `yaml:"image"`
	Controller, Speaker, Tests imageValues
}

type imageValues struct {
	Repository string `yaml:"repository"`
	Digest     string `yaml:"digest"`
}

// of returns the values of a component's image, by the component's key.
func (v chartValues) of(component string) imageValues {
	return map[string]imageValues{"controller": v.Controller, "speaker": v.Speaker, "tests": v.Tests}[component]
}

// readValues reads the chart's values in a checkout.
func readValues(root string) (v values, err error) {
	if v.text, err = os.ReadFile(filepath.Join(root, chartFolder, valuesName)); err != nil {
		return v, fmt.Errorf("read the chart's values: %w", err)
	}
	if err := yaml.Unmarshal(v.text, &v.chartValues); err != nil {
		return v, fmt.Errorf("%s/%s: %w", chartFolder, valuesName, err)
	}
	if v.Image.Registry == "" {
		return v, fmt.Errorf("%s/%s: image.registry is empty, and so nobody knows where the images will be", chartFolder, valuesName)
	}
	return v, nil
}

// writeChart writes the chart as a file and for a registry.
func (m *making) writeChart() error {
	packed, about, err := m.packChart()
	if err != nil {
		return err
	}
	if err := m.write(about.Name+"-"+about.Version+".tgz", packed); err != nil {
		return err
	}
	config, err := json.Marshal(about)
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	img, err := artifact{
		config: config, configType: helmConfigType, layer: static.NewLayer(packed, helmChartType),
		about: m.source.annotations(about.Name, about.Description, about.Version),
	}.image()
	if err != nil {
		return fmt.Errorf("chart: %w", err)
	}
	place := m.values.Image.Registry + "/" + chartsPlace + "/" + about.Name
	if err := m.publish(published{layout: chartLayout, repository: place, tag: about.Version}, entry{image: img}); err != nil {
		return err
	}
	return m.writeHub(place)
}

// writeHub writes what Artifact Hub reads beside the charts of a registry, under a tag of its own.
func (m *making) writeHub(place string) error {
	text, err := os.ReadFile(filepath.Join(m.Root, hubFile))
	if err != nil {
		return fmt.Errorf("read the metadata for Artifact Hub: %w", err)
	}
	img, err := artifact{
		config: []byte("{}"), configType: hubConfigType, layer: static.NewLayer(text, hubLayerType),
		about: map[string]string{"org.opencontainers.image.title": filepath.Base(hubFile)},
	}.image()
	if err != nil {
		return fmt.Errorf("%s: %w", hubFile, err)
	}
	return m.publish(published{layout: hubLayout, repository: place, tag: hubTag}, entry{image: img})
}

// packChart returns the chart's archive, with the version and the digests of the images in it.
func (m *making) packChart() ([]byte, *chart.Metadata, error) {
	// Helm's own loader leaves out what .helmignore names.
	c, err := loader.LoadDir(filepath.Join(m.Root, chartFolder))
	if err != nil {
		return nil, nil, fmt.Errorf("load the chart %s: %w", chartFolder, err)
	}
	values, err := m.pinnedValues()
	if err != nil {
		return nil, nil, err
	}
	about := c.Metadata
	about.Version, about.AppVersion = m.source.chartVersion(), m.Version
	if about.Annotations, err = m.hubAnnotations(about.Annotations); err != nil {
		return nil, nil, err
	}
	head, err := jsonyaml.Marshal(about)
	if err != nil {
		return nil, nil, fmt.Errorf("write Chart.yaml: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(m.Root, licenseFile))
	if err != nil {
		return nil, nil, fmt.Errorf("read the license: %w", err)
	}
	files := []file{{about.Name + "/" + licenseFile, 0o644, text}}
	for _, f := range c.Raw {
		content := f.Data
		switch f.Name {
		case "Chart.yaml":
			content = head
		case valuesName:
			content = values
		}
		files = append(files, file{about.Name + "/" + f.Name, 0o644, content})
	}
	packed, err := tarGz(files, m.source.Date)
	if err != nil {
		return nil, nil, fmt.Errorf("pack the chart: %w", err)
	}
	if err := m.checkChart(packed, files); err != nil {
		return nil, nil, fmt.Errorf("the chart that was packed: %w", err)
	}
	return packed, about, nil
}

// checkChart loads the archive by Helm's code, and checks that it has all that was packed.
func (m *making) checkChart(packed []byte, files []file) error {
	c, err := loader.LoadArchive(bytes.NewReader(packed))
	if err != nil {
		return fmt.Errorf("not loaded by Helm: %w", err)
	}
	if err := c.Validate(); err != nil {
		return fmt.Errorf("refused by Helm: %w", err)
	}
	if c.Metadata.Version != m.source.chartVersion() || c.Metadata.AppVersion != m.Version {
		return fmt.Errorf("it has version %s and appVersion %s", c.Metadata.Version, c.Metadata.AppVersion)
	}
	if len(c.Raw) != len(files) {
		return fmt.Errorf("only %d of its %d files are seen by Helm", len(c.Raw), len(files))
	}
	var values chartValues
	for _, f := range c.Raw {
		if f.Name == valuesName {
			if err := yaml.Unmarshal(f.Data, &values); err != nil {
				return fmt.Errorf("%s: %w", valuesName, err)
			}
		}
	}
	for _, p := range programs() {
		img, err := m.imageOf(p)
		if err != nil {
			return err
		}
		if got := values.of(p.component); got.Digest != img.digest || got.Repository != p.name {
			return fmt.Errorf("%s: %s.repository is %q with digest %q, and has to be %s with %s",
				valuesName, p.component, got.Repository, got.Digest, p.name, img.digest)
		}
	}
	return nil
}

// pinnedValues are the chart's values with the digests of this release's images.
func (m *making) pinnedValues() ([]byte, error) {
	digests := map[string]string{}
	for _, p := range programs() {
		img, err := m.imageOf(p)
		if err != nil {
			return nil, err
		}
		digests[p.component] = img.digest
	}
	pinned, err := setDigests(m.values.text, digests)
	if err != nil {
		return nil, fmt.Errorf("%s/%s: %w", chartFolder, valuesName, err)
	}
	return pinned, nil
}

// imageOf returns a program's image.
func (m *making) imageOf(p program) (published, error) {
	i := slices.IndexFunc(m.images, func(i published) bool { return i.layout == filepath.Join(imagesFolder, p.name) })
	if i < 0 {
		return published{}, fmt.Errorf("there is no image of %s", p.name)
	}
	return m.images[i], nil
}

// setDigests fills in the empty value "digest" of each component. The text around it stays as
// it is: the comments are what people read of the values.
func setDigests(text []byte, digests map[string]string) ([]byte, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, err
	}
	if len(document.Content) != 1 {
		return nil, errors.New("it is empty")
	}
	lines := strings.Split(string(text), "\n")
	for component, digest := range digests {
		node := lookup(lookup(document.Content[0], component), "digest")
		if node == nil || node.Kind != yaml.ScalarNode {
			return nil, fmt.Errorf("there is no value %s.digest to fill in", component)
		}
		line := lines[node.Line-1]
		before, after := line[:node.Column-1], line[node.Column-1:]
		rest, empty := strings.CutPrefix(after, `""`)
		if !empty {
			return nil, fmt.Errorf("line %d: %s.digest is %q, and is filled in by a release only if it is \"\"",
				node.Line, component, node.Value)
		}
		lines[node.Line-1] = before + strconv.Quote(digest) + rest
	}
	return []byte(strings.Join(lines, "\n")), nil
}

// lookup returns the value of a key of a mapping, nil if there is none.
func lookup(mapping *yaml.Node, key string) *yaml.Node {
	if mapping == nil || mapping.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == key {
			return mapping.Content[i+1]
		}
	}
	return nil
}

// hubAnnotations adds to the chart's annotations what Artifact Hub shows of this release.
func (m *making) hubAnnotations(have map[string]string) (map[string]string, error) {
	type hubImage struct {
		Name      string   `json:"name"`
		Image     string   `json:"image"`
		Platforms []string `json:"platforms"`
	}
	var images []hubImage
	for _, p := range programs() {
		place, err := m.imageOf(p)
		if err != nil {
			return nil, err
		}
		img := hubImage{Name: p.name, Image: place.String()}
		for _, platform := range p.platforms {
			if platform.OS == "linux" && m.wants(platform) {
				img.Platforms = append(img.Platforms, platform.String())
			}
		}
		images = append(images, img)
	}
	text, err := jsonyaml.Marshal(images)
	if err != nil {
		return nil, fmt.Errorf("annotation of the images: %w", err)
	}
	all := map[string]string{
		"artifacthub.io/images":     string(text),
		"artifacthub.io/prerelease": strconv.FormatBool(m.source.prerelease()),
	}
	maps.Copy(all, have)
	return all, nil
}
