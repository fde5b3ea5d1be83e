package mint

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"filippo.io/age"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

func parseCert(t *testing.T, text string) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		t.Fatalf("no certificate in %q", text)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// adminOf returns the certificate and the CA in an administrator's kubeconfig.
func adminOf(t *testing.T, conf string) (cert, ca *x509.Certificate) {
	t.Helper()
	k, err := kubeapi.ParseKubeconfig([]byte(conf))
	if err != nil {
		t.Fatal(err)
	}
	decode := func(text string) string {
		b, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	return parseCert(t, decode(k.Users[0].User.CertData)), parseCert(t, decode(k.Clusters[0].Cluster.CAData))
}

// accepts reports whether a client that trusts ca accepts cert at that time.
func accepts(ca, cert *x509.Certificate, at time.Time) error {
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	_, err := cert.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err
}

// TestRenew checks that repeating the command renews admin.conf in the second half of its year, and
// each CA in its last two years. CAs keep their keys, so that pins and certificates stay valid.
func TestRenew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	first := contents(t, dir)
	again := func(at time.Time, want ...string) map[string]string {
		t.Helper()
		ends, err := ExpiringCertificates(dir, at)
		if err != nil || (len(ends) == 0) != (len(want) == 0) {
			t.Errorf("%s: %+v end soon, want %q; %v", at, ends, want, err)
		}
		c, err := newOf(dir, document, Options{Now: at})
		if err != nil || !slices.Equal(c.Renewed, want) || c.Nothing() != (len(want) == 0) {
			t.Fatalf("%s: renewed %q, want %q; %v", at, c.Renewed, want, err)
		}
		return contents(t, dir)
	}
	again(now().AddDate(0, 5, 0))
	files := again(now().AddDate(0, 7, 0), "admin.conf")
	again(now().AddDate(0, 8, 0))
	if cert, ca := adminOf(t, files["admin.conf"]); accepts(ca, cert, now().AddDate(1, 6, 0)) != nil {
		t.Errorf("the administrator's certificate ends %s", cert.NotAfter)
	}
	again(now().AddDate(7, 11, 0), "admin.conf")

	late := now().AddDate(8, 2, 0)
	files = again(late, "pki/ca.crt", "pki/etcd/ca.crt", "pki/front-proxy-ca.crt", "admin.conf")
	again(late.Add(time.Hour))
	for _, of := range configs.ClusterCAs() {
		crt, key := pairFiles(of)
		old, renewed := parseCert(t, first[crt]), parseCert(t, files[crt])
		if files[key] != first[key] || kubeapi.Pin(old) != kubeapi.Pin(renewed) {
			t.Errorf("%s has another key", crt)
		}
		tlsPair, err := tls.X509KeyPair([]byte(files[crt]), []byte(files[key]))
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := sign(&x509.Certificate{NotBefore: now(), NotAfter: now().AddDate(20, 0, 0)}, &pair{renewed, tlsPair.PrivateKey.(*ecdsa.PrivateKey)})
		if err != nil {
			t.Fatal(err)
		}
		for name, ca := range map[string]*x509.Certificate{"former": old, "new": renewed} {
			if err := accepts(ca, leaf.cert, late); err != nil {
				t.Errorf("%s: verifying with the %s CA: %v", crt, name, err)
			}
		}
		if after := now().AddDate(11, 0, 0); accepts(renewed, leaf.cert, after) != nil || accepts(old, leaf.cert, after) == nil {
			t.Errorf("%s ends %s", crt, renewed.NotAfter)
		}
	}
	sites, err := ControlPlaneSites(dir, sealed.Identity{}, late)
	if err != nil || sites[0].Site.Credentials.Keys.EtcdCA.Cert != files["pki/etcd/ca.crt"] {
		t.Errorf("the Sites have other CAs; %v", err)
	}
}

// TestRenewByAClockThatWasAhead checks that the certificates renewed by a computer whose clock is
// years ahead are made again by the next run with a correct clock.
func TestRenewByAClockThatWasAhead(t *testing.T) {
	all := []string{"pki/ca.crt", "pki/etcd/ca.crt", "pki/front-proxy-ca.crt", "admin.conf"}
	for _, years := range []int{1, 9} {
		dir := filepath.Join(t.TempDir(), "shops")
		mustNew(t, dir, document)
		want := all
		if years == 1 {
			want = all[3:]
		}
		for _, at := range []time.Time{now().AddDate(years, 0, 0), now().Add(time.Hour)} {
			c, err := newOf(dir, document, Options{Now: at})
			if err != nil || !slices.Equal(c.Renewed, want) {
				t.Fatalf("%s: renewed %q, want %q; %v", at, c.Renewed, want, err)
			}
			files := contents(t, dir)
			cert, ca := adminOf(t, files["admin.conf"])
			if err := accepts(ca, cert, at); err != nil || string(parseCert(t, files["pki/ca.crt"]).Raw) != string(ca.Raw) {
				t.Errorf("%s: the administrator's kubeconfig: %v", at, err)
			}
		}
		if c, err := newOf(dir, document, Options{Now: now().Add(2 * time.Hour)}); err != nil || !c.Nothing() {
			t.Errorf("again: renewed %q, %v", c.Renewed, err)
		}
	}
}

// TestRenewAfterPowerCut checks that after an interruption before any of the writes, the next run
// renews everything.
func TestRenewAfterPowerCut(t *testing.T) {
	made := filepath.Join(t.TempDir(), "shops")
	mustNew(t, made, document)
	old := contents(t, made)
	late := now().AddDate(9, 0, 0)
	if _, err := newOf(made, document, Options{Now: late}); err != nil {
		t.Fatal(err)
	}
	renewed := contents(t, made)
	order := []string{"admin.conf", "mint.json", "pki/ca.crt", "pki/etcd/ca.crt", "pki/front-proxy-ca.crt"}
	for n := range order {
		state := maps.Clone(old)
		for _, name := range order[:n] {
			state[name] = renewed[name]
		}
		dir := filepath.Join(t.TempDir(), "shops")
		for name, text := range state {
			p := filepath.Join(dir, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o700), os.WriteFile(p, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := newOf(dir, document, Options{Now: late}); err != nil {
			t.Fatalf("before %s: %v", order[n], err)
		}
		got := contents(t, dir)
		_, inAdmin := adminOf(t, got["admin.conf"])
		ca := parseCert(t, got["pki/ca.crt"])
		if record, err := Load(dir); err != nil || !slices.Equal(record.FormerCAs, []string{old["pki/ca.crt"]}) {
			t.Errorf("before %s: former CAs %q, %v", order[n], record.FormerCAs, err)
		}
		if ends, err := ExpiringCertificates(dir, late); err != nil || len(ends) > 0 || inAdmin.NotAfter.Before(ca.NotAfter.AddDate(0, 0, -1)) {
			t.Errorf("before %s: %+v, %v; the CA ends %s, in admin.conf %s", order[n], ends, err, ca.NotAfter, inAdmin.NotAfter)
		}
	}
}

// TestRenewEncrypted checks that an encrypted directory is renewed with its key. Without the key,
// the certificates that expire soon are reported.
func TestRenewEncrypted(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	mustNew(t, dir, document, id.Recipient().String())
	before := contents(t, dir)
	late := now().AddDate(9, 0, 0)
	c, err := newOf(dir, document, Options{Now: late})
	if err != nil || len(c.Expiring) != 4 || len(c.Renewed) > 0 || !same(before, contents(t, dir)) {
		t.Fatalf("%+v, %v", c, err)
	}
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte(id.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	key, err := sealed.ReadIdentity(file)
	if err != nil {
		t.Fatal(err)
	}
	c, err = newOf(dir, document, Options{Now: late, Identity: key})
	if err != nil || len(c.Expiring) > 0 || len(c.Renewed) != 4 {
		t.Fatalf("%+v, %v", c, err)
	}
	conf, err := readFile(dir, fileAdmin, key)
	if err != nil {
		t.Fatal(err)
	}
	if cert, ca := adminOf(t, string(conf)); accepts(ca, cert, late.AddDate(0, 11, 0)) != nil {
		t.Error("the administrator's certificate is not of the new CA")
	}
}

// TestSnapshotOfTheFormerCA checks that a snapshot from before the CA was issued again is
// recognized as the cluster's own.
func TestSnapshotOfTheFormerCA(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	former := contents(t, dir)["pki/ca.crt"]
	if _, err := newOf(dir, document, Options{Now: now().AddDate(9, 0, 0)}); err != nil {
		t.Fatal(err)
	}
	db := bytes.Repeat([]byte{7}, 64<<10)
	copy(db[100:], former)
	sum := sha256.Sum256(db)
	file := filepath.Join(t.TempDir(), "s.db")
	if err := os.WriteFile(file, append(db, sum[:]...), 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := ReadSnapshot(dir, file); err != nil || !s.Ours {
		t.Errorf("%+v, %v", s, err)
	}
	if strings.Contains(contents(t, dir)["pki/ca.crt"], former) {
		t.Error("the old CA equals the new one")
	}
}
