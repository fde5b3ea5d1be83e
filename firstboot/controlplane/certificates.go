package controlplane

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// RenewBefore is how long before its expiry a control-plane certificate is renewed; kubeadm's are
// valid for a year. The check runs at each boot and every two hours.
const RenewBefore = 180 * 24 * time.Hour

// Leaf is a certificate that kubeadm makes, and the CA that signs it.
type Leaf struct{ Base, CA string }

// Leaves lists the certificates that kubeadm makes for a control-plane node.
var Leaves = []Leaf{
	{"apiserver", "ca"},
	{"apiserver-kubelet-client", "ca"},
	{"front-proxy-client", "front-proxy-ca"},
	{"etcd/server", "etcd/ca"},
	{"etcd/peer", "etcd/ca"},
	{"etcd/healthcheck-client", "etcd/ca"},
	{"apiserver-etcd-client", "etcd/ca"},
}

// SuperAdminConf is the kubeconfig with all rights in the cluster. kubeadm makes it.
const SuperAdminConf = ondisk.KubernetesDir + "/super-admin.conf"

// Confs lists the kubeconfigs of the control plane, each with a certificate.
var Confs = []string{ondisk.KubernetesDir + "/admin.conf", SuperAdminConf, ondisk.KubernetesDir + "/controller-manager.conf", ondisk.KubernetesDir + "/scheduler.conf"}

// RenewalDir is where kubeadm makes new certificates and kubeconfigs. It is on the same file system
// as the files in use, so that Link can replace those.
const RenewalDir = ondisk.KubernetesDir + "/edgebake-renewal"

// Renewed returns the path of a file's new version in RenewalDir.
func Renewed(file string) string {
	return RenewalDir + strings.TrimPrefix(file, ondisk.KubernetesDir)
}

// InUse returns the path of a file's version in use: the file itself.
func InUse(file string) string { return file }

// credential is a certificate with its key, or a kubeconfig.
type credential struct {
	// Files lists its files in the order in which they are replaced.
	Files []string
	// Usable reads the credential's files at the paths that at returns, and returns the
	// certificate. It returns an error if the control plane cannot use the credential.
	Usable func(e *machine.Env, at func(file string) string) (*x509.Certificate, error)
	// outdated returns an error if a usable credential must be replaced.
	outdated func(e *machine.Env, at func(file string) string, cert *x509.Certificate) error
}

// Name returns the file by which messages name the credential.
func (c credential) Name() string { return c.Files[len(c.Files)-1] }

// Wrong returns an error if the credential at the paths that at returns must be replaced.
func (c credential) Wrong(e *machine.Env, at func(file string) string) error {
	cert, err := c.Usable(e, at)
	if err != nil {
		return err
	}
	return c.outdated(e, at, cert)
}

// CertificatesPhase lets kubeadm make the control plane's missing and outdated credentials in
// RenewalDir. Those in use are replaced only after the new ones are verified.
func CertificatesPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "certificates", Doc: "the control plane's certificates are intact, valid and have all names", Timeout: 5 * time.Minute,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			for _, ca := range configs.ClusterCAs() {
				member.NoteCAExpiry(e, member.PKIDir+"/"+ca.Base+".crt")
			}
			bad := BadCredentials(e, active.Site)
			if len(bad) > 0 || e.Exists(PodsRestart) || e.Exists(RenewalDir) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			kept := false // kubeadm failed, but the credentials in use are usable
			bad := BadCredentials(e, active.Site)
			if err := putInPlace(e, bad); err != nil { // new ones of an interrupted run
				return err
			}
			if bad = BadCredentials(e, active.Site); len(bad) > 0 {
				failed := makeCredentials(ctx, e, active, bad)
				still := BadCredentials(e, active.Site)
				switch {
				case failed == nil:
				case !areUsable(e, active.Site) || errors.Is(ctx.Err(), context.Canceled):
					return failed
				default: // the control plane can start without the new ones
					kept = true
					e.Note("renewing the control plane's certificates failed: %s; those in use are valid until %s; first boot retries every two hours and at each boot", machine.OneLine(failed), firstExpiry(e, still).UTC().Format(time.RFC3339))
				}
			}
			if err := e.RemoveAll(RenewalDir); err != nil {
				return fmt.Errorf("removing %s: %w", RenewalDir, err)
			}
			if e.Exists(PodsRestart) {
				if err := restartReaders(ctx, e); err != nil {
					return err
				}
			}
			if kept {
				return run.ErrConfirmed
			}
			return nil
		},
	}
}

// makeCredentials makes kubeadm create the wanted credentials in RenewalDir, which has links to all
// other credentials, and then replaces those in use.
func makeCredentials(ctx context.Context, e *machine.Env, active *site.Active, wanted []credential) error {
	if err := e.RemoveAll(RenewalDir); err != nil {
		return fmt.Errorf("removing %s: %w", RenewalDir, err)
	}
	for _, dir := range []string{RenewalDir, Renewed(member.PKIDir), Renewed(member.PKIDir + "/etcd")} {
		if err := e.Mkdir(dir, machine.Mode(0o700)); err != nil {
			return fmt.Errorf("making a directory for new certificates: %w", err)
		}
	}
	for _, c := range wanted {
		e.Log.Info("making a certificate", "file", c.Name(), "why", c.Wrong(e, InUse))
	}
	isWanted := func(file string) bool {
		return slices.ContainsFunc(wanted, func(c credential) bool { return slices.Contains(c.Files, file) })
	}
	for _, file := range append(Files(), ondisk.KubeletConf) {
		if isWanted(file) {
			continue
		}
		target, err := filepath.Rel(path.Dir(Renewed(file)), file)
		if err == nil {
			err = e.Symlink(target, Renewed(file))
		}
		if err != nil {
			return fmt.Errorf("linking the files for new certificates: %w", err)
		}
	}
	began := e.Now().UTC()
	err := kubeadm.Init(ctx, e, active, kubeadm.Local{CertificatesDir: Renewed(member.PKIDir)},
		[]string{"certs", "all"}, []string{"kubeconfig", "all", "--kubeconfig-dir", RenewalDir})
	if err == nil {
		err = saveMade(e, active.Site, wanted, began)
	}
	if err != nil {
		return err
	}
	for _, c := range wanted {
		if err := c.Wrong(e, Renewed); err != nil {
			return fmt.Errorf("verifying %s, which kubeadm has written: %w", Renewed(c.Name()), err)
		}
	}
	return putInPlace(e, wanted)
}

// putInPlace replaces old credentials with the usable new ones in RenewalDir. The new ones stay
// there: after a power cut between a key and its certificate, the next run replaces both again.
func putInPlace(e *machine.Env, old []credential) error {
	old = slices.DeleteFunc(slices.Clone(old), func(c credential) bool {
		return c.Wrong(e, Renewed) != nil
	})
	if len(old) == 0 {
		return nil
	}
	if err := e.Sync(RenewalDir); err != nil { // kubeadm does not sync
		return fmt.Errorf("syncing the new certificates: %w", err)
	}
	mark := e.Contents(PodsRestart) // a run that was killed may have set it
	kubelets := slices.ContainsFunc(old, func(c credential) bool { return slices.Contains(c.Files, ondisk.KubeletConf) })
	if kubelets {
		mark = []byte(kubeletToo)
	}
	if err := e.WriteFile(PodsRestart, mark, machine.Mode(0o600)); err != nil {
		return fmt.Errorf("recording that the control plane must be restarted: %w", err)
	}
	if kubelets { // kubelet prefers pairs that it has renewed itself, even invalid ones
		if err := removeUselessKeys(e); err != nil {
			return err
		}
	}
	for _, c := range old {
		for _, f := range c.Files {
			if err := e.Link(Renewed(f), f); err != nil {
				return fmt.Errorf("replacing %s with its new version: %w", f, err)
			}
		}
	}
	return nil
}

// removeUselessKeys removes kubelet's own key pairs that are not usable now.
func removeUselessKeys(e *machine.Env) error {
	for _, f := range member.KubeletKeys(e) {
		cert, err := member.LoadLinked(e, f)
		if f == member.ServingCert || f == member.ServingKey {
			cert, err = member.LoadPair(e, member.ServingCert, member.ServingKey)
		}
		if err == nil && checkValidity(e, cert) == nil {
			continue
		}
		if err := e.Remove(f); err != nil {
			return fmt.Errorf("removing kubelet's unusable certificate %s: %w", f, err)
		}
	}
	return nil
}

// BadCredentials returns the credentials that kubeadm must make again.
func BadCredentials(e *machine.Env, site *configs.Site) (bad []credential) {
	for _, c := range CredentialsOf(site) {
		if c.Wrong(e, InUse) != nil {
			bad = append(bad, c)
		}
	}
	return bad
}

// areUsable reports whether all credentials are usable now. Outdated ones may be usable.
func areUsable(e *machine.Env, site *configs.Site) bool {
	return !slices.ContainsFunc(CredentialsOf(site), func(c credential) bool {
		_, err := c.Usable(e, InUse)
		return err != nil
	})
}

// firstExpiry returns the earliest expiry of the usable credentials.
func firstExpiry(e *machine.Env, all []credential) time.Time {
	var first time.Time
	for _, c := range all {
		if cert, err := c.Usable(e, InUse); err == nil && (first.IsZero() || cert.NotAfter.Before(first)) {
			first = cert.NotAfter
		}
	}
	return first
}

// CredentialsOf returns all credentials that kubeadm makes for a control-plane node.
func CredentialsOf(site *configs.Site) []credential {
	var all []credential
	for _, l := range Leaves {
		cert, key, ca := member.PKIDir+"/"+l.Base+".crt", member.PKIDir+"/"+l.Base+".key", member.PKIDir+"/"+l.CA+".crt"
		all = append(all, credential{
			Files: []string{key, cert},
			Usable: func(e *machine.Env, at func(string) string) (*x509.Certificate, error) {
				c, err := member.LoadPair(e, at(cert), at(key))
				if err != nil {
					return nil, err
				}
				return c, validBy(e, c, ca)
			},
			outdated: func(e *machine.Env, _ func(string) string, c *x509.Certificate) error {
				if l.Base == "apiserver" {
					for _, name := range site.ControlPlane.Documents().CertSANs() {
						if err := c.VerifyHostname(name); err != nil {
							return err
						}
					}
				}
				return expiresSoon(e, c, ca)
			},
		})
	}
	for _, f := range Confs {
		all = append(all, credential{
			Files: []string{f},
			Usable: func(e *machine.Env, at func(string) string) (*x509.Certificate, error) {
				return confCert(e, at(f))
			},
			outdated: func(e *machine.Env, at func(string) string, c *x509.Certificate) error {
				return cmp.Or(formerCA(e, at(f)), expiresSoon(e, c, ondisk.KubeCA))
			},
		})
	}
	return append(all, credential{
		Files: []string{ondisk.KubeletConf},
		Usable: func(e *machine.Env, at func(string) string) (*x509.Certificate, error) {
			if f := at(ondisk.KubeletConf); f != ondisk.KubeletConf {
				return confCert(e, f)
			}
			cert, err := member.KubeletCert(e)
			if err != nil {
				return nil, err
			}
			return cert, checkValidity(e, cert)
		},
		// kubelet renews its client certificate itself, so compare only the CA in the kubeconfig.
		outdated: func(e *machine.Env, at func(string) string, _ *x509.Certificate) error {
			return formerCA(e, at(ondisk.KubeletConf))
		},
	})
}

// formerCA returns an error if a kubeconfig trusts an earlier issue of the cluster's CA.
func formerCA(e *machine.Env, path string) error {
	k, err := e.KubeconfigAt(path, "the kubeconfig")
	if err != nil {
		return err
	}
	c, err := k.Cluster()
	if err != nil {
		return err
	}
	trusted, err := c.CA(e.Root)
	if err != nil {
		return err
	}
	if kubeapi.Reissued(trusted, e.Contents(ondisk.KubeCA), e.Now()) != nil {
		return errors.New("the cluster's CA was reissued after this kubeconfig was made")
	}
	return nil
}

// confCert returns the certificate of a kubeconfig, with an error if it is not valid now.
func confCert(e *machine.Env, path string) (*x509.Certificate, error) {
	c, err := e.ClientAt(path, "the kubeconfig")
	if err != nil {
		return nil, err
	}
	if c.Cert == nil {
		return nil, errors.New("it contains no client certificate")
	}
	cert, err := x509.ParseCertificate(c.Cert.Certificate[0])
	if err != nil {
		return nil, err
	}
	return cert, validBy(e, cert, ondisk.KubeCA)
}

// validBy returns an error unless the certificate is valid now and signed by the CA in caFile.
func validBy(e *machine.Env, cert *x509.Certificate, caFile string) error {
	cas, err := kubeapi.ParseCerts(e.Contents(caFile))
	if err != nil {
		return err
	}
	if err := e.SignedBy(cert, cas[0]); err != nil {
		return err
	}
	return checkValidity(e, cert)
}

// checkValidity returns an error unless a certificate is valid now. If it is not valid yet, it was
// made while the clock was ahead.
func checkValidity(e *machine.Env, cert *x509.Certificate) error {
	switch now := e.Now(); {
	case now.After(cert.NotAfter):
		return fmt.Errorf("it expired at %s", cert.NotAfter.UTC().Format(time.RFC3339))
	case now.Before(cert.NotBefore):
		return fmt.Errorf("it is not valid before %s", cert.NotBefore.UTC().Format(time.RFC3339))
	}
	return nil
}

// expiresSoon returns an error if the certificate expires within RenewBefore, and more than half of
// its lifetime has passed. The second condition prevents a renewal of short-lived certificates at
// each check.
func expiresSoon(e *machine.Env, cert *x509.Certificate, caFile string) error {
	cas, err := kubeapi.ParseCerts(e.Contents(caFile))
	if err != nil {
		return err
	}
	if !cert.NotAfter.Before(cas[0].NotAfter) {
		return nil // a new certificate would not be valid for longer
	}
	if left, all := cert.NotAfter.Sub(e.Now()), cert.NotAfter.Sub(madeAt(e, cert)); left < min(RenewBefore, all/2) {
		return fmt.Errorf("it expires soon, at %s", cert.NotAfter.UTC().Format(time.RFC3339))
	}
	return nil
}

// MadeFile records when kubeadm made each certificate, because a certificate in a kubeconfig has
// the NotBefore of its CA. If the file is lost, certificates with a lifetime of less than a year
// may be renewed early once.
const MadeFile = ondisk.StateDir + "/certificates.json"

// madeRecord is the contents of MadeFile.
type madeRecord struct {
	Version int `json:"version"`
	// Made maps the hexadecimal SHA-256 of a certificate to the time at which it was made.
	Made map[string]time.Time `json:"made"`
}

const madeRecordVersion = 1

func readMadeRecord(e *machine.Env) madeRecord {
	var n madeRecord
	if json.Unmarshal(e.Contents(MadeFile), &n) != nil {
		return madeRecord{}
	}
	return n
}

func fingerprint(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.Raw)
	return hex.EncodeToString(sum[:])
}

func madeAt(e *machine.Env, cert *x509.Certificate) time.Time {
	if made := readMadeRecord(e).Made[fingerprint(cert)]; made.After(cert.NotBefore) {
		return made
	}
	return cert.NotBefore
}

// saveMade records when new credentials were made, before they replace those in use. It keeps the
// records of the ones in use.
func saveMade(e *machine.Env, site *configs.Site, made []credential, when time.Time) error {
	before, now := readMadeRecord(e).Made, map[string]time.Time{}
	for _, c := range CredentialsOf(site) {
		if cert, err := c.Usable(e, InUse); err == nil && !before[fingerprint(cert)].IsZero() {
			now[fingerprint(cert)] = before[fingerprint(cert)]
		}
	}
	for _, c := range made {
		if cert, err := c.Usable(e, Renewed); err == nil {
			now[fingerprint(cert)] = when
		}
	}
	b, err := json.MarshalIndent(madeRecord{madeRecordVersion, now}, "", "  ")
	if err == nil {
		_, err = e.Write(MadeFile, append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("recording when the certificates were made: %w", err)
	}
	return nil
}
