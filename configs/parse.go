package configs

import (
	"cmp"
	"errors"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/strict"
)

// Version is the version of all documents. APIVersion is the value of their field apiVersion.
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

// documentFormat describes edgebake's documents for package strict.
var documentFormat = &strict.Format{
	APIVersion: APIVersion,
	Kinds:      []string{KindImage, KindSite, KindInventory, KindCluster},
	Limits:     limits,
	Followed:   KindCluster,
	EmptyHint:  "; `edgebake init` writes one to start from",
	KindHint:   "; an Image describes a golden image, a Site a node, an Inventory many nodes, a Cluster a new cluster",
}

// limits returns the limits for documents, which may come from an untrusted stick.
func limits(kind string) strict.Limits {
	switch kind {
	case KindInventory:
		return strict.Limits{Nodes: 2_000_000, Items: 1000, More: map[string]int{"sites": 20_000}}
	case KindSite:
		return strict.Limits{Nodes: 20_000, Items: 1000}
	}
	return strict.DefaultLimits
}

// ParseSite parses a Site that a person has written. Its error is of type Problems.
func ParseSite(name string, data []byte) (*Site, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	return d.Site(Secret{}, false)
}

// ParsePublicSite is like ParseSite, for a Site that may lack its credentials.
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

// ErrGivenToken means that a token from outside the document is invalid.
var ErrGivenToken = errors.New("the given token is not a bootstrap token: " + forms.TokenWords + " (`kubeadm token create` makes one)")

// Document is a document whose YAML is parsed and whose kind is known. It can be decoded only once.
type Document struct {
	*strict.Document
	Data []byte // the input
}

// Read parses the YAML of a document, and checks its version and kind. Its error is of type
// Problems.
func Read(name string, data []byte) (*Document, error) {
	doc, probs := strict.Read(name, data, documentFormat)
	if probs != nil {
		return nil, probs
	}
	return &Document{doc, data}, nil
}

// Site decodes and validates a Site. Unless token is zero, it becomes the token of a Site that has
// none. If forced is set, it also replaces a token.
func (d *Document) Site(token Secret, forced bool) (*Site, error) {
	site := new(Site)
	var bad error
	err := d.Parse(KindSite, site, func() Problems {
		if token.IsZero() || !forced && !site.Credentials.Token.IsZero() {
			return site.Validate()
		}
		if !forms.Token.MatchString(token.Reveal()) {
			bad, site.Credentials = ErrGivenToken, Credentials{} // the invalid token is not in the document
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

// Inventory decodes and validates an Inventory. token and forced mean the same as in Site.
func (d *Document) Inventory(token Secret, forced bool) (*Inventory, error) {
	inv, err := parseInventory(d.Document, token.IsZero(), sitePath)
	if err != nil || token.IsZero() {
		return inv, err
	}
	if !forms.Token.MatchString(token.Reveal()) {
		return nil, ErrGivenToken
	}
	inv.setToken(token, forced)
	return inv, nil
}
