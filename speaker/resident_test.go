package speaker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/lodestone-lb/lodestone/pkg/config"
	"github.com/lodestone-lb/lodestone/pkg/testnet"
	"github.com/lodestone-lb/lodestone/pkg/testnet/router"
	"github.com/lodestone-lb/lodestone/speaker/bgp"
	"github.com/lodestone-lb/lodestone/speaker/netstate"
)

const (
	// apiOfResident has the test binary be a speaker at the API server of that
	// URL, and nothing else.
	apiOfResident = "LODESTONE_TEST_SPEAKER_API"
	// mostResident is what is promised of a speaker, in MB.
	mostResident = 150
)

func TestMain(m *testing.M) {
	if url := os.Getenv(apiOfResident); url != "" {
		if err := beResident(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// BenchmarkResident is the memory of a process, of which the kernel speaks, that
// is the loop and the BGP announcer of a speaker in a cluster of 10,000 Services
// and 1,000 nodes, once two FRRs have all 10,000 routes: what it has then, and
// the most that it had, in the worst of the runs.
func BenchmarkResident(b *testing.B) {
	segment := testnet.NewSegment(b, 3)
	for i, host := range segment.Hosts[1:] {
		router.NewFRR(b, host, fmt.Sprintf("router bgp 64513\n bgp router-id 198.18.0.%d\n no bgp ebgp-requires-policy\n neighbor "+
			"198.18.0.1 remote-as 64512\n", 2+i))
	}
	var listener net.Listener
	require.NoError(b, segment.Hosts[0].Do(func() (err error) { listener, err = net.Listen("tcp", "127.0.0.1:0"); return err }))
	api := newAPIServer(b, corev1.ServiceExternalTrafficPolicyCluster, listener)
	binary, err := os.Executable()
	require.NoError(b, err)
	var now, most float64
	for b.Loop() {
		cmd := segment.Hosts[0].Command(b.Context(), binary)
		cmd.Env = append(os.Environ(), apiOfResident+"="+api.URL)
		out, err := cmd.CombinedOutput()
		require.NoError(b, err, "%s", out)
		var rss, peak float64
		_, err = fmt.Sscan(string(out), &rss, &peak)
		require.NoError(b, err, "%s", out)
		now, most = max(now, rss), max(most, peak)
	}
	b.ReportMetric(now, "MB")
	b.ReportMetric(most, "MB-peak")
	require.Less(b, most, float64(mostResident))
}

// beResident runs a speaker until its two routers have been sent all routes, then
// writes its resident memory in MB and the most that it had.
func beResident(url string) error {
	o, err := manyOptions(url)
	if err != nil {
		return err
	}
	c := *o.Config.(*fakeConfig).config
	c.Advertisements = []config.Advertisement{{Name: "routed", BGP: &config.BGP{AggregationLength: 32, AggregationLengthV6: 128}}}
	for i, address := range []string{"198.18.0.2", "198.18.0.3"} {
		c.Peers = append(c.Peers, config.Peer{
			Name: fmt.Sprint("tor-", i), Address: netip.MustParseAddr(address), Port: 179, LocalASN: 64512, PeerASN: config.ASN{Number: 64513},
			RouterID: netip.MustParseAddr("198.18.0.1"), HoldTime: 90 * time.Second, ConnectRetry: time.Second,
		})
	}
	o.Config = &fakeConfig{config: &c}
	announcer := bgp.New(bgp.Options{Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Registry: prometheus.NewRegistry(),
		NextHops: netstate.NextHops})
	o.Router = announcer
	s, err := New(o)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- announcer.Run(context.Background()) }() // until the loop stops it
	go func() { ended <- s.Run(ctx) }()
	err = waitSent(announcer, manyServices)
	if err == nil {
		err = writeResident()
	}
	cancel()
	return errors.Join(err, <-ended, <-ended)
}

// waitSent waits until all peers have been sent that many routes.
func waitSent(a *bgp.Announcer, routes int) error {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		n := 0
		for _, p := range a.Peers() {
			n += p.Advertised
		}
		if n == 2*routes {
			return nil
		}
	}
	return fmt.Errorf("routes not sent: %+v", a.Peers())
}

func writeResident() error {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	for _, name := range []string{"VmRSS", "VmHWM"} {
		m := regexp.MustCompile(name + `:\s+(\d+) kB`).FindStringSubmatch(string(status))
		if m == nil {
			return fmt.Errorf("no %s in %q", name, strings.TrimSpace(string(status)))
		}
		kb, err := strconv.Atoi(m[1])
		if err != nil {
			return err
		}
		fmt.Printf("%.1f ", float64(kb)/1024)
	}
	return nil
}
