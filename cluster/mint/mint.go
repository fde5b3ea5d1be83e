package mint

import (
	"bytes"
	"cmp"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"go.yaml.in/yaml/v3"
	"golang.org/x/mod/semver"
)

// Files of a directory, in addition to those in pki/, tokens/ and manifests/.
const (
	fileRecord   = "mint.json"
	fileDocument = "cluster.yaml"
	fileAdmin    = "admin.conf"
)

// version is the version of the record that is written. Version 1 can still be read; it has no
// adminUntil and no formerCAs.
const version = 2

// Record is the content of mint.json, the unencrypted description of a directory.
type Record struct {
	Version int       `json:"version"`
	ID      string    `json:"id"` // random, so that two runs with the same document differ
	Created time.Time `json:"created"`
	CAHash  string    `json:"caHash"`
	// Recipients are the public keys to which the secrets are encrypted; empty: they are not
	// encrypted.
	Recipients []string `json:"recipients,omitempty"`
	Fixed      Fixed    `json:"cluster"`
	Kubernetes string   `json:"kubernetesVersion"`
	// Document is the SHA-256 of the document, which may be encrypted.
	Document string  `json:"document"`
	Tokens   []Token `json:"tokens,omitempty"`
	// Manifests are the files of the document's manifests, in the document's order.
	Manifests []File `json:"manifests,omitempty"`
	// Bootstraps are the periods in which the cluster may be bootstrapped, latest last. They are
	// also in the control-plane nodes' Sites.
	Bootstraps []Bootstrap `json:"births,omitempty"`
	// RequestedAt is the time of the last ContinueFrom request; zero if there was none.
	RequestedAt time.Time `json:"said,omitzero"`
	// AdminUntil is when admin.conf expires.
	AdminUntil time.Time `json:"adminUntil,omitzero"`
	// FormerCAs are earlier certificates of the cluster's CA in PEM. A snapshot of etcd contains
	// the certificate that was valid when it was made.
	FormerCAs []string `json:"formerCAs,omitempty"`
}

// File is a manifest in the directory.
type File struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"` // of its unencrypted contents
}

// Bootstrap is a period in which etcd may start empty. It is also in the control-plane nodes'
// Sites.
type Bootstrap struct {
	Issued time.Time `json:"issued"`
	Until  time.Time `json:"until"`
}

// bootstrapUntil returns the time until which the cluster may be bootstrapped; zero if it has
// passed.
func (r *Record) bootstrapUntil(now time.Time) time.Time {
	if n := len(r.Bootstraps); n > 0 && now.Before(r.Bootstraps[n-1].Until) {
		return r.Bootstraps[n-1].Until
	}
	return time.Time{}
}

// Fixed has the fields of a Cluster that cannot change once its keys are made, because
// certificates, etcd's members or addresses in the cluster depend on them.
type Fixed struct {
	Name         string             `json:"name"`
	Endpoint     string             `json:"endpoint"`
	VIP          string             `json:"vip"`
	Port         int                `json:"port"`
	PodCIDRs     []string           `json:"podCIDRs"`
	ServiceCIDRs []string           `json:"serviceCIDRs"`
	Masters      []ControlPlaneNode `json:"masters"`
	DNSDomain    string             `json:"dnsDomain"`
}

// ControlPlaneNode is a member of etcd.
type ControlPlaneNode struct {
	Name    string `json:"name"`
	Address string `json:"address"`
}

// Token is a bootstrap token, without its secret.
type Token struct {
	Node    string    `json:"node"`
	ID      string    `json:"id"`
	Expires time.Time `json:"expires"`
}

// Options are the options of New.
type Options struct {
	Now time.Time
	// EncryptTo are recipients: public keys, or names of files that contain them.
	EncryptTo []string
	// Identity decrypts an encrypted directory, in order to renew its certificates.
	Identity sealed.Identity
	// Manifests are the manifests of the document, in the document's order.
	Manifests []manifest.File
}

// Change is the result of New.
type Change struct {
	Record *Record
	// Minted is set if the directory was made. Otherwise Added and Removed list the nodes whose
	// tokens were made or removed, and Updated is set if the document or its manifests changed.
	Minted         bool
	Added, Removed []string
	Updated        bool
	// Renewed lists the files of renewed certificates. Expiring lists certificates that expire soon
	// but could not be renewed, because the directory is encrypted and no Identity was given.
	Renewed  []string
	Expiring []ExpiringCertificate
}

// Nothing reports whether the directory is unchanged.
func (c *Change) Nothing() bool {
	return !c.Minted && !c.Updated && len(c.Added)+len(c.Removed)+len(c.Renewed) == 0
}

// New mints the cluster of a document into dir. If dir exists, New updates it after permitted
// changes of the document.
func New(dir string, c *clusterdoc.File, o Options) (*Change, error) {
	recipients, err := sealed.Recipients(o.EncryptTo)
	if err != nil {
		return nil, err
	}
	if dir, err = realDir(dir); err != nil {
		return nil, fmt.Errorf("minting %s: %w", c.Name, err)
	}
	entries, err := os.ReadDir(dir)
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("minting %s: %w", c.Name, err)
	case len(entries) == 0:
		return mint(dir, c, recipients, o)
	}
	return update(dir, c, recipients, o)
}

// realDir resolves links, so that the directory itself is replaced instead of a link to it.
func realDir(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	real, err := filepath.EvalSymlinks(abs)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(abs); err == nil {
			return "", fmt.Errorf("%s is a broken symbolic link; remove it", dir)
		}
		return abs, nil
	}
	if err != nil {
		return "", err
	}
	if fi, err := os.Stat(real); err != nil || !fi.IsDir() {
		return "", errors.Join(err, fmt.Errorf("%s is not a directory: name another with --output", dir))
	}
	return real, nil
}

func fixed(c *clusterdoc.File) Fixed {
	f := Fixed{Name: c.Name, Endpoint: c.Endpoint, VIP: c.VIP, Port: c.Port, PodCIDRs: c.PodCIDRs, ServiceCIDRs: c.ServiceCIDRs, DNSDomain: "cluster.local"}
	for _, m := range c.Masters {
		f.Masters = append(f.Masters, ControlPlaneNode{m.Name, m.Address})
	}
	if d := c.Kubeadm.DNSDomain(); d != "" {
		f.DNSDomain = d
	}
	return f
}

func mint(dir string, c *clusterdoc.File, recipients []string, o Options) (*Change, error) {
	now := o.Now
	fail := func(err error) (*Change, error) { return nil, fmt.Errorf("minting %s: %w", c.Name, err) }
	record := &Record{ID: rand.Text(), Created: now.UTC().Truncate(time.Second), Recipients: recipients, Fixed: fixed(c), Kubernetes: c.KubernetesVersion, Document: digest(c.Text)}
	record.Bootstraps = []Bootstrap{{Issued: record.Created, Until: record.Created.Add(c.TokenLifetime())}}
	files := map[string][]byte{fileDocument: c.Text}
	for i, m := range o.Manifests {
		f := manifestFile(i, m)
		record.Manifests = append(record.Manifests, f)
		files[f.Name] = []byte(m.Text)
	}
	var clusterCA pair
	for _, of := range configs.ClusterCAs() {
		ca, err := newCA(of.Name, now)
		if err != nil {
			return fail(err)
		}
		key, err := keyPEM(ca.key)
		if err != nil {
			return fail(err)
		}
		crt, priv := pairFiles(of)
		files[crt], files[priv] = ca.certPEM(), key
		if of.Base == configs.KubernetesCA {
			clusterCA = ca
		}
	}
	record.CAHash = kubeapi.Pin(clusterCA.cert)
	record.AdminUntil = now.Add(adminLife).UTC().Truncate(time.Second)
	sa, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fail(err)
	}
	if files["pki/sa.key"], err = keyPEM(sa); err != nil {
		return fail(err)
	}
	if files["pki/sa.pub"], err = publicPEM(sa.Public()); err != nil {
		return fail(err)
	}
	if files[fileAdmin], err = adminConfig(c.Cluster, clusterCA, now); err != nil {
		return fail(err)
	}
	for _, n := range c.Nodes {
		t, secret, err := tokenFor(n.Name, c.TokenLifetime(), now, record.Tokens)
		if err != nil {
			return fail(err)
		}
		record.Tokens = append(record.Tokens, t)
		files[tokenFile(n.Name)] = secret
	}
	if files[fileRecord], err = encodeRecord(record); err != nil {
		return fail(err)
	}
	if err := create(dir, files, recipients); err != nil {
		return fail(err)
	}
	return &Change{Record: record, Minted: true}, nil
}

func encodeRecord(r *Record) ([]byte, error) {
	r.Version = version
	b, err := json.MarshalIndent(r, "", "  ")
	return append(b, '\n'), err
}

// write writes the record into its directory.
func (r *Record) write(dir string) error {
	b, err := encodeRecord(r)
	if err != nil {
		return err
	}
	return writeFile(dir, fileRecord, b, r.Recipients)
}

// manifestFile returns the name and digest of a manifest in the directory. The name begins with a
// number, because two manifests may have the same base name.
func manifestFile(i int, m manifest.File) File {
	return File{fmt.Sprintf("manifests/%02d-%s", i+1, path.Base(filepath.ToSlash(m.Name))), digest([]byte(m.Text))}
}

// updateManifests writes the manifests that have changed.
func updateManifests(dir string, record *Record, all []manifest.File) (changed bool, err error) {
	var now []File
	for i, m := range all {
		f := manifestFile(i, m)
		now = append(now, f)
		if slices.Contains(record.Manifests, f) {
			continue
		}
		if err := writeFile(dir, f.Name, []byte(m.Text), record.Recipients); err != nil {
			return false, err
		}
	}
	changed = !slices.Equal(now, record.Manifests)
	record.Manifests = now
	return changed, nil
}

func tokenFile(node string) string { return "tokens/" + node + ".yaml" }

// tokenSecret is the Secret of a bootstrap token.
type tokenSecret struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`
	Metadata   struct {
		Name        string            `yaml:"name"`
		Namespace   string            `yaml:"namespace"`
		Annotations map[string]string `yaml:"annotations,omitempty"`
	} `yaml:"metadata"`
	Type       string            `yaml:"type"`
	StringData map[string]string `yaml:"stringData"`
}

// drawToken calls draw until the token's ID differs from those in taken, because a cluster
// identifies a token by its ID.
func drawToken(taken []Token, draw func() (id, secret string)) (id, secret string) {
	for {
		id, secret = draw()
		if !slices.ContainsFunc(taken, func(t Token) bool { return t.ID == id }) {
			return id, secret
		}
	}
}

// tokenFor makes a node's token. It returns the token, and the YAML of its Secret in the cluster.
func tokenFor(node string, life time.Duration, now time.Time, taken []Token) (Token, []byte, error) {
	id, secret := drawToken(taken, kubeapi.NewToken)
	t := Token{Node: node, ID: id, Expires: now.Add(life).UTC().Truncate(time.Second)}
	s := tokenSecret{APIVersion: "v1", Kind: "Secret", Type: kubeapi.TokenType}
	s.Metadata.Name, s.Metadata.Namespace = kubeapi.TokenSecretName(id), kubeapi.TokenNamespace
	s.StringData = kubeapi.TokenData(id, secret, kubeapi.TokenDescription(node), t.Expires)
	text, err := yaml.Marshal(s)
	return t, text, err
}

// Load reads a directory's record.
func Load(dir string) (*Record, error) {
	data, err := os.ReadFile(filepath.Join(dir, fileRecord))
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("reading %s: there is no such directory: `edgebake cluster new` makes one", dir)
		}
		return nil, fmt.Errorf("reading %s: this is not a directory of `edgebake cluster new`: it has no %s", dir, fileRecord)
	}
	if errors.Is(err, syscall.ENOTDIR) {
		return nil, fmt.Errorf("reading %s: this is a file; name the directory that `edgebake cluster new` wrote", dir)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", dir, err)
	}
	var r Record
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := json.Unmarshal(data, &struct {
		Version *int `json:"version"`
	}{&r.Version}); err != nil || r.Version == 0 {
		return nil, fmt.Errorf("reading %s: %s is damaged", dir, fileRecord)
	}
	if r.Version < 1 || r.Version > version {
		return nil, fmt.Errorf("reading %s: %s has version %d, and this edgebake reads versions 1 and %d: use the edgebake that wrote it, or a later one", dir, fileRecord, r.Version, version)
	}
	if err := d.Decode(&r); err != nil {
		return nil, fmt.Errorf("reading %s: %s is damaged: %w", dir, fileRecord, err)
	}
	return &r, nil
}

// update updates a directory after changes of the document.
func update(dir string, c *clusterdoc.File, recipients []string, o Options) (*Change, error) {
	// Lock the directory first: another run may be writing the record.
	held, err := lock(dir)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	record, err := Load(dir)
	if err != nil {
		return nil, fmt.Errorf("%w; to make a new cluster, name an empty directory with --output", err)
	}
	if err := checkModes(dir, os.Geteuid()); err != nil {
		return nil, err
	}
	if err := sameCluster(dir, record, c); err != nil {
		return nil, err
	}
	if len(recipients) > 0 && !sameSet(recipients, record.Recipients) {
		return nil, fmt.Errorf("minting %s: %s %s, and --encrypt-to works only for a new directory; name another directory with --output, or omit --encrypt-to", c.Name, dir, encryptedHow(record))
	}
	if err := complete(dir, record); err != nil {
		return nil, err
	}
	change := &Change{Record: record}
	if err := renew(dir, record, c, o, change); err != nil {
		return nil, err
	}
	if err := addTokens(dir, record, c, o.Now, change); err != nil {
		return nil, err
	}
	manifests, err := updateManifests(dir, record, o.Manifests)
	if err != nil {
		return nil, err
	}
	change.Updated = manifests || record.Document != digest(c.Text)
	record.Document, record.Kubernetes = digest(c.Text), c.KubernetesVersion
	if change.Nothing() {
		return change, sweep(dir, record)
	}
	if err := writeFile(dir, fileDocument, c.Text, record.Recipients); err != nil {
		return nil, err
	}
	// Write the record last: tokens that are not in it are ignored.
	if err := record.write(dir); err != nil {
		return nil, err
	}
	return change, sweep(dir, record)
}

func encryptedHow(r *Record) string {
	if len(r.Recipients) == 0 {
		return "is not encrypted"
	}
	return "is encrypted to other recipients"
}

func sameSet(a, b []string) bool {
	x, y := slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(x, y)
}

// addTokens makes tokens for new nodes, and drops the tokens of removed nodes.
func addTokens(dir string, record *Record, c *clusterdoc.File, now time.Time, change *Change) error {
	var kept []Token
	for _, n := range c.Nodes {
		if i := slices.IndexFunc(record.Tokens, func(t Token) bool { return t.Node == n.Name }); i >= 0 {
			kept = append(kept, record.Tokens[i])
			continue
		}
		// The ID must also differ from those of removed nodes, whose tokens the cluster may still
		// know.
		t, secret, err := tokenFor(n.Name, c.TokenLifetime(), now, slices.Concat(record.Tokens, kept))
		if err != nil {
			return err
		}
		if err := writeFile(dir, tokenFile(n.Name), secret, record.Recipients); err != nil {
			return err
		}
		kept = append(kept, t)
		change.Added = append(change.Added, n.Name)
	}
	for _, t := range record.Tokens {
		if !slices.ContainsFunc(kept, func(k Token) bool { return k.Node == t.Node }) {
			change.Removed = append(change.Removed, t.Node)
		}
	}
	record.Tokens = kept
	return nil
}

// sameCluster rejects the document of another cluster, changes of the fields in Fixed, and an older
// version of Kubernetes.
func sameCluster(dir string, record *Record, c *clusterdoc.File) error {
	now := fixed(c)
	if now.Name != record.Fixed.Name {
		return fmt.Errorf("minting %s: %s contains the keys of cluster %s, which cannot be used for another cluster; name another directory with --output", now.Name, dir, record.Fixed.Name)
	}
	var probs configs.Problems
	changed := func(path string, was, is any) {
		if a, b := fmt.Sprint(was), fmt.Sprint(is); a != b {
			line, col := configs.Locate(c.File, c.Text, path)
			probs = append(probs, configs.Problem{File: c.File, Line: line, Col: col, Path: path,
				Msg: fmt.Sprintf("was %s when the keys in %s were made, and cannot change to %s; undo the change, or mint a new cluster into another directory", a, dir, b)})
		}
	}
	was := record.Fixed
	changed("endpoint", was.Endpoint, now.Endpoint)
	changed("vip", was.VIP, now.VIP)
	changed("port", was.Port, now.Port)
	changed("podCIDRs", strings.Join(was.PodCIDRs, ", "), strings.Join(now.PodCIDRs, ", "))
	changed("serviceCIDRs", strings.Join(was.ServiceCIDRs, ", "), strings.Join(now.ServiceCIDRs, ", "))
	changed("masters", nodeList(was.Masters), nodeList(now.Masters))
	if was.DNSDomain != now.DNSDomain {
		changed("ClusterConfiguration.networking.dnsDomain", was.DNSDomain, now.DNSDomain)
	}
	if semver.Compare(c.KubernetesVersion, record.Kubernetes) < 0 {
		line, col := configs.Locate(c.File, c.Text, "kubernetesVersion")
		probs = append(probs, configs.Problem{File: c.File, Line: line, Col: col, Path: "kubernetesVersion",
			Msg: fmt.Sprintf("was %s before, and cannot go back to %s: Kubernetes cannot read data that a later version stored", record.Kubernetes, c.KubernetesVersion)})
	}
	return probs.Err()
}

// nodeList lists control-plane nodes sorted by name, because the document may list them in any
// order.
func nodeList(masters []ControlPlaneNode) string {
	sorted := slices.SortedFunc(slices.Values(masters), func(a, b ControlPlaneNode) int { return cmp.Compare(a.Name, b.Name) })
	var out []string
	for _, m := range sorted {
		out = append(out, m.Name+" ("+m.Address+")")
	}
	return strings.Join(out, ", ")
}

// keyFiles returns the files that a directory must have, except tokens and manifests.
func keyFiles() []string {
	var files []string
	for _, ca := range configs.ClusterCAs() {
		crt, key := pairFiles(ca)
		files = append(files, crt, key)
	}
	return append(files, "pki/sa.key", "pki/sa.pub", fileAdmin, fileDocument)
}

// pairFiles returns the names of a CA's certificate and key in a directory.
func pairFiles(ca configs.ClusterCA) (crt, key string) {
	return "pki/" + ca.Base + ".crt", "pki/" + ca.Base + ".key"
}

// complete returns an error if a file was removed or replaced. Making new keys instead would make
// another cluster.
func complete(dir string, r *Record) error {
	var errs []error
	names := keyFiles()
	for _, f := range r.Manifests {
		names = append(names, f.Name)
	}
	for _, name := range names {
		p := filepath.Join(dir, filepath.FromSlash(storedName(name, r.Recipients)))
		if _, err := os.Stat(p); err != nil {
			errs = append(errs, fmt.Errorf("reading %s: %w: restore the directory from your copy of it; without a copy, the cluster's keys are lost", dir, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	ca, err := readCA(dir)
	if err != nil {
		return err
	}
	if pin := kubeapi.Pin(ca); pin != r.CAHash {
		return fmt.Errorf("reading %s: pki/ca.crt (%s) is not the CA that was minted (%s): restore the directory from your copy of it", dir, pin, r.CAHash)
	}
	if len(r.Recipients) > 0 {
		return nil
	}
	return pairs(dir)
}

// pairs checks that each CA's key belongs to its certificate, and the service accounts' private key
// to their public one. It cannot check encrypted keys, which not every user of a directory can
// decrypt.
func pairs(dir string) error {
	var errs []error
	for _, ca := range configs.ClusterCAs() {
		crt, key := pairFiles(ca)
		if _, err := tls.LoadX509KeyPair(filepath.Join(dir, filepath.FromSlash(crt)), filepath.Join(dir, filepath.FromSlash(key))); err != nil {
			errs = append(errs, fmt.Errorf("reading %s: %s and %s are not a pair (%w): restore the directory from your copy of it", dir, crt, key, err))
		}
	}
	if err := serviceAccountPair(dir); err != nil {
		errs = append(errs, fmt.Errorf("reading %s: pki/sa.key and pki/sa.pub are not a pair (%w): restore the directory from your copy of it", dir, err))
	}
	return errors.Join(errs...)
}

// serviceAccountPair checks that the service accounts' private and public keys belong together.
func serviceAccountPair(dir string) error {
	private, err := os.ReadFile(filepath.Join(dir, "pki", "sa.key"))
	if err != nil {
		return err
	}
	public, err := os.ReadFile(filepath.Join(dir, "pki", "sa.pub"))
	if err != nil {
		return err
	}
	block, _ := pem.Decode(private)
	if block == nil {
		return errors.New("sa.key is not a key")
	}
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		return err
	}
	if want, err := publicPEM(key.Public()); err != nil || !bytes.Equal(want, public) {
		return errors.Join(err, errors.New("sa.pub belongs to another key"))
	}
	return nil
}

func readCA(dir string) (*x509.Certificate, error) {
	return readCert(filepath.Join(dir, "pki", "ca.crt"))
}

func readCert(p string) (*x509.Certificate, error) {
	text, err := os.ReadFile(p)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("reading %s: it is not a certificate: restore the directory from your copy of it", p)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w: restore the directory from your copy of it", p, err)
	}
	return cert, nil
}
