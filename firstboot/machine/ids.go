package machine

import "regexp"

var machineIDForm = regexp.MustCompile(`^[0-9a-f]{32}$`)

// EtcMachineID is the file in which systemd keeps the machine ID.
const EtcMachineID = "/etc/machine-id"

// ID returns the machine ID, or "" if there is none yet.
func ID(e *Env) string { return IDIn(e, EtcMachineID) }

// IDIn returns the machine ID in a file, or "" if the file has no valid one.
func IDIn(e *Env, path string) string {
	id := e.Text(path)
	if !machineIDForm.MatchString(id) {
		return ""
	}
	return id
}

// BootID returns the ID of this boot. The kernel generates it at its start.
func BootID(e *Env) string { return e.Text("/proc/sys/kernel/random/boot_id") }
