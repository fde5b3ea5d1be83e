package member

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// Both roots of a machine use /var/lib/kubelet, where a kubelet of another minor version changes
// files. KubeletRecord keeps the former files, in case the machine returns to the former root.

const (
	// KubeletRecord records to which kubelet the files in /var/lib/kubelet belong. The first update
	// to another minor version creates it.
	KubeletRecord = ondisk.StateDir + "/kubelet.json"
	// KubeletInstanceConfig contains kubelet's settings that are specific to this node.
	KubeletInstanceConfig = "/var/lib/kubelet/instance-config.yaml"
)

const kubeletRecordVersion = 1

// keptKubeletFiles lists kubelet's settings, and the state of its managers.
var keptKubeletFiles = []string{
	ondisk.KubeletConfig, KubeletInstanceConfig, KubeadmFlags,
	"/var/lib/kubelet/cpu_manager_state", "/var/lib/kubelet/memory_manager_state", "/var/lib/kubelet/dra_manager_state",
	"/var/lib/kubelet/allocated_pods_state", "/var/lib/kubelet/actuated_pods_state",
	"/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint",
}

// KubeletFiles is the contents of KubeletRecord.
type KubeletFiles struct {
	Version int `json:"version"`
	// Minor is the minor version of the kubelet that last took over the files.
	Minor int `json:"minor"`
	// ConfigMinor is the minor version of the kubeadm that wrote config.yaml. It is 0 if some of
	// Former's files may have been restored.
	ConfigMinor int `json:"configMinor"`
	// Former contains the files of the previous version, or nil if there was none.
	Former *FormerKubelet `json:"former,omitempty"`
}

// FormerKubelet contains the files of a kubelet of another minor version.
type FormerKubelet struct {
	Minor       int               `json:"minor"`
	ConfigMinor int               `json:"configMinor"`
	Files       map[string][]byte `json:"files"` // a file that is not in the map did not exist
	// KubeletExtraArgs and TryingArgs are the fields of JoinedAs that belong to the kept flags.
	KubeletExtraArgs map[string]string `json:"kubeletExtraArgs,omitempty"`
	TryingArgs       map[string]string `json:"tryingArgs,omitzero"`
}

// ReadKubeletFiles returns the record. Minor is 0 if there is no record that this program can read.
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

// SaveKubelet records the current kubelet's minor version for the system that boots next.
func SaveKubelet(e *machine.Env, minor int) error {
	if ReadKubeletFiles(e).Minor == 0 {
		return KubeletFiles{Minor: minor, ConfigMinor: minor}.Write(e)
	}
	return nil
}

// TakeOverKubelet prepares the files in /var/lib/kubelet for this system's kubelet, before it
// starts. minor is that kubelet's minor version. Without a record, it changes nothing.
func TakeOverKubelet(e *machine.Env, minor int) error {
	k := ReadKubeletFiles(e)
	switch {
	case minor == 0 || k.Minor == 0, k.Minor == minor && k.ConfigMinor == minor:
		return nil
	case k.Minor == minor:
		// kubeadm does not replace files atomically, so a power cut may leave some of them empty.
		if k.Former == nil || isKubeletConfig(e.Contents(ondisk.KubeletConfig)) == nil && isKubeadmFlags(e.Contents(KubeadmFlags)) == nil {
			return nil
		}
		return k.Former.restore(e)
	case k.Former != nil && k.Former.Minor == minor:
		// If the power fails here and the other root partition boots, kubeadm there writes the
		// settings again.
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

// restorable reports whether the record has a copy of a kubelet file that kubeadm may be rewriting.
func restorable(e *machine.Env, path string) bool {
	k := ReadKubeletFiles(e)
	return k.Minor != k.ConfigMinor && k.Former != nil && k.Former.Files[path] != nil
}

// readFormerKubelet reads the current files in /var/lib/kubelet, which belong to k.
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
		return nil // at that time, the machine was not a node
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
