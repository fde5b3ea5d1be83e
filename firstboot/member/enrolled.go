package member

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// Errors of Enrolled.
var (
	ErrNotEnrolled = errors.New("this machine is not enrolled")
	errExpired     = errors.New("this node's certificate has expired")
	ErrEarly       = errors.New("this node's certificate is not valid yet")
)

// Enrolled returns nil if the node has valid credentials of the cluster. It works offline. It parses
// all files, because kubeadm and kubelet do not sync them: a power cut may leave them empty.
func Enrolled(e *machine.Env) error {
	_, err := Enrolment(e)
	return err
}

// EnrolledOrEarly reports whether the node is enrolled, or has a certificate that is not valid yet
// by this machine's clock.
func EnrolledOrEarly(e *machine.Env) bool {
	err := Enrolled(e)
	return err == nil || errors.Is(err, ErrEarly)
}

// Enrolment returns the node's certificate and the error of Enrolled. With errExpired and ErrEarly
// it returns both. It reads the files each time, because they may change during a pass.
func Enrolment(e *machine.Env) (*x509.Certificate, error) {
	var conf *kubeapi.Kubeconfig
	for _, f := range []struct {
		path  string
		parse func([]byte) error
	}{
		{ondisk.KubeletConf, func(b []byte) (err error) {
			conf, err = leadsToServer(e, b)
			return err
		}},
		{ondisk.KubeletConfig, isKubeletConfig},
		{KubeadmFlags, isKubeadmFlags},
		{ondisk.KubeCA, isCA},
	} {
		b, err := e.Read(f.path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("%w: there is no %s", ErrNotEnrolled, f.path)
		}
		if err == nil {
			err = f.parse(b)
		}
		if err != nil && !restorable(e, f.path) {
			return nil, fmt.Errorf("%w: reading %s: %w", ErrNotEnrolled, f.path, err)
		}
	}
	own, err := ownKubeconfig(e, conf)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotEnrolled, err)
	}
	cert, err := certOf(e, own)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotEnrolled, err)
	}
	switch now := e.Now(); {
	case now.After(cert.NotAfter):
		return cert, fmt.Errorf("%w on %s", errExpired, cert.NotAfter.UTC().Format(time.RFC3339))
	case now.Before(cert.NotBefore):
		return cert, fmt.Errorf("%w: it is valid from %s", ErrEarly, cert.NotBefore.UTC().Format(time.RFC3339))
	}
	return cert, nil
}

// OutOfTime reports whether an error of Enrolled concerns only the certificate's dates. The machine
// then still counts as a node.
func OutOfTime(err error) bool { return errors.Is(err, errExpired) || errors.Is(err, ErrEarly) }

// errCut means that a power cut has damaged a file.
var errCut = errors.New("it is empty or truncated, perhaps by a power failure")

func leadsToServer(e *machine.Env, kubeconfig []byte) (*kubeapi.Kubeconfig, error) {
	k, err := e.ParseKubeconfig(kubeconfig)
	if err != nil {
		return nil, errors.Join(errCut, err)
	}
	if c, err := k.Cluster(); err != nil || c.Server == "" {
		return nil, errors.Join(errCut, err)
	}
	return k, nil
}

func isKubeletConfig(b []byte) error {
	var c struct{ Kind string }
	if err := yamltree.Unmarshal(b, &c); err != nil || c.Kind != "KubeletConfiguration" {
		return errors.Join(errCut, err)
	}
	return nil
}

func isKubeadmFlags(b []byte) error {
	if !KubeadmArgs.Match(b) || bytes.IndexByte(b, 0) >= 0 {
		return errCut
	}
	return nil
}

func isCA(b []byte) error {
	if !x509.NewCertPool().AppendCertsFromPEM(b) {
		return errCut
	}
	return nil
}

// KubeletCert reads kubelet's client certificate, or yurthub's if kubelet connects through yurthub.
func KubeletCert(e *machine.Env) (*x509.Certificate, error) {
	k, err := Credentials(e)
	if err != nil {
		return nil, err
	}
	return certOf(e, k)
}

func certOf(e *machine.Env, k *kubeapi.Kubeconfig) (*x509.Certificate, error) {
	u, err := k.User()
	if err != nil {
		return nil, err
	}
	pair, err := e.KeyPair(u)
	if err != nil {
		return nil, err
	}
	return pair.Leaf, nil
}

// identityFiles returns the files that the node needs to return to the cluster once the token is
// wiped. Syncing them syncs their file systems, and so all other files there.
func identityFiles(e *machine.Env) []string {
	all := append([]string{ondisk.KubeletConf, ondisk.KubeletConfig, KubeadmFlags, ondisk.KubeCA, openyurt.Identity}, KubeletKeys(e)...)
	for _, s := range CertStores() {
		all = append(all, s.Current())
	}
	return slices.DeleteFunc(all, func(p string) bool {
		_, err := os.Stat(e.Path(p))
		return err != nil
	})
}

// SyncCredentials syncs the node's credentials, so that a power cut cannot destroy them.
func SyncCredentials(e *machine.Env) error {
	if err := e.Sync(append(identityFiles(e), "/etc", "/var")...); err != nil {
		return fmt.Errorf("syncing the node's credentials: %w", err)
	}
	return nil
}
