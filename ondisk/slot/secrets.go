package slot

import "bytes"

// Hide returns b with secrets replaced by stars of the same length. It does not
// find encoded secrets; a Site with its token in an Ignition config or in
// files/ is rejected when it is stamped, and by a machine that has not joined.
func Hide(b []byte, secrets ...string) []byte {
	for _, s := range secrets {
		if s != "" {
			b = bytes.ReplaceAll(b, []byte(s), bytes.Repeat([]byte("*"), len(s)))
		}
	}
	return b
}
