package firstboot

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/netip"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// makeServingCert signs a certificate for kubelet's own server by itself, as
// kubelet does where it finds none when it starts, with the same names and for as
// long. Kubelet makes two RSA keys for it, which takes a small machine seconds
// while everything waits for kubelet; an elliptic key takes none.
func makeServingCert(e *machine.Env, name string) error {
	if e.Exists(servingCert) && e.Exists(servingKey) {
		return nil
	}
	key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), e.Random(32))
	if err != nil { // as likely as once in four thousand million times
		return fmt.Errorf("making kubelet's key: %w", err)
	}
	now := e.Now()
	from := now.Add(-time.Hour) // other clocks may be behind
	template := x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(e.Random(15)),
		Subject:      pkix.Name{CommonName: fmt.Sprintf("%s@%d", name, now.Unix())},
		NotBefore:    from, NotAfter: from.AddDate(1, 0, 0),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{name}, BasicConstraintsValid: true,
	}
	if ip, err := netip.ParseAddr(name); err == nil {
		template.DNSNames, template.IPAddresses = nil, append(template.IPAddresses, ip.AsSlice())
	}
	cert, err := x509.CreateCertificate(nil, &template, &template, key.Public(), key) // no randomness: RFC 6979
	if err != nil {
		return fmt.Errorf("signing kubelet's certificate: %w", err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return fmt.Errorf("encoding kubelet's key: %w", err)
	}
	for _, f := range []struct {
		path  string
		block pem.Block
		owner machine.Owner
	}{
		{servingKey, pem.Block{Type: "EC PRIVATE KEY", Bytes: der}, machine.Mode(0o600)},
		{servingCert, pem.Block{Type: "CERTIFICATE", Bytes: cert}, machine.Mode(0o644)},
	} {
		if err := e.WriteFile(f.path, pem.EncodeToMemory(&f.block), f.owner); err != nil {
			return fmt.Errorf("writing what kubelet serves with: %w", err)
		}
	}
	return nil
}
