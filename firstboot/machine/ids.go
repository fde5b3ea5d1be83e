package machine

import "regexp"

var machineIDForm = regexp.MustCompile(`^[0-9a-f]{32}$`)

const EtcMachineID = "/etc/machine-id"

func ID(e *Env) string { return IDIn(e, EtcMachineID) }

func IDIn(e *Env, path string) string {
	id := e.Text(path)
	if !machineIDForm.MatchString(id) {
		return ""
	}
	return id
}

func BootID(e *Env) string { return e.Text("/proc/sys/kernel/random/boot_id") }
