package lab

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
)

// TestHubRequest checks that the approver accepts yurthub's two requests, but no variation of them.
func TestHubRequest(t *testing.T) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	const (
		client, serving = "kubernetes.io/kube-apiserver-client", "kubernetes.io/kubelet-serving"
		forClient       = "digital signature,key encipherment,client auth"
		forServer       = "key encipherment,digital signature,server auth"
	)
	for name, tt := range map[string]struct {
		signer, cn, orgs, dns, usages string
		want                          bool
	}{
		"client":                 {client, "system:node:a", "openyurt:yurthub,system:nodes", "", forClient, true},
		"client of a tenant":     {client, "system:node:a", "openyurt:yurthub,system:nodes,openyurt:tenant:x", "", forClient, true},
		"client, one group":      {client, "system:node:a", "system:nodes", "", forClient, false},
		"client, masters' group": {client, "system:node:a", "system:nodes,system:masters", "", forClient, false},
		"client, no node":        {client, "admin", "openyurt:yurthub,system:nodes", "", forClient, false},
		"client, server's use":   {client, "system:node:a", "openyurt:yurthub,system:nodes", "", forServer, false},
		"server":                 {serving, "system:node:a", "system:nodes", "kubernetes", forServer, true},
		"server, two groups":     {serving, "system:node:a", "system:nodes,openyurt:yurthub", "kubernetes", forServer, false},
		"server without a name":  {serving, "system:node:a", "system:nodes", "", forServer, false},
		"server, more uses":      {serving, "system:node:a", "system:nodes", "kubernetes", forServer + ",client auth", false},
		"another signer":         {client + "-kubelet", "system:node:a", "openyurt:yurthub,system:nodes", "", forClient, false},
	} {
		r := &x509.CertificateRequest{Subject: pkix.Name{CommonName: tt.cn, Organization: strings.Split(tt.orgs, ",")}}
		if tt.dns != "" {
			r.DNSNames = []string{tt.dns}
		}
		der, err := x509.CreateCertificateRequest(rand.Reader, r, key)
		if err != nil {
			t.Fatal(err)
		}
		text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
		if _, got := hubRequest(text, tt.signer, strings.Split(tt.usages, ",")); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
	if _, got := hubRequest([]byte("no PEM"), client, strings.Split(forClient, ",")); got {
		t.Error("an event that is not a request was accepted")
	}
}

func TestNodePosts(t *testing.T) {
	posts, err := nodePosts([]byte(`{"requestReceivedTimestamp":"2026-01-01T00:00:01.5Z","user":{"username":"system:node:a"},"userAgent":"kubelet/v1","objectRef":{"resource":"nodes"},"requestObject":{"metadata":{"name":"a","labels":{"x":"y"}}},"responseStatus":{"code":201}}
{"requestReceivedTimestamp":"2026-01-01T00:00:02Z","objectRef":{"resource":"nodes","subresource":"proxy"},"responseStatus":{"code":404}}
`), 2)
	if err != nil {
		t.Fatal(err)
	}
	if len(posts) != 1 || posts[0].Name != "a" || posts[0].Labels["x"] != "y" || posts[0].Code != 201 || posts[0].Master != 2 || posts[0].User != "system:node:a" {
		t.Errorf("%+v", posts)
	}
	if _, err := nodePosts([]byte("{"), 0); err == nil {
		t.Error("an incomplete event was accepted")
	}
}

func TestEdgeSiteIsValid(t *testing.T) {
	c := &Cluster{Masters: []string{"10.103.0.11:6443"}, Token: "abcdef.0123456789abcdef", CAHash: "sha256:" + strings.Repeat("0a", 32)}
	text, err := Site{Cluster: c, NodeName: "edge1", NodeType: "edge", NodePool: "p"}.YAML()
	if err != nil {
		t.Fatal(err)
	}
	site, err := configs.ParseSite("site.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if site.NodeType != configs.NodeEdge || site.NodePool != "p" {
		t.Errorf("%+v", site)
	}
}
