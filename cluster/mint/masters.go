package mint

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/sealed"
)

// MasterSites are those of all control-plane nodes of a directory. Each holds
// the cluster's keys, and the tokens of the nodes, which the first of them
// publishes in the cluster. While the cluster may be born they say so.
func MasterSites(dir string, id sealed.Identity, now time.Time) ([]NodeSite, error) {
	o, err := open(dir, id)
	if err != nil {
		return nil, err
	}
	keys, err := o.keys(now)
	if err != nil {
		return nil, fmt.Errorf("writing the masters' Sites: %w", err)
	}
	birth := o.record.birth(now)
	var out []NodeSite
	var errs []error
	for i := range o.cluster.Masters {
		m := &o.cluster.Masters[i]
		site, err := o.cluster.MasterSite(m, o.record.ID, o.record.CAHash, birth)
		if err != nil {
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w", m.Name, err))
			continue
		}
		site.Credentials.Keys = keys
		if probs := site.Validate(); len(probs) > 0 {
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w", m.Name, probs))
			continue
		}
		out = append(out, NodeSite{m.Name, m.Match, birth, site})
	}
	return out, errors.Join(errs...)
}

// Words are what a person says of masters that are lost.
type Words struct {
	Absent       []string // dead on arrival
	ContinueFrom string   // whose data is kept
	Restore      string   // SHA-256 of the snapshot that it begins with instead
}

// Say puts the words into masters' Sites.
func (w Words) Say(masters []NodeSite) error {
	var errs []error
	for _, m := range masters {
		c := m.Site.ControlPlane
		c.Absent, c.ContinueFrom, c.Restore = w.Absent, w.ContinueFrom, w.Restore
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
	pair := func(base string) configs.KeyPair {
		return configs.KeyPair{Cert: read("pki/" + base + ".crt"), Key: configs.NewSecret(read("pki/" + base + ".key"))}
	}
	k := &configs.ClusterKeys{
		CA: pair("ca"), EtcdCA: pair("etcd/ca"), FrontProxyCA: pair("front-proxy-ca"),
		ServiceAccount: configs.NewSecret(read("pki/sa.key")),
	}
	var objects []string
	for _, t := range o.record.Tokens {
		if now.Before(t.Expires) {
			objects = append(objects, read(tokenFile(t.Node)))
		}
	}
	k.Objects = configs.NewSecret(strings.Join(objects, "---\n"))
	return k, errors.Join(errs...)
}

// AllowBirth notes that the cluster may be born until then, again or for the
// first time, and returns the record. Nothing forbids it but the living
// cluster: masters that see one take a seat in it.
func AllowBirth(dir string, now, until time.Time) (*Record, error) {
	dir, err := realDir(dir)
	if err != nil {
		return nil, err
	}
	held, err := lock(dir)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	record, err := Load(dir)
	if err != nil {
		return nil, err
	}
	record.Births = append(record.Births, Birth{Issued: now.UTC().Truncate(time.Second), Until: until.UTC().Truncate(time.Second)})
	b, err := encodeRecord(record)
	if err != nil {
		return nil, err
	}
	return record, writeFile(dir, fileRecord, b, record.Recipients)
}
