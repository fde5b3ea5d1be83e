package mint

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

const document = `apiVersion: edgebake.io/v1alpha1
kind: Cluster
name: shops
kubernetesVersion: v1.36.3
masters: [{name: m1, address: 192.168.7.11}, {name: m2, address: 192.168.7.12}, {name: m3, address: 192.168.7.13}]
nodes:
  - {name: a, match: {serial: PC0Q1234}}
  - {name: b, nodePool: p, match: {macs: ["52:54:00:00:00:02"]}}
users: [{name: admin, passwordHash: "$6$saltsalt$Ywt6vPsKHvpWwpoUej7GUvITYqLjHa7JSkXGIcwacvgf.lBcY.jAfOa4ogd.dGXmOSzfHnHwGVih5MJdZOnOM0"}]
`

func now() time.Time { return time.Date(2026, 11, 22, 6, 0, 0, 0, time.UTC) }

// newOf calls New with a document's text.
func newOf(dir, text string, o Options) (*Change, error) {
	doc, err := clusterdoc.Parse("cluster.yaml", []byte(text))
	if err != nil {
		return nil, err
	}
	return New(dir, doc, o)
}

func mustNew(t *testing.T, dir, text string, to ...string) *Change {
	t.Helper()
	c, err := newOf(dir, text, Options{Now: now(), EncryptTo: to})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// contents returns the files of a directory.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		rel, _ := filepath.Rel(dir, p)
		out[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func same(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return true
}

// TestNewAgain checks that repeating the command changes nothing, and that permitted changes of the
// document are applied.
func TestNewAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "deep", "shops")
	first := mustNew(t, dir, document)
	if !first.Minted || len(first.Record.Tokens) != 2 {
		t.Fatalf("%+v", first)
	}
	if err := checkModes(dir, os.Geteuid()); err != nil {
		t.Error(err)
	}
	was := contents(t, dir)
	if again := mustNew(t, dir, document); !again.Nothing() || again.Record.CAHash != first.Record.CAHash {
		t.Errorf("%+v", again)
	}
	if !same(was, contents(t, dir)) {
		t.Error("the same command changed the directory")
	}
	more := mustNew(t, dir, strings.Replace(strings.Replace(document, "  - {name: a, match: {serial: PC0Q1234}}\n", "  - {name: c}\n", 1), "v1.36.3", "v1.37.0", 1))
	if strings.Join(more.Added, " ") != "c" || strings.Join(more.Removed, " ") != "a" || more.Minted {
		t.Errorf("%+v", more)
	}
	is := contents(t, dir)
	for name := range was {
		if strings.HasPrefix(name, "pki/") && was[name] != is[name] {
			t.Errorf("%s changed", name)
		}
	}
	if is["tokens/a.yaml"] != "" || is["tokens/b.yaml"] != was["tokens/b.yaml"] || is["tokens/c.yaml"] == "" {
		t.Error("wrong tokens: want new ones for added nodes only")
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(dir), ".*")); err != nil || len(left) > 0 {
		t.Error(left, err)
	}
}

// TestNewRefuses checks that a document is rejected if it is of another cluster, changes a fixed
// field or has an older version of Kubernetes.
func TestNewRefuses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	was := contents(t, dir)
	for _, tt := range []struct{ old, new, want string }{
		{"name: shops", "name: other", "contains the keys of cluster shops"},
		{"users:", "endpoint: api.example\nusers:", "cluster.yaml:9:11: endpoint: was apiserver.cluster.local when"},
		{"users:", "vip: 10.103.97.3\nusers:", "cluster.yaml:9:6: vip: was 10.103.97.2"},
		{"users:", "port: 7443\nusers:", "port: was 6443"},
		{"users:", "podCIDRs: [10.245.0.0/16]\nusers:", "podCIDRs: was 10.244.0.0/16"},
		{"users:", "serviceCIDRs: [10.97.0.0/16]\nusers:", "serviceCIDRs: was 10.96.0.0/16"},
		{", {name: m3, address: 192.168.7.13}", ", {name: m3, address: 192.168.7.14}", "cluster.yaml:5:10: masters: was m1 (192.168.7.11), m2 (192.168.7.12), m3 (192.168.7.13)"},
		{", {name: m2, address: 192.168.7.12}, {name: m3, address: 192.168.7.13}", "", "masters: was"},
		{"v1.36.3", "v1.35.9", "cannot go back to v1.35.9"},
		{"JdZOnOM0\"}]\n", "JdZOnOM0\"}]\n---\napiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nnetworking: {dnsDomain: a.b}\n", "dnsDomain: was cluster.local"},
	} {
		text := strings.Replace(document, tt.old, tt.new, 1)
		if text == document {
			t.Fatalf("%q is not in the document", tt.old)
		}
		_, err := newOf(dir, text, Options{Now: now()})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.new, err)
		}
	}
	if !same(was, contents(t, dir)) {
		t.Error("a rejected document changed the directory")
	}
	// The order of masters does not matter.
	mustNew(t, dir, strings.Replace(document, "[{name: m1, address: 192.168.7.11}, {name: m2, address: 192.168.7.12},", "[{name: m2, address: 192.168.7.12}, {name: m1, address: 192.168.7.11},", 1))
}

// TestNewDirectory checks that a directory is rejected if it was not minted, was changed since, or
// is in use.
func TestNewDirectory(t *testing.T) {
	// Keep the file reachable: if the garbage collector closed it, it would be unlocked.
	var held *os.File
	defer func() { held.Close() }()
	for name, tt := range map[string]struct {
		spoil func(dir string) error
		want  string
	}{
		"foreign": {func(d string) error { return os.Remove(filepath.Join(d, "mint.json")) }, "it has no mint.json"},
		"open":    {func(d string) error { return os.Chmod(filepath.Join(d, "pki", "ca.key"), 0o644) }, "is accessible to other users (mode 0644)"},
		"no key":  {func(d string) error { return os.Remove(filepath.Join(d, "pki", "etcd", "ca.key")) }, "restore the directory"},
		"other CA": {func(d string) error {
			ca, err := newCA("kubernetes", now())
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(d, "pki", "ca.crt"), ca.certPEM(), 0o600)
		}, "is not the CA that was minted"},
		"other etcd CA": {func(d string) error {
			ca, err := newCA("etcd-ca", now())
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(d, "pki", "etcd", "ca.crt"), ca.certPEM(), 0o600)
		}, "pki/etcd/ca.crt and pki/etcd/ca.key are not a pair"},
		"newer": {func(d string) error {
			return os.WriteFile(filepath.Join(d, "mint.json"), []byte(`{"version":9,"new":1}`), 0o600)
		}, "mint.json has version 9"},
		"damaged": {func(d string) error { return os.WriteFile(filepath.Join(d, "mint.json"), []byte("{"), 0o600) }, "mint.json is damaged"},
		"in use": {func(d string) error {
			var err error
			held, err = lock(d)
			return err
		}, "is in use by another edgebake"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "shops")
			mustNew(t, dir, document)
			if err := tt.spoil(dir); err != nil {
				t.Fatal(err)
			}
			was := contents(t, dir)
			_, err := newOf(dir, document, Options{Now: now()})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Error(err)
			}
			if !same(was, contents(t, dir)) {
				t.Error("the directory was changed")
			}
		})
	}
}

// TestNewAfterPowerCut checks that a power cut while minting leaves no incomplete directory, and
// that the next run removes the temporary one.
func TestNewAfterPowerCut(t *testing.T) {
	parent := t.TempDir()
	dir, work := filepath.Join(parent, "shops"), filepath.Join(parent, ".shops.minting")
	if err := os.MkdirAll(filepath.Join(work, "pki"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(work, "pki", "ca.key"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil { // empty, as if made by a person
		t.Fatal(err)
	}
	mustNew(t, dir, document)
	if _, err := os.Stat(work); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := checkModes(dir, os.Geteuid()); err != nil {
		t.Error(err)
	}
}

// TestUpdateAfterPowerCut checks power cuts during an update, between any two of its writes. The
// inconsistent directory must not be used, and the same command must complete it.
func TestUpdateAfterPowerCut(t *testing.T) {
	namespace := func(name string) manifest.File {
		return manifest.File{Name: name + ".yaml", Text: "apiVersion: v1\nkind: Namespace\nmetadata: {name: of-" + name + "}\n"}
	}
	update := func(dir, text string, all ...manifest.File) {
		t.Helper()
		if _, err := newOf(dir, text, Options{Now: now(), Manifests: all}); err != nil {
			t.Fatal(err)
		}
	}
	edited := namespace("z")
	edited.Text += "# edited\n"
	was := strings.Replace(document, "users:", "manifests: [z.yaml, x.yaml, y.yaml]\nusers:", 1)
	is := strings.NewReplacer("users:", "manifests: [z.yaml, y.yaml]\nusers:", "{name: a,", "{name: c,").Replace(document)
	dir := filepath.Join(t.TempDir(), "shops")
	update(dir, was, namespace("z"), namespace("x"), namespace("y"))
	before := contents(t, dir)
	update(dir, is, edited, namespace("y"))
	after := contents(t, dir)
	var changed []string
	for name := range after {
		if name != fileRecord && after[name] != before[name] {
			changed = append(changed, name)
		}
	}
	if len(changed) != 4 { // a token, a renamed manifest, a changed manifest, and the document
		t.Fatalf("changed: %q", changed)
	}
	for some := range 1 << len(changed) {
		dir := filepath.Join(t.TempDir(), "shops")
		tree := maps.Clone(before)
		tree["tokens/.new-1"] = before["tokens/a.yaml"]
		for i, name := range changed {
			if some>>i&1 == 1 {
				tree[name] = after[name]
			}
		}
		for name, text := range tree {
			p := filepath.Join(dir, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o700), os.WriteFile(p, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		sites, err := ControlPlaneSites(dir, sealed.Identity{}, now())
		if fits := tree[fileDocument] == before[fileDocument] && tree["manifests/01-z.yaml"] == before["manifests/01-z.yaml"]; fits != (err == nil) || fits && len(sites) != 3 {
			t.Errorf("%b: %d Sites, %v", some, len(sites), err)
		} else if !fits && !strings.Contains(err.Error(), "run `edgebake cluster new` again") {
			t.Error(err)
		}
		update(dir, is, edited, namespace("y"))
		got := contents(t, dir)
		if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, slices.Sorted(maps.Keys(after))) || got[fileDocument] != is || got["pki/ca.key"] != before["pki/ca.key"] {
			t.Errorf("%b: after the next run, the directory has %q", some, names)
		}
		if _, err := Sites(dir, sealed.Identity{}, now()); err != nil {
			t.Errorf("%b: %v", some, err)
		}
	}
}

// TestDamagedDirectory checks that if a file is missing or was replaced, each command that uses it
// fails with the file's name and the fix.
func TestDamagedDirectory(t *testing.T) {
	const fix = "restore the directory from your copy of it"
	for name, tt := range map[string]struct {
		damage func(dir string) error
		want   string
		again  bool // New reports the damage too
	}{
		"no token":    {func(dir string) error { return os.Remove(filepath.Join(dir, "tokens/a.yaml")) }, "tokens/a.yaml: no such file or directory: " + fix, false},
		"empty token": {func(dir string) error { return os.WriteFile(filepath.Join(dir, "tokens/a.yaml"), nil, 0o600) }, "tokens/a.yaml is not the token that was minted", false},
		"another token": {func(dir string) error {
			return os.Rename(filepath.Join(dir, "tokens/b.yaml"), filepath.Join(dir, "tokens/a.yaml"))
		}, "tokens/a.yaml is not the token that was minted", false},
		"empty sa.key":   {func(dir string) error { return os.WriteFile(filepath.Join(dir, "pki/sa.key"), nil, 0o600) }, "pki/sa.key and pki/sa.pub are not a pair", true},
		"another sa.pub": {func(dir string) error { return os.WriteFile(filepath.Join(dir, "pki/sa.pub"), []byte("x"), 0o600) }, "sa.pub belongs to another key", true},
	} {
		dir := filepath.Join(t.TempDir(), "shops")
		mustNew(t, dir, document)
		if err := tt.damage(dir); err != nil {
			t.Fatal(err)
		}
		for by, site := range map[string]func(string, sealed.Identity, time.Time) ([]NodeSite, error){"control-plane nodes": ControlPlaneSites, "workers": Sites} {
			if _, err := site(dir, sealed.Identity{}, now()); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), fix) || strings.Contains(err.Error(), ".age") {
				t.Errorf("%s, the Sites of %s: %v", name, by, err)
			}
		}
		if _, err := newOf(dir, document, Options{Now: now()}); tt.again != (err != nil && strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s, minted again: %v", name, err)
		}
	}
}

// TestMintedInTheFuture checks that a directory with a date in the future is rejected: this
// computer's clock, or the clock of the minting computer, must be wrong.
func TestMintedInTheFuture(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	for _, site := range []func(string, sealed.Identity, time.Time) ([]NodeSite, error){ControlPlaneSites, Sites} {
		if _, err := site(dir, sealed.Identity{}, now().Add(-30*time.Minute)); err != nil {
			t.Errorf("with a clock half an hour behind: %v", err)
		}
		if _, err := site(dir, sealed.Identity{}, now().AddDate(-1, 0, 0)); err == nil || !strings.Contains(err.Error(), "it was minted at 2026-11-22T06:00:00Z, but this computer's time is 2025-11-22T06:00:00Z; correct the clock") {
			t.Error(err)
		}
	}
}

// TestEncrypted checks that an encrypted directory contains no secret in clear text, and that Sites
// can be written only with the key.
func TestEncrypted(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	keyFile := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(keyFile, []byte(id.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document, id.Recipient().String())
	identity, err := sealed.ReadIdentity(keyFile)
	if err != nil {
		t.Fatal(err)
	}
	sites, err := Sites(dir, identity, now())
	if err != nil {
		t.Fatal(err)
	}
	secrets := []string{"PRIVATE KEY", "client-key-data", "token-secret", "Ywt6vPsKHvpWwpoUej7GUvITYqLjHa7JSkXGIcwacvgf"}
	for _, s := range sites {
		secrets = append(secrets, strings.Split(s.Site.Credentials.Token.Reveal(), ".")[1])
	}
	for name, text := range contents(t, dir) {
		for _, secret := range secrets {
			if strings.Contains(text, secret) {
				t.Errorf("%s contains %q unencrypted", name, secret)
			}
		}
	}
	if _, err := Sites(dir, sealed.Identity{}, now()); err == nil || !strings.Contains(err.Error(), "--identity") {
		t.Error(err)
	}
	// Without --encrypt-to, an encrypted directory stays encrypted, and is updated.
	if c := mustNew(t, dir, document); !c.Nothing() {
		t.Errorf("%+v", c)
	}
	mustNew(t, dir, strings.Replace(document, "nodes:\n", "nodes:\n  - {name: c}\n", 1))
	if sites, err = Sites(dir, identity, now()); err != nil || len(sites) != 3 {
		t.Error(len(sites), err)
	}
	other, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newOf(dir, document, Options{Now: now(), EncryptTo: []string{other.Recipient().String()}}); err == nil || !strings.Contains(err.Error(), "encrypted to other recipients") {
		t.Error(err)
	}
}

// TestSites checks that each worker's Site has a token of its own, the CA's hash and the API servers,
// but no key, and that an Inventory has the same Sites.
func TestSites(t *testing.T) {
	dir, other := filepath.Join(t.TempDir(), "shops"), filepath.Join(t.TempDir(), "other")
	mustNew(t, other, document)
	cert := contents(t, other)["pki/ca.crt"] // any certificate
	record := mustNew(t, dir, document+"report:\n  url: https://192.0.2.9:8443\n  key: k3k3k3k3k3k3k3k3k3k3k3k3k3\n  caCert: |\n    "+strings.ReplaceAll(strings.TrimSpace(cert), "\n", "\n    ")+"\n").Record
	sites, err := Sites(dir, sealed.Identity{}, now())
	if err != nil || len(sites) != 2 {
		t.Fatal(len(sites), err)
	}
	tokens := map[string]bool{}
	for _, s := range sites {
		raw, err := configs.EncodeSlot(s.Site)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := configs.ParseSite("site.yaml", raw); err != nil {
			t.Error(err)
		}
		if bytes.Contains(raw, []byte("PRIVATE KEY")) || bytes.Contains(raw, []byte("k3k3")) || !bytes.Contains(raw, []byte(record.CAHash)) || strings.Join(s.Site.Masters, " ") != "192.168.7.11:6443 192.168.7.12:6443 192.168.7.13:6443" {
			t.Errorf("%s", raw)
		}
		tokens[s.Site.Credentials.Token.Reveal()] = true
	}
	if len(tokens) != 2 {
		t.Error("two nodes have the same token")
	}
	if a, b := sites[0].Site.Report, sites[1].Site.Report; a.URL != "https://192.0.2.9:8443/a/"+filepath.Base(a.URL) || len(a.URL) < 50 || filepath.Base(a.URL) == filepath.Base(b.URL) || a.CACert == "" {
		t.Errorf("reports go to %+v and %+v", a, b)
	}
	text, err := Inventory(sites)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(string(text), "BEGIN CERTIFICATE") != 1 {
		t.Errorf("the receiver's certificate is repeated for each machine:\n%s", text)
	}
	inv, err := configs.ParseInventory("inventory.yaml", text)
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range sites {
		want, _ := configs.EncodeSlot(s.Site)
		inv.Sites[i].Site.Match = inv.Sites[i].Match
		got, _ := configs.EncodeSlot(&inv.Sites[i].Site)
		if !bytes.Equal(got, want) || inv.Sites[i].Name != s.Name {
			t.Errorf("in the Inventory:\n%s\nalone:\n%s", got, want)
		}
	}
	late := now().Add(169 * time.Hour)
	if _, err := Sites(dir, sealed.Identity{}, late); err == nil || strings.Count(err.Error(), "expired at 2026-11-29T06:00:00Z") != 2 {
		t.Error(err)
	}
	sites[0].Site.Match = configs.Match{}
	if _, err := Inventory(sites); err == nil || !strings.Contains(err.Error(), "node a has no match") {
		t.Error(err)
	}
}

// TestAdminConfig checks that the administrator's kubeconfig has a cluster and a context for each
// API server, and one user with a certificate of an administrator for a year, and that the CA is
// valid now and for about ten years.
func TestAdminConfig(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	files := contents(t, dir)
	k, err := kubeapi.ParseKubeconfig([]byte(files["admin.conf"]))
	if err != nil {
		t.Fatal(err)
	}
	ca := parseCert(t, files["pki/ca.crt"])
	var want []kubeapi.NamedCluster
	var contexts []kubeapi.NamedContext
	for n := range 3 {
		name := fmt.Sprintf("shops-m%d", n+1)
		want = append(want, kubeapi.NamedCluster{Name: name, Cluster: kubeapi.Cluster{
			Server: fmt.Sprintf("https://192.168.7.%d:6443", 11+n), CAData: base64.StdEncoding.EncodeToString([]byte(files["pki/ca.crt"]))}})
		contexts = append(contexts, kubeapi.NamedContext{Name: name, Context: kubeapi.Context{Cluster: name, User: "shops-admin"}})
	}
	if !reflect.DeepEqual(k.Clusters, want) || !reflect.DeepEqual(k.Contexts, contexts) || k.CurrentContext != "shops-m1" {
		t.Errorf("clusters %+v, contexts %+v, current context %s", k.Clusters, k.Contexts, k.CurrentContext)
	}
	if len(k.Users) != 1 || k.Users[0].Name != "shops-admin" {
		t.Fatalf("%d users", len(k.Users))
	}
	decode := func(text string) []byte {
		b, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	user := k.Users[0].User
	if _, err := tls.X509KeyPair(decode(user.CertData), decode(user.KeyData)); err != nil {
		t.Errorf("the administrator's key: %v", err)
	}
	cert := parseCert(t, string(decode(user.CertData)))
	if !slices.Equal(cert.Subject.Organization, []string{"kubeadm:cluster-admins"}) || !slices.Equal(cert.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) {
		t.Errorf("the certificate is for %s, usage %v", cert.Subject, cert.ExtKeyUsage)
	}
	for _, at := range []struct {
		time  time.Time
		valid bool
	}{{now().AddDate(0, 0, -1), false}, {now(), true}, {now().AddDate(0, 11, 0), true}, {now().AddDate(1, 1, 0), false}} {
		if err := accepts(ca, cert, at.time); (err == nil) != at.valid {
			t.Errorf("the administrator's certificate at %s: %v", at.time, err)
		}
	}
	if ca.NotBefore.After(now()) || ca.NotAfter.Before(now().AddDate(9, 11, 0)) || ca.NotAfter.After(now().AddDate(10, 1, 0)) {
		t.Errorf("the CA is valid from %s to %s", ca.NotBefore, ca.NotAfter)
	}
}

// TestRenewTokens checks a cluster that was not switched on in time: workers whose tokens have
// expired get new ones, even after an interruption, and control-plane nodes' Sites contain them.
func TestRenewTokens(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	change, err := newOf(dir, document, Options{Now: now()})
	if err != nil {
		t.Fatal(err)
	}
	if names, err := RenewTokens(dir, sealed.Identity{}, now()); err != nil || names != nil {
		t.Errorf("all are valid: %q, %v", names, err)
	}
	before := contents(t, dir)
	late := change.Record.Tokens[0].Expires.Add(time.Hour)
	if _, err := Sites(dir, sealed.Identity{}, late); err == nil || !strings.Contains(err.Error(), "--bootstrap TIME") {
		t.Errorf("expired: %v", err)
	}
	// This is the directory after a power cut before the record is written.
	if err := os.WriteFile(filepath.Join(dir, tokenFile("a")), []byte("apiVersion: v1\nkind: Secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, x := range change.Record.Tokens {
		all = append(all, x.Node)
	}
	names, err := RenewTokens(dir, sealed.Identity{}, late)
	if err != nil || !slices.Equal(names, all) {
		t.Fatalf("renewed %q of %q: %v", names, all, err)
	}
	after := contents(t, dir)
	for name := range after {
		if changed := name == fileRecord || strings.HasPrefix(name, "tokens/"); changed != (after[name] != before[name]) {
			t.Errorf("%s: changed %v", name, !changed)
		}
	}
	record, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	workers, err := Sites(dir, sealed.Identity{}, late)
	if err != nil || len(workers) != len(all) {
		t.Fatalf("%d Sites: %v", len(workers), err)
	}
	masters, err := ControlPlaneSites(dir, sealed.Identity{}, late)
	if err != nil {
		t.Fatal(err)
	}
	objects, err := manifest.Unpack(masters[0].Site.Credentials.Keys.Objects)
	if err != nil {
		t.Fatal(err)
	}
	for i, x := range record.Tokens {
		if !x.Expires.After(late) || x.ID == change.Record.Tokens[i].ID || !strings.Contains(objects[0].Text, x.ID) {
			t.Errorf("%s: token %s until %v", x.Node, x.ID, x.Expires)
		}
		if !strings.HasPrefix(workers[i].Site.Credentials.Token.Reveal(), x.ID+".") {
			t.Errorf("the Site of %s has another token", x.Node)
		}
	}
}

// TestRecordOfAnotherVersion checks that an earlier edgebake's directory is read and updated, and a
// later edgebake's is rejected because of its version, whatever fields it has.
func TestRecordOfAnotherVersion(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	file := filepath.Join(dir, fileRecord)
	rewrite := func(edit func(map[string]any)) {
		t.Helper()
		var r map[string]any
		b, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(b, &r)
		}
		if err != nil {
			t.Fatal(err)
		}
		edit(r)
		if b, err = json.Marshal(r); err == nil {
			err = os.WriteFile(file, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	rewrite(func(r map[string]any) {
		r["version"] = 1
		delete(r, "adminUntil")
	})
	late := now().AddDate(0, 7, 0)
	if _, err := newOf(dir, document, Options{Now: late}); err != nil {
		t.Fatal(err)
	}
	if r, err := Load(dir); err != nil || r.Version != 2 || !r.AdminUntil.Equal(late.Add(adminLife)) {
		t.Errorf("%+v, %v", r, err)
	}
	rewrite(func(r map[string]any) { r["version"], r["later"] = 3, true })
	want := "reading " + dir + ": mint.json has version 3, and this edgebake reads versions 1 and 2: use the edgebake that wrote it, or a later one"
	if _, err := Load(dir); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// TestRecordFields fails if a field is added without a new version. Earlier edgebakes reject
// unknown fields, so they must first see a version that they do not support.
func TestRecordFields(t *testing.T) {
	t.Parallel()
	fields := map[int]string{2: "version id created caHash recipients cluster kubernetesVersion document tokens manifests births said adminUntil formerCAs"}
	var got []string
	for f := range reflect.TypeFor[Record]().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		got = append(got, name)
	}
	if strings.Join(got, " ") != fields[version] {
		t.Errorf("version %d of %s has the fields\n%s\nwant\n%s", version, fileRecord, strings.Join(got, " "), fields[version])
	}
}

// TestInventoryOfMany checks that spreadSeconds is omitted if it is the default for the Inventory's
// size, because first boot of an earlier image does not know the field.
func TestInventoryOfMany(t *testing.T) {
	t.Parallel()
	var sites []NodeSite
	for i := range 500 {
		name := fmt.Sprint("shop-", i)
		c := &clusterdoc.Cluster{Name: "shops", Endpoint: "apiserver.cluster.local", VIP: "10.103.97.2", Port: 6443, Masters: []clusterdoc.ControlPlaneNode{{Name: "m1", Address: "192.0.2.11"}}, Nodes: make([]clusterdoc.Node, 500)}
		site := c.NodeSite(&clusterdoc.Node{Name: name, NodeType: configs.NodeNative}, configs.NewSecret("abcdef.0123456789abcdef"), "sha256:"+strings.Repeat("ab", 32))
		site.Match.Serial = name
		sites = append(sites, NodeSite{Name: name, Site: site})
	}
	if sites[0].Site.SpreadSeconds != 5 {
		t.Fatalf("a Site has %d", sites[0].Site.SpreadSeconds)
	}
	text, err := Inventory(sites)
	if err != nil {
		t.Fatal(err)
	}
	inv, err := configs.ParseInventory("inventory.yaml", text)
	if err != nil || inv.Sites[7].SpreadSeconds != 5 || strings.Contains(string(text), "spreadSeconds") {
		t.Errorf("%v\n%s", err, text[:min(len(text), 1000)])
	}
}
