package release

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
)

// The types of statement and predicate: in-toto's and SLSA's. The build type stands for what the
// parameters mean, which the section of decisions.md explains.
const (
	statementType  = "https://in-toto.io/Statement/v1"
	provenanceType = "https://slsa.dev/provenance/v1"
	buildType      = project + "/blob/main/docs/explanation/decisions.md#a-release-is-made-from-a-commit-by-one-command"
	builderID      = project + "/tree/main/hack/release"
	payloadType    = "application/vnd.in-toto+json"
)

const (
	provenanceName = "provenance.json"
	envelopeName   = "provenance.intoto.jsonl"
)

// statement is what in-toto calls by that name: a predicate about subjects.
type statement struct {
	Type          string     `json:"_type"`
	Subject       []resource `json:"subject"`
	PredicateType string     `json:"predicateType"`
	Predicate     provenance `json:"predicate"`
}

// resource is a file, an image or a commit.
type resource struct {
	Name   string            `json:"name,omitempty"`
	URI    string            `json:"uri,omitempty"`
	Digest map[string]string `json:"digest,omitempty"`
}

// provenance is SLSA's predicate. It has no times and no name of the run: nobody but the one
// who runs it vouches for those, and they would differ each time.
type provenance struct {
	BuildDefinition buildDefinition `json:"buildDefinition"`
	RunDetails      runDetails      `json:"runDetails"`
}

type buildDefinition struct {
	BuildType            string            `json:"buildType"`
	ExternalParameters   map[string]string `json:"externalParameters"`
	InternalParameters   map[string]string `json:"internalParameters"`
	ResolvedDependencies []resource        `json:"resolvedDependencies"`
}

type runDetails struct {
	Builder builder `json:"builder"`
}

type builder struct {
	ID      string            `json:"id"`
	Version map[string]string `json:"version"`
}

// writeProvenance writes from which commit every file and every image of the release was made,
// and how. Signed it is an envelope, unsigned the bare statement.
func (m *making) writeProvenance(all []binary) error {
	text, err := m.statement(all)
	if err != nil {
		return fmt.Errorf("provenance: %w", err)
	}
	if m.Key == nil {
		return m.write(provenanceName, append(text, '\n'))
	}
	signed, err := m.Key.envelope(payloadType, text)
	if err != nil {
		return fmt.Errorf("sign the provenance: %w", err)
	}
	return m.write(envelopeName, append(signed, '\n'))
}

// command is the one that makes the same release.
func (m *making) command() string {
	command := "make release VERSION=" + m.Version
	if len(m.Platforms) > 0 {
		command += " PLATFORMS=" + strings.Join(m.Platforms, ",")
	}
	return command
}

func (m *making) statement(all []binary) ([]byte, error) {
	var subjects []resource
	for _, f := range m.sortedFiles() {
		subjects = append(subjects, resource{Name: f.name, Digest: map[string]string{"sha256": f.sha256}})
	}
	for _, p := range m.images {
		algorithm, value, _ := strings.Cut(p.digest, ":")
		subjects = append(subjects, resource{Name: p.repository + ":" + p.tag, Digest: map[string]string{algorithm: value}})
	}
	golang := ""
	for _, b := range all {
		golang = b.info.GoVersion
	}
	return json.Marshal(statement{
		Type: statementType, Subject: subjects, PredicateType: provenanceType,
		Predicate: provenance{
			BuildDefinition: buildDefinition{
				BuildType:          buildType,
				ExternalParameters: map[string]string{"source": "git+" + project, "version": m.Version},
				InternalParameters: map[string]string{"command": m.command(), "go": golang},
				ResolvedDependencies: []resource{{
					URI: "git+" + project + "@" + m.source.Commit, Digest: map[string]string{"gitCommit": m.source.Commit},
				}},
			},
			RunDetails: runDetails{Builder: builder{
				ID: builderID, Version: map[string]string{"commit": m.source.Commit, "go": runtime.Version()},
			}},
		},
	})
}
