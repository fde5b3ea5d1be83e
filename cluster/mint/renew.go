package mint

import (
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"path/filepath"
	"slices"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

const (
	// caRenewal is the remaining validity at which a CA is issued again.
	caRenewal = kubeapi.CAWarning
	// adminRenewal is the remaining validity at which the administrator's kubeconfig is renewed.
	adminRenewal = adminLife / 2
)

// ExpiringCertificate is a certificate in a directory that expires soon.
type ExpiringCertificate struct {
	File string
	End  time.Time
}

// ExpiringCertificates returns the certificates in dir that `edgebake cluster new` would renew now.
func ExpiringCertificates(dir string, now time.Time) ([]ExpiringCertificate, error) {
	dir, err := realDir(dir)
	if err != nil {
		return nil, err
	}
	record, err := Load(dir)
	if err != nil {
		return nil, err
	}
	cas, err := dueCAs(dir, now)
	if err != nil {
		return nil, err
	}
	var all []ExpiringCertificate
	for _, ca := range cas {
		crt, _ := pairFiles(ca.ClusterCA)
		all = append(all, ExpiringCertificate{crt, ca.cert.NotAfter})
	}
	if record.adminDue(now) {
		all = append(all, ExpiringCertificate{fileAdmin, record.adminExpiry()})
	}
	return all, nil
}

// adminDue reports whether the administrator's kubeconfig must be renewed: it expires soon, or it
// is not valid yet because the clock was ahead when it was made.
func (r *Record) adminDue(now time.Time) bool {
	end := r.adminExpiry()
	return now.Add(adminRenewal).After(end) || now.Add(skew).Before(end.Add(-adminLife))
}

// adminExpiry returns when the administrator's kubeconfig expires. If the record has no date, the
// kubeconfig has never been renewed.
func (r *Record) adminExpiry() time.Time {
	if r.AdminUntil.IsZero() {
		return r.Created.Add(adminLife)
	}
	return r.AdminUntil
}

// dueCA is a CA that must be issued again.
type dueCA struct {
	configs.ClusterCA
	cert *x509.Certificate
}

func dueCAs(dir string, now time.Time) ([]dueCA, error) {
	var due []dueCA
	for _, ca := range configs.ClusterCAs() {
		crt, _ := pairFiles(ca)
		cert, err := readCert(filepath.Join(dir, filepath.FromSlash(crt)))
		if err != nil {
			return nil, err
		}
		// A certificate that is not valid yet is due too, as in adminDue.
		if now.Add(caRenewal).After(cert.NotAfter) || now.Before(cert.NotBefore) {
			due = append(due, dueCA{ca, cert})
		}
	}
	return due, nil
}

// renew renews the administrator's kubeconfig, and the CAs that expire soon or are not valid yet.
// CAs keep their keys, so pins and the certificates signed by a CA stay valid.
func renew(dir string, record *Record, c *clusterdoc.File, o Options, change *Change) error {
	cas, err := dueCAs(dir, o.Now)
	if err != nil {
		return err
	}
	if len(cas) == 0 && !record.adminDue(o.Now) {
		return nil
	}
	if err := record.checkClock(dir, o.Now); err != nil {
		return err
	}
	if len(record.Recipients) > 0 && !o.Identity.Given() {
		change.Expiring, err = ExpiringCertificates(dir, o.Now)
		return err
	}
	fail := func(err error) error { return fmt.Errorf("renewing certificates of %s: %w", c.Name, err) }
	fresh := map[string][]byte{}
	clusterCA, err := loadCA(dir, configs.ClusterCAs()[0], o.Identity)
	if err != nil {
		return fail(err)
	}
	for _, due := range cas {
		old, err := loadCA(dir, due.ClusterCA, o.Identity)
		if err != nil {
			return fail(err)
		}
		ca, err := reissue(old, o.Now)
		if err != nil {
			return fail(err)
		}
		crt, _ := pairFiles(due.ClusterCA)
		fresh[crt] = ca.certPEM()
		change.Renewed = append(change.Renewed, crt)
		if due.Base == configs.KubernetesCA {
			if former := string(old.certPEM()); !slices.Contains(record.FormerCAs, former) { // an interrupted run may have added it already
				record.FormerCAs = append(record.FormerCAs, former)
			}
			clusterCA = ca
		}
	}
	admin, err := adminConfig(c.Cluster, clusterCA, o.Now)
	if err != nil {
		return fail(err)
	}
	record.AdminUntil = o.Now.Add(adminLife).UTC().Truncate(time.Second)
	change.Renewed = append(change.Renewed, fileAdmin)
	// Write the CAs last: until then they are still due, so that a repeated run renews everything.
	// Write the record before them, because it identifies snapshots by the former CA.
	if err := writeFile(dir, fileAdmin, admin, record.Recipients); err != nil {
		return err
	}
	if len(cas) > 0 {
		if err := record.write(dir); err != nil {
			return err
		}
	}
	for _, due := range cas {
		crt, _ := pairFiles(due.ClusterCA)
		if err := writeFile(dir, crt, fresh[crt], record.Recipients); err != nil {
			return err
		}
	}
	return nil
}

// loadCA reads a CA's certificate and key.
func loadCA(dir string, ca configs.ClusterCA, id sealed.Identity) (pair, error) {
	crt, key := pairFiles(ca)
	cert, err := readCert(filepath.Join(dir, filepath.FromSlash(crt)))
	if err != nil {
		return pair{}, err
	}
	text, err := readFile(dir, key, id)
	if err != nil {
		return pair{}, err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return pair{}, fmt.Errorf("%s is not a key: restore the directory from your copy of it", key)
	}
	private, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil || !private.PublicKey.Equal(cert.PublicKey) {
		return pair{}, errors.Join(err, fmt.Errorf("%s and %s are not a pair: restore the directory from your copy of it", crt, key))
	}
	return pair{cert, private}, nil
}

// reissue makes a new certificate of a CA with the same key and names. It always expires later than
// the old one, because machines use the certificate that expires last.
func reissue(old pair, now time.Time) (pair, error) {
	serial, err := newSerial()
	if err != nil {
		return pair{}, err
	}
	end := now.Add(caLife)
	if later := old.cert.NotAfter.Add(time.Second); end.Before(later) {
		end = later
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: old.cert.Subject, RawSubject: old.cert.RawSubject, DNSNames: old.cert.DNSNames,
		NotBefore: now.Add(-skew).UTC(), NotAfter: end.UTC(), KeyUsage: old.cert.KeyUsage,
		// Certificates signed by the CA name it by this ID.
		SubjectKeyId: old.cert.SubjectKeyId, BasicConstraintsValid: true, IsCA: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, old.key.Public(), old.key)
	if err != nil {
		return pair{}, err
	}
	cert, err := x509.ParseCertificate(der)
	return pair{cert, old.key}, err
}

// newSerial returns a certificate's serial number, which is positive.
func newSerial() (*big.Int, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 62))
	if err != nil {
		return nil, err
	}
	return serial.Add(serial, big.NewInt(1)), nil
}
