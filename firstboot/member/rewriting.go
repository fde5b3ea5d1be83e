package member

import (
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// Rewriting adds to fix, which overwrites this machine's disk, a warning about the data on the
// disk.
func Rewriting(e *machine.Env, fix string) string {
	switch {
	case e.Exists(configs.EtcdDataDir + "/member"):
		return fix + "; this destroys the machine's etcd data: first make sure that more than half of all control-plane nodes run without it, or copy " + SnapshotDir + " to another computer"
	case HasCredentials(e):
		return fix + "; this destroys the data of pods on the disk, and the Site needs a token for the machine to join again"
	}
	return fix
}
