package configs

import "fmt"

// Count returns a number with a noun, such as "1 site" or "2 sites".
func Count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}
