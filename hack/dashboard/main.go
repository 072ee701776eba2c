// Command dashboard serves the dashboard of an invented cluster, to anybody on
// this machine: for working at the page, and for its tests in a browser. It
// prints the address, and takes commands on standard input, one per line:
//
//	speaker N up|down     the speaker of node N is ready, or not
//	session N [reason]    the session of node N with tor-b is down for a reason, or up
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lodestone-lb/lodestone/inspect/dashboard"
	"github.com/lodestone-lb/lodestone/inspect/dashboard/example"
)

func main() {
	var size example.Size
	flag.IntVar(&size.Nodes, "nodes", 12, "number of nodes")
	flag.IntVar(&size.Services, "services", 200, "number of Services")
	flag.BoolVar(&size.Trouble, "trouble", false, "have some of everything that can be wrong")
	address := flag.String("listen", "127.0.0.1:0", "where to serve")
	flag.Parse()
	if err := run(context.Background(), *address, example.New(size)); err != nil {
		fmt.Fprintln(os.Stderr, "dashboard:", err)
		os.Exit(1)
	}
}

// run serves until standard input ends.
func run(ctx context.Context, address string, c *example.Cluster) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	d := dashboard.New(dashboard.Options{
		Source: func() dashboard.Source { return c.Source() }, Version: "v0.9.0", Log: slog.Default(),
	})
	fmt.Printf("http://%s%s/\n", listener.Addr(), dashboard.Path)
	server := &http.Server{Handler: d.Handler(), ReadHeaderTimeout: 5 * time.Second}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var group errgroup.Group
	group.Go(func() error { return d.Run(ctx) })
	group.Go(func() error {
		defer server.Close()
		defer cancel()
		return obey(ctx, os.Stdin, c)
	})
	if err := server.Serve(listener); err != http.ErrServerClosed { //nolint:errorlint // Serve does not wrap it
		return err
	}
	return group.Wait()
}

// obey does what it reads until there is nothing more.
func obey(ctx context.Context, in io.Reader, c *example.Cluster) error {
	for lines := bufio.NewScanner(in); lines.Scan(); {
		what, rest, _ := strings.Cut(lines.Text(), " ")
		number, how, _ := strings.Cut(rest, " ")
		n, err := strconv.Atoi(number)
		switch {
		case err != nil:
		case what == "speaker":
			err = c.SetSpeaker(ctx, n-1, how == "up")
		case what == "session":
			err = c.SetSession(ctx, n-1, how)
		default:
			err = fmt.Errorf("command %q is not known", what)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
