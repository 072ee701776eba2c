package lab

import (
	"os"
	"path/filepath"
	"testing"
)

// What containerd writes to is each node's own; the rest is there once.
func TestNodesHaveTheirOwnDatabases(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "n1")
	if err := os.Mkdir(filepath.Join(from, "bolt"), 0o711); err != nil {
		t.Fatal(err)
	}
	files := []string{"bolt/meta.db", "blob"}
	for _, name := range files {
		if err := os.WriteFile(filepath.Join(from, name), []byte(name), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	if err := linkAll(from, to); err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		content, err := os.ReadFile(filepath.Join(to, name))
		if err != nil || string(content) != name {
			t.Errorf("%s = %q, %v", name, content, err)
		}
		stored, _ := os.Stat(filepath.Join(from, name))
		linked, _ := os.Stat(filepath.Join(to, name))
		if own := !os.SameFile(stored, linked); own != (filepath.Ext(name) == ".db") || linked.Mode() != stored.Mode() {
			t.Errorf("%s: the node's own = %v, mode %v", name, own, linked.Mode())
		}
	}
	if info, err := os.Stat(filepath.Join(to, "bolt")); err != nil || info.Mode().Perm() != 0o711 {
		t.Errorf("folder: %v, %v", info, err)
	}
}
