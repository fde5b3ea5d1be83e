package main

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

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
