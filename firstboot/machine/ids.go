package machine

import "regexp"

var machineIDForm = regexp.MustCompile(`^[0-9a-f]{32}$`)

// EtcMachineID is where systemd keeps the machine's ID.
const EtcMachineID = "/etc/machine-id"

// ID is the machine's ID, empty if it has none yet.
func ID(e *Env) string { return IDIn(e, EtcMachineID) }

// IDIn is the machine ID in a file, empty if it is not of its form.
func IDIn(e *Env, path string) string {
	id := e.Text(path)
	if !machineIDForm.MatchString(id) {
		return ""
	}
	return id
}

// BootID is another one after each start of the kernel.
func BootID(e *Env) string { return e.Text("/proc/sys/kernel/random/boot_id") }
