package scale

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// share is a cgroup, of either version, that limits the processors of its processes.
type share struct {
	dir       string
	v2        bool
	processes int
}

const cgroups = "/sys/fs/cgroup"

func newShare(name string) (*share, error) {
	s := &share{dir: filepath.Join(cgroups, "cpu", name)}
	if _, err := os.Stat(filepath.Join(cgroups, "cgroup.controllers")); err == nil {
		s.dir, s.v2 = filepath.Join(cgroups, name), true
		if err := os.WriteFile(filepath.Join(cgroups, "cgroup.subtree_control"), []byte("+cpu"), 0); err != nil {
			return nil, fmt.Errorf("having processors bounded: %w", err)
		}
	}
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		return nil, fmt.Errorf("having processors bounded: %w", err)
	}
	return s, nil
}

func (s *share) write(file, text string) error {
	return os.WriteFile(filepath.Join(s.dir, file), []byte(text), 0)
}

// add moves a process into the cgroup. A cgroup has the weight of one thread outside of it, so add
// increases the weight by that of two threads.
func (s *share) add(pid int) error {
	s.processes++
	weight := s.write("cpu.shares", strconv.Itoa(2*1024*s.processes))
	if s.v2 {
		weight = s.write("cpu.weight", strconv.Itoa(2*100*s.processes))
	}
	return errors.Join(weight, s.write("cgroup.procs", strconv.Itoa(pid)))
}

// set limits the processors; 0 means no limit.
func (s *share) set(processors float64) error {
	const period = 100_000 // microseconds
	quota := strconv.Itoa(int(processors * period))
	if s.v2 {
		if processors == 0 {
			quota = "max"
		}
		return s.write("cpu.max", fmt.Sprintf("%s %d", quota, period))
	}
	if processors == 0 {
		quota = "-1"
	}
	return s.write("cpu.cfs_quota_us", quota)
}

// remove removes the cgroup after its processes have ended. It retries, because the kernel notices
// their end a moment later.
func (s *share) remove() error {
	for range 100 {
		if err := os.Remove(s.dir); !errors.Is(err, syscall.EBUSY) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("removing %s: its processes do not end", s.dir)
}
