package mint

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

const (
	caLife    = 10 * 365 * 24 * time.Hour // as for kubeadm's CAs
	adminLife = 365 * 24 * time.Hour
	// skew is how far a machine's clock may be behind when it first sees a certificate.
	skew = time.Hour
)

// pair is a certificate and its key.
type pair struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func (p pair) certPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.cert.Raw})
}

// keyPEM returns a key in the format in which kubeadm writes EC keys.
func keyPEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

func publicPEM(key crypto.PublicKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// sign makes a key and a certificate for it, signed by ca, or self-signed if ca is nil.
func sign(template *x509.Certificate, ca *pair) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, err
	}
	if template.SerialNumber, err = newSerial(); err != nil {
		return pair{}, err
	}
	by := pair{template, key}
	if ca != nil {
		by = *ca
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.cert, key.Public(), by.key)
	if err != nil {
		return pair{}, err
	}
	cert, err := x509.ParseCertificate(der)
	return pair{cert, key}, err
}

// newCA makes a CA with this name and the same properties as kubeadm's CAs.
func newCA(name string, now time.Time) (pair, error) {
	p, err := sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		DNSNames:              []string{name}, // kubeadm sets this too
		NotBefore:             now.Add(-skew).UTC(),
		NotAfter:              now.Add(caLife).UTC(),
		KeyUsage:              x509.KeyUsageKeyEncipherment | x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}, nil)
	if err != nil {
		return p, fmt.Errorf("making the CA %s: %w", name, err)
	}
	return p, nil
}

// adminConfig returns an administrator's kubeconfig. It has one context per control-plane node,
// because an operator's computer may reach neither the endpoint's name nor the VIP.
func adminConfig(c *clusterdoc.Cluster, ca pair, now time.Time) ([]byte, error) {
	admin, err := sign(&x509.Certificate{
		// kubeadm gives this group its rights when it initializes a cluster.
		Subject:     pkix.Name{CommonName: "kubernetes-admin", Organization: []string{"kubeadm:cluster-admins"}},
		NotBefore:   now.Add(-skew).UTC(),
		NotAfter:    now.Add(adminLife).UTC(),
		KeyUsage:    x509.KeyUsageKeyEncipherment | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, &ca)
	if err != nil {
		return nil, fmt.Errorf("making the administrator's certificate: %w", err)
	}
	key, err := keyPEM(admin.key)
	if err != nil {
		return nil, fmt.Errorf("making the administrator's certificate: %w", err)
	}
	encode := base64.StdEncoding.EncodeToString
	k := kubeapi.Kubeconfig{APIVersion: "v1", Kind: "Config", Users: []kubeapi.NamedUser{{Name: c.Name + "-admin", User: kubeapi.User{CertData: encode(admin.certPEM()), KeyData: encode(key)}}}}
	for i, endpoint := range c.APIServers() {
		name := c.Name + "-" + c.Masters[i].Name
		k.Clusters = append(k.Clusters, kubeapi.NamedCluster{Name: name, Cluster: kubeapi.Cluster{Server: "https://" + endpoint, CAData: encode(ca.certPEM())}})
		k.Contexts = append(k.Contexts, kubeapi.NamedContext{Name: name, Context: kubeapi.Context{Cluster: name, User: k.Users[0].Name}})
	}
	k.CurrentContext = k.Contexts[0].Name
	return yaml.Marshal(k)
}
