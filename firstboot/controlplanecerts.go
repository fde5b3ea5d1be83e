package firstboot

import (
	"context"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

// renewBefore is how long a certificate of the control plane must still be
// valid: kubeadm's are valid for a year. It is looked at at each boot, and every
// two hours.
const renewBefore = 180 * 24 * time.Hour

// leaf is a certificate that kubeadm makes, and the CA that signs it.
type leaf struct{ base, ca string }

var leaves = []leaf{
	{"apiserver", "ca"},
	{"apiserver-kubelet-client", "ca"},
	{"front-proxy-client", "front-proxy-ca"},
	{"etcd/server", "etcd/ca"},
	{"etcd/peer", "etcd/ca"},
	{"etcd/healthcheck-client", "etcd/ca"},
	{"apiserver-etcd-client", "etcd/ca"},
}

// Kubeconfigs of the control plane.
const superAdminConf = ondisk.KubernetesDir + "/super-admin.conf"

var controlPlaneConfs = []string{ondisk.KubernetesDir + "/admin.conf", superAdminConf, ondisk.KubernetesDir + "/controller-manager.conf", ondisk.KubernetesDir + "/scheduler.conf"}

// certificatesPhase has kubeadm make the control plane's certificates and
// kubeconfigs. kubeadm takes whatever file is there for whole, and keeps a
// certificate whose names have changed: what is not good is removed first.
func certificatesPhase(active *Active) Phase {
	site := active.Site
	return Phase{
		Name: "certificates", Doc: "the control plane's certificates are whole, valid and have all names", Timeout: 5 * time.Minute,
		Check: func(_ context.Context, e *Env) (Verdict, error) {
			if len(badCertificates(e, site)) > 0 || e.exists(podsRestart) {
				return Todo, nil
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			bad := badCertificates(e, site)
			if len(bad) == 0 {
				return restartReaders(ctx, e)
			}
			kubelets := slices.Contains(bad, ondisk.KubeletConf)
			mark := e.contents(podsRestart) // of a run that was killed
			if kubelets {
				mark = []byte(kubeletToo)
			}
			if err := e.WriteFile(podsRestart, mark, Mode(0o600)); err != nil {
				return fmt.Errorf("noting that the control plane is to be restarted: %w", err)
			}
			for _, f := range bad {
				if err := e.Remove(f); err != nil {
					return fmt.Errorf("removing a certificate of no use: %w", err)
				}
			}
			if kubelets { // it prefers the ones that it has renewed itself
				for _, f := range kubeletKeys(e) {
					if err := e.Remove(f); err != nil {
						return fmt.Errorf("removing a certificate of no use: %w", err)
					}
				}
			}
			if err := kubeadmInit(ctx, e, active, configs.KubeadmLocal{}, []string{"certs", "all"}, []string{"kubeconfig", "all"}); err != nil {
				return err
			}
			if err := e.Sync("/etc"); err != nil { // kubeadm does not
				return fmt.Errorf("syncing the certificates: %w", err)
			}
			return restartReaders(ctx, e)
		},
	}
}

// badCertificates are files that kubeadm must make, or make anew.
func badCertificates(e *Env, site *configs.Site) []string {
	var bad []string
	for _, l := range leaves {
		cert, key := pkiDir+"/"+l.base+".crt", pkiDir+"/"+l.base+".key"
		if err := goodLeaf(e, site, l); err != nil {
			e.Log.Info("a certificate is to be made", "certificate", cert, "why", err)
			bad = append(bad, cert, key)
		}
	}
	for _, f := range controlPlaneConfs {
		if err := goodConf(e, f); err != nil {
			e.Log.Info("a kubeconfig is to be made", "kubeconfig", f, "why", err)
			bad = append(bad, f)
		}
	}
	// Kubelet renews its own, as long as it runs.
	if cert, err := kubeletCert(e); err != nil || e.Now().After(cert.NotAfter) {
		bad = append(bad, ondisk.KubeletConf)
	}
	return bad
}

func goodLeaf(e *Env, site *configs.Site, l leaf) error {
	cert, err := loadPair(e, pkiDir+"/"+l.base+".crt", pkiDir+"/"+l.base+".key")
	if err != nil {
		return err
	}
	if err := good(e, cert, pkiDir+"/"+l.ca+".crt"); err != nil {
		return err
	}
	if l.base != "apiserver" {
		return nil
	}
	for _, name := range site.ControlPlane.CertSANs() {
		if err := cert.VerifyHostname(name); err != nil {
			return err
		}
	}
	return nil
}

// good reports whether a certificate is signed by that CA and valid for long.
func good(e *Env, cert *x509.Certificate, caFile string) error {
	cas, err := api.ParseCerts(e.contents(caFile))
	if err != nil {
		return err
	}
	if err := e.signedBy(cert, cas[0]); err != nil {
		return err
	}
	if left := cert.NotAfter.Sub(e.Now()); left < renewBefore {
		return fmt.Errorf("it is valid until %s", cert.NotAfter.UTC().Format(time.RFC3339))
	}
	return nil
}

func goodConf(e *Env, path string) error {
	c, err := e.clientAt(path, "the kubeconfig")
	if err != nil {
		return err
	}
	if c.Cert == nil {
		return errors.New("it has no certificate")
	}
	cert, err := x509.ParseCertificate(c.Cert.Certificate[0])
	if err != nil {
		return err
	}
	return good(e, cert, ondisk.KubeCA)
}

// parseSigner reads a private key, PEM. No error quotes any of it.
func parseSigner(text []byte) (crypto.Signer, error) {
	b, _ := pem.Decode(text)
	if b == nil {
		return nil, errors.New("there is no private key in PEM")
	}
	key, err := x509.ParsePKCS8PrivateKey(b.Bytes)
	if err != nil {
		key, err = anyError(x509.ParseECPrivateKey(b.Bytes))
	}
	if err != nil {
		key, err = anyError(x509.ParsePKCS1PrivateKey(b.Bytes))
	}
	signer, ok := key.(crypto.Signer)
	if err != nil || !ok {
		return nil, errors.New("the private key is damaged")
	}
	return signer, nil
}

func anyError[T any](key T, err error) (any, error) { return key, err }
