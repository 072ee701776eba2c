package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/pkg/buildinfo"
)

func TestManPages(t *testing.T) {
	dir := t.TempDir()
	code, out, errs := run(t, "", "man", dir)
	require.Equal(t, ExitOK, code, errs)
	require.Empty(t, out)

	// There is a page for each command that --help names, and none for the one that writes them.
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		return string(text)
	}
	require.Contains(t, read("lodestone.1"), ".BR lodestone\\-status (1).")
	require.Contains(t, read("lodestone-bgp-routes.1"), ".SH SEE ALSO\n.BR lodestone\\-bgp (1)\n")
	require.NoFileExists(t, filepath.Join(dir, "lodestone-man.1"))

	// Each has what --help has, and makes sense to man.
	pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
	require.NoError(t, err)
	require.Greater(t, len(pages), 10)
	status := read("lodestone-status.1")
	for _, want := range []string{
		".SH NAME\nlodestone\\-status \\- Show ", ".SH SYNOPSIS\n.B lodestone status [flags]\n", "Exits with 0 when all is well",
		".B \\-w, \\-\\-watch\n", ".nf\n  lodestone status\n  lodestone status \\-\\-watch\n",
	} {
		require.Contains(t, status, want)
	}
	if man, err := exec.LookPath("man"); err == nil {
		for _, page := range pages {
			out, err := exec.CommandContext(t.Context(), man, "--warnings", "--local-file", page).CombinedOutput()
			require.NoError(t, err, "%s: %s", page, out)
			require.NotContains(t, string(out), "warning:", page)
		}
	}

	code, _, errs = run(t, "", "man", filepath.Join(dir, "nowhere"))
	require.Equal(t, ExitFailed, code)
	require.Contains(t, errs, "write the man page lodestone.1")
}

// TestManPageIsOfItsBuild: the date is the build's, and not that of the day.
func TestManPageIsOfItsBuild(t *testing.T) {
	page := manPage(root(Streams{}), buildinfo.Info{Version: "v9.8.7", Date: "2031-05-04T03:02:01Z"})
	first, _, _ := strings.Cut(page, "\n")
	require.Equal(t, `.TH "LODESTONE" 1 "2031-05-04" "lodestone v9.8.7" "Lodestone"`, first)
}

func TestRoffKeepsTheText(t *testing.T) {
	require.Equal(t, "a\\-b \\e(c\n\\&.so x\n\\&'br", roff("a-b \\(c\n.so x\n'br"))
}
