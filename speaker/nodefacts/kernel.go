package nodefacts

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/lodestone-lb/lodestone/pkg/diagnose"
)

// kernel is the path of /proc. The files about the network are those of the thread's network namespace.
type kernel string

// addTo adds the kernel's facts. It reads the settings of these interfaces.
func (k kernel) addTo(f *diagnose.Facts, interfaces []string) {
	names := []string{diagnose.SysctlForward4, diagnose.SysctlForward6}
	for _, i := range interfaces {
		for _, setting := range diagnose.InterfaceSettings {
			names = append(names, diagnose.Sysctl(i, setting))
		}
	}
	note := func(what string, err error) {
		if err != nil {
			f.Unread[what] = err.Error()
		}
	}
	for _, name := range names {
		value, err := k.sysctl(name)
		if err == nil {
			f.Sysctls[name] = value
		}
		note(name, err)
	}
	var err error
	f.DefaultRoutes, err = k.defaultRoutes()
	note("default routes", err)
	f.Capabilities, err = k.capabilities()
	note("capabilities", err)
	f.BGPListeners, err = k.listeners(179)
	note("bgp listeners", err)
}

func (k kernel) path(elements ...string) string {
	return filepath.Join(append([]string{string(k)}, elements...)...)
}

func (k kernel) sysctl(name string) (int, error) {
	raw, err := os.ReadFile(k.path("sys", name))
	if err != nil {
		return 0, err //nolint:wrapcheck // it names the file
	}
	value, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil {
		return 0, fmt.Errorf("%s is %.20q, not a number", name, raw)
	}
	return value, nil
}

// defaultRoutes returns the interfaces of the IPv4 default routes.
func (k kernel) defaultRoutes() ([]string, error) {
	file, err := os.Open(k.path("thread-self", "net", "route"))
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the file
	}
	defer file.Close()
	return parseRoutes(file)
}

// parseRoutes reads /proc/net/route: interface, destination, gateway, flags,
// three counters, mask.
func parseRoutes(r io.Reader) ([]string, error) {
	var names []string
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if f := strings.Fields(lines.Text()); len(f) > 7 && f[1] == "00000000" && f[7] == "00000000" && !slices.Contains(names, f[0]) {
			names = append(names, f[0])
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read routes: %w", err)
	}
	return names, nil
}

// capabilities returns the effective capabilities of this process.
func (k kernel) capabilities() (uint64, error) {
	raw, err := os.ReadFile(k.path("self", "status"))
	if err != nil {
		return 0, err //nolint:wrapcheck // it names the file
	}
	for line := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(line, "CapEff:"); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			if err != nil {
				return 0, fmt.Errorf("read CapEff: %w", err)
			}
			return set, nil
		}
	}
	return 0, errors.New("the kernel does not report CapEff")
}

// listeners returns the TCP sockets that listen on the port.
func (k kernel) listeners(port uint16) ([]diagnose.Listener, error) {
	own, err := k.ownSockets()
	if err != nil {
		return nil, err
	}
	var all []diagnose.Listener
	for _, name := range []string{"tcp", "tcp6"} {
		file, err := os.Open(k.path("thread-self", "net", name))
		if errors.Is(err, fs.ErrNotExist) && name == "tcp6" {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, err //nolint:wrapcheck // it names the file
		}
		found, err := parseListeners(file)
		file.Close()
		if err != nil {
			return nil, err
		}
		for _, s := range found {
			if s.address.Port() == port {
				all = append(all, diagnose.Listener{Address: s.address, Ours: own[s.inode]})
			}
		}
	}
	return all, nil
}

// ownSockets returns the inodes of this process's sockets.
func (k kernel) ownSockets() (map[string]bool, error) {
	entries, err := os.ReadDir(k.path("self", "fd"))
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the directory
	}
	own := map[string]bool{}
	for _, e := range entries {
		target, err := os.Readlink(k.path("self", "fd", e.Name()))
		if inode, ok := strings.CutPrefix(target, "socket:["); ok && err == nil {
			own[strings.TrimSuffix(inode, "]")] = true
		}
	}
	return own, nil
}

// socket is a listening socket.
type socket struct {
	address netip.AddrPort
	inode   string
}

// stateListen is TCP_LISTEN (proc(5), /proc/net/tcp).
const stateListen = "0A"

// parseListeners reads /proc/net/tcp or tcp6 up to the end of the listening sockets, which come first: a node
// may have a hundred thousand others.
func parseListeners(r io.Reader) ([]socket, error) {
	var all []socket
	lines := bufio.NewScanner(r)
	lines.Scan() // the header
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 10 || f[3] != stateListen {
			break
		}
		address, err := parseAddrPort(f[1])
		if err != nil {
			return nil, err
		}
		all = append(all, socket{address, f[9]})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read sockets: %w", err)
	}
	return all, nil
}

// parseAddrPort reads "0100007F:00B3": words of 32 bits in the machine's order,
// and the port.
func parseAddrPort(text string) (netip.AddrPort, error) {
	a, p, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(a)
	port, err2 := strconv.ParseUint(p, 16, 16)
	if err := errors.Join(err, err2); err != nil || len(raw) != 4 && len(raw) != 16 {
		return netip.AddrPort{}, fmt.Errorf("%.50q is not an address and a port", text)
	}
	for i := 0; i < len(raw); i += 4 {
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	addr, _ := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr, uint16(port)), nil
}
