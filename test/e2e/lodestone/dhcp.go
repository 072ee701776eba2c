package lodestone

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
)

// dnsmasq is where Debian has it, which is not on everybody's PATH.
const dnsmasq = "/usr/sbin/dnsmasq"

// DHCPServer is a dnsmasq on the client, which is on the nodes' segment.
type DHCPServer struct {
	dir string
	end func(by unix.Signal) error
}

// RunDHCPServer starts a DHCP server that leases the addresses from first to
// last for an hour, and waits until it serves.
func (i *Installation) RunDHCPServer(ctx context.Context, first, last string) (*DHCPServer, error) {
	dir, err := os.MkdirTemp("", "lodestone-dhcp-")
	if err != nil {
		return nil, err
	}
	d := &DHCPServer{dir: dir}
	// Nobody has the addresses: it need not ping each for 3 s before it offers it.
	log, end, err := run(ctx, i.Lab.Namespace(lab.Client), dnsmasq, "--keep-in-foreground", "--log-facility=-",
		"--conf-file=/dev/null", "--pid-file",
		"--user=root", "--group=root", "--port=0", "--interface=eth0", "--bind-interfaces", "--log-dhcp", "--no-ping",
		"--dhcp-authoritative", "--dhcp-leasefile="+d.file(), "--dhcp-range="+first+","+last+",255.255.255.0,1h")
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	d.end = end
	err = Wait(ctx, "the DHCP server serves", func() error {
		text, err := os.ReadFile(log)
		if err == nil && !strings.Contains(string(text), "DHCP, sockets bound exclusively") {
			err = fmt.Errorf("its log has %q", text)
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(err, d.Stop())
	}
	return d, nil
}

func (d *DHCPServer) file() string { return filepath.Join(d.dir, "leases") }

// Stop ends the server. What it has leased is forgotten.
func (d *DHCPServer) Stop() error { return errors.Join(d.end(unix.SIGTERM), os.RemoveAll(d.dir)) }

// Leases are the leases that the server knows, by address: the name of the
// client's host.
func (d *DHCPServer) Leases() (map[string]string, error) {
	text, err := os.ReadFile(d.file())
	if err != nil {
		return nil, err
	}
	leases := map[string]string{}
	for line := range strings.Lines(string(text)) {
		// When it ends, hardware address, address, name, client identifier.
		if fields := strings.Fields(line); len(fields) == 5 {
			leases[fields[2]] = fields[3]
		}
	}
	return leases, nil
}
