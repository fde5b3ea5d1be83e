package firstboot

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// TestServingCert: kubelet starts with a certificate of its node's name that it
// can load, and takes one that is there already.
func TestServingCert(t *testing.T) {
	t.Parallel()
	for name, names := range map[string]struct{ dns, ip string }{"edge-1": {dns: "edge-1"}, "192.0.2.7": {ip: "192.0.2.7"}} {
		w := nativeWorld(t)
		e := w.env()
		if err := makeServingCert(e, name); err != nil {
			t.Fatal(err)
		}
		pair, err := tls.LoadX509KeyPair(filepath.Join(w.root, servingCert), filepath.Join(w.root, servingKey))
		if err != nil {
			t.Fatal(err)
		}
		cert := pair.Leaf
		if _, ok := cert.PublicKey.(*ecdsa.PublicKey); !ok {
			t.Errorf("the key is %T: anything but an elliptic one takes seconds", cert.PublicKey)
		}
		var ips []string
		for _, ip := range cert.IPAddresses {
			ips = append(ips, ip.String())
		}
		if strings.Join(cert.DNSNames, " ") != names.dns || strings.Join(ips, " ") != names.ip {
			t.Errorf("%s: the certificate is for %q and %q", name, cert.DNSNames, ips)
		}
		if cert.NotBefore.After(w.now.Add(-time.Minute)) || cert.NotAfter.Before(w.now.AddDate(0, 11, 0)) || cert.SerialNumber.Sign() <= 0 {
			t.Errorf("valid from %s to %s, serial %s; now is %s", cert.NotBefore, cert.NotAfter, cert.SerialNumber, w.now)
		}
		roots := x509.NewCertPool()
		roots.AddCert(cert)
		if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: w.now, DNSName: name, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
			t.Error(err)
		}
		before := w.get(servingCert)
		if err := makeServingCert(e, "another"); err != nil || w.get(servingCert) != before {
			t.Errorf("a certificate that was there was replaced (%v)", err)
		}
		if err := undoJoin(t.Context(), e); err != nil || w.has(servingCert) || w.has(servingKey) {
			t.Errorf("a join that is undone leaves it (%v)", err)
		}
	}
}

// TestServingCertCannotBeWritten: the join is not begun, and tried again.
func TestServingCertCannotBeWritten(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	e := w.env()
	write, failed := e.WriteFile, false
	e.WriteFile = func(path string, data []byte, o machine.Owner) error {
		if path == servingKey && !failed {
			failed = true
			return errors.New("no space left on device")
		}
		return write(path, data, o)
	}
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if !failed || w.joins != 1 || !w.said("writing what kubelet serves with: no space left on device") {
		t.Errorf("%d joins, console:\n%s", w.joins, strings.Join(w.console, "\n"))
	}
}
