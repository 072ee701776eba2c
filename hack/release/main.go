// Command release makes all that a release of Lodestone consists of, in a folder, and
// publishes nothing: make release VERSION=v0.2.0. With -push it brings one into a registry
// of yours: make push REGISTRY=registry.example.com/lodestone.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"github.com/lodestone-lb/lodestone/hack/release/internal/release"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	root := flags.String("root", "../..", "The checkout of Lodestone that is released.")
	dist := flags.String("dist", "../../dist", "The folder to write to. It must be empty, or not exist.")
	version := flags.String("version", "", "The version, such as v0.2.0.")
	ldflags := flags.String("ldflags", "", "What go build passes to the linker: the Makefile's.")
	key := flags.String("key", os.Getenv("LODESTONE_RELEASE_KEY"),
		"A file with an ECDSA P-256 key in PEM that signs; $COSIGN_PASSWORD opens one of cosign's. "+
			"Default: $LODESTONE_RELEASE_KEY. Without a key nothing is signed.")
	platforms := flags.String("platforms", "", "The platforms to build for, with commas: linux/amd64,linux/arm64. Default: all.")
	push := flags.String("push", "", "Make no release, but push the images and the chart of the one in -dist below this place: "+
		"registry.example.com/lodestone.")
	verify := flags.String("verify", "", "A file with the public key that has to have signed what is pushed. Default: none has to.")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *push != "" {
		return release.Push(ctx, *dist, *push, *verify, out)
	}
	config := release.Config{
		Root: *root, Dist: *dist, Version: *version, Out: out,
		Build: release.GoBuild(*root, *ldflags),
	}
	if *platforms != "" {
		config.Platforms = strings.Split(*platforms, ",")
	}
	if *key != "" {
		signer, err := release.LoadKey(*key, []byte(os.Getenv("COSIGN_PASSWORD")))
		if err != nil {
			return err
		}
		config.Key = signer
	}
	return release.Make(ctx, config)
}
