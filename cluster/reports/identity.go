package reports

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/file"
)

// Identity has the secrets by which machines and the receiver recognize each other.
type Identity struct {
	Certificate tls.Certificate
	// PEM is the certificate, for report.caCert of the Sites.
	PEM string
	// Path is the path of the common URL. It is secret: anyone who knows it can send reports.
	Path string
	// Key is the key from which each machine's own URL is derived (clusterdoc.ReportPath). A
	// Cluster has it in report.key.
	Key configs.Secret
}

const (
	certFile   = "receiver.crt"
	keyFile    = "receiver.key"
	pathFile   = "receiver.path"
	secretFile = "receiver.secret" // contains Key
)

// lifetime is the validity of the certificate, which Sites contain.
const lifetime = 10 * 365 * 24 * time.Hour

// LoadIdentity reads the receiver's identity from the directory, or makes one for these names and
// addresses. Sites contain its certificate, so a name that the certificate lacks is an error.
func LoadIdentity(dir string, names []string, now time.Time) (*Identity, error) {
	at := func(name string) string { return filepath.Join(dir, name) }
	if _, err := os.Lstat(at(certFile)); errors.Is(err, fs.ErrNotExist) {
		if len(names) == 0 {
			return nil, fmt.Errorf("making the receiver's certificate in %s: the first time, --name is required, the name or address at which machines reach this computer", dir)
		}
		undo, err := file.MakeDir(dir, 0o700)
		if err != nil {
			return nil, fmt.Errorf("making the receiver's directory: %w", err)
		}
		defer undo()
		if err := mint(at, names, now); err != nil {
			return nil, fmt.Errorf("making the receiver's certificate: %w", err)
		}
	}
	text, err := os.ReadFile(at(certFile))
	if err != nil {
		return nil, fmt.Errorf("reading the receiver's certificate: %w", err)
	}
	key, err := os.ReadFile(at(keyFile))
	if err != nil {
		return nil, fmt.Errorf("reading the receiver's key: %w", err)
	}
	path, err := os.ReadFile(at(pathFile))
	if err != nil {
		return nil, fmt.Errorf("reading the receiver's path: %w", err)
	}
	secret, err := os.ReadFile(at(secretFile))
	if errors.Is(err, fs.ErrNotExist) { // made by a version without this file
		secret = newSecret()
		err = file.Replace(at(secretFile), secret)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the receiver's secret: %w", err)
	}
	id := &Identity{PEM: string(text), Path: strings.TrimSpace(string(path)), Key: configs.NewSecret(strings.TrimSpace(string(secret)))}
	if len(id.Path) < minSecret || len(id.Key.Reveal()) < minSecret {
		return nil, fmt.Errorf("reading %s and %s: one of them is truncated; restore them from your copy of %s", at(pathFile), at(secretFile), dir)
	}
	if id.Certificate, err = tls.X509KeyPair(text, key); err != nil {
		return nil, fmt.Errorf("reading the receiver's certificate %s: %w", at(certFile), err)
	}
	for _, name := range names {
		if err := id.Certificate.Leaf.VerifyHostname(name); err != nil {
			return nil, fmt.Errorf("--name %s: the certificate in %s is for %s, and Sites already contain this certificate; use one of these names, or another directory (--dir) and new Sites",
				name, dir, strings.Join(Names(id), ", "))
		}
	}
	return id, nil
}

// Names returns the names in the certificate, then its addresses.
func Names(id *Identity) []string {
	leaf := id.Certificate.Leaf
	names := append([]string(nil), leaf.DNSNames...)
	for _, ip := range leaf.IPAddresses {
		names = append(names, ip.String())
	}
	return names
}

// minSecret is the minimum length of a secret in characters.
const minSecret = 20

// newSecret returns a random line.
func newSecret() []byte { return []byte(strings.ToLower(rand.Text()) + "\n") }

// mint makes an identity. The certificate is written last, so that all files exist if it does.
func mint(at func(string) string, names []string, now time.Time) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return err
	}
	cert := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "edgebake receiver of reports"},
		// Start earlier, for machines whose clock is behind.
		NotBefore: now.Add(-24 * time.Hour), NotAfter: now.Add(lifetime),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		// The certificate is its own CA. MaxPathLenZero forbids any CA below it.
		BasicConstraintsValid: true, IsCA: true, MaxPathLenZero: true,
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			cert.IPAddresses = append(cert.IPAddresses, ip)
		} else {
			cert.DNSNames = append(cert.DNSNames, name)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		return err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		data []byte
	}{
		{keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})},
		{pathFile, append([]byte("/"), newSecret()...)},
		{secretFile, newSecret()},
		{certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})},
	} {
		// Replace existing files, because an interrupted attempt may have left some.
		if err := file.Replace(at(f.name), f.data); err != nil {
			return err
		}
	}
	return nil
}
