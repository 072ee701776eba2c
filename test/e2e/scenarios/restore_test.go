//go:build long

package scenarios

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/process"
)

// etcd is restored from a backup, and of Lodestone nothing is restarted. A Service that was deleted after the backup is back
// with its address, although another Service had got the address, which is gone now. Other Services are served all the
// time, and no address has two owners.
func TestEtcdIsRestoredFromABackup(t *testing.T) {
	s := begin(t)
	stays := s.serveUDP("stays")
	s.steady(stays)
	s.service("deleted", port("http", corev1.ProtocolTCP, 80))
	deleted := s.assigned("deleted")
	restore := s.backupOfEtcd()

	s.delete("deleted")
	s.deleted("deleted")
	s.service("later", annotated(addrAnnotation, deleted), port("http", corev1.ProtocolTCP, 80))
	s.holds("later", deleted)
	s.eventually("it answers", func() error { return s.reachTCP(deleted) })

	for i := range 500 { // etcd counts changes, and clients ask for what came after the last one that they know
		s.change("later", annotated("example.com/change", strconv.Itoa(i)))
	}
	s.losesNothing([]string{stays}, restore)
	s.restartKubernetes()
	s.eventually("the Services are those of the backup", func() error {
		list, err := s.Kube.CoreV1().Services(s.namespace).List(s.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var names []string
		for _, svc := range list.Items {
			names = append(names, svc.Name)
		}
		if !slices.Equal(names, []string{"deleted", "stays"}) {
			return fmt.Errorf("they are %q", names)
		}
		return nil
	})
	s.holds("deleted", deleted)
	s.eventually("it answers again", func() error { return s.reachTCP(deleted) })
	s.oneAnswerer(deleted)
	s.oneAnswerer(stays)
	s.service("new", port("http", corev1.ProtocolTCP, 80))
	fresh := s.assigned("new")
	require.NotContains(t, []string{stays, deleted}, fresh)
	s.eventually("a new one answers", func() error { return s.reachTCP(fresh) })
}

// backupOfEtcd copies what etcd has, while it stands still, and returns what puts it back.
func (s *story) backupOfEtcd() (restore func()) {
	s.Helper()
	etcd, err := s.Lab.Process("etcd")
	require.NoError(s, err)
	server, err := s.Lab.Process(lab.APIServerOf(lab.ControlPlane))
	require.NoError(s, err)
	backup := filepath.Join(s.TempDir(), "etcd")
	data := dataOf(s, etcd)
	still := func(do func() error) {
		s.Helper()
		err := errors.Join(server.Kill(s.ctx), etcd.Kill(s.ctx))
		err = errors.Join(err, do(), etcd.Restart(), server.Restart(), s.Lab.WaitAPIServerOf(s.ctx, lab.ControlPlane))
		require.NoError(s, err)
	}
	still(func() error { return os.CopyFS(backup, os.DirFS(data)) })
	return func() {
		still(func() error {
			return errors.Join(os.RemoveAll(data), os.CopyFS(data, os.DirFS(backup)), os.Chmod(data, 0o700))
		})
	}
}

// restartKubernetes restarts the components of Kubernetes besides the API server, as its guide demands after etcd was restored. Those that
// are connected again before the API server refuses anything continue to watch from versions that etcd has not reached: they would not see
// the next Service, and give it no endpoints, until as many changes have been made as were lost. Lodestone's own are not restarted.
func (s *story) restartKubernetes() {
	s.Helper()
	names := []string{"kube-controller-manager", "kube-scheduler"}
	for _, node := range s.Lab.Nodes() {
		names = append(names, "kubelet-"+node, "kube-proxy-"+node)
	}
	for _, name := range names {
		p, err := s.Lab.Process(name)
		require.NoError(s, err)
		require.NoError(s, errors.Join(p.Kill(s.ctx), p.Restart()))
	}
}

// dataOf is etcd's folder.
func dataOf(s *story, etcd *process.Process) string {
	for _, arg := range etcd.Args {
		if dir, ok := strings.CutPrefix(arg, "--data-dir="); ok {
			return dir
		}
	}
	require.Fail(s, "etcd has no folder", "%q", etcd.Args)
	return ""
}
