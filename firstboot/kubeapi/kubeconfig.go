package kubeapi

import (
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
)

// Kubeconfig has the fields of a kubeconfig file that nodes use.
type Kubeconfig struct {
	APIVersion     string         `yaml:"apiVersion"`
	Kind           string         `yaml:"kind"`
	Clusters       []NamedCluster `yaml:"clusters"`
	Users          []NamedUser    `yaml:"users,omitempty"`
	Contexts       []NamedContext `yaml:"contexts,omitempty"`
	CurrentContext string         `yaml:"current-context,omitempty"`
}

// NamedCluster is one entry of clusters.
type NamedCluster struct {
	Name    string  `yaml:"name"`
	Cluster Cluster `yaml:"cluster"`
}

// Cluster is the address of an API server, and how to verify it.
type Cluster struct {
	Server        string `yaml:"server"`
	TLSServerName string `yaml:"tls-server-name,omitempty"`
	CAFile        string `yaml:"certificate-authority,omitempty"`
	CAData        string `yaml:"certificate-authority-data,omitempty"` // base64
}

// NamedUser is one entry of users.
type NamedUser struct {
	Name string `yaml:"name"`
	User User   `yaml:"user"`
}

// User has the credentials of a client.
type User struct {
	Token    string `yaml:"token,omitempty"`
	CertFile string `yaml:"client-certificate,omitempty"`
	KeyFile  string `yaml:"client-key,omitempty"`
	CertData string `yaml:"client-certificate-data,omitempty"`
	KeyData  string `yaml:"client-key-data,omitempty"`
}

// NamedContext is one entry of contexts.
type NamedContext struct {
	Name    string  `yaml:"name"`
	Context Context `yaml:"context"`
}

// Context combines a cluster and a user.
type Context struct {
	Cluster   string `yaml:"cluster"`
	User      string `yaml:"user"`
	Namespace string `yaml:"namespace,omitempty"`
}

// maxKubeconfig limits the size of a kubeconfig in bytes. It is enough for several CAs. The limit
// protects the parser from a cluster-info of an unverified server.
const maxKubeconfig = 128 << 10

// ParseKubeconfig parses a kubeconfig, which must have a cluster.
func ParseKubeconfig(data []byte) (*Kubeconfig, error) {
	if len(data) > maxKubeconfig {
		return nil, fmt.Errorf("parsing a kubeconfig: it has %d bytes, more than the limit of %d", len(data), maxKubeconfig)
	}
	doc, err := yamltree.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("parsing a kubeconfig: %w", err)
	}
	if hasAlias(doc) {
		return nil, errors.New("parsing a kubeconfig: YAML aliases (*name) are not accepted")
	}
	var k Kubeconfig
	if err := yamltree.Decode(doc, &k); err != nil {
		return nil, fmt.Errorf("parsing a kubeconfig: %w", err)
	}
	if len(k.Clusters) == 0 {
		return nil, errors.New("parsing a kubeconfig: it names no cluster")
	}
	return &k, nil
}

func hasAlias(n *yaml.Node) bool {
	return n.Kind == yaml.AliasNode || slices.ContainsFunc(n.Content, hasAlias)
}

// Cluster returns the cluster of the current context, or the only one.
func (k *Kubeconfig) Cluster() (*Cluster, error) {
	c, err := named(k.Clusters, "cluster", k.context().Cluster, func(c NamedCluster) string { return c.Name })
	if err != nil {
		return nil, err
	}
	return &c.Cluster, nil
}

// User returns the user of the current context, or the only one.
func (k *Kubeconfig) User() (*User, error) {
	u, err := named(k.Users, "user", k.context().User, func(u NamedUser) string { return u.Name })
	if err != nil {
		return nil, err
	}
	return &u.User, nil
}

// context returns the current context, or the zero Context if there is none.
func (k *Kubeconfig) context() (current Context) {
	for _, c := range k.Contexts {
		if c.Name == k.CurrentContext {
			current = c.Context
		}
	}
	return current
}

// named returns the entry with this name in a list. A list's only entry matches every name.
func named[T any](list []T, kind, name string, of func(T) string) (*T, error) {
	for i := range list {
		if of(list[i]) == name || len(list) == 1 {
			return &list[i], nil
		}
	}
	return nil, fmt.Errorf("reading a kubeconfig: it has no %s %q", kind, name)
}

// CA returns the CA of c in PEM. Paths in c are relative to root.
func (c *Cluster) CA(root string) ([]byte, error) {
	if c.CAData != "" {
		b, err := base64.StdEncoding.DecodeString(c.CAData)
		if err != nil {
			return nil, fmt.Errorf("decoding a kubeconfig's certificate-authority-data: %w", err)
		}
		return b, nil
	}
	if c.CAFile == "" {
		return nil, errors.New("reading a kubeconfig: its cluster has no CA")
	}
	b, err := os.ReadFile(filepath.Join(root, c.CAFile))
	if err != nil {
		return nil, fmt.Errorf("reading a kubeconfig's CA: %w", err)
	}
	return b, nil
}

// KeyTexts returns the client certificate and key in PEM. Paths in u are relative to root.
func (u *User) KeyTexts(root string) (cert, key []byte, err error) {
	part := func(data, file string) ([]byte, error) {
		if data != "" {
			return base64.StdEncoding.DecodeString(data)
		}
		if file == "" {
			return nil, errors.New("there is none")
		}
		return os.ReadFile(resolve(root, file))
	}
	if cert, err = part(u.CertData, u.CertFile); err != nil {
		return nil, nil, fmt.Errorf("reading a kubeconfig's client certificate: %w", err)
	}
	if u.KeyData == "" && u.CertData == "" && u.KeyFile == u.CertFile {
		return cert, cert, nil // kubelet keeps both in one file
	}
	if key, err = part(u.KeyData, u.KeyFile); err != nil {
		return nil, nil, fmt.Errorf("reading a kubeconfig's client key: %w", err)
	}
	return cert, key, nil
}

// resolve returns the path of file inside root. It follows one absolute symlink, because kubelet's
// current certificate is one.
func resolve(root, file string) string {
	p := filepath.Join(root, file)
	if t, err := os.Readlink(p); err == nil && filepath.IsAbs(t) {
		return filepath.Join(root, t)
	}
	return p
}

// Client returns a Client for the kubeconfig, whose paths are relative to root. pair reads the
// client certificate of the kubeconfig's user.
func (k *Kubeconfig) Client(root string, dial DialFunc, pair func(*User) (*tls.Certificate, error)) (*Client, error) {
	cl, err := k.Cluster()
	if err != nil {
		return nil, err
	}
	ca, err := cl.CA(root)
	if err != nil {
		return nil, err
	}
	u, err := k.User()
	if err != nil {
		return nil, err
	}
	c := &Client{Server: cl.Server, ServerName: cl.TLSServerName, CA: ca, Token: u.Token, Dial: dial}
	if u.Token == "" {
		if c.Cert, err = pair(u); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// NewKubeconfig returns a kubeconfig with one cluster, one user and one context. A kubeconfig for
// discovery may have a user without credentials.
func NewKubeconfig(c Cluster, u User) ([]byte, error) {
	k := Kubeconfig{
		APIVersion: "v1", Kind: "Config",
		Clusters:       []NamedCluster{{Name: "kubernetes", Cluster: c}},
		Users:          []NamedUser{{Name: "node", User: u}},
		Contexts:       []NamedContext{{Name: "node@kubernetes", Context: Context{Cluster: "kubernetes", User: "node"}}},
		CurrentContext: "node@kubernetes",
	}
	b, err := yaml.Marshal(k)
	if err != nil {
		return nil, fmt.Errorf("writing a kubeconfig: %w", err)
	}
	return b, nil
}

// SetServer returns data with this server and tls-server-name in every cluster; an empty
// tls-server-name is removed. All other fields stay unchanged.
func SetServer(data []byte, server, tlsServerName string) ([]byte, error) {
	return editClusters(data, func(c *yaml.Node) {
		setText(c, "server", server)
		setText(c, "tls-server-name", tlsServerName)
	})
}

// SetCA returns data with this CA (PEM) in every cluster. All other fields stay unchanged.
func SetCA(data, ca []byte) ([]byte, error) {
	return editClusters(data, func(c *yaml.Node) {
		setText(c, "certificate-authority", "")
		setText(c, "certificate-authority-data", base64.StdEncoding.EncodeToString(ca))
	})
}

// editClusters applies edit to each cluster of a kubeconfig.
func editClusters(data []byte, edit func(cluster *yaml.Node)) ([]byte, error) {
	doc, err := yamltree.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("parsing a kubeconfig: %w", err)
	}
	var clusters *yaml.Node
	if len(doc.Content) == 1 {
		clusters = yamltree.Value(doc.Content[0], "clusters")
	}
	if clusters == nil || clusters.Kind != yaml.SequenceNode || len(clusters.Content) == 0 {
		return nil, errors.New("parsing a kubeconfig: it names no cluster")
	}
	for _, entry := range clusters.Content {
		c := yamltree.Value(entry, "cluster")
		if c == nil || c.Kind != yaml.MappingNode {
			return nil, errors.New("parsing a kubeconfig: an entry of clusters has no cluster")
		}
		edit(c)
	}
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(doc); err != nil {
		return nil, fmt.Errorf("writing a kubeconfig: %w", err)
	}
	return out.Bytes(), nil
}

// setText sets a field; an empty value removes it.
func setText(m *yaml.Node, key, v string) {
	if v == "" {
		yamltree.Remove(m, key)
		return
	}
	yamltree.Set(m, key, yamltree.String(v))
}
