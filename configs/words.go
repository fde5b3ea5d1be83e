package configs

import "fmt"

// Count returns a number with a noun, such as "1 site" or "2 sites".
func Count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// HumanSize returns a number of bytes as a Kubernetes quantity, for messages and tables.
func HumanSize(n int64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%.0fGi", float64(n)/(1<<30))
	case n >= 1<<30:
		return fmt.Sprintf("%.1fGi", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.0fMi", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.0fKi", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}
