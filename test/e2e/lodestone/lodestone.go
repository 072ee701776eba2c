// Package lodestone operates the Lodestone that is installed in the lab, and
// looks at it from outside: through the API, through its metrics, and on the
// wire.
//
// The files, from the outside in:
//
//	lodestone.go  Installation: configuration, upgrades, and the command lodestone
//	pods.go       the pods: who leads, and pods that are killed or replaced
//	metrics.go    metrics and /status
//	wire.go       who answers ARP and NDP for a VIP
//	routers.go    what the lab's routers know
//	echo.go       pods that answer, and whether a VIP is served
//	loss.go       what a client sees while the owner of a VIP is lost
//	dhcp.go       a DHCP server on the segment
//	apiproxy.go   proxies before the API server that count or hold requests
//	faultyapi.go  proxies that let requests fail, or change the time
package lodestone

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// The names under which the chart installs Lodestone. They are spelled out
// here, not imported: a test of a promise must not change with the code.
const (
	Namespace  = "lodestone-system"
	ConfigMap  = "lodestone-config"
	Controller = "lodestone-controller"
	Speaker    = "lodestone-speaker"
)

// Installation is the Lodestone in a lab.
type Installation struct {
	Lab  *lab.Cluster
	Kube kubernetes.Interface
	// ConfigMapName is ConfigMap, unless the chart's values name another one.
	ConfigMapName string

	web *http.Client

	tokenLock sync.Mutex
	token     string
	tokenAt   time.Time
}

// New returns the Lodestone that is installed in the lab.
func New(cluster *lab.Cluster) (*Installation, error) {
	kube, err := cluster.Clientset()
	if err != nil {
		return nil, err
	}
	return &Installation{Lab: cluster, Kube: kube, ConfigMapName: ConfigMap, web: &http.Client{
		Timeout: 5 * time.Second,
		Transport: &http.Transport{
			DialContext:     netns.Dialer(cluster.Namespace(lab.ControlPlane)),
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // the certificates are self-signed
		},
	}}, nil
}

// Document completes a configuration with the head that every one has.
func Document(body string) string {
	return "apiVersion: lodestone.io/v1alpha1\nkind: Config\n" + body
}

// Digest is what the metrics call the document by.
func Digest(document string) string {
	sum := sha256.Sum256([]byte(document))
	return hex.EncodeToString(sum[:])
}

// WriteConfig replaces the document in the ConfigMap, whatever it is worth.
func (i *Installation) WriteConfig(ctx context.Context, document string) error {
	maps := i.Kube.CoreV1().ConfigMaps(Namespace)
	data := map[string]string{"config.yaml": document}
	return Wait(ctx, "the ConfigMap takes the document", func() error {
		m, err := maps.Get(ctx, i.ConfigMapName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			_, err = maps.Create(ctx, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: i.ConfigMapName, Namespace: Namespace}, Data: data,
			}, metav1.CreateOptions{})
			return err
		}
		if err != nil {
			return err
		}
		m.Data = data
		_, err = maps.Update(ctx, m, metav1.UpdateOptions{})
		return err
	})
}

// Configure writes the document and waits until the leading controller goes
// by it.
func (i *Installation) Configure(ctx context.Context, document string) error {
	if err := i.WriteConfig(ctx, document); err != nil {
		return err
	}
	return Wait(ctx, "the leader goes by the new configuration", func() error {
		return i.leaderHas(ctx, "lodestone_config_info", Labels{"digest": Digest(document)}, 1)
	})
}

// Wait polls until check finds nothing wrong, and gives up after Timeout. What takes long is looked
// at less often: the API server's time is what the stories that run side by side share.
func Wait(ctx context.Context, what string, check func() error) error {
	start := time.Now()
	for {
		err := check()
		if err == nil {
			return nil
		}
		taken := time.Since(start)
		if ctx.Err() != nil || taken > Timeout {
			return fmt.Errorf("it never happened that %s: %w", what, err)
		}
		time.Sleep(min(max(20*time.Millisecond, taken/10), 250*time.Millisecond))
	}
}

// Timeout is how long anything that should happen at once may take on a busy
// machine. It is a limit for giving up, not a promise about speed.
const Timeout = 60 * time.Second

// RunController starts a controller of ours beside the cluster, with no flag
// but the kubeconfig and those given. The function returned ends it, by SIGTERM as an
// operator would or by SIGKILL, and returns once it is gone.
func (i *Installation) RunController(ctx context.Context, flags ...string) (end func(by unix.Signal) error, err error) {
	args := append([]string{filepath.Join(i.Lab.Root, "bin", Controller), "--kubeconfig=" + i.Lab.Kubeconfig()}, flags...)
	_, end, err = run(ctx, i.Lab.Namespace(lab.ControlPlane), args...)
	return end, err
}

// Serves checks that the controller beside the cluster serves. That it is
// Ready is not enough: a standby, which everyone is at first, is ready, too.
func (i *Installation) Serves(ctx context.Context) error {
	url := fmt.Sprintf("https://%s:%d/readyz", i.Lab.Addresses(lab.ControlPlane)[0], metricsPort["controller"])
	response, err := i.Get(ctx, url, "")
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && (response.StatusCode != http.StatusOK || !bytes.Contains(body, []byte("[+] services:"))) {
		err = fmt.Errorf("it answers %s: %s", response.Status, body)
	}
	return err
}

// run starts a program in a namespace. It returns the file that the program's
// output goes to, and what ends the program by a signal.
func run(ctx context.Context, namespace string, args ...string) (log string, end func(by unix.Signal) error, err error) {
	name := filepath.Base(args[0])
	output, err := os.CreateTemp("", name+"-*.log")
	if err != nil {
		return "", nil, fmt.Errorf("create log: %w", err)
	}
	defer output.Close()
	cmd := netns.Command(context.WithoutCancel(ctx), namespace, args...)
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Start(); err != nil {
		return "", nil, fmt.Errorf("start %s: %w", name, err)
	}
	return output.Name(), func(by unix.Signal) error { return terminate(name, cmd, by, output.Name()) }, nil
}

func terminate(name string, cmd *exec.Cmd, by unix.Signal, log string) error {
	defer os.Remove(log)
	if err := cmd.Process.Signal(by); err != nil {
		raw, _ := os.ReadFile(log)
		return fmt.Errorf("end %s: %w; its log: %s", name, err, raw)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case <-ended:
		return nil
	case <-time.After(Timeout):
		raw, _ := os.ReadFile(log)
		return fmt.Errorf("%s did not end within %s of its signal; its log: %s", name, Timeout, raw)
	}
}

// Upgrade upgrades to a chart by helm, with the lab's values and the given flags,
// and returns when all pods run as the chart has them.
func (i *Installation) Upgrade(ctx context.Context, chart string, flags ...string) error {
	return i.roll(ctx, i.upgrade(chart, flags...)...)
}

func (i *Installation) upgrade(chart string, flags ...string) []string {
	return append([]string{"upgrade", "lodestone", chart, "--namespace", Namespace, "--values", i.Lab.Values()}, flags...)
}

// Reinstall is Upgrade for when no client counts what it loses: all speakers are replaced at the same time.
func (i *Installation) Reinstall(ctx context.Context, chart string, flags ...string) error {
	err := i.replaceSpeakers(ctx, func(old []corev1.Pod) error {
		if _, err := i.Lab.Helm(ctx, i.upgrade(chart, flags...)...); err != nil {
			return err
		}
		err := Wait(ctx, "Kubernetes has noticed that speakers are to be others", func() error {
			speakers, err := i.Kube.AppsV1().DaemonSets(Namespace).Get(ctx, Speaker, metav1.GetOptions{})
			if err == nil && speakers.Status.ObservedGeneration < speakers.Generation {
				err = errors.New("it has not")
			}
			return err
		})
		if err != nil {
			return err
		}
		return i.terminateAll(ctx, old)
	})
	if err != nil {
		return err
	}
	return i.ScaleController(ctx, 2)
}

// Rollback undoes the last upgrade by helm, and returns when all runs as before.
func (i *Installation) Rollback(ctx context.Context) error {
	return i.roll(ctx, "rollback", "lodestone", "--namespace", Namespace)
}

// roll replaces the pods by helm, and returns when the controllers work again.
func (i *Installation) roll(ctx context.Context, args ...string) error {
	if _, err := i.Lab.Helm(ctx, append(args, "--wait", "--timeout", "5m")...); err != nil {
		return err
	}
	return i.ScaleController(ctx, 2)
}

// CLI runs the operator's tool against the cluster and returns what it prints
// and exits with.
func (i *Installation) CLI(ctx context.Context, stdin string, args ...string) (output string, code int, err error) {
	cmd := i.Lab.Command(ctx, lab.ControlPlane, append([]string{filepath.Join(i.Lab.Root, "bin", "lodestone")}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	raw, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return string(raw), exit.ExitCode(), nil
	}
	return string(raw), 0, err
}
