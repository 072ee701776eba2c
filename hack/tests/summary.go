package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// slow is the duration from which a test has a line of its own, so that its progress can be
// seen.
const slow = 10 * time.Second

// excerpt is how many bytes of a failed test's output are printed again at the
// end, so that the end alone has the reason.
const excerpt = 1600

// reason is where an output has why a test failed: at a panic, after which come the stacks of all goroutines, or at an
// assertion, after which a story prints the logs of the lab. A short assertion has an end.
var reason = regexp.MustCompile(fmt.Sprintf(`(?ms)^(panic|fatal error): |^\s+Error Trace:(.{0,%d}?\n\s+Test:[^\n]*\n)?`, excerpt/2))

// event is one line of test2json.
type event struct {
	Action     string
	Package    string
	ImportPath string // of build output
	Test       string
	Elapsed    float64
	Output     string
}

// key is a test, or a package when test is empty.
type key struct{ pkg, test string }

// summary is what became of the tests. Several may be read at a time.
type summary struct {
	// began is called with the package of each test that begins. It may be nil.
	began func(pkg string)

	mu                      sync.Mutex
	out                     io.Writer
	passed, failed, skipped int
	// output is what unfinished tests and packages have printed.
	output map[key]*strings.Builder
	// paused are the tests that wait until those that are not parallel have ended.
	paused map[key]bool
	// tests counts the finished tests of each package, bad the failed ones.
	tests, bad map[string]int
	// failures are the last lines of what failed.
	failures []string
}

func newSummary(out io.Writer) *summary {
	return &summary{out: out, output: map[key]*strings.Builder{}, paused: map[key]bool{}, tests: map[string]int{}, bad: map[string]int{}}
}

// read reads the events of `go test -json`, and reports whether one is that something has failed.
func (s *summary) read(r io.Reader) (failed bool, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		failed = s.line(lines.Bytes()) || failed
	}
	return failed, lines.Err()
}

func (s *summary) line(text []byte) (failed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var e event
	if err := json.Unmarshal(text, &e); err != nil {
		fmt.Fprintf(s.out, "%s\n", text) // the go command itself prints plain text
		return false
	}
	s.add(e)
	return e.Action == "fail"
}

func (s *summary) add(e event) {
	k := key{cmp.Or(e.Package, e.ImportPath), e.Test}
	switch e.Action {
	case "run":
		if s.began != nil {
			s.began(e.Package)
		}
		s.output[k] = &strings.Builder{}
	case "pause":
		s.paused[k] = true
	case "cont":
		delete(s.paused, k)
	case "output", "build-output":
		if s.output[k] == nil {
			s.output[k] = &strings.Builder{}
		}
		s.output[k].WriteString(e.Output)
	case "build-fail":
		fmt.Fprintf(s.out, "%s", s.output[k])
		delete(s.output, k)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.finishPackage(k, e)
		} else {
			s.finishTest(k, e)
		}
	}
}

func (s *summary) finishTest(k key, e event) {
	output := s.output[k]
	delete(s.output, k)
	s.tests[k.pkg]++
	took := time.Duration(e.Elapsed * float64(time.Second))
	switch e.Action {
	case "fail":
		fmt.Fprintf(s.out, "FAIL %s %s\n%s", k.pkg, k.test, output)
		s.fail(k.pkg, 1, fmt.Sprintf(" %s\n%s", k.test, end(output)))
	case "skip":
		s.skipped++
		fmt.Fprintf(s.out, "SKIP %s %s\n%s", k.pkg, k.test, output)
	default:
		s.passed++
		if took >= slow {
			fmt.Fprintf(s.out, "pass %s %s (%v)\n", k.pkg, k.test, took)
		}
		s.raced(output)
	}
}

func (s *summary) finishPackage(k key, e event) {
	// A test that has not ended when its package ends did not pass. Those that wait for their turn have nothing to print.
	waiting, running := 0, false
	for _, test := range s.unfinished(k.pkg) {
		if s.paused[test] {
			waiting++
			continue
		}
		running = true
		s.finishTest(test, event{Action: "fail"})
	}
	if s.skipped += waiting; waiting > 0 {
		s.failures = append(s.failures, fmt.Sprintf("skipped: %s ended before the turn of %d tests\n", k.pkg, waiting))
	}
	if output := s.output[k]; e.Action == "fail" && (running && output != nil || s.bad[k.pkg] == 0) {
		// It did not build, panicked, or timed out.
		fmt.Fprintf(s.out, "%s", output)
		s.fail(k.pkg, max(0, 1-s.bad[k.pkg]), "\n"+end(output))
	}
	s.raced(s.output[k])
	delete(s.output, k)
	if s.tests[k.pkg] > 0 || s.bad[k.pkg] > 0 {
		fmt.Fprintf(s.out, "%-4s %s (%d tests, %.1fs)\n", map[bool]string{true: "ok", false: "FAIL"}[s.bad[k.pkg] == 0], k.pkg,
			s.tests[k.pkg], e.Elapsed)
	}
}

// fail counts failed tests of the package. The text, which follows the package's name, is for the end of what is printed.
func (s *summary) fail(pkg string, tests int, text string) {
	s.failed += tests
	s.bad[pkg] += tests
	s.failures = append(s.failures, "failed: "+pkg+text)
}

// raced prints an output that has the report of a data race. All tests that run at that moment fail, and the report may
// be in the output of another one.
func (s *summary) raced(output *strings.Builder) {
	if output != nil && strings.Contains(output.String(), "WARNING: DATA RACE") {
		fmt.Fprintf(s.out, "%s", output)
	}
}

// unfinished are the tests of the package that have not ended, by name.
func (s *summary) unfinished(pkg string) []key {
	var keys []key
	for k := range s.output {
		if k.pkg == pkg && k.test != "" {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b key) int { return strings.Compare(a.test, b.test) })
	return keys
}

// end returns the lines of an output with the reason, or the last ones.
func end(output *strings.Builder) string {
	if output == nil {
		return ""
	}
	text := output.String()
	if at := reason.FindStringSubmatchIndex(text); at != nil {
		through := at[0] + excerpt*3/4
		if at[4] >= 0 {
			through = at[1]
		}
		if len(text) > through {
			text = text[:through] + "[...]\n"
		}
	}
	if len(text) <= excerpt {
		return text
	}
	text = text[len(text)-excerpt:]
	return "[...]" + text[max(strings.IndexByte(text, '\n'), 0):]
}

// close prints the counts and reports whether all is well. No tests at all is
// not: something kept them from running.
func (s *summary) close(strict bool) bool {
	fmt.Fprint(s.out, strings.Join(s.failures, ""))
	fmt.Fprintf(s.out, "%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	return s.failed == 0 && s.passed > 0 && (!strict || s.skipped == 0)
}
