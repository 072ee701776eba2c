package process

import (
	"os"
	"testing"
)

func TestParseStatSurvivesAHostileName(t *testing.T) {
	line := []byte("42 (a) (b 7) S 1 42 42 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 123456 0 0\n")
	started, state, err := parseStat(line)
	if err != nil || started != 123456 || state != 'S' {
		t.Errorf("parseStat = %d, %c, %v; want 123456, S, nil", started, state, err)
	}
}

func TestParseStatRefusesAShortLine(t *testing.T) {
	if _, _, err := parseStat([]byte("42 (a) S 1")); err == nil {
		t.Error("a truncated line was accepted")
	}
}

func TestAliveTellsTheProcessFromOneWithItsNumber(t *testing.T) {
	started, _, err := stat(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	self := &Process{PID: os.Getpid(), Started: started}
	if !self.Alive() {
		t.Error("a running process is not alive")
	}
	other := &Process{PID: os.Getpid(), Started: started - 1}
	if other.Alive() {
		t.Error("a process that started at another time passes for ours")
	}
}

func TestGetNamesWhatIsMissing(t *testing.T) {
	table, err := NewTable(t.TempDir(), "ls-none")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := table.Get("etcd"); err == nil || err.Error() != `find process "etcd": the lab started none of that name` {
		t.Errorf("err = %v", err)
	}
}
