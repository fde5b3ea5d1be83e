package yamltree

import (
	"math"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// words11 contains the words for true and false in YAML 1.1, the version that kubectl uses.
var words11 = map[string]bool{
	"y": true, "Y": true, "yes": true, "Yes": true, "YES": true, "on": true, "On": true, "ON": true,
	"n": false, "N": false, "no": false, "No": false, "NO": false, "off": false, "Off": false, "OFF": false,
}

// AsKubectl changes the types of the scalars in a tree to those in kubectl, which are the types of
// JSON: a date is a string, yes and off are booleans, and every key is a string. It returns the
// first scalar that JSON cannot represent (.inf, .nan or a null key), or nil.
func AsKubectl(n *yaml.Node) (bad *yaml.Node) {
	if n.Kind == yaml.ScalarNode {
		return scalarAsKubectl(n)
	}
	for i, c := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 && c.Kind == yaml.ScalarNode {
			if c.ShortTag() == "!!null" && bad == nil {
				bad = c
			}
			keyAsKubectl(c)
		} else if found := AsKubectl(c); bad == nil {
			bad = found
		}
	}
	return bad
}

func scalarAsKubectl(n *yaml.Node) (bad *yaml.Node) {
	switch n.ShortTag() {
	case "!!timestamp":
		n.Tag = "!!str"
	case "!!str":
		if b, ok := words11[n.Value]; ok && n.Style == 0 {
			n.Tag, n.Value = "!!bool", strconv.FormatBool(b)
		}
	case "!!float":
		var f float64
		if n.Decode(&f) == nil && (math.IsInf(f, 0) || math.IsNaN(f)) {
			return n
		}
	}
	return nil
}

func keyAsKubectl(k *yaml.Node) {
	scalarAsKubectl(k)
	var v any
	switch k.ShortTag() {
	case "!!bool", "!!int", "!!float":
		if k.Decode(&v) != nil {
			return // decoding reports the problem
		}
	default:
		return
	}
	switch v := v.(type) {
	case bool:
		k.Value = strconv.FormatBool(v)
	case int:
		k.Value = strconv.Itoa(v)
	case int64:
		k.Value = strconv.FormatInt(v, 10)
	case float64:
		k.Value = strconv.FormatFloat(v, 'g', -1, 64)
	}
	k.Tag = "!!str"
}
