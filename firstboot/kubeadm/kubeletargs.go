package kubeadm

import (
	"fmt"

	kubeadmdocs "github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// On a metered link, kubelet sends an unchanged status once an hour instead of every five minutes.
// Its lease still shows that it is alive, and changes are sent at once. There is no flag for this,
// so the setting is in a file. The file is on DATA, so that it survives an update of the root file
// system.
const (
	KubeletConfDir  = ondisk.StateDir + "/kubelet.conf.d"
	MeteredConfFile = KubeletConfDir + "/50-metered.conf"
	MeteredConf     = `# Written by firstboot for ipvs.profile: metered.
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
nodeStatusReportFrequency: 1h
`
)

// SiteArgs returns the Site's arguments for kubelet, and those that follow from other fields of the
// Site.
func SiteArgs(active *site.Active) map[string]string {
	want := member.Union(active.Site.KubeletExtraArgs, nil)
	if _, given := want["config-dir"]; !given && active.Site.IPVS.Profile == "metered" && active.Image.Kubernetes != "" &&
		!kubeadmdocs.Before(active.Image.Kubernetes, 30) { // earlier kubelets do not support the directory
		want["config-dir"] = KubeletConfDir
	}
	return want
}

// LacksConfDir reports whether kubelet needs its configuration directory, and
// the directory is missing or outdated.
func LacksConfDir(e *machine.Env, want map[string]string) bool {
	return want["config-dir"] == KubeletConfDir && string(e.Contents(MeteredConfFile)) != MeteredConf
}

// WriteConfDir writes kubelet's configuration directory if kubelet needs it.
func WriteConfDir(e *machine.Env, want map[string]string) error {
	if !LacksConfDir(e, want) {
		return nil
	}
	if err := e.WriteFile(MeteredConfFile, []byte(MeteredConf), machine.Mode(0o644)); err != nil {
		return fmt.Errorf("writing kubelet's configuration directory: %w", err)
	}
	return nil
}
