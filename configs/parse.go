package configs

import (
	"cmp"
	"errors"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
)

// Version is that of every document this package reads; APIVersion is what the
// document says.
const (
	Version    = "v1alpha1"
	APIVersion = "edgebake.io/" + Version
)

// Kinds of document.
const (
	KindImage     = "Image"
	KindSite      = "Site"
	KindInventory = "Inventory"
	KindCluster   = "Cluster"
)

// documentForm describes edgebake's documents.
var documentForm = &strict.Form{
	APIVersion: APIVersion,
	Kinds:      []string{KindImage, KindSite, KindInventory, KindCluster},
	Limits:     limits,
	Followed:   KindCluster,
	EmptyHint:  "; `edgebake init` writes one to start from",
	KindHint:   "; an Image describes what is baked, a Site what is stamped, an Inventory many Sites, a Cluster what is minted",
}

// limits bound what a stranger's document costs a machine that reads it.
func limits(kind string) strict.Limits {
	switch kind {
	case KindInventory:
		return strict.Limits{Nodes: 2_000_000, Items: 1000, More: map[string]int{"sites": 20_000}}
	case KindSite:
		return strict.Limits{Nodes: 20_000, Items: 1000}
	}
	return strict.DefaultLimits
}

// ParseImage reads an Image: version first, then strictly, then defaults,
// then validation. The error is Problems with everything found wrong. Of a
// document for several architectures it is the first's; all are checked.
func ParseImage(name string, data []byte) (*Image, error) {
	all, err := ParseImages(name, data)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// ParseSite reads a Site as a person writes it. The error is Problems with
// everything found wrong.
func ParseSite(name string, data []byte) (*Site, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	return d.Site(Secret{}, false)
}

// ParsePublicSite reads a Site whose secrets have been forgotten, or are in
// another file. It is as strict as ParseSite but asks for no credentials.
func ParsePublicSite(name string, data []byte) (*Site, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	site := new(Site)
	if err := d.Parse(KindSite, site, func() Problems { return site.validate(false) }); err != nil {
		return nil, err
	}
	return site, nil
}

// ErrGivenToken says what is wrong with a token that did not come with a document.
var ErrGivenToken = errors.New("the given token is not a bootstrap token: " + forms.TokenWords + " (`kubeadm token create` makes one)")

// Document is a document whose YAML and kind have been read. It is decoded once.
type Document struct {
	*strict.Document
	Data []byte // what was read
}

// Read reads a document of any kind that begins as one of edgebake's. The error is
// Problems.
func Read(name string, data []byte) (*Document, error) {
	doc, probs := strict.Read(name, data, documentForm)
	if probs != nil {
		return nil, probs
	}
	return &Document{doc, data}, nil
}

// Site is the document as a Site. It gets the bootstrap token, if there is one and
// it has none itself; with forced, in any case.
func (d *Document) Site(token Secret, forced bool) (*Site, error) {
	site := new(Site)
	var bad error
	err := d.Parse(KindSite, site, func() Problems {
		if token.IsZero() || !forced && !site.Credentials.Token.IsZero() {
			return site.Validate()
		}
		if !forms.Token.MatchString(token.Reveal()) {
			bad, site.Credentials = ErrGivenToken, Credentials{} // the document is not what has it
			return site.validate(false)
		}
		site.Credentials = Credentials{Token: token}
		return site.Validate()
	})
	if err := cmp.Or(err, bad); err != nil {
		return nil, err
	}
	return site, nil
}

// Inventory is the document as an Inventory. Its Sites get the bootstrap token as a
// Site does.
func (d *Document) Inventory(token Secret, forced bool) (*Inventory, error) {
	inv, err := parseInventory(d.Document, token.IsZero())
	if err != nil || token.IsZero() {
		return inv, err
	}
	if !forms.Token.MatchString(token.Reveal()) {
		return nil, ErrGivenToken
	}
	inv.setToken(token, forced)
	return inv, nil
}
