package outputs

import "testing"

func TestNameForArch(t *testing.T) {
	for path, want := range map[string]string{"a/base.tar.zst": "a/base-arm64.tar.zst", "base.tar": "base-arm64.tar", "n.raw.zst": "n-arm64.raw.zst", "base": "base-arm64"} {
		if got := forArch(path, "arm64"); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}
