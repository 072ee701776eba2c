package tutorial_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"github.com/lodestone-lb/lodestone/test/e2e/lab"
	"github.com/lodestone-lb/lodestone/test/e2e/lodestone"
	"github.com/lodestone-lb/lodestone/test/e2e/netns"
	"github.com/lodestone-lb/lodestone/test/e2e/pki"
	"github.com/lodestone-lb/lodestone/test/e2e/probe"
	"github.com/lodestone-lb/lodestone/test/e2e/program"
	"github.com/lodestone-lb/lodestone/test/e2e/registry"
)

const (
	user, password = "USER", "PASSWORD" // as the tutorial has them
	firstVIP       = "198.18.0.193"
	earlyVIP       = "198.18.0.200"
	// firstVIPWithin is when nobody waits any longer for the first answer after helm install. How long it takes is measured for
	// docs/reference/benchmarks.md.
	firstVIPWithin = 3 * time.Minute
)

// TestInstallFromARegistry does what the README and the tutorial about a real cluster have those do
// who have a registry. It is on the lab's client, and nothing reaches any other one. What is
// installed is what is committed, because a release is of a commit.
func TestInstallFromARegistry(t *testing.T) {
	t.Parallel()
	root, err := lab.Root()
	require.NoError(t, err)
	i := &installer{T: t, clone: filepath.Join(t.TempDir(), "lodestone"), key: filepath.Join(t.TempDir(), "key.pem")}
	i.outside(root, "git", "clone", "--quiet", ".", i.clone)
	require.NoError(t, pki.WriteKey(i.key))
	// Whatever a build has to download comes from outside of the lab.
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	require.NoError(t, err)
	steps := prompted(section(t, string(readme), "Install"), "$ ")
	require.Regexp(t, "^make release ", steps[0].text)
	started := time.Now()
	i.outside(i.clone, "bash", "-c", theirs.Replace(steps[0].text)+" KEY="+i.key)
	t.Logf("made the release in %s", time.Since(started).Round(time.Second))
	docker, err := program.Builder{Root: root, Progress: t.Logf}.Own(t.Context(), "docker")
	require.NoError(t, err)

	i.Cluster, err = lab.Up(t.Context(), lab.Options{NoLodestone: true, Progress: t.Logf})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, i.Down(context.Background())) })
	i.registry, err = registry.New(i.Namespace(lab.Client), i.Addresses(lab.Client)[0], t.TempDir())
	require.NoError(t, err)
	home := t.TempDir()
	i.env = []string{
		"SSL_CERT_FILE=" + i.registry.CA, "DOCKER_CONFIG=" + home,
		"HELM_CACHE_HOME=" + home, "HELM_CONFIG_HOME=" + home, "HELM_DATA_HOME=" + home,
	}
	i.set = "PATH=" + filepath.Join(i.clone, "bin") + ":" + filepath.Dir(docker) + ":$PATH\n"
	tutorial := document(t, i.Cluster, "tutorial/real-cluster.md")
	i.trust(fenced(t, tutorial, "toml"))

	i.fromARelease(section(t, string(readme), "Install"), steps[1:])
	for _, command := range prompted(tutorial[strings.LastIndex(tutorial, "To undo it all"):], "$ ") {
		i.run(command)
	}
	nothingLeft(t, i.Cluster)
	i.byTheTutorial(tutorial)
	nothingLeft(t, i.Cluster)
}

// theirs replaces what a reader has under another name, after inTheLab. Whoever asks for 62
// addresses waits for as many seconds. The lab's Helm is no release of Helm, which knows the
// Kubernetes of its time: it renders for 1.20.
var theirs = strings.NewReplacer(
	"registry.example.com", "198.18.0.100",
	"linux/amd64", "linux/"+runtime.GOARCH,
	"seq 1 62", "seq 1 3",
	"~/.docker", "$DOCKER_CONFIG",
	"helm template", "helm template --kube-version 1.31.0",
	"203.0.113.$i", "198.18.0.$((192 + i))",
)

// busy is what diagnose finds on a machine with more to do than it can: speakers were late, and nothing else is wrong.
var busy = regexp.MustCompile(`^0 errors, \d+ warnings?, 0 unknown;.*\n\n(WARNING +heartbeats .*\n( .*\n)+\n)+ok: `)

// installer is the reader.
type installer struct {
	*testing.T
	*lab.Cluster
	registry *registry.Registry
	clone    string   // of the repository
	key      string   // that signs releases
	env      []string // of a computer that trusts the registry's authority
	set      string   // what the shell keeps from command to command
	owner    string   // of the first VIP
	leave    func() string
}

// outside runs a command on this machine, not in the lab.
func (i *installer) outside(dir string, args ...string) {
	i.Helper()
	cmd := exec.CommandContext(i.Context(), args[0], args[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "LODESTONE_RELEASE_KEY=") // what another make was given is nothing to this one
	out, err := cmd.CombinedOutput()
	require.NoError(i, err, "%v: %s", args, out)
}

// trust has containerd know the authority of the registry, by the tutorial's file.
func (i *installer) trust(hosts string) {
	i.Helper()
	authority, err := os.ReadFile(i.registry.CA)
	require.NoError(i, err)
	for _, node := range i.Nodes() {
		dir := filepath.Join(i.Registries(node), i.registry.Host)
		require.NoError(i, os.MkdirAll(dir, 0o755))
		require.NoError(i, os.WriteFile(filepath.Join(dir, "ca.crt"), authority, 0o600))
		require.NoError(i, os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(theirs.Replace(hosts)), 0o600))
	}
}

// shell returns a command that will run in the clone, by the reader's shell.
func (i *installer) shell(ctx context.Context, c command) *exec.Cmd {
	cmd := i.Command(ctx, c.host, "bash", "-euo", "pipefail", "-c", i.set+theirs.Replace(inTheLab.Replace(c.text)))
	cmd.Dir, cmd.Env, cmd.Stdin = i.clone, append(cmd.Env, i.env...), strings.NewReader(user+"\n"+password+"\n")
	return cmd
}

// run runs a command once, or until it shows what is promised.
func (i *installer) run(c command) (output string) {
	i.Helper()
	ctx, cancel := context.WithTimeout(i.Context(), 6*time.Minute)
	defer cancel()
	once := func() error {
		raw, err := i.shell(ctx, c).CombinedOutput()
		if output = string(raw); err != nil && !(strings.HasPrefix(c.text, "lodestone diagnose") && busy.MatchString(output)) {
			return fmt.Errorf("%w: %s", err, raw)
		}
		return nil
	}
	err := error(nil)
	if want := promise(c.text); want == nil {
		err = once()
	} else {
		err = lodestone.Wait(ctx, c.text, func() error {
			if err := once(); err != nil || want.MatchString(output) {
				return err
			}
			return fmt.Errorf("it does not match %s: %s", want, output)
		})
	}
	require.NoError(i, err, "line %d: %s", c.line, c.text)
	i.Logf("$ %s\n%s", c.text, output)
	return output
}

// refused runs a command that has to fail, and that with a text.
func (i *installer) refused(c command, want string) {
	i.Helper()
	output, err := i.shell(i.Context(), c).CombinedOutput()
	require.Error(i, err, "%s: %s", c.text, output)
	require.Regexp(i, want, string(output), c.text)
	i.Logf("$ %s\n%s", c.text, output)
}

func promise(text string) *regexp.Regexp {
	for begin, want := range map[string]string{
		"kubectl get nodes -o wide":              `(?m)^n1 +Ready .*\nn2 +Ready .*\nn3 +Ready `,
		"kubectl -n kube-system get configmap":   `mode: nftables`,
		"bin/lodestone version":                  `^lodestone `,
		"kubectl -n lodestone-system get pods":   `(?s)(lodestone-(controller|speaker)\S+ +1/1 +Running.*){5}`,
		"kubectl -n lodestone-system get events": `ImagePullBackOff`,
		"helm test":                              `Phase: +Succeeded`,
		"lodestone status":                       `3`,
		"lodestone diagnose":                     ``,
		"kubectl get service web":                `(?m)^web +LoadBalancer +[0-9.]+ +198\.18\.0\.193 `,
		"lodestone explain service web":          `198\.18\.0\.193`,
		"lodestone simulate drain":               `198\.18\.0\.193`,
		"curl":                                   `{"pod":"web-`,
		"ip neighbor":                            hardwareAddress.String(),
	} {
		if strings.HasPrefix(text, begin) {
			return regexp.MustCompile(want)
		}
	}
	return nil
}

// file writes a file of a page into the clone.
func (i *installer) file(name, text string) {
	i.Helper()
	require.NoError(i, os.WriteFile(filepath.Join(i.clone, name), []byte(theirs.Replace(inTheLab.Replace(text))), 0o600))
}

// fromARelease does what the README has after the release is made, and on the way what the guide to
// verifying has.
func (i *installer) fromARelease(text string, steps []command) {
	require.NoError(i, i.registry.Open("", ""))
	guide := document(i.T, i.Cluster, "guides/verify-a-release.md")
	i.verifyFiles(section(i.T, guide, "Files"))
	i.kubectl("create deployment web --image=nginx --port=80 --replicas=2")
	i.kubectl("expose deployment web --type=LoadBalancer --port=80")
	i.file("values.yaml", fenced(i.T, text, "yaml"))
	for _, c := range steps {
		switch {
		case strings.HasPrefix(c.text, "make push"):
			i.push(c, prompted(section(i.T, guide, "Before it goes into a registry of yours"), "$ "))
		case strings.HasPrefix(c.text, "helm install"):
			require.NoError(i, i.registry.Close())
			i.refused(c, `198\.18\.0\.100.*connection refused`)
			require.NoError(i, i.registry.Open("", ""))
			started := time.Now()
			i.run(c)
			i.answers(firstVIP, firstVIPWithin)
			i.Logf("install first_vip_s=%.1f", time.Since(started).Seconds())
		default:
			i.run(c)
		}
	}
	require.NoError(i, i.registry.Close())
}

// kubectl does what is no command of a page.
func (i *installer) kubectl(args string) {
	i.run(command{host: lab.ControlPlane, text: "kubectl " + args})
}

// answers waits until the client has an answer of an address.
func (i *installer) answers(address string, timeout time.Duration) {
	i.Helper()
	ctx, cancel := context.WithTimeout(i.Context(), timeout)
	defer cancel()
	for {
		asking, done := context.WithTimeout(ctx, time.Second)
		_, err := probe.Get(asking, i.Namespace(lab.Client), netip.AddrPortFrom(netip.MustParseAddr(address), 80))
		done()
		if err == nil {
			return
		}
		require.NoError(i, ctx.Err(), "%s does not answer: %v", address, err)
		time.Sleep(50 * time.Millisecond)
	}
}

// verifyFiles does what the guide has for those without cosign, and then with another key.
func (i *installer) verifyFiles(guide string) {
	i.Helper()
	for _, c := range prompted(guide, "$ ") {
		if strings.HasPrefix(c.text, "cosign") {
			continue
		}
		c.text = "cd dist; " + c.text
		i.run(c)
		if strings.Contains(c.text, "openssl") {
			i.run(command{host: lab.ControlPlane, text: "openssl ecparam -name prime256v1 -genkey -noout | openssl ec -pubout -out other.pub"})
			c.text = strings.Replace(c.text, "cosign.pub", "../other.pub", 1)
			i.refused(c, "Verification failure")
		}
	}
}

// push pushes the release as the guide has it, which wants a password and verifies it before, and as
// the README has it.
func (i *installer) push(readme command, guide []command) {
	i.Helper()
	require.Len(i, guide, 2)
	login, verified := guide[0], guide[1]
	require.Contains(i, verified.text, "PUBLIC_KEY=cosign.pub")
	i.run(command{host: lab.ControlPlane, text: "cp dist/cosign.pub ."})
	other := verified
	other.text = strings.Replace(verified.text, "cosign.pub", "other.pub", 1)
	i.refused(other, "is not the signature of checksums.txt by the key .*other.pub")
	require.NoError(i, i.registry.Close())
	i.refused(readme, `push 198\.18\.0\.100/lodestone/lodestone-controller:v0\.1\.0: .*connection refused`)
	require.NoError(i, i.registry.Open(user, password))
	i.refused(verified, `docker login 198\.18\.0\.100: `)
	i.run(login)
	i.run(verified)
	require.NoError(i, i.registry.Close())
	require.NoError(i, i.registry.Open("", ""))
	i.run(readme)

	public, err := os.ReadFile(filepath.Join(i.clone, "cosign.pub"))
	require.NoError(i, err)
	block, _ := pem.Decode(public)
	key, err := x509.ParsePKIXPublicKey(block.Bytes)
	require.NoError(i, err)
	list, err := os.ReadFile(filepath.Join(i.clone, "dist", "images.txt"))
	require.NoError(i, err)
	for line := range strings.Lines(string(list)) {
		place, digest, _ := strings.Cut(strings.TrimSpace(strings.TrimPrefix(line, "ghcr.io/lodestone-lb/")), "@")
		repository, tag, _ := strings.Cut(place, ":")
		sum := sha256.Sum256(i.get("lodestone/"+repository, "manifests/"+tag))
		require.Equal(i, digest, "sha256:"+hex.EncodeToString(sum[:]), line)
		i.signedBy(key.(*ecdsa.PublicKey), "lodestone/"+repository, digest)
		if strings.HasPrefix(repository, "charts/") && tag == "0.1.0" {
			pull := "helm pull oci://registry.example.com/lodestone/charts/lodestone --version 0.1.0 --destination " + i.TempDir()
			require.Contains(i, i.run(command{host: lab.ControlPlane, text: pull}), "Digest: "+digest)
		}
	}
}

// get returns what the registry has.
func (i *installer) get(repository, what string) []byte {
	i.Helper()
	authority, err := os.ReadFile(i.registry.CA)
	require.NoError(i, err)
	roots := x509.NewCertPool()
	require.True(i, roots.AppendCertsFromPEM(authority))
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DialContext: netns.Dialer(i.Namespace(lab.ControlPlane)), TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true,
	}}
	request, err := http.NewRequestWithContext(i.Context(), http.MethodGet, "https://"+i.registry.Host+"/v2/"+repository+"/"+what, nil)
	require.NoError(i, err)
	response, err := client.Do(request)
	require.NoError(i, err)
	defer response.Body.Close()
	require.Equal(i, http.StatusOK, response.StatusCode, what)
	content, err := io.ReadAll(response.Body)
	require.NoError(i, err)
	return content
}

// signedBy looks where cosign looks, and as cosign does.
func (i *installer) signedBy(key *ecdsa.PublicKey, repository, digest string) {
	i.Helper()
	var manifest v1.Manifest
	require.NoError(i, json.Unmarshal(i.get(repository, "manifests/"+strings.Replace(digest, ":", "-", 1)+".sig"), &manifest))
	require.Len(i, manifest.Layers, 1)
	text := i.get(repository, "blobs/"+manifest.Layers[0].Digest.String())
	require.Contains(i, string(text), `"docker-manifest-digest":"`+digest+`"`)
	signature, err := base64.StdEncoding.DecodeString(manifest.Layers[0].Annotations["dev.cosignproject.cosign/signature"])
	require.NoError(i, err)
	sum := sha256.Sum256(text)
	require.True(i, ecdsa.VerifyASN1(key, sum[:], signature), "the signature of %s", repository)
	sum[0] ^= 1
	require.False(i, ecdsa.VerifyASN1(key, sum[:], signature), "the signature of %s is one of anything", repository)
}

// byTheTutorial does all that is in it.
func (i *installer) byTheTutorial(text string) {
	require.NoError(i, i.registry.Open(user, password))
	// kubeadm would have made it.
	i.kubectl("--namespace kube-system create configmap kube-proxy --from-literal=config.conf='mode: nftables'")
	i.file("values.yaml", fenced(i.T, text, "yaml"))
	commands := prompted(text, "$ ")
	require.Greater(i, len(commands), 30)
	for _, c := range commands {
		i.follow(c)
	}
	require.NoError(i, i.registry.Close())
}

// follow runs a command as a reader does.
func (i *installer) follow(c command) {
	i.Helper()
	c.text = strings.ReplaceAll(c.text, " NODE", " "+i.owner)
	switch {
	case regexp.MustCompile(`^[A-Z]+=`).MatchString(c.text):
		i.set += theirs.Replace(c.text) + "\n"
	case strings.HasPrefix(c.text, "for i in "): // a shell takes no answer for a failure, a reader does not
		c.text += "; true"
		require.Empty(i, i.run(c), "an address is taken")
	case strings.HasPrefix(c.text, "helm install"):
		i.whileTheRegistryIsAway(c)
	case strings.HasPrefix(c.text, "ip neighbor"):
		owner, err := i.Owner(netip.MustParseAddr(firstVIP))
		require.NoError(i, err)
		i.run(c)
		i.owner = owner
		require.Contains(i, i.run(command{host: lab.ControlPlane, text: "lodestone explain vip " + firstVIP}), owner)
	case strings.HasPrefix(c.text, "while sleep"):
		c.text = "set +e; " + c.text // a reader's shell goes on after a failure
		i.leave = untilLeft(i.T, func(ctx context.Context) *exec.Cmd { return i.shell(ctx, c) })
	case strings.HasPrefix(c.text, "kubectl label node "+i.owner) && i.owner != "":
		i.run(c)
		i.moved(strings.HasSuffix(c.text, "=true"))
	case strings.HasPrefix(c.text, "kubectl delete service web"):
		i.codes()
		i.run(c)
	default:
		i.run(c)
	}
}

// moved waits until the first VIP has left its owner, or is back.
func (i *installer) moved(away bool) {
	i.Helper()
	require.NoError(i, lodestone.Wait(i.Context(), "the VIP moves", func() error {
		owner, err := i.Owner(netip.MustParseAddr(firstVIP))
		if err == nil && (owner != i.owner) != away {
			err = fmt.Errorf("it is at %s, and was at %s", owner, i.owner)
		}
		return err
	}))
	time.Sleep(3 * time.Second) // a reader looks at the other terminal
}

// codes leaves the other terminal. A request may be lost to each of the two moves.
func (i *installer) codes() {
	i.Helper()
	codes := strings.Fields(i.leave())
	i.Logf("%s", codes)
	require.Greater(i, len(codes), 5)
	lost := 0
	for _, code := range codes {
		if code != "200" {
			lost++
		}
	}
	require.LessOrEqual(i, lost, 2, "%s", codes)
}

// whileTheRegistryIsAway installs, and has the registry come back when the cluster complains. There
// is a Service already, with an address that the tutorial does not come to.
func (i *installer) whileTheRegistryIsAway(c command) {
	i.Helper()
	i.kubectl("create deployment early --image=nginx --port=80")
	i.kubectl("create service loadbalancer early --tcp=80:8080")
	i.kubectl("annotate service early lodestone.io/addresses=" + earlyVIP)
	require.NoError(i, i.registry.Close())
	var output []byte
	installed := make(chan error, 1)
	go func() (err error) {
		defer func() { installed <- err }()
		if output, err = i.shell(i.Context(), c).CombinedOutput(); err != nil {
			err = fmt.Errorf("%w: %s", err, output)
		}
		return err
	}()
	events := i.run(command{host: lab.ControlPlane, text: "kubectl -n lodestone-system get events"})
	require.Regexp(i, `198\.18\.0\.100.*connection refused`, events)
	answerers, err := lodestone.Arping(i.Context(), i.Namespace(lab.Client), earlyVIP, 3)
	require.NoError(i, err)
	require.Empty(i, answerers, "who has announced it?")

	require.NoError(i, i.registry.Open(user, password))
	i.oneAnswererUntil(installed)
	i.Logf("$ %s\n%s", c.text, output)
	i.answers(earlyVIP, time.Minute)
	installation, err := lodestone.New(i.Cluster)
	require.NoError(i, err)
	// It may move once more, to the speaker that was ready last.
	one := func() error { return installation.OneAnswerer(i.Context(), earlyVIP) }
	require.NoError(i, lodestone.Wait(i.Context(), "one node answers", one))
	i.kubectl("delete service,deployment early")
}

// oneAnswererUntil asks for the early VIP until Lodestone is installed. While it moves to a speaker
// that has come, two may answer one request, but not the next one as well.
func (i *installer) oneAnswererUntil(installed <-chan error) {
	i.Helper()
	for twice := 0; ; {
		select {
		case err := <-installed:
			require.NoError(i, err)
			return
		default:
		}
		answerers, err := lodestone.Arping(i.Context(), i.Namespace(lab.Client), earlyVIP, 1)
		require.NoError(i, err)
		slices.Sort(answerers)
		if len(slices.Compact(answerers)) > 1 {
			twice++
		} else {
			twice = 0
		}
		require.Less(i, twice, 2, "nodes that answer for it: %s", answerers)
	}
}

// section returns what a page has under a heading.
func section(t *testing.T, markdown, heading string) string {
	t.Helper()
	_, text, found := strings.Cut(markdown, "\n## "+heading+"\n")
	require.True(t, found, heading)
	text, _, _ = strings.Cut(text, "\n## ")
	return text
}

// fenced returns the first block of a language.
func fenced(t *testing.T, markdown, language string) string {
	t.Helper()
	block := regexp.MustCompile("(?s)```" + language + "\n(.*?)```").FindStringSubmatch(markdown)
	require.NotNil(t, block, language)
	return block[1]
}
