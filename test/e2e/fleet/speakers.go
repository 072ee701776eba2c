package fleet

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/netns"
)

// run starts all speakers.
func (f *Fleet) run(context.Context) error {
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: fleet\ncontexts: [{name: fleet, context: {cluster: "+
		"fleet}}]\nclusters: [{name: fleet, cluster: {server: 'http://%s'}}]\n", f.api())
	if err := os.WriteFile(f.kubeconfig(), []byte(text), 0o600); err != nil {
		return err
	}
	for _, name := range f.names {
		if err := f.StartSpeaker(name); err != nil {
			return err
		}
	}
	return nil
}

func (f *Fleet) kubeconfig() string { return filepath.Join(f.dir, "kubeconfig") }

// StartSpeaker starts the node's speaker, which has ended.
func (f *Fleet) StartSpeaker(node string) error {
	log, err := os.OpenFile(f.Log(node), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := netns.Command(context.Background(), f.host(node), f.options.Speaker,
		"--node-name="+node, "--node-ip="+f.nodeIP(node).String(), "--kubeconfig="+f.kubeconfig(), "--kube-proxy-healthz-url=")
	cmd.Env = append(os.Environ(), "LODESTONE_MEMBERSHIP_KEY=a key that only this fleet has")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the speaker of %s: %w", node, err)
	}
	f.speakers[node] = cmd
	return nil
}

// EndSpeaker ends the node's speaker by SIGTERM, as an update does, or by
// SIGKILL, as a crash does, and waits until it has ended.
func (f *Fleet) EndSpeaker(node string, by unix.Signal) error {
	cmd := f.speakers[node]
	delete(f.speakers, node)
	if err := cmd.Process.Signal(by); err != nil {
		return fmt.Errorf("end the speaker of %s: %w", node, err)
	}
	if err := cmd.Wait(); err != nil && by == unix.SIGTERM {
		return fmt.Errorf("the speaker of %s ended: %w", node, err)
	}
	return nil
}

// Speaker is the process id of the node's speaker.
func (f *Fleet) Speaker(node string) int { return f.speakers[node].Process.Pid }

// nodeIP is the node's address by which speakers reach each other.
func (f *Fleet) nodeIP(node string) netip.Addr {
	if f.options.Management {
		return management(f.Host(node))
	}
	return f.Host(node)
}

// Host is the node's address on the segment.
func (f *Fleet) Host(node string) netip.Addr { return nodeHost(slices.Index(f.names, node) + 1) }
