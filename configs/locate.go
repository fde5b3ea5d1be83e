package configs

import "github.com/edgebake/edgebake/configs/strict"

// Locate returns the position of a field in a document. If the document does not contain the field,
// it returns the position of the nearest enclosing value. It returns 0, 0 if data is not a
// document.
func Locate(name string, data []byte, path string) (line, col int) {
	at := located(name, data).Find(path)
	return at.Line, at.Col
}

// LocateSite sets the positions of problems that were found by comparing a Site with an image or a
// cluster.
func LocateSite(name string, data []byte, probs Problems) Problems {
	doc := located(name, data)
	for i := range probs {
		at := doc.Find(probs[i].Path)
		probs[i].File, probs[i].Line, probs[i].Col = name, at.Line, at.Col
	}
	probs.Sort()
	return probs
}

// LocateInventory is like LocateSite, for an Inventory. sites[i] are the problems of its i-th site.
// If only defaults sets a field, its problem is reported there, once for all sites.
func LocateInventory(name string, data []byte, sites []Problems) Problems {
	r := inventoryReport{doc: located(name, data), site: sitePath}
	for i, probs := range sites {
		for _, p := range probs {
			r.of(i, p)
		}
	}
	r.finish(len(sites))
	r.doc.Probs.Sort()
	return r.doc.Probs
}

// located reads a document that was read without errors before.
func located(name string, data []byte) *strict.Document {
	doc, probs := strict.Read(name, data, documentFormat)
	if probs != nil {
		return &strict.Document{File: name}
	}
	return doc
}
