package mint

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/configs/sealed"
)

// ControlPlaneSites are those of all control-plane nodes of a directory. Each holds
// the cluster's keys, and the tokens of the nodes, which the first of them
// publishes in the cluster. While the cluster may be born they say so.
func ControlPlaneSites(dir string, id sealed.Identity, now time.Time) ([]NodeSite, error) {
	o, err := open(dir, id, now)
	if err != nil {
		return nil, err
	}
	keys, err := o.keys(now)
	if err != nil {
		return nil, fmt.Errorf("writing the control-plane nodes' Sites: %w", err)
	}
	birth := o.record.birth(now)
	var out []NodeSite
	var errs []error
	for i := range o.cluster.Masters {
		m := &o.cluster.Masters[i]
		site, err := o.cluster.ControlPlaneSite(m, o.record.ID, o.record.CAHash, birth)
		if err != nil {
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w", m.Name, err))
			continue
		}
		site.Credentials.Keys = keys
		if probs := site.Validate(); len(probs) > 0 {
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w", m.Name, probs))
			continue
		}
		out = append(out, NodeSite{m.Name, birth, site})
	}
	return out, errors.Join(errs...)
}

// Words are what a person says of control-plane nodes that are lost.
type Words struct {
	Absent       []string // dead on arrival
	ContinueFrom string   // whose data is kept
	Restore      string   // SHA-256 of the snapshot that it begins with instead
	// Said is when ContinueFrom is said: it holds once.
	Said time.Time
	// Birth is until when etcd may begin with nothing; zero: as the directory has it.
	Birth time.Time
}

// Say puts the words into control-plane nodes' Sites.
func (w Words) Say(masters []NodeSite) error {
	var errs []error
	for i := range masters {
		m := &masters[i]
		c := m.Site.ControlPlane
		if !w.Birth.IsZero() {
			m.Expires = birthTime(w.Birth)
			c.BirthUntil = m.Expires.Format(time.RFC3339)
		}
		c.Absent, c.ContinueFrom, c.Restore = w.Absent, w.ContinueFrom, w.Restore
		if w.ContinueFrom != "" {
			c.Said = w.Said.UTC().Format(time.RFC3339)
		}
		if probs := m.Site.Validate(); len(probs) > 0 {
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w", m.Name, probs))
		}
	}
	return errors.Join(errs...)
}

// keys are the cluster's, as a Site carries them.
func (o *opened) keys(now time.Time) (*configs.ClusterKeys, error) {
	var errs []error
	read := func(name string) string {
		text, err := readFile(o.dir, name, o.id)
		errs = append(errs, err)
		return string(text)
	}
	k := &configs.ClusterKeys{ServiceAccount: configs.NewSecret(read("pki/sa.key"))}
	for _, ca := range configs.ClusterCAs() {
		crt, key := pairFiles(ca)
		*ca.Of(k) = configs.KeyPair{Cert: read(crt), Key: configs.NewSecret(read(key))}
	}
	var objects []string
	for _, t := range o.record.Tokens {
		if now.Before(t.Expires) {
			text, _, err := readToken(o.dir, t, o.id)
			errs = append(errs, err)
			objects = append(objects, string(text))
		}
	}
	if len(objects) > 0 {
		tokens, err := manifest.Pack([]manifest.File{{Name: "tokens", Text: strings.Join(objects, "---\n")}})
		k.Objects = tokens
		errs = append(errs, err)
	}
	var manifests []manifest.File
	for i, f := range o.record.Manifests {
		text := read(f.Name)
		// As with the document: a power cut may have left the next one.
		if text != "" && digest([]byte(text)) != f.SHA256 {
			errs = append(errs, fmt.Errorf("reading %s: %s is not the manifest of the last update: run `edgebake cluster new` again, with the current manifests", o.dir, f.Name))
		}
		manifests = append(manifests, manifest.File{Name: o.cluster.Manifests[i], Text: text})
	}
	packed, err := manifest.Pack(manifests)
	k.Manifests = packed
	return k, errors.Join(append(errs, err)...)
}

// birthTime is a time as Sites and the record have it.
func birthTime(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }

// RenewTokens makes new tokens for the workers whose tokens have expired, and
// returns their names. It is for a cluster that is yet to be born: one that lives
// learns of none of them.
func RenewTokens(dir string, id sealed.Identity, now time.Time) ([]string, error) {
	dir, held, err := hold(dir)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	o, err := open(dir, id, now)
	if err != nil {
		return nil, err
	}
	var renewed []string
	for i, t := range o.record.Tokens {
		if now.Before(t.Expires) {
			continue
		}
		fresh, secret, err := tokenFor(t.Node, o.cluster.TokenLifetime(), now, o.record.Tokens)
		if err != nil {
			return nil, err
		}
		// A power cut before the record leaves the expired token, which nobody
		// reads any more.
		if err := writeFile(dir, tokenFile(t.Node), secret, o.record.Recipients); err != nil {
			return nil, err
		}
		o.record.Tokens[i] = fresh
		renewed = append(renewed, t.Node)
	}
	if renewed == nil {
		return nil, nil
	}
	return renewed, o.record.write(dir)
}

// WordTime is when a word to continue is said now: later than the last one, be the
// clock what it may. Machines carry out none that is not later.
func (r *Record) WordTime(now time.Time) time.Time {
	now = now.UTC().Truncate(time.Second)
	if next := r.Said.Add(time.Second); next.After(now) {
		return next
	}
	return now
}

// noteWord notes that a word to continue was said then.
func noteWord(dir string, said time.Time) error {
	dir, held, err := hold(dir)
	if err != nil {
		return err
	}
	defer held.Close()
	record, err := Load(dir)
	if err != nil {
		return err
	}
	record.Said = said
	return record.write(dir)
}

// allowBirth notes that the cluster may be born until then, again or for the
// first time, and returns the record. Nothing forbids it but the living
// cluster: control-plane nodes that see one take a seat in it.
func allowBirth(dir string, now, until time.Time) (*Record, error) {
	dir, held, err := hold(dir)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	record, err := Load(dir)
	if err != nil {
		return nil, err
	}
	record.Births = append(record.Births, Birth{Issued: birthTime(now), Until: birthTime(until)})
	return record, record.write(dir)
}
