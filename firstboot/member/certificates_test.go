package member_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
)

// TestEnrolledReadsWhatItFinds checks that a node with an empty, truncated or zeroed file does not
// count as enrolled.
func TestEnrolledReadsWhatItFinds(t *testing.T) {
	t.Parallel()
	ready := readyNode(t)
	for _, file := range []string{ondisk.KubeletConf, ondisk.KubeletConfig, member.KubeadmFlags, ondisk.KubeCA, member.ClientCert} {
		for spoilt, spoil := range map[string]func([]byte) []byte{
			"empty":   func([]byte) []byte { return nil },
			"cut off": func(b []byte) []byte { return b[:len(b)/2] },
			"zeros":   func(b []byte) []byte { return make([]byte, len(b)) },
		} {
			w := ready.Clone(t)
			p := filepath.Join(w.Root, file)
			if file == member.ClientCert {
				p = filepath.Join(w.Root, "/var/lib/kubelet/pki/kubelet-client-2026-11-20-10-00-00.pem")
			}
			b, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(p, spoil(b), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := member.Enrolled(w.Env()); !errors.Is(err, member.ErrNotEnrolled) {
				t.Errorf("%s is %s: Enrolled returns %v", file, spoilt, err)
			}
			if file != member.ClientCert {
				continue
			}
			// Without a token the machine cannot join again, which is reported.
			w.PowerOn()
			if err := w.Boot(); err == nil || !w.ConsoleHas("FAILED discovery") {
				t.Errorf("%s is %s:\n%s", file, spoilt, strings.Join(w.Console, "\n"))
			}
		}
	}
	if err := member.Enrolled(ready.Env()); err != nil {
		t.Error(err)
	}
}

// TestRestoreCertificates damages the current certificate of each store, after two rotations, in
// every way in which a power cut may damage it.
func TestRestoreCertificates(t *testing.T) {
	t.Parallel()
	base := newWorld(t)
	pair := func(days int) string {
		return base.Cluster.ClientFrom("system:node:edge-sn0042", base.Now.AddDate(0, 0, days), base.Now.AddDate(1, 0, days))
	}
	first, second, third := pair(0), pair(100), pair(200)
	otherKey := third[:strings.Index(third, "-----BEGIN PRIVATE")] + second[strings.Index(second, "-----BEGIN PRIVATE"):]
	for _, s := range member.CertStores() {
		// The clock may be wrong: the second certificate has the greatest name.
		dated := func(date string) string { return s.Dir + "/" + s.Name + "-" + date + ".pem" }
		one, two, three := dated("2026-11-20-10-00-00"), dated("2031-01-01-00-00-00"), dated("2027-06-08-10-00-00")
		for name, tc := range map[string]struct {
			third  string
			target string // of the link; "": no link
			want   string // the link's target afterwards
		}{
			"sound":                 {third, three, three},
			"sound, not the newest": {third, one, one},
			"empty":                 {"", three, two},
			"cut off":               {third[:len(third)/2], three, two},
			"zeros":                 {strings.Repeat("\x00", len(third)), three, two},
			"another's key":         {otherKey, three, two},
			"dangling":              {third, dated("2027-07-07-00-00-00"), three},
			"no link":               {third, "", three},
			"relative":              {"", filepath.Base(three), two},
		} {
			w := newWorld(t)
			w.Put(one, first)
			w.Put(two, second)
			w.Put(three, tc.third)
			w.Put(s.Dir+"/"+s.Name+"-other-2035-01-01-00-00-00.pem", third) // of another store
			if tc.target != "" {
				if err := os.Symlink(tc.target, filepath.Join(w.Root, s.Current())); err != nil {
					t.Fatal(err)
				}
			}
			if err := member.RestoreCertificates(w.Env()); err != nil {
				t.Error(err)
			}
			if got, err := os.Readlink(filepath.Join(w.Root, s.Current())); err != nil || got != tc.want {
				t.Errorf("%s, %s: the link leads to %s, not %s (%v)", s.Name, name, got, tc.want, err)
			}
		}
		// If no certificate is usable, and the program requests a new one,
		// the broken one must be removed.
		w := newWorld(t)
		w.Put(one, "")
		if err := os.Symlink(one, filepath.Join(w.Root, s.Current())); err != nil {
			t.Fatal(err)
		}
		if err := member.RestoreCertificates(w.Env()); err != nil {
			t.Error(err)
		}
		if w.Has(s.Current()) == s.Replaceable {
			t.Errorf("%s has no usable certificate; its link exists: %v", s.Name, w.Has(s.Current()))
		}
	}
}

// TestRestoreKubeletsOwnPair checks that a pair with a damaged file is removed, because kubelet
// only checks that the files exist.
func TestRestoreKubeletsOwnPair(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pair := w.Cluster.Client("edge-sn0042@1", w.Now.AddDate(1, 0, 0))
	cert, key := member.KubeletPKI+"/kubelet.crt", member.KubeletPKI+"/kubelet.key"
	for _, tc := range []struct {
		cert, key string
		stays     bool
	}{{pair, pair, true}, {"", pair, false}, {pair, "", false}} {
		w.Put(cert, tc.cert)
		w.Put(key, tc.key)
		if err := member.RestoreCertificates(w.Env()); err != nil {
			t.Error(err)
		}
		if w.Has(cert) != tc.stays || w.Has(key) != tc.stays {
			t.Errorf("certificate of %d bytes, key of %d: left are %v and %v", len(tc.cert), len(tc.key), w.Has(cert), w.Has(key))
		}
	}
}

// TestRotationCutOff checks that the node recovers without a token if, months after the join, the
// power is cut right after a certificate was rotated.
func TestRotationCutOff(t *testing.T) {
	t.Parallel()
	w := readyNode(t)
	rotated := member.KubeletPKI + "/kubelet-client-2027-08-01-00-00-00.pem"
	w.Now = w.Now.Add(200 * 24 * time.Hour)
	w.PutUnsynced(rotated, w.Cluster.Client("system:node:edge-sn0042", w.Now.AddDate(1, 0, 0)))
	link := filepath.Join(w.Root, member.ClientCert)
	if err := errors.Join(os.Remove(link), os.Symlink(rotated, link)); err != nil {
		t.Fatal(err)
	}
	w.LoseUnsynced()
	w.PowerOn()
	if err := w.Boot(); err != nil || w.Joins != 1 {
		t.Errorf("%v; kubeadm joined %d times\n%s", err, w.Joins, strings.Join(w.Console, "\n"))
	}
}
