package member

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// Both systems of a machine use one /var/lib/kubelet. A kubelet of another
// minor version changes the files there, and kubelet does not promise that
// an earlier one can read them. So the files of the former version are kept
// when a system of another one boots, and restored when the former system
// does. The record of all this is one file, which is replaced atomically.

const (
	// KubeletRecord records which kubelet the files in /var/lib/kubelet are for. The first
	// update to another minor version makes it.
	KubeletRecord = ondisk.StateDir + "/kubelet.json"
	// KubeletInstanceConfig has this node's own part of kubelet's settings.
	KubeletInstanceConfig = "/var/lib/kubelet/instance-config.yaml"
)

const kubeletRecordVersion = 1

// keptKubeletFiles are kubelet's settings and the state of its managers.
var keptKubeletFiles = []string{
	ondisk.KubeletConfig, KubeletInstanceConfig, KubeadmFlags,
	"/var/lib/kubelet/cpu_manager_state", "/var/lib/kubelet/memory_manager_state", "/var/lib/kubelet/dra_manager_state",
	"/var/lib/kubelet/allocated_pods_state", "/var/lib/kubelet/actuated_pods_state",
	"/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
}

// KubeletFiles is the contents of KubeletRecord.
type KubeletFiles struct {
	Version int `json:"version"`
	// Minor is the minor version of Kubernetes that the files are for.
	Minor int `json:"minor"`
	// ConfigMinor is the minor version of the kubeadm that wrote
	// config.yaml; 0: files of Former may have been restored.
	ConfigMinor int `json:"configMinor"`
	// Former has the files of the version before; nil: there was none.
	Former *FormerKubelet `json:"former,omitempty"`
}

// FormerKubelet has the files of a kubelet of another minor version.
type FormerKubelet struct {
	Minor       int               `json:"minor"`
	ConfigMinor int               `json:"configMinor"`
	Files       map[string][]byte `json:"files"` // a missing one did not exist
	// KubeletExtraArgs and TryingArgs are those of JoinedAs, which are in the kept flags.
	KubeletExtraArgs map[string]string `json:"kubeletExtraArgs,omitempty"`
	TryingArgs       map[string]string `json:"tryingArgs,omitzero"`
}

// ReadKubeletFiles returns the record. Its Minor is 0 if there is none that this program
// knows.
func ReadKubeletFiles(e *machine.Env) KubeletFiles {
	var k KubeletFiles
	if b := e.Contents(KubeletRecord); b != nil {
		if err := json.Unmarshal(b, &k); err != nil || k.Version > kubeletRecordVersion {
			e.Log.Warn("the record of kubelet's files is unusable", "file", KubeletRecord, "version", k.Version, "error", err)
			return KubeletFiles{}
		}
	}
	return k
}

// Write replaces the record.
func (k KubeletFiles) Write(e *machine.Env) error {
	k.Version = kubeletRecordVersion
	b, err := json.Marshal(k)
	if err == nil {
		_, err = e.Write(KubeletRecord, append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("recording which kubelet the files in /var/lib/kubelet are for: %w", err)
	}
	return nil
}

// SaveKubelet records which kubelet's files these are, for a system that boots next.
func SaveKubelet(e *machine.Env, minor int) error {
	if ReadKubeletFiles(e).Minor == 0 {
		return KubeletFiles{Minor: minor, ConfigMinor: minor}.Write(e)
	}
	return nil
}

// TakeOverKubelet prepares the files in /var/lib/kubelet for this system's
// kubelet, of a minor version of Kubernetes. It must be called before
// kubelet starts. Without a record the files belong to this kubelet.
func TakeOverKubelet(e *machine.Env, minor int) error {
	k := ReadKubeletFiles(e)
	switch {
	case minor == 0 || k.Minor == 0, k.Minor == minor && k.ConfigMinor == minor:
		return nil
	case k.Minor == minor:
		// kubeadm replaces files in place, so a power cut leaves some of them empty.
		if k.Former == nil || isKubeletConfig(e.Contents(ondisk.KubeletConfig)) == nil && isKubeadmFlags(e.Contents(KubeadmFlags)) == nil {
			return nil
		}
		return k.Former.restore(e)
	case k.Former != nil && k.Former.Minor == minor:
		// If the power is cut here and the other system boots, its
		// kubeadm writes the settings again.
		if err := (KubeletFiles{Minor: k.Minor, Former: k.Former}).Write(e); err != nil {
			return err
		}
		if err := k.Former.restore(e); err != nil {
			return err
		}
		e.Console(fmt.Sprintf("restored kubelet's settings and state of v1.%d", minor))
		return KubeletFiles{Minor: minor, ConfigMinor: k.Former.ConfigMinor}.Write(e)
	}
	former, err := readFormerKubelet(e, k)
	if err != nil {
		return err
	}
	return KubeletFiles{Minor: minor, ConfigMinor: k.ConfigMinor, Former: former}.Write(e)
}

// restorable reports whether a copy exists of a file of
// kubelet that kubeadm may be rewriting.
func restorable(e *machine.Env, path string) bool {
	k := ReadKubeletFiles(e)
	return k.Minor != k.ConfigMinor && k.Former != nil && k.Former.Files[path] != nil
}

// readFormerKubelet reads the present files, which the record describes.
func readFormerKubelet(e *machine.Env, k KubeletFiles) (*FormerKubelet, error) {
	f := &FormerKubelet{Minor: k.Minor, ConfigMinor: k.ConfigMinor, Files: map[string][]byte{}}
	for _, p := range keptKubeletFiles {
		b, err := e.Read(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("copying the files of kubelet v1.%d: %w", k.Minor, err)
		}
		f.Files[p] = b
	}
	if j, ok := ReadJoinedAs(e); ok {
		f.KubeletExtraArgs, f.TryingArgs = j.KubeletExtraArgs, j.TryingArgs
	}
	return f, nil
}

// restore writes the files back.
func (f *FormerKubelet) restore(e *machine.Env) error {
	fail := func(err error) error { return fmt.Errorf("restoring the files of kubelet v1.%d: %w", f.Minor, err) }
	if f.Files[ondisk.KubeletConfig] == nil {
		return nil // the machine was no node then
	}
	for _, p := range keptKubeletFiles {
		b, ok := f.Files[p]
		if !ok {
			if err := e.Remove(p); err != nil {
				return fail(err)
			}
			continue
		}
		mode := fs.FileMode(0o600)
		if p == ondisk.KubeletConfig || p == KubeadmFlags || p == KubeletInstanceConfig {
			mode = 0o644
		}
		if _, err := e.Write(p, b, machine.Mode(mode)); err != nil {
			return fail(err)
		}
	}
	j, ok := ReadJoinedAs(e)
	if !ok {
		return nil
	}
	j.KubeletExtraArgs, j.TryingArgs = f.KubeletExtraArgs, f.TryingArgs
	return j.Write(e)
}
