package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lodestone-lb/lodestone/pkg/buildinfo"
	"github.com/lodestone-lb/lodestone/pkg/usage"
)

// manCommand writes the man pages that packages and archives of the command have in them.
func manCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "man DIRECTORY",
		Short:  "Write the man pages into a directory",
		Hidden: true, // who has the command has the pages, or --help
		Args:   usage.Args(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return writePages(cmd.Root(), args[0])
		},
	}
}

// writePages writes a page for the command and one for each of those below it.
func writePages(cmd *cobra.Command, dir string) error {
	page := pageName(cmd) + ".1"
	text := manPage(cmd, buildinfo.Get())
	if err := os.WriteFile(filepath.Join(dir, page), []byte(text), 0o644); err != nil { //nolint:gosec // for all to read
		return fmt.Errorf("write the man page %s: %w", page, err)
	}
	for _, sub := range cmd.Commands() {
		if !sub.IsAvailableCommand() {
			continue
		}
		if err := writePages(sub, dir); err != nil {
			return err
		}
	}
	return nil
}

func pageName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }

// manPage returns what --help prints, in the language of man. The date is that of the build, so
// that the same commit gives the same page.
func manPage(cmd *cobra.Command, build buildinfo.Info) string {
	var page strings.Builder
	date, _, _ := strings.Cut(build.Date, "T")
	fmt.Fprintf(&page, ".TH %q 1 %q %q %q\n", strings.ToUpper(pageName(cmd)), date, "lodestone "+build.Version, "Lodestone")
	fmt.Fprintf(&page, ".SH NAME\n%s \\- %s\n", roff(pageName(cmd)), roff(cmd.Short))
	usage := cmd.UseLine()
	if cmd.HasAvailableSubCommands() {
		usage = cmd.CommandPath() + " COMMAND"
	}
	fmt.Fprintf(&page, ".SH SYNOPSIS\n.B %s\n", roff(usage))
	if cmd.Long != "" {
		page.WriteString(".SH DESCRIPTION\n")
		for i, paragraph := range strings.Split(strings.TrimSpace(cmd.Long), "\n\n") {
			if i > 0 {
				page.WriteString(".PP\n")
			}
			writeParagraph(&page, paragraph)
		}
	}
	if cmd.HasAvailableSubCommands() {
		page.WriteString(".SH COMMANDS\n")
	}
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			fmt.Fprintf(&page, ".TP\n.B %s\n%s; see\n.BR %s (1).\n", roff(sub.Name()), roff(sub.Short), roff(pageName(sub)))
		}
	}
	writeFlags(&page, cmd)
	if cmd.Example != "" {
		page.WriteString(".SH EXAMPLES\n")
		verbatim(&page, cmd.Example)
	}
	if cmd.HasParent() {
		fmt.Fprintf(&page, ".SH SEE ALSO\n.BR %s (1)\n", roff(pageName(cmd.Parent())))
	}
	return page.String()
}

// writeParagraph fills text, but leaves the lines of lists and of what is indented alone.
func writeParagraph(page *strings.Builder, text string) {
	for line := range strings.SplitSeq(text, "\n") {
		if strings.HasPrefix(line, "- ") || strings.HasPrefix(line, " ") || strings.HasPrefix(line, "\t") {
			verbatim(page, text)
			return
		}
	}
	page.WriteString(roff(text) + "\n")
}

func verbatim(page *strings.Builder, text string) {
	page.WriteString(".nf\n" + roff(strings.Trim(text, "\n")) + "\n.fi\n")
}

func writeFlags(page *strings.Builder, cmd *cobra.Command) {
	if !cmd.Flags().HasAvailableFlags() {
		return
	}
	page.WriteString(".SH OPTIONS\n")
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		value, usage := pflag.UnquoteUsage(f)
		if value != "" {
			name += " " + value
		}
		fmt.Fprintf(page, ".TP\n.B %s\n%s\n", roff(name), roff(usage))
		if f.DefValue != "" && f.DefValue != "false" {
			fmt.Fprintf(page, "Default: %s\n", roff(f.DefValue))
		}
	})
}

// roff escapes what means something to man: backslashes, hyphens that are to stay what they are
// for who copies them, and dots and quotes that begin a line.
func roff(text string) string {
	lines := strings.Split(strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text), "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
			lines[i] = `\&` + line
		}
	}
	return strings.Join(lines, "\n")
}
