package firstboot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/ondisk"
)

// inUseBytes are the certificates and kubeconfigs that the control plane uses.
func (m *controlPlane) inUseBytes() map[string]string {
	m.t.Helper()
	all := map[string]string{}
	for _, c := range credentialsOf(m.site) {
		for _, f := range c.files {
			if m.has(f) {
				all[f] = m.get(f)
			}
		}
	}
	return all
}

// wantUsable checks that each certificate can be used, or its new one can, with which
// the next run repairs it.
func (m *controlPlane) wantUsable(when string) {
	m.t.Helper()
	for _, c := range credentialsOf(m.site) {
		_, err := c.usable(m.env(), inUse)
		if err == nil {
			continue
		}
		if _, other := c.usable(m.env(), renewed); other != nil {
			m.t.Errorf("%s: %s cannot be used (%v), nor can its new one (%v)", when, c.name(), err, other)
		}
	}
}

// kubeadm that fails takes no certificate from a control plane that is well: what is
// in use stays, to the byte, and etcd starts with it after a restart.
func TestRenewalThatFails(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	full := errors.New("exit status 1")
	for name, fails := range map[string]func(m *controlPlane) func(Cmd) error{
		"at once": func(*controlPlane) func(Cmd) error {
			return func(c Cmd) error {
				fmt.Fprintln(c.Output, "error execution phase certs/apiserver: write /etc/kubernetes/pki/apiserver.key: no space left on device")
				return full
			}
		},
		"between a key and its certificate": func(m *controlPlane) func(Cmd) error {
			return func(c Cmd) error {
				m.before = func(effect string) {
					if effect == "kubeadm writes "+renewed(pkiDir+"/etcd/peer.crt") {
						m.cut = true
					}
				}
				err := m.kubeadm(c)
				m.before, m.cut = nil, false
				return err
			}
		},
		"at the kubeconfigs": func(m *controlPlane) func(Cmd) error {
			return func(c Cmd) error {
				if strings.Contains(strings.Join(c.Args, " "), "kubeconfig all") {
					return full
				}
				return m.kubeadm(c)
			}
		},
		"with files that were cut off": func(m *controlPlane) func(Cmd) error {
			return func(c Cmd) error {
				err := m.kubeadm(c)
				m.put(renewed(pkiDir+"/etcd/server.crt"), "")
				return err
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.bootDone()
			m.now = m.now.AddDate(0, 8, 0)
			before := m.inUseBytes()
			pods := m.get(controlPlanePods[0])
			failing := fails(m)
			m.world.init = func(c Cmd) error {
				if args := strings.Join(c.Args, " "); strings.Contains(args, "certs all") || strings.Contains(args, "kubeconfig all") {
					return failing(c)
				}
				return m.kubeadm(c)
			}
			for _, when := range []string{"the timer", "a restart"} {
				if when == "a restart" {
					m.on()
				}
				m.console = nil
				m.bootDone()
				for f, text := range before {
					if m.get(f) != text {
						t.Errorf("%s: %s is another", when, f)
					}
				}
				if !m.said("the control plane's certificates are not renewed: ") || !m.said("are valid until 2027-11-20T10:00:") {
					t.Errorf("%s: nobody was told\n%s", when, strings.Join(m.console, "\n"))
				}
				if m.has(renewalDir) || when == "the timer" && m.get(controlPlanePods[0]) != pods {
					t.Errorf("%s: it left something, or restarted a pod", when)
				}
			}
			m.world.init = m.kubeadm
			m.bootDone()
			if bad, _ := badCredentials(m.env(), m.site); len(bad) > 0 || m.get(controlPlanePods[0]) == pods {
				t.Errorf("%d are not renewed, or not read", len(bad))
			}
		})
	}
}

// A certificate that cannot be used is waited for; the others stay meanwhile.
func TestRenewalOfABrokenPairThatFails(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.now = m.now.AddDate(0, 8, 0)
	m.put(pkiDir+"/etcd/server.key", "")
	before := m.inUseBytes()
	m.world.init = func(Cmd) error { return errors.New("no space left on device") }
	m.on()
	if err := m.boot(); err == nil || !m.said("no space left on device") {
		t.Errorf("%v\n%s", err, strings.Join(m.console, "\n"))
	}
	for f, text := range before {
		if m.get(f) != text {
			t.Errorf("%s is another", f)
		}
	}
	m.world.init = m.kubeadm
	m.on()
	m.bootDone()
}

// Kubelet's own certificate that can be used stays when only its kubeconfig is
// broken; one that has expired goes, since kubelet would prefer it.
func TestKubeletKeepsWhatItCanUse(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for _, expired := range []bool{false, true} {
		m := newControlPlane(t, sites)
		m.bootDone()
		own, err := os.Readlink(filepath.Join(m.root, clientCert))
		if err != nil {
			t.Fatal(err)
		}
		if expired {
			m.put(own, m.cluster.client("system:node:m1", m.now.AddDate(0, 0, -1)))
		}
		before := m.get(own)
		m.put(ondisk.KubeletConf, "")
		m.on()
		m.before = func(effect string) {
			if effect == "link "+ondisk.KubeletConf && m.has(own) == expired {
				t.Errorf("expired %v: %s is there: %v", expired, own, m.has(own))
			}
		}
		m.bootDone()
		if !expired && m.get(own) != before {
			t.Errorf("%s is another", own)
		}
	}
}

// The power goes before each effect of a renewal: what the control plane can use is
// never lost, and the next run ends with all of it renewed.
func TestPowerCutOfRenewal(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for name, days := range map[string]int{"due": 240, "expired": 370} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.bootDone()
			m.now = m.now.AddDate(0, 0, days)
			m.effects, m.names = 0, nil
			files := m.files()
			whole := m.cloneWith(t, files)
			whole.bootDone()
			first := slices.IndexFunc(whole.names, func(effect string) bool { return strings.HasPrefix(effect, "link ") }) // before, nothing in use is another
			end := slices.Index(whole.names, "remove all of "+renewalDir) + 2
			if first < 0 || end < first+20 {
				t.Fatalf("effects: %q", whole.names)
			}
			for n := 1; n <= end; n++ {
				for _, kind := range []string{"kill", "power cut"} {
					if kind == "kill" && n <= first {
						continue
					}
					t.Run(fmt.Sprint(kind, " at ", n), func(t *testing.T) {
						t.Parallel()
						cut := m.cloneWith(t, files)
						cut.cutAt = n
						if err := cut.boot(); err == nil {
							t.Fatal("it went on without power")
						}
						when := cut.names[len(cut.names)-1]
						if kind == "power cut" {
							cut.lose()
						}
						if days < 365 {
							cut.wantUsable(when)
						}
						if cut.cutAt = 0; kind == "power cut" {
							cut.on()
						}
						cut.bootDone()
						if bad, _ := badCredentials(cut.env(), cut.site); len(bad) > 0 || cut.has(renewalDir) || cut.has(podsRestart) {
							t.Errorf("%s: %d certificates are bad", when, len(bad))
						}
						cut.keysOnlyInPlace()
					})
				}
			}
		})
	}
}
