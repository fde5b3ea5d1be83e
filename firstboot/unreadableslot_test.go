package firstboot

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// slotFails makes the disk return an error whenever the machine's own slot is read, while broken
// returns true.
func slotFails(e *machine.Env, broken func() bool) {
	read := e.ReadSlot
	e.ReadSlot = func(dev string) (*slot.Contents, error) {
		if dev == worldtest.SlotDevice && broken() {
			return nil, &fs.PathError{Op: "read", Path: dev, Err: syscall.EIO}
		}
		return read(dev)
	}
}

// TestForgetTokenInAnUnreadableSlot checks that the token does not count as forgotten while the
// disk cannot read the slot, which may still contain it.
func TestForgetTokenInAnUnreadableSlot(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.Env()
	broken := true
	slotFails(e, func() bool { return broken && w.Joins > 0 })
	if err := w.Run(New(e)); err == nil {
		t.Errorf("first boot succeeded\n%s", strings.Join(w.Console, "\n"))
	}
	if j, _ := member.ReadJoinedAs(e); j.TokenForgotten {
		t.Error("the token counts as forgotten")
	}
	if !w.ConsoleHas("forget-token: ") || !w.ConsoleHas("read "+worldtest.SlotDevice+": input/output error") || !w.ConsoleHas("may still contain the bootstrap token") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
	broken = false
	if err := w.Run(New(e)); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	w.NoSecret()
}

// TestForgetTokenInAnUnreadableDirectory checks that a file whose existence is unknown does not
// count as removed.
func TestForgetTokenInAnUnreadableDirectory(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.PowerOn()
	dir := filepath.Join(w.Root, filepath.Dir(member.HubBootstrap))
	err := errors.Join(os.RemoveAll(dir), os.MkdirAll(filepath.Dir(dir), 0o755), os.Symlink(filepath.Base(dir), dir)) // a loop
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Boot(); err == nil || !w.ConsoleHas("forget-token: ") {
		t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
}

// TestResetWithAnUnreadableSlot checks that a reset of an unfinished join stops if the disk cannot
// read the slot: the token in it would make the machine join again.
func TestResetWithAnUnreadableSlot(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.Cluster.HubServerCSR = "pending"
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded although no CSR was approved")
	}
	e := w.Env()
	slotFails(e, func() bool { return true })
	_, err := Reset(t.Context(), e, func(run.Step) {})
	if err == nil || !strings.Contains(err.Error(), "removing the secrets from the slot: reading the slot "+worldtest.SlotDevice) || !strings.Contains(err.Error(), "input/output error") {
		t.Errorf("reset: %v", err)
	}
	if !w.Has(ondisk.KubeletConf) && !w.Has(member.JoinFile) {
		t.Error("the reset went on")
	}
	if _, err := w.reset(); err != nil {
		t.Fatal(err)
	}
	w.NoSecret()
}
