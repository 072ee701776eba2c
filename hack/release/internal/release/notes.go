package release

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/mod/semver"
)

const changelogFile = "CHANGELOG.md"

// section is a version's part of the changelog.
type section struct {
	// version has a leading v; it is empty for what is not released.
	version, text string
}

func (m *making) writeNotes() error {
	changelog, err := os.ReadFile(filepath.Join(m.Root, changelogFile))
	if err != nil {
		return fmt.Errorf("read the changelog: %w", err)
	}
	text, err := notes(string(changelog), m.Version)
	if err != nil {
		return fmt.Errorf("%s: %w", changelogFile, err)
	}
	return m.write("release-notes.md", []byte(text))
}

// notes returns what the changelog has of a version: its own section, or what is not
// released yet if the version is newer than all that are.
func notes(changelog, version string) (string, error) {
	newest, unreleased := "", ""
	for _, s := range sections(changelog) {
		if s.version == version {
			return format(version, s.text)
		}
		if s.version == "" {
			unreleased = s.text
		} else if newest == "" || semver.Compare(s.version, newest) > 0 {
			newest = s.version
		}
	}
	if newest != "" && semver.Compare(version, newest) < 0 {
		return "", fmt.Errorf("there is no section for %s, and it is older than %s, so that what is unreleased is not its own: "+
			"write a section \"## %s\"", version, newest, version)
	}
	return format(version, unreleased)
}

func sections(changelog string) (found []section) {
	heading := regexp.MustCompile(`(?m)^## +(.+)$`)
	name := regexp.MustCompile(`^\[?v?(\d+\.\d+\.\d+(?:-[0-9A-Za-z.-]+)?)\]?(?:\s|$)`)
	places := heading.FindAllStringSubmatchIndex(changelog, -1)
	for i, at := range places {
		end := len(changelog)
		if i+1 < len(places) {
			end = places[i+1][0]
		}
		title, text := changelog[at[2]:at[3]], changelog[at[1]:end]
		if version := name.FindStringSubmatch(title); version != nil {
			found = append(found, section{"v" + version[1], text})
		} else if strings.Contains(strings.ToLower(title), "unreleased") {
			found = append(found, section{"", text})
		}
	}
	return found
}

// format makes notes that can stand alone: links that lead into the repository from the
// changelog lead there from anywhere, and to the files as they were at that version.
func format(version, text string) (string, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return "", errors.New("it has nothing about " + version + ": write what changes for users, under \"## Unreleased\"")
	}
	link := regexp.MustCompile(`\]\(([^):\s]+)\)`)
	text = link.ReplaceAllStringFunc(text, func(found string) string {
		target := link.FindStringSubmatch(found)[1]
		if strings.HasPrefix(target, "#") {
			target = changelogFile + target
		}
		return "](" + project + "/blob/" + version + "/" + target + ")"
	})
	return "# Lodestone " + version + "\n\n" + text + "\n", nil
}
