package firstboot

import "regexp"

var machineIDForm = regexp.MustCompile(`^[0-9a-f]{32}$`)

const etcMachineID = "/etc/machine-id"

func machineID(e *Env) string { return machineIDIn(e, etcMachineID) }

func machineIDIn(e *Env, path string) string {
	id := e.text(path)
	if !machineIDForm.MatchString(id) {
		return ""
	}
	return id
}

func bootID(e *Env) string { return e.text("/proc/sys/kernel/random/boot_id") }
