// Package bytesize formats numbers of bytes for people.
package bytesize

import "fmt"

// Human returns a rounded Kubernetes quantity, for tables and for sizes that are only described.
func Human(n int64) string {
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

// MiB returns mebibytes, for messages that compare two sizes of disks or files. It has one decimal
// place unless n is a whole number of them.
func MiB(n int64) string {
	if n%(1<<20) == 0 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

// MB returns megabytes, for bytes that a network transfers: its limits are decimal, for example 20M.
func MB(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

// MBOf returns how many of a number of megabytes are done.
func MBOf(done, total int64) string { return fmt.Sprintf("%.1f of %s", float64(done)/1e6, MB(total)) }
