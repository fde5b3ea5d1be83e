package controlplane_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestMasterRenewsCertificates checks that certificates and kubeconfigs that are damaged or end
// soon are made again; kubelet's is made again after a year without power.
func TestMasterRenewsCertificates(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for name, spoil := range map[string]func(m *controlPlane) []string{
		"a key is empty": func(m *controlPlane) []string {
			m.Put(member.PKIDir+"/etcd/server.key", "")
			return []string{"certs all", "kubeconfig all", "etcd local"}
		},
		"half a kubeconfig": func(m *controlPlane) []string {
			m.Put(controlplane.SuperAdminConf, "apiVersion: v1\nkind: Conf")
			return []string{"certs all", "kubeconfig all", "etcd local"}
		},
		"eight months later": func(m *controlPlane) []string {
			m.Now = m.Now.AddDate(0, 8, 0)
			return []string{"certs all", "kubeconfig all", "etcd local"}
		},
		"370 days later": func(m *controlPlane) []string {
			m.Now = m.Now.AddDate(0, 0, 370)
			return []string{"certs all", "kubeconfig all", "etcd local", "kubelet-finalize all"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.bootDone()
			want := spoil(m)
			m.inits = nil
			m.on()
			m.bootDone()
			if !slices.Equal(m.inits, want) {
				t.Errorf("kubeadm ran %q, want %q", m.inits, want)
			}
			if bad := controlplane.BadCredentials(m.Env(), m.site); len(bad) > 0 || m.Has(controlplane.RenewalDir) {
				t.Errorf("still bad: %d, and %s is there: %v", len(bad), controlplane.RenewalDir, m.Has(controlplane.RenewalDir))
			}
		})
	}
}

// TestMasterRunsForYears checks that no certificate expires on a machine that runs for years, and
// that the control plane uses the renewed certificates.
func TestMasterRunsForYears(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	if m.Units[ondisk.UnitAgain] != "active" {
		t.Fatal("the timer that runs first boot again is not active")
	}
	pods := m.Get(controlplane.Pods[1])
	m.inits = nil
	for range 26 { // the timer runs for 780 days
		m.Now = m.Now.AddDate(0, 0, 30)
		m.KubeletLastActive = m.Now
		if at, err := os.Readlink(filepath.Join(m.Root, member.ClientCert)); err != nil {
			t.Fatal(err)
		} else {
			m.PutUnsynced(at, m.Cluster.Client("system:node:m1", m.Now.AddDate(1, 0, 0))) // kubelet renews its own certificate
		}
		m.bootDone()
		for _, l := range controlplane.Leaves {
			cert, err := member.LoadPair(m.Env(), member.PKIDir+"/"+l.Base+".crt", member.PKIDir+"/"+l.Base+".key")
			if err != nil || m.Now.AddDate(0, 0, 30).After(cert.NotAfter) {
				t.Fatalf("%s on %s: %v", l.Base, m.Now, err)
			}
		}
		if len(m.inits) > 0 {
			if now := m.Get(controlplane.Pods[1]); now == pods || !strings.Contains(now, "name: kube-controller-manager.yaml") {
				t.Fatalf("the controller manager still has its old certificate:\n%s", now)
			} else {
				pods = now
			}
			if !slices.Equal(m.inits, []string{"certs all", "kubeconfig all"}) || len(m.restarts) > 0 {
				t.Fatalf("kubeadm ran %q, etcd was restarted %q", m.inits, m.restarts)
			}
			m.inits = nil
		} else if m.Get(controlplane.Pods[1]) != pods {
			t.Fatal("a pod was restarted without need")
		}
	}
}

// TestRestartOutlastsAKill checks that if first boot is killed right after it renewed certificates,
// the next run restarts the programs that still use the former ones.
func TestRestartOutlastsAKill(t *testing.T) {
	t.Parallel()
	const restart = "restart " + ondisk.UnitKubelet
	sites := mintedSites(t, 1)
	for name, tt := range map[string]struct {
		days int
		at   []string // first boot is killed once at each
	}{
		"pods":                    {240, []string{"write " + controlplane.Pods[1]}},
		"pods, kubelet's expired": {370, []string{"write " + controlplane.Pods[1]}},
		"kubelet":                 {370, []string{restart}},
		"twice":                   {370, []string{"write " + controlplane.Pods[1], restart}},
		"its mark is still there": {370, []string{"remove " + controlplane.PodsRestart}},
		"halfway through them":    {370, []string{"kubeadm writes " + controlplane.Renewed(controlplane.Confs[3]), restart}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.bootDone()
			pods := m.Get(controlplane.Pods[1])
			m.Now = m.Now.AddDate(0, 0, tt.days)
			renewed := m.Now
			for _, at := range tt.at {
				m.Effects, m.EffectNames = 0, nil
				m.BeforeEffect = func(effect string) {
					if effect == at {
						m.PowerCutAt = 1
					}
				}
				if err := m.Boot(); err == nil || m.EffectNames[len(m.EffectNames)-1] != at {
					t.Fatalf("%v: first boot was not killed at %s: %q", err, at, m.EffectNames)
				}
				m.BeforeEffect, m.PowerCutAt = nil, 0
			}
			m.bootDone()
			if m.Get(controlplane.Pods[1]) == pods {
				t.Error("the controller manager still has its old certificate")
			}
			if started := m.World.Started[ondisk.UnitKubelet]; started.Before(renewed) != (tt.days < 365) {
				t.Errorf("kubelet was started on %s, and has had a new certificate since %s", started, renewed)
			}
			if m.Has(controlplane.PodsRestart) {
				t.Error("a pod was restarted once more")
			}
		})
	}
}

// inUseBytes returns the contents of the certificates and
// kubeconfigs in use by the control plane.
func (m *controlPlane) inUseBytes() map[string]string {
	m.T.Helper()
	all := map[string]string{}
	for _, c := range controlplane.CredentialsOf(m.site) {
		for _, f := range c.Files {
			if m.Has(f) {
				all[f] = m.Get(f)
			}
		}
	}
	return all
}

// wantUsable checks that every certificate is usable, or has a usable renewed
// version, which the next run installs.
func (m *controlPlane) wantUsable(when string) {
	m.T.Helper()
	for _, c := range controlplane.CredentialsOf(m.site) {
		_, err := c.Usable(m.Env(), controlplane.InUse)
		if err == nil {
			continue
		}
		if _, other := c.Usable(m.Env(), controlplane.Renewed); other != nil {
			m.T.Errorf("%s: %s cannot be used (%v), nor can its new one (%v)", when, c.Name(), err, other)
		}
	}
}

// TestRenewalThatFails checks that if kubeadm fails, a working control plane keeps its
// certificates, byte for byte, and etcd starts with them after a restart.
func TestRenewalThatFails(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	full := errors.New("exit status 1")
	for name, fails := range map[string]func(m *controlPlane) func(machine.Cmd) error{
		"at once": func(*controlPlane) func(machine.Cmd) error {
			return func(c machine.Cmd) error {
				fmt.Fprintln(c.Output, "error execution phase certs/apiserver: write /etc/kubernetes/pki/apiserver.key: no space left on device")
				return full
			}
		},
		"between a key and its certificate": func(m *controlPlane) func(machine.Cmd) error {
			return func(c machine.Cmd) error {
				m.BeforeEffect = func(effect string) {
					if effect == "kubeadm writes "+controlplane.Renewed(member.PKIDir+"/etcd/peer.crt") {
						m.PoweredOff = true
					}
				}
				err := m.kubeadm(c)
				m.BeforeEffect, m.PoweredOff = nil, false
				return err
			}
		},
		"at the kubeconfigs": func(m *controlPlane) func(machine.Cmd) error {
			return func(c machine.Cmd) error {
				if strings.Contains(strings.Join(c.Args, " "), "kubeconfig all") {
					return full
				}
				return m.kubeadm(c)
			}
		},
		"with files that were cut off": func(m *controlPlane) func(machine.Cmd) error {
			return func(c machine.Cmd) error {
				err := m.kubeadm(c)
				m.Put(controlplane.Renewed(member.PKIDir+"/etcd/server.crt"), "")
				return err
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.bootDone()
			m.Now = m.Now.AddDate(0, 8, 0)
			before := m.inUseBytes()
			pods := m.Get(controlplane.Pods[0])
			failing := fails(m)
			m.World.KubeadmInit = func(c machine.Cmd) error {
				if args := strings.Join(c.Args, " "); strings.Contains(args, "certs all") || strings.Contains(args, "kubeconfig all") {
					return failing(c)
				}
				return m.kubeadm(c)
			}
			for _, when := range []string{"the timer", "a restart"} {
				if when == "a restart" {
					m.on()
				}
				m.Console = nil
				m.bootDone()
				for f, text := range before {
					if m.Get(f) != text {
						t.Errorf("%s: %s has changed", when, f)
					}
				}
				if !m.ConsoleHas("renewing the control plane's certificates failed: ") || !m.ConsoleHas("are valid until 2027-11-20T10:00:") {
					t.Errorf("%s: the console does not report the failed renewal\n%s", when, strings.Join(m.Console, "\n"))
				}
				if m.Has(controlplane.RenewalDir) || when == "the timer" && m.Get(controlplane.Pods[0]) != pods {
					t.Errorf("%s: a failed renewal left files, or restarted a pod", when)
				}
			}
			m.World.KubeadmInit = m.kubeadm
			m.bootDone()
			if bad := controlplane.BadCredentials(m.Env(), m.site); len(bad) > 0 || m.Get(controlplane.Pods[0]) == pods {
				t.Errorf("%d certificates were not renewed, or their programs were not restarted", len(bad))
			}
		})
	}
}

// TestRenewalOfABrokenPairThatFails checks that an unusable certificate is an error until kubeadm
// can make it again. The others do not change meanwhile.
func TestRenewalOfABrokenPairThatFails(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Now = m.Now.AddDate(0, 8, 0)
	m.Put(member.PKIDir+"/etcd/server.key", "")
	before := m.inUseBytes()
	m.World.KubeadmInit = func(machine.Cmd) error { return errors.New("no space left on device") }
	m.on()
	if err := m.Boot(); err == nil || !m.ConsoleHas("no space left on device") {
		t.Errorf("%v\n%s", err, strings.Join(m.Console, "\n"))
	}
	for f, text := range before {
		if m.Get(f) != text {
			t.Errorf("%s has changed", f)
		}
	}
	m.World.KubeadmInit = m.kubeadm
	m.on()
	m.bootDone()
}

// TestKubeletKeepsWhatItCanUse checks that if only kubelet's kubeconfig is broken, its usable
// certificate is kept. An expired one is removed, because kubelet would prefer it.
func TestKubeletKeepsWhatItCanUse(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for _, expired := range []bool{false, true} {
		m := newControlPlane(t, sites)
		m.bootDone()
		own, err := os.Readlink(filepath.Join(m.Root, member.ClientCert))
		if err != nil {
			t.Fatal(err)
		}
		if expired {
			m.Put(own, m.Cluster.Client("system:node:m1", m.Now.AddDate(0, 0, -1)))
		}
		before := m.Get(own)
		m.Put(ondisk.KubeletConf, "")
		m.on()
		m.BeforeEffect = func(effect string) {
			if effect == "link "+ondisk.KubeletConf && m.Has(own) == expired {
				t.Errorf("expired %v: %s is there: %v", expired, own, m.Has(own))
			}
		}
		m.bootDone()
		if !expired && m.Get(own) != before {
			t.Errorf("%s has changed", own)
		}
	}
}

// TestPowerCutOfRenewal checks that a power cut before each effect of a renewal never leaves the
// control plane without usable certificates, and the next run completes the renewal.
func TestPowerCutOfRenewal(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for name, days := range map[string]int{"due": 240, "expired": 370} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.bootDone()
			m.Now = m.Now.AddDate(0, 0, days)
			m.Effects, m.EffectNames = 0, nil
			files := m.Files()
			whole := m.CloneWith(t, files)
			whole.bootDone()
			first := slices.IndexFunc(whole.EffectNames, func(effect string) bool { return strings.HasPrefix(effect, "link ") }) // before that, no file in use is changed
			end := slices.Index(whole.EffectNames, "remove all of "+controlplane.RenewalDir) + 2
			if first < 0 || end < first+20 {
				t.Fatalf("effects: %q", whole.EffectNames)
			}
			for n := 1; n <= end; n += worldtest.EveryCut() {
				for _, kind := range []string{"kill", "power cut"} {
					if kind == "kill" && n <= first {
						continue
					}
					t.Run(fmt.Sprint(kind, " at ", n), func(t *testing.T) {
						t.Parallel()
						cut := m.CloneWith(t, files)
						cut.PowerCutAt = n
						if err := cut.Boot(); err == nil {
							t.Fatal("the machine continued after the power cut")
						}
						when := cut.EffectNames[len(cut.EffectNames)-1]
						if kind == "power cut" {
							cut.LoseUnsynced()
						}
						if days < 365 {
							cut.wantUsable(when)
						}
						if cut.PowerCutAt = 0; kind == "power cut" {
							cut.on()
						}
						cut.bootDone()
						if bad := controlplane.BadCredentials(cut.Env(), cut.site); len(bad) > 0 || cut.Has(controlplane.RenewalDir) || cut.Has(controlplane.PodsRestart) {
							t.Errorf("%s: %d certificates are bad", when, len(bad))
						}
						cut.keysOnlyInPlace()
					})
				}
			}
		})
	}
}

// TestRenewalOfShortCertificates checks that certificates of any lifetime are made once, and
// renewed after half of that time, even if the record of their creation is lost.
func TestRenewalOfShortCertificates(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	const day = 24 * time.Hour
	for _, life := range []time.Duration{30 * day, 90 * day, 180 * day, 360 * day, 1000 * day} {
		t.Run(life.String(), func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.certTime = life
			made := func() int {
				n := 0
				for _, phase := range m.inits {
					if phase == "certs all" {
						n++
					}
				}
				m.inits = nil
				return n
			}
			m.bootDone()
			if n := made(); n != 1 {
				t.Fatalf("the certificates of a new machine were made %d times", n)
			}
			due := life - min(life/2, controlplane.RenewBefore)
			for _, tt := range []struct {
				after time.Duration
				want  int
			}{{due - day, 0}, {2 * day, 1}, {2 * time.Hour, 0}, {due - day, 0}, {2 * day, 1}} {
				m.Now = m.Now.Add(tt.after)
				own, err := os.Readlink(filepath.Join(m.Root, member.ClientCert))
				if err != nil {
					t.Fatal(err)
				}
				m.Put(own, m.Cluster.Client("system:node:m1", m.Now.AddDate(1, 0, 0))) // kubelet renews its own certificate
				m.bootDone()                                                           // as firstboot-again.timer does
				if n := made(); n != tt.want {
					t.Fatalf("%s later the certificates were made %d times, want %d", tt.after, n, tt.want)
				}
				pods := m.Get(controlplane.Pods[0])
				m.bootDone()
				if made() != 0 || m.Get(controlplane.Pods[0]) != pods {
					t.Fatal("the certificates were made again, or a pod was restarted")
				}
			}
			if err := os.Remove(filepath.Join(m.Root, controlplane.MadeFile)); err != nil {
				t.Fatal(err)
			}
			m.bootDone()
			if n := made(); n > 1 || n > 0 && life > 2*controlplane.RenewBefore {
				t.Errorf("without the record, the certificates were made %d times", n)
			}
			m.bootDone()
			if n := made(); n > 0 {
				t.Errorf("with the record, the certificates were made %d times", n)
			}
		})
	}
}

// TestRenewalAtTheEndOfACA checks that certificates that a CA issues in its last months are not
// renewed again and again, whether they expire before the CA or not. etcd starts with them.
func TestRenewalAtTheEndOfACA(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	cas, err := kubeapi.ParseCerts([]byte(sites[0].Site.Credentials.Keys.CA.Cert))
	if err != nil {
		t.Fatal(err)
	}
	end := cas[0].NotAfter
	for name, cutOff := range map[string]time.Time{"they outlive it": {}, "cut off at its end": end, "cut off a day before": end.AddDate(0, 0, -1)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.certEnd = cutOff
			m.bootDone()
			m.Now = end.AddDate(0, 0, -200)
			m.on()
			m.bootDone()
			m.inits = nil
			for _, days := range []int{120, 60, 30, 10, 2} {
				m.Now = end.AddDate(0, 0, -days)
				m.bootDone()
			}
			if most := map[bool]int{true: 10, false: 0}[name == "cut off a day before"]; len(m.inits) > most {
				t.Errorf("kubeadm ran %q", m.inits)
			}
			m.on()
			m.bootDone()
		})
	}
}

// TestRenewalWhileKubeletDoesNotRun checks that pods read renewed certificates even if kubelet has
// failed, or systemd restarts it in a loop.
func TestRenewalWhileKubeletDoesNotRun(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for _, state := range []string{"activating", "failed"} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.bootDone()
			m.Now = m.Now.AddDate(0, 8, 0)
			pods := m.Get(controlplane.Pods[1])
			m.Units[ondisk.UnitKubelet] = state
			m.bootDone() // as firstboot-again.timer does
			if m.Get(controlplane.Pods[1]) == pods {
				t.Error("the controller manager was not restarted for its new kubeconfig")
			}
		})
	}
}

// TestRenewalWithASpoiltManifest checks that a manifest that a power cut has truncated prevents
// neither the restart of the other pods with renewed certificates, nor its own repair in the next
// phase.
func TestRenewalWithASpoiltManifest(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Now = m.Now.AddDate(0, 8, 0)
	m.Put(controlplane.Pods[2], "")
	m.EffectNames = nil
	m.bootDone()
	if m.EffectCount("write "+controlplane.Pods[1]) == 0 || m.Get(controlplane.Pods[2]) == "" || m.Has(controlplane.PodsRestart) {
		t.Errorf("a pod is not restarted, or its manifest is still empty: %q", m.EffectNames)
	}
}

// madeTimes returns how often kubeadm made certificates.
func (m *controlPlane) madeTimes() (n int) {
	for _, phase := range m.inits {
		if phase == "certs all" {
			n++
		}
	}
	return n
}

// TestCertificatesOfAClockAhead checks a PC whose clock shows Shanghai's local time, eight hours
// ahead. Certificates that were made before a time server has answered are made again.
func TestCertificatesOfAClockAhead(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	for name, tt := range map[string]struct {
		after time.Duration // until a time server answers
		times int
	}{
		"before the first":            {20 * time.Second, 1},
		"while the API server starts": {2 * time.Minute, 2},
		"two hours later":             {2 * time.Hour, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, sites)
			m.SetClock(m.Now.Add(8 * time.Hour))
			m.Patience = 30 * time.Minute
			at := m.Now.Add(tt.after)
			m.ClockSynced = false
			m.Cluster.Down["192.0.2.11:6443"] = tt.after == 2*time.Minute
			m.TimeServerAnswers = func() bool {
				if !m.ClockSynced && !m.Now.Before(at) {
					m.ClockSynced = true
					m.StepClock(-m.ClockSkew)
					m.Cluster.Mu.Lock()
					m.Cluster.Down["192.0.2.11:6443"] = false
					m.Cluster.Mu.Unlock()
				}
				return m.ClockSynced
			}
			m.bootDone()
			pods := m.Get(controlplane.Pods[0])
			if tt.after == 2*time.Hour {
				if m.ClockSynced || m.ClockSkew == 0 {
					t.Fatal("the test needs a wrong clock, but the clock is right")
				}
				m.Now = at
				m.TimeServerAnswers()
				m.bootDone() // as firstboot-again.timer does
				if m.Get(controlplane.Pods[0]) == pods {
					t.Error("the API server was not restarted for its new certificate")
				}
			}
			for _, bad := range controlplane.BadCredentials(m.Env(), m.site) {
				t.Errorf("%s: %v", bad.Name(), bad.Wrong(m.Env(), controlplane.InUse))
			}
			if m.ClockSkew != 0 {
				t.Errorf("the clock is wrong by %s", m.ClockSkew)
			}
			if n := m.madeTimes(); n != tt.times {
				t.Errorf("certificates were made %d times, want %d", n, tt.times)
			}
		})
	}
}

// TestCertificatesOfAClockBehind checks a control-plane node that boots with a clock behind its
// certificates. They become valid once a time server answers.
func TestCertificatesOfAClockBehind(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Now = m.Now.AddDate(0, 3, 0)
	conf := m.Cluster.Client("system:node:m1", m.Now.AddDate(1, 0, 0)) // kubelet has renewed it
	own, err := os.Readlink(filepath.Join(m.Root, member.ClientCert))
	if err != nil {
		t.Fatal(err)
	}
	m.PutUnsynced(own, conf)
	m.SetClock(m.Now.AddDate(0, -2, 0))
	m.on()
	at := m.Now.Add(20 * time.Second)
	m.ClockSynced = false
	m.TimeServerAnswers = func() bool {
		if !m.ClockSynced && !m.Now.Before(at) {
			m.ClockSynced = true
			m.StepClock(-m.ClockSkew)
		}
		return m.ClockSynced
	}
	m.bootDone()
	if n := m.madeTimes(); n != 1 || m.Get(own) != conf {
		t.Errorf("certificates were made %d times", n)
	}
}

// TestClockBehindTheOtherMasters checks a control-plane node without a battery, a time server or
// etcd's data. It joins a cluster whose certificates start later than its clock shows.
func TestClockBehindTheOtherMasters(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 3))
	m.ClockSynced, m.Cluster.NoClusterInfo = false, false
	m.Now = m.Now.Add(200 * time.Hour)
	m.SetClock(m.Now.Add(-200 * time.Hour)) // the time at which the Site was stamped
	m.quorum()
	err := m.Boot()
	if m.ClockSkew < -time.Hour || len(m.starts) != 1 {
		t.Errorf("%v: the clock is wrong by %s; etcd was started as %q\n%s", err, m.ClockSkew, m.starts, strings.Join(m.Console, "\n"))
	}
}
