// Command docker does of Docker what the tutorial asks of it: log in, build and push. There is
// no daemon. An image has the binary that make build has built, as package image makes it, where
// the Dockerfile would build it again.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/lodestone-lb/lodestone/test/e2e/image"
)

// home has the password and the images.
var home = os.Getenv("DOCKER_CONFIG")

// targets are those of the Dockerfile.
var targets = map[string]image.Image{
	"controller": {Binary: "bin/lodestone-controller", User: "65532:65532"},
	"speaker":    {Binary: "bin/lodestone-speaker", User: "0:0"},
	"cli":        {Binary: "bin/lodestone", User: "65532:65532"},
}

func main() {
	if err := run(os.Args[1:], os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "docker:", err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader) error {
	switch {
	case len(args) == 2 && args[0] == "login":
		return login(args[1], in)
	case len(args) > 1 && args[0] == "build":
		return build(args[1:])
	case len(args) == 2 && args[0] == "push":
		return push(args[1])
	}
	return fmt.Errorf("this one knows login HOST, build and push REF, and not %s", strings.Join(args, " "))
}

// login keeps what is typed: a user and a password.
func login(host string, in io.Reader) error {
	lines := bufio.NewScanner(in)
	var typed []string
	for len(typed) < 2 && lines.Scan() {
		typed = append(typed, lines.Text())
	}
	if len(typed) < 2 {
		return fmt.Errorf("log in to %s: want a user and a password, in a line each", host)
	}
	raw, err := json.Marshal(map[string]any{"auths": map[string]authn.AuthConfig{host: {Username: typed[0], Password: typed[1]}}})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(home, "config.json"), raw, 0o600)
}

func build(args []string) error {
	flags := flag.NewFlagSet("build", flag.ContinueOnError)
	target, tag := flags.String("target", "", ""), flags.String("tag", "", "")
	flags.String("build-arg", "", "") // make build has it from Git
	if err := flags.Parse(args); err != nil {
		return err
	}
	img, known := targets[*target]
	if !known {
		return fmt.Errorf("the Dockerfile has no target %q", *target)
	}
	img.Ref = *tag
	return img.Write(archive(*tag))
}

func archive(tag string) string { return filepath.Join(home, url.PathEscape(tag)+".tar") }

func push(tag string) error {
	place, err := name.NewTag(tag)
	if err != nil {
		return err
	}
	img, err := tarball.ImageFromPath(archive(tag), &place)
	if err != nil {
		return fmt.Errorf("there is no image %s; build it: %w", tag, err)
	}
	return remote.Write(place, img, remote.WithAuthFromKeychain(authn.DefaultKeychain))
}
