package oracle

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/desk"
)

// exposure matches the last line of systemd-analyze security. The rating 0.0 means fully confined,
// 10.0 not confined at all.
var exposure = regexp.MustCompile(`Overall exposure level for \S+: (\d+)\.(\d)`)

// TestBenchExposure makes systemd rate how much an attacker who controls a node's service could do.
// firstboot is confined little, because it sets up the whole machine.
func TestBenchExposure(t *testing.T) {
	desk.NeedProgram(t, "systemd-analyze", "systemd")
	version, _, _ := strings.Cut(output(t, "systemd-analyze", "--version"), "\n")
	text := "# What the services on a node could do\n\n" +
		"Made by `make bench` (test/oracle, TestBenchExposure): the exposure level that `systemd-analyze security --offline=yes` gives each unit, from 0 (confined in every way) to 10. " +
		version + ".\n\n| unit | exposure | most that the test allows |\n|---|---|---|\n"
	for _, u := range []struct {
		name string
		most int
	}{{"ipvscare.service", 25}, {"firstboot.service", 70}} {
		out, err := exec.Command("systemd-analyze", "security", "--offline=yes", "--no-pager",
			filepath.Join("../../overlays/files/base/usr/lib/systemd/system", u.name)).CombinedOutput()
		m := exposure.FindStringSubmatch(string(out))
		if err != nil || m == nil {
			t.Fatalf("%s: %v\n%s", u.name, err, out)
		}
		tenths, err := strconv.Atoi(m[1] + m[2])
		if err != nil || tenths > u.most {
			t.Errorf("%s: exposure %d tenths, at most %d are allowed: %v\n%s", u.name, tenths, u.most, err, out)
		}
		text += fmt.Sprintf("| %s | %s.%s | %.1f |\n", u.name, m[1], m[2], float64(u.most)/10)
	}
	t.Log(text)
	if dir := os.Getenv("EDGEBAKE_BENCH"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, "exposure.md"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
