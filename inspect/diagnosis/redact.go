package diagnosis

import (
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// redacted stands where a secret was.
const redacted = "REDACTED"

// secretName ends a name of something secret. A reference to a Secret
// (passwordSecretRef) is none.
const secretName = `(?:password|passwd|secret|token|credentials?|(?:membership|private|secret|api|access)[_ -]?key|authorization)`

// secrets are what secrets look like in any text, and what remains of them.
var secrets = []struct {
	pattern *regexp.Regexp
	remains string
}{
	{regexp.MustCompile(`-----BEGIN [A-Z ]*PRIVATE KEY-----[^"-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?`), redacted},
	{regexp.MustCompile(`eyJ[\w-]{4,}\.[\w-]{4,}\.[\w-]*`), redacted}, // RFC 7519
	{regexp.MustCompile(`(?i)(bearer|basic)\s+[\w.~+/=-]{8,}`), "$1 " + redacted},
	{regexp.MustCompile(`(://[^/\s:@"]+:)[^/\s@"]+@`), "${1}" + redacted + "@"},
	// In the forms name="value", name='value', "name": \"value\" within another
	// text, "name": value of JSON, which stays JSON, and name=value.
	{regexp.MustCompile(`(?i)(` + secretName + `(?:\\?["'])?\s*[:=]\s*)"(?:[^"\\]|\\.)*"`), `${1}"` + redacted + `"`},
	{regexp.MustCompile(`(?i)(` + secretName + `(?:\\?["'])?\s*[:=]\s*)'(?:[^'"\\]|\\.)*'`), `${1}'` + redacted + `'`},
	{regexp.MustCompile(`(?i)(` + secretName + `(?:\\?["'])?\s*[:=]\s*)\\"(?:[^"\\]|\\[^"])*\\"`), `${1}\"` + redacted + `\"`},
	{regexp.MustCompile(`(?i)(` + secretName + `"\s*:\s*)[^\s,;{}\[\]"'\\]+`), `${1}"` + redacted + `"`},
	{regexp.MustCompile(`(?i)(` + secretName + `(?:\\"|')?\s*[:=][ \t]*)[^\s,;{}\[\]"\\][^\s,;}\]"\\]*`), "${1}" + redacted},
}

// Redact takes out of a text what looks like a secret.
func Redact(text []byte) []byte {
	for _, s := range secrets {
		text = s.pattern.ReplaceAll(text, []byte(s.remains))
	}
	return text
}

var secretKey = regexp.MustCompile(`(?i)` + secretName + `$`)

// redactYAML takes secrets out of a document: whole values, however they are
// written. It fails if it cannot find out what is a value.
func redactYAML(text []byte) ([]byte, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, err //nolint:wrapcheck // the caller does
	}
	r := redaction{}
	r.hide(&document)
	out, err := yaml.Marshal(&document)
	if err != nil {
		return nil, err //nolint:wrapcheck // the caller does
	}
	return Redact(out), nil
}

// redaction is which values of a document are taken out.
type redaction map[*yaml.Node]bool

// hide takes secrets out of a part of the document.
func (r redaction) hide(n *yaml.Node) {
	n.HeadComment, n.LineComment, n.FootComment = string(Redact([]byte(n.HeadComment))), string(Redact([]byte(n.LineComment))),
		string(Redact([]byte(n.FootComment)))
	for i, child := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 1 {
			if key := n.Content[i-1].Value; secretKey.MatchString(key) || strings.HasSuffix(key, "SecretRef") && child.Kind != yaml.MappingNode {
				r.blank(child) // a reference is a map: anything else may be the secret itself
			}
		}
		r.hide(child)
	}
}

// blank takes out whatever a value consists of. What an alias means stands somewhere else, and is taken out there. What
// others may refer to stays, without its text.
func (r redaction) blank(n *yaml.Node) {
	if r[n] {
		return
	}
	r[n] = true
	switch n.Kind {
	case yaml.AliasNode:
		r.blank(n.Alias)
	case yaml.ScalarNode:
		n.Value, n.Tag, n.Style = redacted, "", 0
	}
	for _, child := range n.Content {
		r.blank(child)
	}
}
