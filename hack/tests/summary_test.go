package main

import (
	"strings"
	"testing"
)

func TestSummary(t *testing.T) {
	const line, trace = "    a_test.go:1: \n", "        \tError Trace:\ta_test.go:1\n"
	tests := []struct {
		name, events, want string
		strict, ok         bool
	}{
		{
			name: "all pass",
			events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"noise\n"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Elapsed":1}
{"Action":"skip","Package":"without/tests"}`,
			want:   "ok   p (1 tests, 1.0s)\n1 passed, 0 failed, 0 skipped\n",
			strict: true,
			ok:     true,
		},
		{
			name: "a failed test shows its output",
			events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"got 1, want 2\n"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p"}`,
			want: "FAIL p TestA\ngot 1, want 2\nFAIL p (1 tests, 0.0s)\nfailed: p TestA\ngot 1, want 2\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "the report of a data race is shown, whatever output it is in",
			events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"run","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestA","Output":"WARNING: DATA RACE\nRead by A\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"race detected during execution of test\n"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Output":"WARNING: DATA RACE\nRead by nobody\n"}
{"Action":"fail","Package":"p"}`,
			want: "WARNING: DATA RACE\nRead by A\nFAIL p TestB\nrace detected during execution of test\n" +
				"WARNING: DATA RACE\nRead by nobody\nFAIL p (2 tests, 0.0s)\n" +
				"failed: p TestB\nrace detected during execution of test\n1 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "the end has the end of a long output",
			events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"` + strings.Repeat("x", excerpt) + `\nlast\n"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p"}`,
			want: "FAIL p TestA\n" + strings.Repeat("x", excerpt) + "\nlast\nFAIL p (1 tests, 0.0s)\n" +
				"failed: p TestA\n[...]\nlast\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "a test that never ends is a failed one",
			events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"panic: timed out\n"}
{"Action":"fail","Package":"p"}`,
			want: "FAIL p TestA\npanic: timed out\nFAIL p (1 tests, 0.0s)\nfailed: p TestA\npanic: timed out\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "an assertion is at the end, and not the logs that a story prints after it",
			events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: \n        \tError Trace:\ta_test.go:1\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"` + strings.Repeat("x", 2*excerpt) + `\n"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p"}`,
			want: "FAIL p TestA\n" + line + trace + strings.Repeat("x", 2*excerpt) + "\nFAIL p (1 tests, 0.0s)\n" +
				"failed: p TestA\n" + line + trace + strings.Repeat("x", excerpt*3/4-len(trace)) +
				"[...]\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "nothing of the logs after a short assertion",
			events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: \n        \tError Trace:\ta_test.go:1\n"}
{"Action":"output","Package":"p","Test":"TestA","Output":"        \tError:\tno\n        \tTest:\tTestA\n    logs\n"}
{"Action":"fail","Package":"p","Test":"TestA"}
{"Action":"fail","Package":"p"}`,
			want: "FAIL p TestA\n" + line + trace + "        \tError:\tno\n        \tTest:\tTestA\n    logs\nFAIL p (1 tests, 0.0s)\n" +
				"failed: p TestA\n" + line + trace + "        \tError:\tno\n        \tTest:\tTestA\n[...]\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "a panic is shown, and not each test that it kept from running",
			events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestA","Output":"=== PAUSE TestA\n"}
{"Action":"pause","Package":"p","Test":"TestA"}
{"Action":"run","Package":"p","Test":"TestB"}
{"Action":"pause","Package":"p","Test":"TestB"}
{"Action":"cont","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestB","Output":"got 1, want 2\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"panic: no disco\n"}
{"Action":"output","Package":"p","Test":"TestB","Output":"` + strings.Repeat("x", excerpt) + `\n"}
{"Action":"output","Package":"p","Output":"FAIL p 1s\n"}
{"Action":"fail","Package":"p"}`,
			want: "FAIL p TestB\ngot 1, want 2\npanic: no disco\n" + strings.Repeat("x", excerpt) +
				"\nFAIL p 1s\nFAIL p (1 tests, 0.0s)\nfailed: p TestB\ngot 1, want 2\npanic: no disco\n" +
				strings.Repeat("x", excerpt*3/4-len("panic: no disco\n")) +
				"[...]\nskipped: p ended before the turn of 1 tests\nfailed: p\nFAIL p 1s\n0 passed, 1 failed, 1 skipped\n",
		},
		{
			name: "a package that does not build is a failed test",
			events: `{"ImportPath":"p [p.test]","Action":"build-output","Output":"p.go:1: broken\n"}
{"ImportPath":"p [p.test]","Action":"build-fail"}
{"Action":"output","Package":"p","Output":"FAIL p [build failed]\n"}
{"Action":"fail","Package":"p"}`,
			want: "p.go:1: broken\nFAIL p [build failed]\nFAIL p (0 tests, 0.0s)\nfailed: p\nFAIL p [build failed]\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "strict refuses a skipped test and prints why it was",
			events: `{"Action":"run","Package":"p","Test":"TestA"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"run","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestB","Output":"needs root\n"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"pass","Package":"p"}`,
			want:   "SKIP p TestB\nneeds root\nok   p (2 tests, 0.0s)\n1 passed, 0 failed, 1 skipped\n",
			strict: true,
		},
		{
			name:   "no test at all is a failure",
			events: "go: cannot load module\n",
			want:   "go: cannot load module\n0 passed, 0 failed, 0 skipped\n",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			s := newSummary(&out)
			if _, err := s.read(strings.NewReader(tt.events)); err != nil {
				t.Fatal(err)
			}
			if ok := s.close(tt.strict); ok != tt.ok {
				t.Errorf("close: %v, want %v", ok, tt.ok)
			}
			if out.String() != tt.want {
				t.Errorf("printed:\n%s\nwant:\n%s", out.String(), tt.want)
			}
		})
	}
}
