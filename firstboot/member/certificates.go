package member

import (
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// certStore is the store of a client-go certificate manager: NAME-DATE.pem files, and the link
// NAME-current.pem to the newest one. The files are not synced: a power cut may leave one empty.
type certStore struct {
	Dir, Name string
	// Replaceable means that the program requests a new certificate if the file is missing. If the
	// file is broken, it does not.
	Replaceable bool
}

// CertStores returns the stores of kubelet and yurthub.
func CertStores() []certStore {
	all := []certStore{{KubeletPKI, "kubelet-client", false}, {KubeletPKI, "kubelet-server", true}}
	for _, c := range openyurt.Certificates() {
		all = append(all, certStore{c.Dir, c.Name, c.Replaceable})
	}
	return all
}

func (s certStore) Current() string { return s.Dir + "/" + s.Name + "-current.pem" }

// RestoreCertificates makes links to damaged certificates point to the newest usable ones, removes
// unusable certificates that kubelet or yurthub then make again, and restores the cluster's CA. It
// must run before kubelet and yurthub start.
func RestoreCertificates(e *machine.Env) error {
	var errs []error
	for _, s := range CertStores() {
		if err := s.restore(e); err != nil {
			errs = append(errs, fmt.Errorf("restoring %s: %w", s.Current(), err))
		}
	}
	return errors.Join(append(errs, removeBrokenPair(e, ServingCert, ServingKey), restoreCA(e))...)
}

// restoreCA writes a damaged or missing ondisk.KubeCA again, from the kubeconfig with the node's own
// certificate. kubeadm does not sync the file, and without it the machine does not count as a node.
func restoreCA(e *machine.Env) error {
	broken := isCA(e.Contents(ondisk.KubeCA))
	if broken == nil || e.Exists(LeavingFile) {
		return nil
	}
	ca := EnrolledCA(e)
	if _, err := KubeletCert(e); err != nil || isCA(ca) != nil {
		return nil
	}
	if err := e.WriteFile(ondisk.KubeCA, ca, machine.Mode(0o644)); err != nil {
		return fmt.Errorf("restoring the cluster's CA: %w", err)
	}
	e.Log.Warn("the cluster's CA was unusable: restored it from kubelet's credentials", "file", ondisk.KubeCA, "error", broken)
	e.Console(ondisk.KubeCA + " was unusable, and was restored from kubelet's credentials")
	return nil
}

func (s certStore) restore(e *machine.Env) error {
	broken := checkLoadable(e, s.Current())
	if broken == nil {
		return nil
	}
	if newest := s.newest(e); newest != "" {
		if err := e.Symlink(newest, s.Current()); err != nil {
			return err
		}
		e.Log.Warn("the current certificate is unusable: using the newest usable one", "link", s.Current(), "to", newest, "error", broken)
		e.Console(fmt.Sprintf("%s was unusable, and links to %s again", s.Current(), filepath.Base(newest)))
		return nil
	}
	if s.Replaceable && e.Exists(s.Current()) {
		e.Log.Warn("removed a certificate that cannot be used: another one will be requested", "link", s.Current(), "error", broken)
		return e.Remove(s.Current())
	}
	return nil
}

var certDate = regexp.MustCompile(`^-[0-9-]+\.pem$`)

// newest returns the path of the usable certificate that was issued last, or "". It ignores the
// dates in the names, because the clock may have been wrong.
func (s certStore) newest(e *machine.Env) string {
	entries, err := os.ReadDir(e.Path(s.Dir))
	if err != nil {
		return ""
	}
	var best string
	var issued *x509.Certificate
	for _, en := range entries { // sorted by name
		date, ok := strings.CutPrefix(en.Name(), s.Name)
		if !ok || !certDate.MatchString(date) || !en.Type().IsRegular() {
			continue
		}
		p := s.Dir + "/" + en.Name()
		cert, err := LoadPair(e, p, p)
		if err == nil && (issued == nil || !cert.NotBefore.Before(issued.NotBefore)) {
			best, issued = p, cert
		}
	}
	return best
}

// checkLoadable returns an error if the certificate at path, which may be a link, cannot be used.
func checkLoadable(e *machine.Env, path string) error {
	_, err := LoadLinked(e, path)
	return err
}

// LoadLinked reads a certificate and its key from one file, which may be a link.
func LoadLinked(e *machine.Env, path string) (*x509.Certificate, error) {
	if target, err := os.Readlink(e.Path(path)); err == nil {
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		path = target
	}
	return LoadPair(e, path, path)
}

// LoadPair reads a certificate and its key from two files.
func LoadPair(e *machine.Env, certFile, keyFile string) (*x509.Certificate, error) {
	cert, err := e.Read(certFile)
	if err != nil {
		return nil, err
	}
	key, err := e.Read(keyFile)
	if err != nil {
		return nil, err
	}
	pair, err := e.ParsePair(cert, key)
	if err != nil {
		return nil, err
	}
	return pair.Leaf, nil
}

// removeBrokenPair removes kubelet's self-signed certificate if it is unusable: kubelet makes a new
// one only if the files are missing.
func removeBrokenPair(e *machine.Env, cert, key string) error {
	if !slices.ContainsFunc([]string{cert, key}, e.Exists) {
		return nil
	}
	if _, err := LoadPair(e, cert, key); err == nil {
		return nil
	}
	return errors.Join(e.Remove(cert), e.Remove(key))
}
