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

// ControlPlaneSites returns the Sites of all control-plane nodes of a directory. Each has the keys,
// the tokens that the first machine publishes, and the time until which the cluster may bootstrap.
func ControlPlaneSites(dir string, id sealed.Identity, now time.Time) ([]NodeSite, error) {
	o, err := open(dir, id, now)
	if err != nil {
		return nil, err
	}
	keys, err := o.keys(now)
	if err != nil {
		return nil, fmt.Errorf("writing the control-plane nodes' Sites: %w", err)
	}
	bootstrap := o.record.bootstrapUntil(now)
	var out []NodeSite
	var errs []error
	for i := range o.cluster.Masters {
		m := &o.cluster.Masters[i]
		site, err := o.cluster.ControlPlaneSite(m, o.record.ID, o.record.CAHash, bootstrap)
		if err != nil {
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w", m.Name, err))
			continue
		}
		site.Credentials.Keys = keys
		if probs := site.Validate(); len(probs) > 0 {
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w", m.Name, probs))
			continue
		}
		out = append(out, NodeSite{m.Name, bootstrap, site})
	}
	return out, errors.Join(errs...)
}

// Requests are the operator's requests about lost control-plane nodes and late bootstrapping.
type Requests struct {
	Absent       []string // nodes that never started
	ContinueFrom string   // node with whose data the cluster continues
	Restore      string   // SHA-256 of a snapshot that ContinueFrom starts with instead of its data
	// RequestedAt is the time of the ContinueFrom request. A machine carries out each request once.
	RequestedAt time.Time
	// Bootstrap is the end of the period in which etcd may start empty; zero: as recorded in the
	// directory.
	Bootstrap time.Time
}

// Apply writes the requests into the control-plane nodes' Sites.
func (w Requests) Apply(masters []NodeSite) error {
	var errs []error
	for i := range masters {
		m := &masters[i]
		c := m.Site.ControlPlane
		if !w.Bootstrap.IsZero() {
			m.Expires = wholeSeconds(w.Bootstrap)
			c.BootstrapUntil = m.Expires.Format(time.RFC3339)
		}
		c.Absent, c.ContinueFrom, c.Restore = w.Absent, w.ContinueFrom, w.Restore
		if w.ContinueFrom != "" {
			c.RequestedAt = w.RequestedAt.UTC().Format(time.RFC3339)
		}
		if probs := m.Site.Validate(); len(probs) > 0 {
			errs = append(errs, fmt.Errorf("writing the Site of %s: %w", m.Name, probs))
		}
	}
	return errors.Join(errs...)
}

// keys returns the cluster's keys for a Site.
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
		// If a run was interrupted by a power cut, the manifest may be newer than the record.
		if text != "" && digest([]byte(text)) != f.SHA256 {
			errs = append(errs, fmt.Errorf("reading %s: %s is not the manifest that the last `edgebake cluster new` recorded: run `edgebake cluster new` again, with the current manifests", o.dir, f.Name))
		}
		manifests = append(manifests, manifest.File{Name: o.cluster.Manifests[i], Text: text})
	}
	packed, err := manifest.Pack(manifests)
	k.Manifests = packed
	return k, errors.Join(append(errs, err)...)
}

// wholeSeconds rounds a time down to seconds, the precision of Sites and the record.
func wholeSeconds(t time.Time) time.Time { return t.UTC().Truncate(time.Second) }

// RenewTokens makes new tokens for the workers whose tokens have expired, and returns the workers'
// names. It must not be used once the cluster is bootstrapped: a running cluster does not get these
// tokens.
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
		// If the power is cut before the record is written, the record still has the expired token,
		// so the next run makes another.
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

// RequestTime returns the time of a new ContinueFrom request. It is always later than that of the
// last request, because machines ignore requests that are not newer.
func (r *Record) RequestTime(now time.Time) time.Time {
	now = now.UTC().Truncate(time.Second)
	if next := r.RequestedAt.Add(time.Second); next.After(now) {
		return next
	}
	return now
}

// saveRequestTime records the time of a ContinueFrom request.
func saveRequestTime(dir string, requested time.Time) error {
	dir, held, err := hold(dir)
	if err != nil {
		return err
	}
	defer held.Close()
	record, err := Load(dir)
	if err != nil {
		return err
	}
	record.RequestedAt = requested
	return record.write(dir)
}

// allowBootstrap records the time until which the cluster may be bootstrapped, and returns the
// record. Control-plane nodes that find a running cluster join it instead.
func allowBootstrap(dir string, now, until time.Time) (*Record, error) {
	dir, held, err := hold(dir)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	record, err := Load(dir)
	if err != nil {
		return nil, err
	}
	record.Bootstraps = append(record.Bootstraps, Bootstrap{Issued: wholeSeconds(now), Until: wholeSeconds(until)})
	return record, record.write(dir)
}
