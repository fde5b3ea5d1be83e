package configs

import (
	"github.com/edgebake/edgebake/configs/strict"
)

// Locate tells where in a document a field is, or what is nearest around it:
// for problems that only show when what a field names is looked at. Line and
// column are 0 if data is not a document.
func Locate(name string, data []byte, path string) (line, col int) {
	doc := located(name, data)
	if doc.Root == nil {
		return 0, 0
	}
	at := doc.Find(path)
	return at.Line, at.Col
}

// LocateSite says where in a Site the fields of problems are that only show
// beside an image or a cluster.
func LocateSite(name string, data []byte, probs Problems) Problems {
	doc := located(name, data)
	for i := range probs {
		at := doc.Find(probs[i].Path)
		probs[i].File, probs[i].Line, probs[i].Col = name, at.Line, at.Col
	}
	probs.Sort()
	return probs
}

// LocateInventory does so for an Inventory, where sites[i] are the problems of
// its i-th site: in the site where it says something on the field, else in
// defaults, once for all sites.
func LocateInventory(name string, data []byte, sites []Problems) Problems {
	r := inventoryReport{doc: located(name, data)}
	for i, probs := range sites {
		for _, p := range probs {
			r.of(i, p)
		}
	}
	r.finish(len(sites))
	r.doc.Probs.Sort()
	return r.doc.Probs
}

// located returns a document that was read before, with the places of its fields.
func located(name string, data []byte) *strict.Document {
	doc, probs := strict.Read(name, data, documentForm)
	if probs != nil {
		return &strict.Document{File: name}
	}
	into := map[string]any{KindImage: new(Image), KindInventory: new(Inventory), KindCluster: new(Cluster)}[doc.Kind]
	if into == nil {
		into = new(Site)
	}
	doc.DecodeInto(into)
	doc.Probs = nil
	return doc
}
