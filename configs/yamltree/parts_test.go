package yamltree

import (
	"bytes"
	"fmt"
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestEncodingInParts checks that encoding a list in parts gives the same bytes as encoding it at
// once.
func TestEncodingInParts(t *testing.T) {
	for _, n := range []int{1, itemsAtOnce - 1, itemsAtOnce, itemsAtOnce + 1, 3*itemsAtOnce + 7} {
		list := List()
		for i := range n {
			list.Content = append(list.Content, Mapping("name", Quoted(fmt.Sprint("sites:", i)), "sites", List(Quoted("sites:\n"))))
		}
		got, err := EncodeWithList(Mapping("kind", Plain("Inventory", "!!str")), "sites", list.Content, func(n *yaml.Node) *yaml.Node { return n })
		if err != nil {
			t.Fatal(err)
		}
		want, err := Encode(Mapping("kind", Plain("Inventory", "!!str"), "sites", list))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d items: %v\n%.1000s\nwant\n%.1000s", n, err, got, want)
		}
	}
}
