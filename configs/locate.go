package configs

import "reflect"

// Locate tells where in a document a field is, or what is nearest around it:
// for problems that only show when what a field names is looked at. Line and
// column are 0 if data is not a document.
func Locate(name string, data []byte, path string) (line, col int) {
	doc := located(name, data)
	if doc.root == nil {
		return 0, 0
	}
	at := doc.find(path)
	return at.line, at.col
}

// LocateSite says where in a Site the fields of problems are that only show
// beside an image or a cluster.
func LocateSite(name string, data []byte, probs Problems) Problems {
	doc := located(name, data)
	for i := range probs {
		at := doc.find(probs[i].Path)
		probs[i].File, probs[i].Line, probs[i].Col = name, at.line, at.col
	}
	probs.sort()
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
	r.doc.probs.sort()
	return r.doc.probs
}

// located is a document that was read before, with the places of its fields.
func located(name string, data []byte) *document {
	doc, probs := readDocument(name, data)
	if probs != nil {
		return &document{file: name}
	}
	doc.decode(doc.root, reflect.New(doc.typ()).Elem(), "")
	doc.probs = nil
	return doc
}
