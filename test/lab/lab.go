// Package lab runs real systems for tests and the demo: a Kubernetes control plane as processes of
// this host, and virtual machines that boot edgebake's images and join it.
//
// A Lab owns a directory and every process that was started in it. Close ends those processes by
// their IDs, and no others. Guests are observed only from outside: by their serial console, the API
// server, and their disks once they are off. No agent runs in them.
package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Lab is a working directory, with the processes started in it.
type Lab struct {
	Dir     string
	sockets string // short path: a socket's path may have only 107 bytes
	log     io.Writer

	mu    sync.Mutex
	procs []*Process
	undo  []func() error
	slow  bool // the API servers are emulated, and their clocks may be slower than this host's
}

// New makes a lab in dir, which it creates if it is missing. log gets progress messages for a
// person.
func New(dir string, log io.Writer) (*Lab, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("making a lab in %s: %w", dir, err)
	}
	// The directory will contain the keys of a cluster's CA.
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making a lab: %w", err)
	}
	sockets, err := os.MkdirTemp("", "lab-")
	if err != nil {
		return nil, fmt.Errorf("making a lab: %w", err)
	}
	l := &Lab{Dir: dir, sockets: sockets, log: log}
	l.onClose(func() error { return os.RemoveAll(sockets) })
	return l, nil
}

func (l *Lab) say(format string, a ...any) { fmt.Fprintf(l.log, format+"\n", a...) }

// Close ends the processes, newest first, and then reverts everything else. It keeps the directory.
func (l *Lab) Close() error {
	l.mu.Lock()
	procs, undo := slices.Clone(l.procs), slices.Clone(l.undo)
	l.procs, l.undo = nil, nil
	l.mu.Unlock()
	var errs []error
	for _, p := range slices.Backward(procs) {
		p.Kill()
	}
	for _, f := range slices.Backward(undo) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

func (l *Lab) onClose(f func() error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.undo = append(l.undo, f)
}

// Process is a program that the lab has started.
type Process struct {
	Name string
	Log  string // path of the file with its output

	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended
	err  error         // why the process ended; valid once done is closed
}

// start runs argv until it ends or the lab is closed. Its output goes to Dir/NAME.log, but standard
// output goes to stdout if that is not nil.
func (l *Lab) start(name string, argv []string, stdout io.Writer) (*Process, error) {
	p := &Process{Name: name, Log: filepath.Join(l.Dir, name+".log"), done: make(chan struct{})}
	f, err := os.OpenFile(p.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Dir = l.Dir
	p.cmd.Stderr = f
	p.cmd.Stdout = f
	if stdout != nil {
		p.cmd.Stdout = stdout
	}
	// A new process group protects the process from Ctrl-C at the terminal. The parent-death signal
	// ends it together with this program.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	err = p.cmd.Start()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		f.Close()
		close(p.done)
	}()
	l.mu.Lock()
	l.procs = append(l.procs, p)
	l.mu.Unlock()
	return p, nil
}

// Pid returns the ID of the process.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Kill ends the process at once and waits until it is gone.
func (p *Process) Kill() {
	// An error means that the process has already ended.
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Signal sends a signal, such as SIGSTOP.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// ended returns an error, with the last lines of the log, if the process has ended.
func (p *Process) ended() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended (%v); its last lines:\n%s", p.Name, p.err, tailFile(p.Log, 2<<10))
	default:
		return nil
	}
}

// run runs a command and returns its standard output. The error includes all of its output.
func (l *Lab) run(ctx context.Context, argv ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = l.Dir
	var out, both bytes.Buffer
	cmd.Stdout = io.MultiWriter(&out, &both)
	cmd.Stderr = &both
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Run(); err != nil {
		return out.Bytes(), fmt.Errorf("running %q: %w: %s", argv, err, bytes.TrimSpace(both.Bytes()))
	}
	return out.Bytes(), nil
}

// poll calls ready until it returns true, one of procs ends, or ctx is done. Its error includes the
// last error of ready.
func (l *Lab) poll(ctx context.Context, what string, procs []*Process, ready func(context.Context) (bool, error)) error {
	limit := 10 * time.Second // time limit of each call
	if l.slow {
		limit = time.Minute
	}
	var last error
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, p := range procs {
			if err := p.ended(); err != nil {
				return fmt.Errorf("waiting for %s: %w", what, err)
			}
		}
		try, cancel := context.WithTimeout(ctx, limit)
		ok, err := ready(try)
		cancel()
		if ok {
			return nil
		}
		if err != nil && ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, errors.Join(context.Cause(ctx), last))
		case <-tick.C:
		}
	}
}

func tailFile(path string, n int64) []byte {
	f, err := os.Open(path)
	if err != nil {
		return []byte(err.Error())
	}
	defer f.Close()
	if fi, err := f.Stat(); err == nil && fi.Size() > n {
		if _, err := f.Seek(-n, io.SeekEnd); err != nil {
			return []byte(err.Error())
		}
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return []byte(err.Error())
	}
	return b
}
