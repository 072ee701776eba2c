package image

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func TestImageHoldsTheBinaryAsEntrypoint(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "echo")
	if err := os.WriteFile(binary, []byte("static program"), 0o755); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(dir, "echo.tar")
	if err := (Image{Ref: "lab.local/echo:dev", Binary: binary, User: "65532:65532"}).Write(archive); err != nil {
		t.Fatal(err)
	}

	tag := name.MustParseReference("lab.local/echo:dev").(name.Tag)
	img, err := tarball.ImageFromPath(archive, &tag)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got := config.Config; got.User != "65532:65532" || len(got.Entrypoint) != 1 || got.Entrypoint[0] != "/echo" {
		t.Errorf("config = %+v, want user 65532:65532 and entrypoint /echo", got)
	}
	files := tar.NewReader(mutate.Extract(img))
	header, err := files.Next()
	if err != nil {
		t.Fatal(err)
	}
	content, _ := io.ReadAll(files)
	if header.Name != "echo" || header.FileInfo().Mode().Perm() != 0o755 || string(content) != "static program" {
		t.Errorf("file = %s %v %q", header.Name, header.FileInfo().Mode(), content)
	}
	if _, err := files.Next(); err != io.EOF {
		t.Errorf("a second file: %v", err)
	}
}

func TestWriteNamesTheImageThatFailed(t *testing.T) {
	err := Image{Ref: "lab.local/echo:dev", Binary: "/nowhere/echo"}.Write(filepath.Join(t.TempDir(), "x.tar"))
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "lab.local/echo:dev") {
		t.Errorf("err = %v", err)
	}
}
