package configs

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// TestEncodingInParts: an Inventory that is written in parts is what it is when
// it is written at once.
func TestEncodingInParts(t *testing.T) {
	for _, n := range []int{1, sitesAtOnce - 1, sitesAtOnce, sitesAtOnce + 1, 3*sitesAtOnce + 7} {
		text := "apiVersion: edgebake.io/v1alpha1\nkind: Inventory\ndefaults:\n  # whose\n  masters: [\"10.0.0.1:6443\"]\n  caCertHashes: [\"sha256:" + strings.Repeat("0", 64) + "\"]\nsites:\n"
		for i := range n {
			text += fmt.Sprintf("  - name: shop-%d\n    match: {serial: SN%d}\n    labels: {sites: \"sites\"}\n    credentials: {token: abcdef.%016d}\n", i, i, i)
		}
		inv, err := ParseInventory("i", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		got, err := EncodeSlotInventory(inv)
		if err != nil {
			t.Fatal(err)
		}
		root := empty()
		root.Content = append(root.Content, plain("apiVersion", "!!str"), encodeString(APIVersion), plain("kind", "!!str"), encodeString(KindInventory),
			plain("defaults", "!!str"), clean(inv.merged.defaults), plain("sites", "!!str"), sequence(inv.merged.sites, clean))
		want, err := encodeNode(root)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%d sites:\n%s\nwant\n%s", n, got[:min(len(got), 1000)], want[:min(len(want), 1000)])
		}
	}
}
