package machine

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"sync"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

// Pass holds the lookups and the connections of one pass over the phases.
type Pass struct {
	disk       *Disk              // the disk from which this system was started
	transports kubeapi.Transports // to API servers
	ends       []func()           // called at the end of the pass

	mu          sync.Mutex
	kubeconfigs map[string]*kubeapi.Kubeconfig // by their text; must not be changed
	pairs       map[[sha256.Size]byte]*tls.Certificate
	signed      map[[sha256.Size]byte]struct{} // pairs of a certificate and the CA that signed it
}

// NewPass returns a Pass for Env.Pass, to be closed at the end of the pass.
func NewPass() *Pass {
	return &Pass{kubeconfigs: map[string]*kubeapi.Kubeconfig{}, pairs: map[[sha256.Size]byte]*tls.Certificate{}, signed: map[[sha256.Size]byte]struct{}{}}
}

// Close closes the connections, and calls the funcs of AtEndOfPass.
func (p *Pass) Close() {
	p.transports.Close()
	for _, end := range p.ends {
		end()
	}
}

// AtEndOfPass registers end, to be called when the pass is over. Outside of a pass it does nothing.
func (e *Env) AtEndOfPass(end func()) {
	if e.Pass != nil {
		e.Pass.ends = append(e.Pass.ends, end)
	}
}

// once returns the value of key. If it is missing, it is created; two concurrent callers may both
// create it.
func once[K comparable, V any](mu *sync.Mutex, all map[K]V, key K, create func() (V, error)) (V, error) {
	mu.Lock()
	v, ok := all[key]
	mu.Unlock()
	if ok {
		return v, nil
	}
	v, err := create()
	if err == nil {
		mu.Lock()
		all[key] = v
		mu.Unlock()
	}
	return v, err
}

// ParseKubeconfig parses a kubeconfig. During a pass, each text is parsed only once.
func (e *Env) ParseKubeconfig(text []byte) (*kubeapi.Kubeconfig, error) {
	parse := func() (*kubeapi.Kubeconfig, error) { return kubeapi.ParseKubeconfig(text) }
	if e.Pass == nil {
		return parse()
	}
	return once(&e.Pass.mu, e.Pass.kubeconfigs, string(text), parse)
}

// ParsePair parses a certificate and its key. During a pass, each pair is parsed only once.
func (e *Env) ParsePair(cert, key []byte) (*tls.Certificate, error) {
	parse := func() (*tls.Certificate, error) {
		pair, err := tls.X509KeyPair(cert, key)
		return &pair, err
	}
	if e.Pass == nil {
		return parse()
	}
	return once(&e.Pass.mu, e.Pass.pairs, digest(cert, key), parse)
}

// KeyPair returns the client certificate of a kubeconfig's user.
func (e *Env) KeyPair(u *kubeapi.User) (*tls.Certificate, error) {
	cert, key, err := u.KeyTexts(e.Root)
	if err != nil {
		return nil, err
	}
	pair, err := e.ParsePair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("reading a kubeconfig's client certificate: %w", err)
	}
	return pair, nil
}

// SignedBy verifies the signature of a certificate. During a pass, each signature is verified only
// once.
func (e *Env) SignedBy(cert, ca *x509.Certificate) error {
	if e.Pass == nil {
		return cert.CheckSignatureFrom(ca)
	}
	_, err := once(&e.Pass.mu, e.Pass.signed, digest(cert.Raw, ca.Raw), func() (struct{}, error) { return struct{}{}, cert.CheckSignatureFrom(ca) })
	return err
}

// digest returns a hash of both texts.
func digest(a, b []byte) [sha256.Size]byte {
	h := sha256.New()
	fmt.Fprintf(h, "%d\n", len(a))
	h.Write(a)
	h.Write(b)
	return [sha256.Size]byte(h.Sum(nil))
}

// Transports returns the connections of this pass, or nil outside of a pass.
func (e *Env) Transports() *kubeapi.Transports {
	if e.Pass == nil {
		return nil
	}
	return &e.Pass.transports
}

// APIDialer returns the Dialer for API servers.
func (e *Env) APIDialer() kubeapi.Dialer {
	return kubeapi.Dialer{Dial: e.Dial, Now: e.Now, Sessions: e.Sessions}
}

// ClientOf returns a client for a kubeconfig.
func (e *Env) ClientOf(k *kubeapi.Kubeconfig) (*kubeapi.Client, error) {
	c, err := k.Client(e.Root, e.Dial, e.KeyPair)
	if err == nil {
		c.Transports, c.Now = e.Transports(), e.Now
	}
	return c, err
}

// KubeconfigAt reads the kubeconfig at path. whose describes it in errors.
func (e *Env) KubeconfigAt(path, whose string) (*kubeapi.Kubeconfig, error) {
	text, err := e.Read(path)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", whose, err)
	}
	return e.ParseKubeconfig(text)
}

// ClientAt returns a client for the kubeconfig at path. whose describes it in errors.
func (e *Env) ClientAt(path, whose string) (*kubeapi.Client, error) {
	k, err := e.KubeconfigAt(path, whose)
	if err != nil {
		return nil, err
	}
	return e.ClientOf(k)
}
