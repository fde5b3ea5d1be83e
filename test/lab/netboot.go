package lab

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"time"
)

// ServeNetBoot serves guests whose firmware boots from the network: it runs a web server for dir,
// and a dnsmasq that makes an HTTPClient boot the file from it. It returns the URL of dir. Both end
// when the lab is closed. If by is not nil, the server uses HTTPS with a certificate from that
// authority.
func (l *Lab) ServeNetBoot(ctx context.Context, ns *Namespace, dir, file string, by *HTTPSAuthority) (url string, err error) {
	addr := net.JoinHostPort(Gateway, "8080")
	url = "http://" + addr
	ln, err := ns.Listen(ctx, "tcp", addr)
	if err != nil {
		return "", fmt.Errorf("serving %s: %w", dir, err)
	}
	if by != nil {
		url = "https://" + addr
		ln = tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{by.server}, CipherSuites: []uint16{
			tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
			tls.TLS_RSA_WITH_AES_256_GCM_SHA384, // firmware of 2022 does not support ECDHE
		}})
	}
	server := &http.Server{Handler: http.FileServer(http.Dir(dir)), ReadHeaderTimeout: time.Minute}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(ln) }()
	l.onClose(func() error {
		err := server.Close()
		if serving := <-failed; !errors.Is(serving, http.ErrServerClosed) {
			err = errors.Join(err, serving)
		}
		return err
	})
	_, err = l.start("dnsmasq", ns.Wrap([]string{"dnsmasq", "--conf-file=/dev/null", "--keep-in-foreground", "--log-facility=-", "--user=root", "--port=0",
		"--bind-interfaces", "--interface=br0", "--dhcp-range=10.103.0.150,10.103.0.160,255.255.255.0", "--dhcp-leasefile=/dev/null",
		"--dhcp-vendorclass=set:http,HTTPClient", "--dhcp-option-force=tag:http,60,HTTPClient", "--dhcp-boot=tag:http," + url + "/" + file}), nil)
	return url, err
}

// HTTPSAuthority is a CA of the lab, and the certificate of the lab's server at the gateway's
// address.
type HTTPSAuthority struct {
	// CA is the CA's certificate in PEM, and List the EFI signature list that contains it.
	CA, List []byte
	server   tls.Certificate
}

// NewHTTPSAuthority creates a CA.
func NewHTTPSAuthority() (*HTTPSAuthority, error) {
	// Use RSA, which the TLS of every firmware supports.
	caKey, err1 := rsa.GenerateKey(rand.Reader, 2048)
	key, err2 := rsa.GenerateKey(rand.Reader, 2048)
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("making a CA for HTTPS: %w", err)
	}
	now := time.Now()
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "lab"}, NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(1, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: Gateway}, NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
		IPAddresses: []net.IP{net.ParseIP(Gateway)}, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err1 := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	server, err2 := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("making a CA for HTTPS: %w", err)
	}
	return &HTTPSAuthority{
		CA:     pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		List:   signatureList(der),
		server: tls.Certificate{Certificate: [][]byte{server}, PrivateKey: key},
	}, nil
}

// signatureList returns an EFI_SIGNATURE_LIST with one certificate (UEFI 2.10, section 32.4.1).
func signatureList(der []byte) []byte {
	const header, owner = 28, 16
	// EFI_CERT_X509_GUID
	b := []byte{0xa1, 0x59, 0xc0, 0xa5, 0xe4, 0x94, 0xa7, 0x4a, 0x87, 0xb5, 0xab, 0x15, 0x5c, 0x2b, 0xf0, 0x72}
	for _, n := range []int{header + owner + len(der), 0, owner + len(der)} {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	return append(append(b, make([]byte, owner)...), der...)
}
