package release

import (
	"fmt"

	"sigs.k8s.io/yaml"
)

// archived is an archive of the command.
type archived struct {
	Platform
	file, sha256 string
	// plugin is the file in it that kubectl runs.
	plugin string
}

// krewPlugin is a manifest of krew, with the fields that ours has.
type krewPlugin struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   map[string]string `json:"metadata"`
	Spec       krewSpec          `json:"spec"`
}

type krewSpec struct {
	Version          string         `json:"version"`
	Homepage         string         `json:"homepage"`
	ShortDescription string         `json:"shortDescription"`
	Description      string         `json:"description"`
	Platforms        []krewPlatform `json:"platforms"`
}

type krewPlatform struct {
	Selector krewSelector `json:"selector"`
	URI      string       `json:"uri"`
	SHA256   string       `json:"sha256"`
	Files    []krewFile   `json:"files"`
	Bin      string       `json:"bin"`
}

type krewSelector struct {
	MatchLabels map[string]string `json:"matchLabels"`
}

type krewFile struct {
	From string `json:"from"`
	To   string `json:"to"`
}

const krewName = "lodestone-krew.yaml"

// writeKrew writes the manifest. It names the archives where a release on the project's page
// has them.
func (m *making) writeKrew(archives []archived) error {
	plugin := krewPlugin{
		APIVersion: "krew.googlecontainertools.github.com/v1alpha2", Kind: "Plugin",
		Metadata: map[string]string{"name": "lodestone"},
		Spec: krewSpec{
			Version: m.Version, Homepage: project,
			// krew's index takes at most 50 characters.
			ShortDescription: "See what the Lodestone load balancer does",
			Description: "Shows which Service has which address, and why, or why none; which node announces\n" +
				"it; what an edit of the configuration or the loss of a node would change; and checks\n" +
				"the cluster and every node for what keeps Services from working.\n",
		},
	}
	for _, a := range archives {
		plugin.Spec.Platforms = append(plugin.Spec.Platforms, krewPlatform{
			Selector: krewSelector{map[string]string{"os": a.OS, "arch": a.Arch}},
			URI:      project + "/releases/download/" + m.Version + "/" + a.file,
			SHA256:   a.sha256,
			Files:    []krewFile{{a.plugin, "."}, {licenseFile, "."}},
			Bin:      a.plugin,
		})
	}
	text, err := yaml.Marshal(plugin)
	if err != nil {
		return fmt.Errorf("krew manifest: %w", err)
	}
	return m.write(krewName, text)
}
