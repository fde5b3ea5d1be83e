package slot

import "bytes"

// Hide returns b with secrets replaced by stars of the same length. It does not find encoded
// secrets, so stamping and unjoined machines reject a Site whose token is also in an Ignition
// config or in files/.
func Hide(b []byte, secrets ...string) []byte {
	for _, s := range secrets {
		if s != "" {
			b = bytes.ReplaceAll(b, []byte(s), bytes.Repeat([]byte("*"), len(s)))
		}
	}
	return b
}
