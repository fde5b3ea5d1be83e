package cluster

import (
	"errors"
	"strings"

	"go.yaml.in/yaml/v3"
)

// encode returns v as YAML with an indent of two.
func encode(v any) (string, error) {
	var b strings.Builder
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	err := errors.Join(enc.Encode(v), enc.Close())
	return b.String(), err
}

// lines returns an object as lines of YAML.
func lines(obj map[string]any) []string {
	if obj == nil {
		return nil
	}
	text, err := encode(obj)
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimRight(text, "\n"), "\n")
}

// diff returns a line diff from a to b, with - and + and some context lines.
func diff(a, b []string) string {
	// Longest common subsequence in a full table: objects have only some hundred lines.
	long := make([][]int, len(a)+1)
	for i := range long {
		long[i] = make([]int, len(b)+1)
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if a[i] == b[j] {
				long[i][j] = long[i+1][j+1] + 1
			} else {
				long[i][j] = max(long[i+1][j], long[i][j+1])
			}
		}
	}
	var out strings.Builder
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			out.WriteString("  " + a[i] + "\n")
			i, j = i+1, j+1
		case i < len(a) && (j == len(b) || long[i+1][j] >= long[i][j+1]):
			out.WriteString("- " + a[i] + "\n")
			i++
		default:
			out.WriteString("+ " + b[j] + "\n")
			j++
		}
	}
	return out.String()
}
