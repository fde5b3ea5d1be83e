package site

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// IdentityPhase makes this machine's ID, the file systems' UUIDs, which are derived from the ID,
// and the HMAC key that identifies Sites. It also records cluster membership before a stick is
// read. After an update the ID stays the same, because the initrd copies it from DATA.
func IdentityPhase() run.Phase {
	return run.Phase{
		Name: "identity", Doc: "the machine ID and the file systems' UUIDs are this machine's own", Timeout: 2 * time.Minute,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			// Check this before anything is written to one of the disks.
			if err := oneDisk(e); err != nil {
				return run.Todo, err
			}
			id := machine.IDIn(e, ondisk.MachineID)
			if id == "" || machine.ID(e) != id || !hasKey(e) || member.RecordToSave(e) != nil {
				return run.Todo, nil
			}
			for label, dev := range OwnFileSystems(e) {
				if have, err := e.FSUUID(dev); err == nil && have != fsUUID(id, label) && !e.Exists(UUIDTried(label)) {
					return run.Todo, nil
				}
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			id, err := saveMachineID(e)
			if err != nil {
				return err
			}
			if err := makeKey(e); err != nil {
				return err
			}
			if err := member.SaveRecord(e); err != nil {
				return err
			}
			for label, dev := range OwnFileSystems(e) {
				want := fsUUID(id, label)
				if have, err := e.FSUUID(dev); err != nil || have == want || e.Exists(UUIDTried(label)) {
					continue
				}
				// Nothing is mounted by UUID, so a file system that keeps the golden image's UUID
				// works. One attempt per boot is sufficient.
				if _, err := e.Write(UUIDTried(label), nil, machine.Mode(0o600)); err != nil {
					return fmt.Errorf("recording the attempt to change the UUID of %s: %w", label, err)
				}
				if err := e.Run(ctx, machine.Cmd{Args: []string{"tune2fs", "-U", uuidString(want), dev}}); err != nil {
					e.Log.Warn("this file system keeps the UUID of the golden image", "partition", label, "error", err)
				}
			}
			return nil
		},
	}
}

// saveMachineID makes the machine IDs of the root file system and of DATA equal. DATA's takes
// precedence: if the initrd did not copy it, systemd has generated another ID for the root file
// system.
func saveMachineID(e *machine.Env) (string, error) {
	id := machine.IDIn(e, ondisk.MachineID)
	if id == "" {
		id = machine.ID(e)
	}
	if id == "" {
		id = hex.EncodeToString(e.Random(16))
	}
	if machine.IDIn(e, ondisk.MachineID) != id {
		if err := e.WriteFile(ondisk.MachineID, []byte(id+"\n"), machine.Mode(0o444)); err != nil {
			return "", fmt.Errorf("saving the machine ID: %w", err)
		}
	}
	if had := machine.ID(e); had != id {
		if err := e.WriteFile(machine.EtcMachineID, []byte(id+"\n"), machine.Mode(0o444)); err != nil {
			return "", fmt.Errorf("writing the machine ID: %w", err)
		}
		if had != "" {
			e.Log.Warn("this boot started with another machine ID; the machine's own ID takes effect at the next boot", "had", had, "machine", id)
		}
	}
	return id, nil
}

const keyLength = 32

func hasKey(e *machine.Env) bool { return len(e.Contents(KeyFile)) == keyLength }

// makeKey creates KeyFile if the machine has none.
func makeKey(e *machine.Env) error {
	b, err := e.ReadIfExists(KeyFile)
	if err != nil { // with another key the Site would look changed
		return fmt.Errorf("reading this machine's key: %w", err)
	}
	if len(b) == keyLength {
		return nil
	}
	if err := e.WriteFile(KeyFile, e.Random(keyLength), machine.Mode(0o600)); err != nil {
		return fmt.Errorf("making a key for this machine: %w", err)
	}
	return nil
}

// UUIDTried returns the path of the mark that a new UUID was tried for this file system. A reboot
// removes the mark.
func UUIDTried(label string) string { return ondisk.RunMark + "uuid-" + label }

// OwnFileSystems returns the devices of DATA and of the booted root file system, by label: file
// systems whose UUIDs are the same in every copy of the image. The other root file system keeps
// its UUID until it is booted.
func OwnFileSystems(e *machine.Env) map[string]string {
	out := map[string]string{}
	d, err := e.RootDisk()
	if err != nil {
		return out // edgebake did not build this node, or a test has no disks
	}
	for _, p := range d.Parts {
		if p.Label == ondisk.LabelData || p.Name == d.Root {
			out[p.Label] = "/dev/" + p.Name
		}
	}
	return out
}

func fsUUID(machineID, label string) (u [16]byte) {
	m := hmac.New(sha256.New, []byte(machineID))
	m.Write([]byte("edgebake file system " + label))
	copy(u[:], m.Sum(nil))
	u[6] = u[6]&0x0f | 0x80 // version 8: vendor-specific (RFC 9562)
	u[8] = u[8]&0x3f | 0x80
	return u
}

func uuidString(u [16]byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16])
}
