package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestReport(t *testing.T) {
	var out strings.Builder
	r := report{out: &out, output: map[string][]string{}, skips: map[string]int{}}
	err := r.read(strings.NewReader(`{"Action":"output","Package":"github.com/edgebake/edgebake/a","Test":"TestOne","Output":"it is broken\n"}
{"Action":"fail","Package":"github.com/edgebake/edgebake/a","Test":"TestOne","Elapsed":2.5}
{"Action":"output","Package":"github.com/edgebake/edgebake/a","Test":"TestTwo","Output":"it is quiet\n"}
{"Action":"pass","Package":"github.com/edgebake/edgebake/a","Test":"TestTwo","Elapsed":12}
{"Action":"output","Package":"github.com/edgebake/edgebake/a","Test":"TestRoot","Output":"    a_test.go:1: SKIPPED, NOT TESTED: only root can run this\n"}
{"Action":"skip","Package":"github.com/edgebake/edgebake/a","Test":"TestRoot","Elapsed":0}
{"Action":"output","Package":"github.com/edgebake/edgebake/a","Output":"FAIL\tgithub.com/edgebake/edgebake/a\t15s\n"}
{"Action":"fail","Package":"github.com/edgebake/edgebake/a","Elapsed":15}
{"Action":"output","Package":"github.com/edgebake/edgebake/b","Test":"TestPanics","Output":"panic: b\n"}
{"Action":"fail","Package":"github.com/edgebake/edgebake/b","Elapsed":1}
{"ImportPath":"github.com/edgebake/edgebake/c","Action":"build-output","Output":"c.go:1: syntax error\n"}
{"Action":"fail","Package":"github.com/edgebake/edgebake/c","Elapsed":0}
{"Action":"output","Package":"github.com/edgebake/edgebake/d","Output":"ok  \tgithub.com/edgebake/edgebake/d\t3s\n"}
{"Action":"pass","Package":"github.com/edgebake/edgebake/d","Elapsed":3}
go: a word of go's own
`))
	if err != nil {
		t.Fatal(err)
	}
	r.end()
	const want = `it is broken
FAIL	github.com/edgebake/edgebake/a	15s
panic: b
c.go:1: syntax error
ok  	github.com/edgebake/edgebake/d	3s
go: a word of go's own
SKIPPED, NOT TESTED:
    1 times: only root can run this
The slowest tests:
    12.0 s  a TestTwo
     2.5 s  a TestOne
     0.0 s  a TestRoot
FAILED: a TestOne
FAILED: b TestPanics
FAILED: c
1 tests passed, 3 failed
`
	if got := out.String(); got != want {
		t.Errorf("the report is\n%s\nwant\n%s", got, want)
	}
}

// TestEndChildren checks that a process that a test left behind in its own session is ended.
func TestEndChildren(t *testing.T) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!").Output()
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(string(out), &pid); err != nil {
		t.Fatal(err)
	}
	endChildren()
	if err := syscall.Kill(pid, 0); err == nil {
		t.Errorf("process %d still runs", pid)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// TestInterruptedTwice sends signals to unit.sh until it ends. A second signal, which make sends too,
// must not end the removal of the tests' files.
func TestInterruptedTwice(t *testing.T) {
	script, err := filepath.Abs("../unit.sh")
	if err != nil {
		t.Fatal(err)
	}
	module, files := t.TempDir(), t.TempDir()
	for name, text := range map[string]string{
		"go.mod":    "module example.com/x\n\ngo 1.24\n",
		"x_test.go": "package x\n\nimport (\n\t\"os\"\n\t\"testing\"\n\t\"time\"\n)\n\nfunc TestSleeps(t *testing.T) {\n\tos.WriteFile(os.TempDir()+\"/began\", nil, 0o600)\n\ttime.Sleep(time.Minute)\n}\n",
	} {
		if err := os.WriteFile(filepath.Join(module, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(script, "-vet=off", ".")
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "TMPDIR="+files, "PWD="+module, "CGO_ENABLED=0")
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	began := func() bool {
		found, _ := filepath.Glob(filepath.Join(files, "*", "began"))
		return len(found) > 0
	}
	for end := time.Now().Add(5 * time.Minute); !began(); time.Sleep(10 * time.Millisecond) {
		if len(ended) > 0 || time.Now().After(end) {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			t.Fatal("the test in the module has not begun")
		}
	}
	for len(ended) == 0 {
		_ = cmd.Process.Signal(syscall.SIGTERM)
	}
	if left, _ := os.ReadDir(files); len(left) > 0 {
		t.Errorf("unit.sh left %s", left[0].Name())
	}
}
