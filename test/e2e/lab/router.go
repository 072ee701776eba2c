package lab

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"text/template"
	"time"

	"github.com/lodestone-lb/lodestone/test/e2e/process"
)

// RouterASN is the AS number of the lab's routers. They accept sessions from
// every address of the LAN and any other AS number.
const RouterASN = 64513

// routerFiles is what the daemons' configurations are filled in with.
type routerFiles struct {
	Name     string
	ASN      int
	ID       string
	Segments []segment
}

// segment is one family of the LAN.
type segment struct {
	Name   string // ipv4 or ipv6
	Subnet string
}

// startRouter starts the router's daemons and returns when they answer.
func (c *Cluster) startRouter(ctx context.Context, r router) error {
	dir := filepath.Join(c.place.routerDir(), r.name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make folder of %s: %w", r.name, err)
	}
	conf, err := c.writeRouterConfig(r, dir)
	if err != nil {
		return fmt.Errorf("write configuration of %s: %w", r.name, err)
	}
	specs, ask := birdSpecs(conf, dir), []string{"show status"}
	if r.daemon == RouterFRR {
		ask = []string{"show bgp summary", "show bfd peers"}
		if specs, err = FRR(conf, dir); err != nil {
			return err
		}
	}
	for _, spec := range specs {
		if spec.Name == "bgpd" {
			spec.Args = supervised(spec.Args)
		}
		spec.Args = append([]string{"chrt", "--rr", "1"}, spec.Args...) // a router does nothing else
		spec.Name, spec.Namespace = spec.Name+"-"+r.name, c.Namespace(r.name)
		if _, err := c.processes.Start(spec); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, question := range ask {
		err := poll(ctx, 50*time.Millisecond, func() error {
			_, err := c.AskRouter(ctx, r.name, question)
			return err
		})
		if err != nil {
			return fmt.Errorf("wait for %s: %w", r.name, err)
		}
	}
	return nil
}

// supervised restarts a daemon when it crashes, as watchfrr does on a router: FRR 8.4 sometimes crashes when
// a neighbour is deleted (a segmentation fault in thread_fetch).
func supervised(args []string) []string {
	return append([]string{"sh", "-c", `while :; do "$@"; echo "$1 ended with $?"; sleep 0.2; done`, "supervised"}, args...)
}

// give makes the folder the user's.
func give(dir, name string) error {
	u, err := user.Lookup(name)
	if err != nil {
		return fmt.Errorf("find the user of the routing daemons: %w", err)
	}
	uid, _ := strconv.Atoi(u.Uid) // numbers, on Linux
	gid, _ := strconv.Atoi(u.Gid)
	return os.Chown(dir, uid, gid)
}

func (c *Cluster) writeRouterConfig(r router, dir string) (path string, err error) {
	fill := routerFiles{Name: r.name, ASN: RouterASN, ID: c.ips(r.name)[0].String()}
	for _, address := range c.addresses(r.name) {
		s := segment{Name: "ipv4", Subnet: address.Masked().String()}
		if address.Addr().Is6() {
			s.Name = "ipv6"
		}
		fill.Segments = append(fill.Segments, s)
	}
	t, err := template.ParseFS(files, "files/"+r.daemon+".conf")
	if err != nil {
		return "", err
	}
	var text strings.Builder
	if err := t.Execute(&text, fill); err != nil {
		return "", err
	}
	path = filepath.Join(dir, r.daemon+".conf")
	return path, os.WriteFile(path, []byte(text.String()), 0o644)
}

// FRR gives the folder to FRR's user and returns the daemons in the order that
// they start in. Each takes what is its own from the configuration.
func FRR(conf, dir string) ([]process.Spec, error) {
	if err := give(dir, "frr"); err != nil {
		return nil, err
	}
	specs := make([]process.Spec, 0, 3)
	for _, daemon := range []string{"zebra", "bgpd", "bfdd"} {
		args := []string{"/usr/lib/frr/" + daemon, "--config_file=" + conf, "--vty_socket=" + dir, "--socket=" + filepath.Join(dir, "zserv.api"),
			"--pid_file=" + filepath.Join(dir, daemon+".pid"), "--vty_port=0", "--log=stdout"}
		if daemon == "bfdd" {
			args = append(args, "--bfdctl="+filepath.Join(dir, "bfdd.sock"))
		}
		specs = append(specs, process.Spec{Name: daemon, Args: args})
	}
	return specs, nil
}

func birdSpecs(conf, dir string) []process.Spec {
	return []process.Spec{{Name: "bird", Args: []string{"bird", "-f", "-c", conf, "-s", filepath.Join(dir, "bird.ctl")}}}
}

// AskRouter gives the router's daemons a command, of vtysh or of birdc, and
// returns the answer.
func (c *Cluster) AskRouter(ctx context.Context, name string, commands ...string) (string, error) {
	dir := filepath.Join(c.place.routerDir(), name)
	for _, r := range c.routers {
		switch {
		case r.name != name:
		case r.daemon == RouterBIRD:
			return c.output(ctx, name, append([]string{"birdc", "-s", filepath.Join(dir, "bird.ctl")}, commands...)...)
		default:
			args := []string{"vtysh", "--vty_socket", dir}
			for _, command := range commands {
				args = append(args, "-c", command)
			}
			return c.output(ctx, name, args...)
		}
	}
	return "", fmt.Errorf("ask %s: the lab has no such router", name)
}
