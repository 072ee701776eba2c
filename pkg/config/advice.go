package config

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxQuoted is how much of a value, in characters, an error repeats.
const maxQuoted = 64

// quote quotes what the user wrote, the start of it if it is long.
func quote(s string) string { return strconv.Quote(clip(s)) }

func clip(s string) string {
	if utf8.RuneCountInString(s) <= maxQuoted {
		return s
	}
	return string([]rune(s)[:maxQuoted]) + "..."
}

const layer2Only = "this version announces by layer 2 only"

// elsewhere are keys that people look for and that are not there.
var elsewhere = map[string]string{
	"bgp":   layer2Only,
	"peers": layer2Only,
	"bfd":   layer2Only,
	"<<":    "merge keys are not supported: write the keys out",
}

// advice says what an unknown key was probably meant to be.
func advice(path, unknown string, keys []key) string {
	if hint, ok := elsewhere[unknown]; ok {
		return hint
	}
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.name
	}
	if best := nearest(unknown, names); best != "" {
		return "did you mean " + strconv.Quote(best) + "?"
	}
	if strings.HasSuffix(path, "nodeSelector") {
		return "labels go under matchLabels"
	}
	if home := homeOf(unknown); home != "" {
		return "it belongs in " + home
	}
	return "the keys here are " + strings.Join(names, ", ")
}

// homeOf returns the place of the key when there is exactly one.
func homeOf(name string) string {
	var homes []string
	for _, path := range knownKeys() {
		if home, ok := strings.CutSuffix(path, "."+name); ok {
			homes = append(homes, home)
		}
	}
	if len(homes) != 1 {
		return ""
	}
	return homes[0]
}

// nearest returns the name that is at most a third of its letters away.
func nearest(unknown string, names []string) string {
	if len(unknown) > maxQuoted {
		return ""
	}
	best, at := "", 0
	for _, name := range names {
		if n := distance(strings.ToLower(unknown), strings.ToLower(name)); n <= (len(name)+2)/3 && (best == "" || n < at) {
			best, at = name, n
		}
	}
	return best
}

// distance is the Levenshtein distance of two short strings.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			substitute := diagonal
			if a[i] != b[j] {
				substitute++
			}
			diagonal = row[j+1]
			row[j+1] = min(substitute, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// join lists accepted values for a message.
func join[T ~string](values []T) string {
	var b strings.Builder
	for i, v := range values {
		if i > 0 {
			b.WriteString(" or ")
		}
		b.WriteString(string(v))
	}
	return b.String()
}
