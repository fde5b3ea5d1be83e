package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.yaml.in/yaml/v3"
)

const (
	signerClient  = "kubernetes.io/kube-apiserver-client"
	signerServing = "kubernetes.io/kubelet-serving"
)

// identity has the two certificates of yurthub, and the server that issued them.
type identity struct {
	o      *options
	client *tls.Certificate
	server *tls.Certificate
	ca     *x509.CertPool
	caPEM  []byte
	// via is the server named in kubelet.conf or yurthub.conf. It gets the request for the serving
	// certificate, which does not go through the load balancer.
	via       *url.URL
	sni       string
	bootstrap *kubeconfig
}

// kubeconfig has the fields of a kubeconfig that this program needs.
type kubeconfig struct {
	Clusters []struct {
		Cluster struct {
			Server        string `yaml:"server"`
			CAData        string `yaml:"certificate-authority-data"`
			CAFile        string `yaml:"certificate-authority"`
			TLSServerName string `yaml:"tls-server-name"`
		} `yaml:"cluster"`
	} `yaml:"clusters"`
	Users []struct {
		User struct {
			Token string `yaml:"token"`
		} `yaml:"user"`
	} `yaml:"users"`
}

func readKubeconfig(path string) (*kubeconfig, *url.URL, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	var k kubeconfig
	if err := yaml.Unmarshal(b, &k); err != nil {
		return nil, nil, fmt.Errorf("parsing %s: %w", path, err)
	}
	if len(k.Clusters) != 1 {
		return nil, nil, fmt.Errorf("%s has %d clusters, not one", path, len(k.Clusters))
	}
	u, err := url.Parse(k.Clusters[0].Cluster.Server)
	if err != nil {
		return nil, nil, fmt.Errorf("server of %s: %w", path, err)
	}
	return &k, u, nil
}

func (o *options) pki(name string) string { return filepath.Join(o.rootDir, "pki", name) }

func newIdentity(o *options) (*identity, error) {
	id := &identity{o: o, ca: x509.NewCertPool()}
	if o.bootstrapMode == "kubeletcertificate" {
		conf := filepath.Join(o.etc, "kubelet.conf")
		k, via, err := readKubeconfig(conf)
		if err != nil {
			return nil, fmt.Errorf("kubelet's kubeconfig: %w", err)
		}
		id.via, id.sni = via, k.Clusters[0].Cluster.TLSServerName
		if err := id.readCA(filepath.Join(o.etc, "pki", "ca.crt")); err != nil {
			return nil, err
		}
		pair := filepath.Join(o.kubeletDir, "pki", "kubelet-client-current.pem")
		cert, err := tls.LoadX509KeyPair(pair, pair)
		if err != nil {
			return nil, fmt.Errorf("kubelet's certificate: %w", err)
		}
		id.client = &cert
		return id, nil
	}
	hubConf := filepath.Join(o.rootDir, "yurthub.conf")
	if _, via, err := readKubeconfig(hubConf); err == nil {
		if !slices.ContainsFunc(o.servers, func(s *url.URL) bool { return s.Host == via.Host }) {
			log.Printf("server %s of %s is not in --server-addr: removing everything below %s", via.Host, hubConf, o.rootDir)
			entries, err := os.ReadDir(o.rootDir)
			if err != nil {
				return nil, err
			}
			for _, e := range entries {
				if p := filepath.Join(o.rootDir, e.Name()); p != o.bootstrapFile {
					if err := os.RemoveAll(p); err != nil {
						return nil, err
					}
				}
			}
		} else if pair := o.pki("yurthub-current.pem"); fileExists(pair) {
			cert, err := tls.LoadX509KeyPair(pair, pair)
			if err != nil {
				return nil, err
			}
			id.client, id.via = &cert, via
			return id, id.readCA(o.pki("ca.crt"))
		}
	}
	k, via, err := readKubeconfig(o.bootstrapFile)
	if err != nil {
		return nil, fmt.Errorf("bootstrap file: %w", err)
	}
	id.via, id.bootstrap, id.sni = via, k, k.Clusters[0].Cluster.TLSServerName
	c := k.Clusters[0].Cluster
	if c.CAFile != "" {
		return id, id.readCA(c.CAFile)
	}
	b, err := base64.StdEncoding.DecodeString(c.CAData)
	if err != nil {
		return nil, fmt.Errorf("CA of %s: %w", o.bootstrapFile, err)
	}
	return id, id.addCA(b, o.bootstrapFile)
}

func fileExists(p string) bool { _, err := os.Stat(p); return err == nil }

func (id *identity) readCA(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("cluster CA: %w", err)
	}
	return id.addCA(b, path)
}

func (id *identity) addCA(b []byte, path string) error {
	if !id.ca.AppendCertsFromPEM(b) {
		return fmt.Errorf("%s holds no certificate", path)
	}
	id.caPEM = b
	return nil
}

// obtain requests missing certificates, and returns when both exist.
func (id *identity) obtain(ctx context.Context) error {
	if id.client == nil {
		// Save the identity before the certificate exists, as the real program does.
		if err := id.saveHubConf(); err != nil {
			return err
		}
		cert, err := id.request(ctx, id.requester(), signerClient, &x509.CertificateRequest{
			Subject: pkix.Name{CommonName: "system:node:" + id.o.nodeName, Organization: append([]string{"system:nodes", "openyurt:yurthub"}, id.o.orgs...)},
		}, []string{"key encipherment", "digital signature", "client auth"}, "yurthub")
		if err != nil {
			return err
		}
		id.client = cert
	}
	if pair := id.o.pki("yurthub-server-current.pem"); fileExists(pair) {
		cert, err := tls.LoadX509KeyPair(pair, pair)
		if err == nil {
			id.server = &cert
			return nil
		}
	}
	ips := []net.IP{net.ParseIP(id.o.bind), net.ParseIP(id.o.dummyIP), net.ParseIP(id.o.nodeIP)}
	ips = slices.DeleteFunc(ips, func(ip net.IP) bool { return ip == nil })
	cert, err := id.request(ctx, id.requester(), signerServing, &x509.CertificateRequest{
		Subject:     pkix.Name{CommonName: "system:node:" + id.o.nodeName, Organization: []string{"system:nodes"}},
		DNSNames:    []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
		IPAddresses: ips,
	}, []string{"key encipherment", "digital signature", "server auth"}, "yurthub-server")
	id.server = cert
	return err
}

// saveHubConf stores the identity in yurthub.conf and pki/ca.crt.
func (id *identity) saveHubConf() error {
	if err := os.MkdirAll(id.o.pki(""), 0o700); err != nil {
		return err
	}
	conf := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: default, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: default, user: {client-certificate: %q, client-key: %[3]q}}]
contexts: [{name: default, context: {cluster: default, user: default}}]
current-context: default
`, id.via.String(), id.o.pki("ca.crt"), id.o.pki("yurthub-current.pem"))
	if err := os.WriteFile(id.o.pki("ca.crt"), id.caPEM, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(id.o.rootDir, "yurthub.conf"), []byte(conf), 0o600)
}

// requester returns a client for the server via, with the node's certificate or the bootstrap
// token.
func (id *identity) requester() *http.Client {
	return &http.Client{Timeout: 10 * time.Second, Transport: id.transport(id.sni)}
}

type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(r)
}

func (id *identity) transport(sni string) http.RoundTripper {
	t := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: id.ca, ServerName: sni},
		DialContext:     (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 5 * time.Second}).DialContext,
		// kubelet must get the API server's bytes unchanged, so do not decompress them.
		DisableCompression: true,
		ForceAttemptHTTP2:  true,
	}
	if id.client != nil {
		t.TLSClientConfig.Certificates = []tls.Certificate{*id.client}
		return t
	}
	if id.bootstrap != nil && len(id.bootstrap.Users) == 1 {
		return bearer{id.bootstrap.Users[0].User.Token, t}
	}
	return t
}

type csr struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   map[string]any `json:"metadata"`
	Spec       csrSpec        `json:"spec"`
	Status     struct {
		Conditions []struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		} `json:"conditions,omitempty"`
		Certificate []byte `json:"certificate,omitempty"`
	} `json:"status,omitzero"`
}

type csrSpec struct {
	Request    []byte   `json:"request"`
	SignerName string   `json:"signerName"`
	Usages     []string `json:"usages"`
}

const csrPath = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// request requests a certificate, and repeats the request until the certificate is issued or ctx
// ends.
func (id *identity) request(ctx context.Context, c *http.Client, signer string, template *x509.CertificateRequest, usages []string, name string) (*tls.Certificate, error) {
	if err := os.MkdirAll(id.o.pki(""), 0o700); err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(csr{
		APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequest",
		Metadata: map[string]any{"generateName": "csr-"},
		Spec:     csrSpec{pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), signer, usages},
	})
	if err != nil {
		return nil, err
	}
	csrName := ""
	for {
		got, err := id.csr(ctx, c, csrName, body)
		switch {
		case err != nil:
			log.Printf("CSR for %s: %v", signer, err)
		case len(got.Status.Certificate) > 0:
			keyDER, err := x509.MarshalECPrivateKey(key)
			if err != nil {
				return nil, err
			}
			pair := append(bytes.Clone(got.Status.Certificate), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})...)
			if err := os.WriteFile(id.o.pki(name+"-current.pem"), pair, 0o600); err != nil {
				return nil, err
			}
			cert, err := tls.X509KeyPair(pair, pair)
			return &cert, err
		case len(got.Status.Conditions) > 0 && got.Status.Conditions[0].Type != "Approved":
			log.Printf("CSR %s for %s is %s", csrName, signer, got.Status.Conditions[0].Type)
			csrName = "" // request another certificate
		default:
			csrName, _ = got.Metadata["name"].(string)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("CSR for %s was not answered: %w", signer, ctx.Err())
		case <-time.After(time.Second):
		}
	}
}

// csr creates a certificate request, or reads the existing one if name is not empty.
func (id *identity) csr(ctx context.Context, c *http.Client, name string, body []byte) (*csr, error) {
	method, path, r := http.MethodPost, csrPath, io.Reader(bytes.NewReader(body))
	if name != "" {
		method, path, r = http.MethodGet, csrPath+"/"+name, nil
	}
	req, err := http.NewRequestWithContext(ctx, method, id.via.JoinPath(path).String(), r)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 {
		return nil, fmt.Errorf("%s: %s", resp.Status, b)
	}
	var got csr
	if err := json.Unmarshal(b, &got); err != nil {
		return nil, errors.Join(errors.New("answer to a CSR"), err)
	}
	return &got, nil
}
