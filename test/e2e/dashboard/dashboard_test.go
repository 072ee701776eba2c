// Package dashboard_test looks at the dashboard with a real browser: what people
// see, that it follows what happens, and that nothing on it is out of bounds.
package dashboard_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// timeout is how long anything on the page may take on a busy machine.
const timeout = 60 * time.Second

// screenshots names a folder to keep the screenshots in. Empty: the test's own.
var screenshots = os.Getenv("LODESTONE_SCREENSHOTS")

// site is a dashboard of an invented cluster.
type site struct {
	url   string
	input io.Writer
}

// trigger sends a command to the invented cluster.
func (s site) trigger(t *testing.T, command string) {
	t.Helper()
	_, err := fmt.Fprintln(s.input, command)
	require.NoError(t, err)
}

var build = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "dashboard-*")
	if err != nil {
		return "", err
	}
	binary := filepath.Join(dir, "dashboard")
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", binary, "./hack/dashboard")
	cmd.Dir = "../../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build: %w: %s", err, out)
	}
	return binary, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if binary, err := build(); err == nil {
		os.RemoveAll(filepath.Dir(binary))
	}
	os.Exit(code)
}

// serve starts a dashboard; it ends with the test.
func serve(t *testing.T, args ...string) site {
	t.Helper()
	binary, err := build()
	require.NoError(t, err)
	cmd := exec.Command(binary, args...)
	cmd.Stderr = os.Stderr
	input, err := cmd.StdinPipe()
	require.NoError(t, err)
	output, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		input.Close()
		assert.NoError(t, cmd.Wait())
	})
	line, err := bufio.NewReader(output).ReadString('\n')
	require.NoError(t, err)
	return site{strings.TrimSpace(line), input}
}

// window is a window of a browser.
type window struct {
	*testing.T
	ctx context.Context

	mu sync.Mutex
	// complaints are errors on the console, exceptions and violations of the
	// content security policy.
	complaints []string
}

// open opens a window, which ends with the test.
func open(t *testing.T, width, height int64) *window {
	t.Helper()
	binary := ""
	for _, name := range []string{os.Getenv("LODESTONE_BROWSER"), "chromium-headless-shell", "chromium", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil && binary == "" {
			binary = path
		}
	}
	require.NotEmpty(t, binary, "no browser: hack/deps.sh installs chromium-headless-shell, LODESTONE_BROWSER names another one")
	allocator, stop := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(binary), chromedp.NoSandbox)...) // root has no sandbox
	t.Cleanup(stop)
	ctx, closeWindow := chromedp.NewContext(allocator)
	t.Cleanup(closeWindow)
	w := &window{T: t, ctx: ctx}
	require.NoError(t, chromedp.Listen(ctx, w.hear))
	_, err := chromedp.Call(ctx, log.Enable, cdp.Empty{})
	require.NoError(t, err)
	w.do(chromedp.EmulateViewport(width, height))
	return w
}

// hear takes note of what the browser complains about.
func (w *window) hear(event any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		w.complaints = append(w.complaints, "exception: "+e.ExceptionDetails.Text)
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.ConsoleAPICalledTypeError || e.Type == runtime.ConsoleAPICalledTypeWarning {
			w.complaints = append(w.complaints, fmt.Sprintf("console: %s", e.Args[0].Value))
		}
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError || e.Entry.Level == log.EntryLevelWarning {
			w.complaints = append(w.complaints, fmt.Sprintf("%s: %s %s", e.Entry.Source, e.Entry.Text, e.Entry.URL))
		}
	case *page.EventJavascriptDialogOpening:
		w.complaints = append(w.complaints, "dialog: "+e.Message)
	}
}

func (w *window) do(actions ...chromedp.Action[chromedp.Void]) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, timeout)
	defer cancel()
	require.NoError(w, chromedp.Do(ctx, actions...))
}

// becomes waits until an expression of the page is true.
func (w *window) becomes(what, expression string) {
	w.Helper()
	for deadline := time.Now().Add(timeout); !is[bool](w, "!!("+expression+")"); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.picture("failed-" + strings.ReplaceAll(w.Name(), "/", "-"))
			require.FailNow(w, "it never happened that "+what, is[string](w, text))
		}
	}
}

// is returns the value of an expression of the page.
func is[T any](w *window, expression string) T {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, timeout)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	require.NoError(w, err)
	return value
}

// prefer sets the browser's preferred colour scheme.
func prefer(scheme string) chromedp.Action[chromedp.Void] {
	return func(ctx context.Context, t *chromedp.Target) (none chromedp.Void, err error) {
		_, err = cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"},
		}})
		return none, err
	}
}

// picture keeps a picture of the whole page.
func (w *window) picture(name string) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, timeout)
	defer cancel()
	image, err := chromedp.Run(ctx, chromedp.FullScreenshot(100))
	require.NoError(w, err)
	folder := screenshots
	if folder == "" {
		folder = w.TempDir()
	}
	require.NoError(w, os.WriteFile(filepath.Join(folder, name+".png"), image, 0o644))
}

// content checks that the browser had nothing to complain about.
func (w *window) content() {
	w.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	assert.Empty(w, w.complaints)
}

const text = `document.body.innerText`

func TestThePageShowsTheClusterAndFollowsIt(t *testing.T) {
	s := serve(t, "-nodes=12", "-services=200")
	w := open(t, 1280, 900)
	w.do(prefer("light"), chromedp.Navigate(s.url))
	w.becomes("the page is live", `document.querySelector("#live").textContent === "live"`)
	assert.Equal(t, "All is well", is[string](w, `document.querySelector("#verdict h2").textContent`))
	assert.Equal(t, "Lodestone fra1", is[string](w, `document.title`))
	assert.EqualValues(t, 12, is[int](w, `document.querySelectorAll(".node").length`))
	assert.EqualValues(t, 25, is[int](w, `document.querySelectorAll("#vips tr").length`), "one page of VIPs")
	assert.EqualValues(t, 4, is[int](w, `document.querySelectorAll(".pool").length`))
	w.picture("light")

	s.trigger(t, "session 3 hold timer expired: the router was not heard for 1m30s")
	w.becomes("the page shows that the session is down", text+`.includes("worker-03 has no session with tor-b: hold timer expired")`)
	w.becomes("what is wrong comes first", `document.querySelector(".node button").textContent === "worker-03"`)
	s.trigger(t, "speaker 5 down")
	w.becomes("the VIPs of a lost speaker have moved", `/from worker-05 to worker-/.test(`+text+`)`)
	w.picture("trouble-live")
	for _, speaker := range []string{"6", "7"} {
		s.trigger(t, "speaker "+speaker+" down")
	}
	w.becomes("how many speakers are not ready is shown", text+`.includes("3 not ready")`)
	for _, speaker := range []string{"5", "6", "7"} {
		s.trigger(t, "speaker "+speaker+" up")
	}
	s.trigger(t, "session 3")
	w.becomes("all is well again", `document.querySelector("#verdict h2").textContent === "All is well"`)
	assert.True(t, is[bool](w, `document.querySelector("#live").textContent === "live"`), "without a reload")
	w.content()
}

func TestSearchAndPages(t *testing.T) {
	s := serve(t, "-nodes=36", "-services=400")
	w := open(t, 1280, 900)
	w.do(chromedp.Navigate(s.url))
	w.becomes("there are VIPs", `document.querySelectorAll("#vips tr").length === 25`)
	first := is[string](w, `document.querySelector("#vips td").textContent`)
	w.do(chromedp.Click(chromedp.CSS(`#vips-pages button:last-of-type`)))
	w.becomes("the next page is there", `document.querySelector("#vips td").textContent !== "`+first+`" && /page 2 of 16/.test(`+text+`)`)
	w.do(chromedp.Click(chromedp.CSS(`#nodes-pages button:last-of-type`)))
	w.becomes("the other nodes are there", `document.querySelectorAll(".node").length === 12`)
	w.do(chromedp.SendKeys(chromedp.CSS(`input[type=search]`), "media/API-0001"))
	w.becomes("one VIP is found", `document.querySelector("#vips-count").textContent === "1"`)
	assert.Contains(t, is[string](w, `document.querySelector("#vips").innerText`), "media/api-0001")
	is[bool](w, `(() => { const i = document.querySelector("input[type=search]"); i.value = ""; return i.dispatchEvent(new Event("input", {bubbles: true})); })()`)
	w.do(chromedp.Click(chromedp.CSS(`input[type=checkbox]`)))
	w.becomes("nothing is in trouble", text+`.includes("No VIP is like that.")`)
	w.content()
}

// Names and messages that others choose stay text.
func TestHostileTextsStayTexts(t *testing.T) {
	s := serve(t, "-nodes=6", "-services=40", "-trouble")
	w := open(t, 1280, 900)
	w.do(prefer("dark"), chromedp.Navigate(s.url))
	w.becomes("the hostile node is shown", `[...document.querySelectorAll(".node button")].some(b => b.textContent.includes("<img src=x"))`)
	w.becomes("the hostile message is shown", `document.querySelector("#events").textContent.includes("<img src=x")`)
	assert.Zero(t, is[int](w, `document.querySelectorAll("img[src=x], main img, main script").length`))
	assert.NotEqual(t, "owned", is[string](w, `document.title`))
	w.picture("trouble-dark")
	w.content()
}

func TestPhone(t *testing.T) {
	s := serve(t, "-nodes=6", "-services=80", "-trouble")
	for _, scheme := range []string{"light", "dark"} {
		t.Run(scheme, func(t *testing.T) {
			w := open(t, 390, 844)
			w.do(prefer(scheme), chromedp.Navigate(s.url))
			w.becomes("there are VIPs", `document.querySelectorAll("#vips tr").length > 20`)
			assert.EqualValues(t, 390, is[int](w, `document.documentElement.scrollWidth`), "nothing is cut off at the right")
			assert.Empty(t, is[[]string](w, `[...document.querySelectorAll("main *")].filter(e => e.getBoundingClientRect().right > 391 && getComputedStyle(e).position !== "absolute").map(e => e.className || e.tagName)`))
			w.picture("phone-" + scheme)
			w.content()
		})
	}
}

// TestContrast: every text has enough contrast, by WCAG 2.2 level AA.
func TestContrast(t *testing.T) {
	s := serve(t, "-nodes=6", "-services=40", "-trouble")
	for _, scheme := range []string{"light", "dark"} {
		t.Run(scheme, func(t *testing.T) {
			w := open(t, 1280, 900)
			w.do(prefer(scheme), chromedp.Navigate(s.url))
			w.becomes("there are VIPs", `document.querySelectorAll("#vips tr").length > 20`)
			ground := is[string](w, `getComputedStyle(document.body).backgroundColor`)
			assert.Equal(t, map[string]string{"light": "rgb(244, 246, 248)", "dark": "rgb(14, 19, 24)"}[scheme], ground)
			assert.Empty(t, is[[]string](w, poorContrast))
		})
	}
}

// poorContrast lists texts with a contrast below 4.5 to 1.
const poorContrast = `(() => {
  const parse = (c) => { const m = c.match(/[\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
  const light = ([r, g, b]) => { const f = (v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255]; };
  const poor = new Set();
  for (const e of document.querySelectorAll("body *")) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.add(e.tagName + "." + e.className + " " + ratio.toFixed(2));
  }
  return [...poor];
})()`

// TestManyServices: the page stays as small as it is with few.
func TestManyServices(t *testing.T) {
	s := serve(t, "-nodes=50", "-services=10000")
	w := open(t, 1280, 900)
	w.do(chromedp.Navigate(s.url))
	w.becomes("there are VIPs", `document.querySelectorAll("#vips tr").length === 25`)
	assert.Less(t, is[int](w, `document.querySelectorAll("*").length`), 3000)
	w.picture("many")
	w.content()
}
