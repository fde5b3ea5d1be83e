package lab

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
)

// Attach returns a cluster that runs on its own machines and that this host only observes. caFile
// has its CA, and kubeconfig an administrator's client certificate.
func (l *Lab) Attach(progs *Programs, network Net, caFile, kubeconfig string, masters ...string) (*Cluster, error) {
	l.slow = true
	c := &Cluster{Masters: masters, CAFile: caFile, Kubeconfig: kubeconfig, lab: l, net: network, progs: progs,
		dir: filepath.Join(l.Dir, "cluster"), hosts: masters}
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("reading %s: no certificate in it", caFile)
	}
	pair, err := clientPair(kubeconfig)
	if err != nil {
		return nil, err
	}
	c.http = &http.Client{Transport: &http.Transport{DialContext: network.Dial,
		TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}}}}
	return c, nil
}
