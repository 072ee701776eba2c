package migrate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"reflect"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

const (
	// MaxSize is the most that is read of one input, in bytes.
	MaxSize = 16 << 20
	// maxObjects is how many objects an input may have.
	maxObjects = 100_000
	// maxCause is how much of a parser's error a message repeats.
	maxCause = 256
)

// Object is one Kubernetes object as it was found.
type Object struct {
	// From is where: "file:line", or the cluster.
	From string
	Kind string
	// Group is that of its API, without the version. Empty: the core.
	Group           string
	Namespace, Name string
	// JSON is all of it.
	JSON []byte
}

// String is the object as messages name it.
func (o *Object) String() string {
	name := o.Name
	if o.Namespace != "" {
		name = o.Namespace + "/" + name
	}
	return strings.Trim(o.Kind+" "+name, " ")
}

// header is what all objects have.
type header struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"metadata"`
	Items []runtime.RawExtension `json:"items"`
}

// Read returns the objects in a text of YAML documents or JSON, lists taken
// apart. Errors begin with the name of the file.
func Read(name string, text io.Reader) ([]Object, error) {
	raw, err := io.ReadAll(io.LimitReader(text, MaxSize+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read %s: %w", name, err)
	case len(raw) > MaxSize:
		return nil, Errors{{From: name, Message: fmt.Sprintf("is larger than %d bytes (16 MiB): give the objects of the "+
			"load balancer alone", MaxSize)}}
	}
	var objects []Object
	for line, doc := range documents(raw) {
		from := fmt.Sprintf("%s:%d", name, line)
		body, err := yaml.YAMLToJSONStrict(doc)
		if err != nil {
			return nil, Errors{{From: from, Message: fmt.Sprintf("the document that begins here is not YAML: %s",
				cut(strings.TrimPrefix(err.Error(), "yaml: ")))}}
		}
		if string(body) == "null" {
			continue
		}
		if objects, err = appendObject(objects, from, body, 0); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

var separator = regexp.MustCompile(`(?m)^---(?:[ \t]|\r?$)`)

// documents yields the documents of a text and the lines in which they begin.
func documents(text []byte) iter.Seq2[int, []byte] {
	return func(yield func(int, []byte) bool) {
		line, start := 1, 0
		for _, at := range append(separator.FindAllIndex(text, -1), []int{len(text), len(text)}) {
			doc := text[start:at[0]]
			blank := len(doc) - len(bytes.TrimLeft(doc, "\r\n"))
			if len(bytes.TrimSpace(doc)) > 0 && !yield(line+bytes.Count(doc[:blank], []byte("\n")), doc) {
				return
			}
			line += bytes.Count(text[start:at[1]], []byte("\n"))
			start = at[1]
		}
	}
}

// appendObject appends an object, or those of a list.
func appendObject(objects []Object, from string, body []byte, depth int) ([]Object, error) {
	var h header
	if err := kjson.UnmarshalCaseSensitivePreserveInts(body, &h); err != nil {
		return nil, Errors{{From: from, Message: "is not a Kubernetes object: " + cut(err.Error())}}
	}
	o := Object{From: from, Kind: h.Kind, Namespace: h.Metadata.Namespace, Name: h.Metadata.Name, JSON: body}
	if group, _, ok := strings.Cut(h.APIVersion, "/"); ok {
		o.Group = group
	}
	switch {
	case h.Kind == "" || h.APIVersion == "":
		return nil, Errors{{From: from, Object: o.String(), Message: "is not a Kubernetes object: it has no kind or no apiVersion"}}
	case strings.HasSuffix(h.Kind, "List") && o.Name == "":
		return appendItems(objects, from, h, depth)
	case len(objects) == maxObjects:
		return nil, Errors{{From: from, Message: fmt.Sprintf("has more than %d objects: give those of the load balancer alone",
			maxObjects)}}
	}
	return append(objects, o), nil
}

// appendItems appends what is in a list. A list in a list is nothing that any
// program writes.
func appendItems(objects []Object, from string, list header, depth int) (_ []Object, err error) {
	if depth > 0 {
		return nil, Errors{{From: from, Object: list.Kind, Message: "is a list in a list: write its items out"}}
	}
	for i, item := range list.Items {
		body := item.Raw
		var h header
		if kjson.UnmarshalCaseSensitivePreserveInts(body, &h) == nil && h.Kind == "" && list.Kind != "List" {
			if body, err = withKind(body, list); err != nil {
				return nil, err
			}
		}
		if objects, err = appendObject(objects, fmt.Sprintf("%s: items[%d]", from, i), body, depth+1); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

// withKind gives an item of a list of one kind the kind that it leaves out.
func withKind(body []byte, list header) ([]byte, error) {
	var item map[string]any
	if err := kjson.UnmarshalCaseSensitivePreserveInts(body, &item); err != nil {
		return nil, err
	}
	item["apiVersion"], item["kind"] = list.APIVersion, strings.TrimSuffix(list.Kind, "List")
	return json.Marshal(item)
}

// into decodes an object. Unknown keys become notes, because a later version may have them.
func (m *migration) into(o *Object, v any) bool {
	unknown, err := kjson.UnmarshalStrict(o.JSON, v)
	return m.decoded(o, "", unknown, err)
}

// decoded reports what went wrong with decoding.
func (m *migration) decoded(o *Object, field string, unknown []error, err error) bool {
	if err != nil {
		at, message := whereOf(err)
		m.errorf(o, strings.Trim(field+"."+at, "."), "%s", message)
		return false
	}
	for _, u := range unknown {
		var strict kjson.FieldError
		if !errors.As(u, &strict) {
			continue
		}
		if strings.Contains(u.Error(), "duplicate") {
			m.errorf(o, strict.FieldPath(), "is set twice")
		} else {
			m.decidef(o, strings.Trim(field+"."+strict.FieldPath(), "."),
				"is not known here: look up what it does, and whether Lodestone has it")
		}
	}
	return true
}

// whereOf returns the field that an error is about, and what is wrong with it.
func whereOf(err error) (field, message string) {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return "", cut(strings.TrimPrefix(err.Error(), "json: "))
	}
	return wrong.Field, "must be " + kindOf(wrong.Type) + ", not " + cut(wrong.Value)
}

// kindOf names what a field holds.
func kindOf(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Pointer:
		return kindOf(t.Elem())
	case reflect.String:
		return "text"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int32:
		return "a whole number"
	case reflect.Uint16, reflect.Uint32:
		return fmt.Sprintf("a whole number from 0 to %d", uint64(1)<<t.Bits()-1)
	case reflect.Slice:
		return "a list"
	default:
		return "a map"
	}
}

func cut(text string) string {
	if len(text) > maxCause {
		text = strings.ToValidUTF8(text[:maxCause], "") + "..."
	}
	return strings.ReplaceAll(text, "\n", " ")
}
