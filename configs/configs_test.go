package configs

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/examples"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/configs/strict"
	"go.yaml.in/yaml/v3"
	"golang.org/x/tools/txtar"
)

// TestWrongKind checks that the error about a document of another kind names the expected kind.
func TestWrongKind(t *testing.T) {
	if _, err := parseImage("a", []byte(examples.Site)); err == nil || !strings.Contains(err.Error(), "expected a document of kind Image, got one of kind Site") {
		t.Error(err)
	}
	if _, err := ParseSite("a", []byte(examples.Image)); err == nil || !strings.Contains(err.Error(), "expected a document of kind Site, got one of kind Image") {
		t.Error(err)
	}
}

const smallSite = `apiVersion: edgebake.io/v1alpha1
kind: Site
masters: [192.168.7.11:6443]
credentials: {token: abcdef.0123456789abcdef}
caCertHashes: ["sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"]
`

const smallImage = `apiVersion: edgebake.io/v1alpha1
kind: Image
name: small
base: {debian: }
kubernetes: {version: v1.36.3, source: {goModule: {}}}
containerd: {version: 2.2.9, source: {goModule: }}
`

func mustSite(t *testing.T, doc string) *Site {
	t.Helper()
	s, err := ParseSite("site.yaml", []byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestDefaults(t *testing.T) {
	s := mustSite(t, smallSite)
	for _, f := range []struct{ name, got, want string }{
		{"endpoint", s.Endpoint, "apiserver.cluster.local"},
		{"vip", s.VIP, "10.103.97.2"},
		{"vip and port", s.VIPHostPort(), "10.103.97.2:6443"},
		{"endpoint URL", s.EndpointURL(), "https://apiserver.cluster.local:6443"},
		{"nodeType", s.NodeType, "native"},
		{"nodeName", s.NodeName, "node-{{.MAC}}"},
		{"criSocket", s.CRISocket, "unix:///run/containerd/containerd.sock"},
		{"scheduler", s.IPVS.Scheduler, "rr"},
		{"profile", s.IPVS.Profile, "lan"},
		{"probePath", s.IPVS.ProbePath, "/readyz"},
		{"rise and fall", fmt.Sprint(s.IPVS.Rise, s.IPVS.Fall), "2 2"},
	} {
		if f.got != f.want {
			t.Errorf("%s: %q, want %q", f.name, f.got, f.want)
		}
	}
	i, err := parseImage("image.yaml", []byte(smallImage))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []struct{ name, got, want string }{
		{"arch", i.Arch, "amd64"},
		{"hardware", i.Hardware, "cloud"},
		{"suite", i.Base.Debian.Suite, "trixie"},
		{"sourceDate", i.SourceDate, "2026-01-01T00:00:00Z"},
		{"source time", fmt.Sprint(i.SourceTime().Unix()), "1767225600"},
		{"nodeTypes", fmt.Sprint(i.NodeTypes), "[native]"},
		{"cni", i.CNI.Config + " " + i.CNI.PodCIDR, "bridge 10.244.0.0/16"},
		{"imageStore", i.ImageStore.Mode, "prebaked"},
		{"reserve", i.Disk.Reserve, "same"},
	} {
		if f.got != f.want {
			t.Errorf("%s: %q, want %q", f.name, f.got, f.want)
		}
	}
	for version, form := range map[string]string{"v1.6.1": "staticPod", "v1.7.0": "unit"} {
		part := map[string]string{"staticPod": "image: {ref: 'example.com/yurthub:1'}", "unit": "binary: {file: yurthub}"}[form]
		i, err := parseImage("image.yaml", fmt.Appendf(nil, "%syurthub: {version: %s, %s}\n", strings.NewReplacer("v1.36.3", "v1.30.3", "goModule: }", "goModule: }, crictl: {version: v1.36.0, source: {goModule: }}").Replace(smallImage), version, part))
		if err != nil {
			t.Fatal(err)
		}
		if i.Yurthub.Form != form || i.Yurthub.LBMode != "priority" || fmt.Sprint(i.NodeTypes) != "[native edge cloud]" {
			t.Errorf("yurthub %s: form %s, lbMode %s, node types %v", version, i.Yurthub.Form, i.Yurthub.LBMode, i.NodeTypes)
		}
	}
}

// TestValidateChangesNothing checks that Validate does not change the document.
func TestValidateChangesNothing(t *testing.T) {
	s, again := mustSite(t, examples.Site), mustSite(t, examples.Site)
	if probs := s.Validate(); probs != nil {
		t.Error(probs)
	}
	if !reflect.DeepEqual(s, again) {
		t.Error("Validate changed the site")
	}
	empty := &Site{}
	if len(empty.Validate()) == 0 || !reflect.DeepEqual(empty, &Site{}) {
		t.Error("Validate changed an empty site, or accepted it")
	}
}

// TestScalarsAsTheyStand checks that versions, modes and labels keep their text, even if it looks
// like a number.
func TestScalarsAsTheyStand(t *testing.T) {
	s := mustSite(t, smallSite+"labels: {a: true, b: 1.10, c: 0755, d: 2026-01-01, e: yes, f: ~}\n")
	want := map[string]string{"a": "true", "b": "1.10", "c": "0755", "d": "2026-01-01", "e": "yes", "f": ""}
	if !reflect.DeepEqual(s.Labels, want) {
		t.Errorf("%v, want %v", s.Labels, want)
	}
}

// TestEditors checks that the parsers accept YAML as editors on other systems, and programs, write
// it. Binary files are rejected.
func TestEditors(t *testing.T) {
	want := mustSite(t, smallSite)
	for name, doc := range map[string]string{
		"byte order mark, CR LF": "\xef\xbb\xbf" + strings.ReplaceAll(smallSite, "\n", "\r\n"),
		"JSON": `{"apiVersion":"edgebake.io/v1alpha1","kind":"Site","masters":["192.168.7.11:6443"],"credentials":{"token":"abcdef.0123456789abcdef"},
			"caCertHashes":["sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"]}`,
		"document start": "---\n" + smallSite + "...\n",
	} {
		if got := mustSite(t, doc); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: the parsed Site differs", name)
		}
	}
	for _, doc := range []string{"\x00\x01\x02", "\xff\xfea\x00", "\x1f\x8b\x08"} {
		if _, err := parseAny("a", []byte(doc)); err == nil {
			t.Errorf("%q was accepted", doc)
		}
	}
}

// TestAliases checks that aliases work, but cannot make a document too large.
func TestAliases(t *testing.T) {
	s := mustSite(t, smallSite+"taints: [&t {key: a, effect: NoSchedule}]\nlabels: {x: &v hello, y: *v}\n")
	if s.Labels["y"] != "hello" {
		t.Error(s.Labels)
	}
	bomb := smallSite + "network:\n  interfaces:\n" +
		"    - &i\n      name: eth0\n      vlans:\n        - &v\n          id: 5\n          addresses: &a [" + strings.Repeat("x,", 500) + "x]\n" +
		strings.Repeat("        - *v\n", 500) + strings.Repeat("    - *i\n", 500)
	_, err := ParseSite("bomb.yaml", []byte(bomb))
	if err == nil || !strings.Contains(err.Error(), "too large") {
		t.Errorf("%.300v", err)
	}
}

// fill sets every field of v to a value that YAML must quote.
func fill(v reflect.Value, depth int) {
	switch {
	case v.Type() == reflect.TypeFor[Secret]():
		v.Set(reflect.ValueOf(NewSecret("s3cret: \"x\"\n# " + fmt.Sprint(depth))))
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), depth+1)
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), depth+1)
		}
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), depth+1)
		fill(v.Index(1), depth+1)
	case v.Kind() == reflect.Map:
		v.Set(reflect.ValueOf(map[string]string{"true": "yes", "a: b": "", "1": "0x1f"}))
	case v.Kind() == reflect.String:
		v.SetString("null #\t'\"é\n ")
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	default:
		v.SetInt(int64(depth))
	}
}

// TestEncode checks that the document in the slot contains every field and is parsed to the same
// value. The public form must differ only in the secrets.
func TestEncode(t *testing.T) {
	site := new(Site)
	fill(reflect.ValueOf(site).Elem(), 0)
	site.APIVersion, site.Kind = APIVersion, KindSite
	slot, err := EncodeSlot(site)
	if err != nil {
		t.Fatal(err)
	}
	doc, probs := strict.Read("slot", slot, documentFormat)
	if probs != nil {
		t.Fatal(probs)
	}
	back := new(Site)
	doc.DecodeInto(back)
	if doc.Probs != nil {
		t.Fatal(doc.Probs)
	}
	if !reflect.DeepEqual(site, back) {
		t.Errorf("the round trip changed the document:\n%s", slot)
	}
	if !bytes.Contains(slot, []byte("s3cret")) {
		t.Errorf("no secrets:\n%s", slot)
	}

	// Encode a complete, parsed Site.
	s := mustSite(t, examples.Site)
	slot, err = EncodeSlot(s)
	if err != nil {
		t.Fatal(err)
	}
	if again := mustSite(t, string(slot)); !reflect.DeepEqual(s, again) {
		t.Errorf("the round trip changed the document:\n%s", slot)
	}
	// Encode the Site as it is after the token was wiped.
	s.Credentials = Credentials{}
	public, err := EncodeSlot(s)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParseSite("public", public); err == nil {
		t.Error("a site without credentials was accepted as complete")
	}
	p, err := ParsePublicSite("public", public)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(s, p) {
		t.Errorf("the public site differs in more than its secrets:\n%s", public)
	}
}

// TestSecretsStayHidden prints a Site as text, JSON and YAML, and logs it.
func TestSecretsStayHidden(t *testing.T) {
	const secret = "s3cretS3CRETs3cret"
	site := new(Site)
	site.Credentials.Token = NewSecret(secret)
	site.Ignition = NewSecret(secret)
	site.Users = []User{{Name: "a", PasswordHash: NewSecret(secret)}}
	site.Network.Interfaces = []Interface{{WiFi: &WiFi{PSK: NewSecret(secret)}}}
	s := site.Credentials.Token
	private := struct{ hidden Secret }{s}
	m := map[string]Secret{"a": s}

	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%t", "%p", "%T", "% x", "%#q", "%10.3s", "%U"} {
		for _, v := range []any{site, *site, s, &s, site.Users, m, private, &private, []any{s}, [1]Secret{s}} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
	}
	js, err := json.Marshal(site)
	if err != nil {
		t.Fatal(err)
	}
	ym, err := yaml.Marshal(site)
	if err != nil {
		t.Fatal(err)
	}
	out.Write(js)
	out.Write(ym)
	for _, h := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
		slog.New(h).Info("x", "token", s, "site", site, "wifi", site.Network.Interfaces[0].WiFi, "users", site.Users)
	}
	fmt.Fprintln(&out, s, &s, fmt.Errorf("joining with %v: %w", s, errors.New("no")))
	for _, form := range []string{secret, fmt.Sprintf("%x", secret), fmt.Sprintf("%X", secret), "c2Vjcm", "s3c"} {
		if bytes.Contains(out.Bytes(), []byte(form)) {
			t.Errorf("%q shows:\n%s", form, out.String())
		}
	}
	for _, b := range [][]byte{js, ym} {
		if !bytes.Contains(b, []byte(Mask)) {
			t.Errorf("no mask in %s", b)
		}
	}
	if NewSecret(secret) != s || NewSecret("other") == s || s == (Secret{}) {
		t.Error("equal secrets do not compare equal")
	}
	if s.Reveal() != secret {
		t.Error("Reveal does not return the secret")
	}
	if (Secret{}).String() != "" || !NewSecret("").IsZero() {
		t.Error("an empty secret is not printed as an empty string")
	}
}

func TestSecretComesIn(t *testing.T) {
	var v struct{ A Secret }
	if err := json.Unmarshal([]byte(`{"A": "x"}`), &v); err != nil || v.A.Reveal() != "x" {
		t.Error(v.A.Reveal(), err)
	}
	if err := yaml.Unmarshal([]byte(`a: y`), &v); err != nil || v.A.Reveal() != "y" {
		t.Error(v.A.Reveal(), err)
	}
	for _, err := range []error{json.Unmarshal([]byte(`{"A": {"s3cret": 1}}`), &v), yaml.Unmarshal([]byte(`a: [s3cret]`), &v)} {
		if err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Error(err)
		}
	}
}

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{"1Mi": 1 << 20, "512MiB": 512 << 20, "3Gi": 3 << 30, "2G": 2e9, "2GB": 2e9, "500k": 5e5, "1TiB": 1 << 40, "64Ti": 64 << 40} {
		if got, err := forms.ParseSize(in); err != nil || got != want {
			t.Errorf("%s: %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "3", "3g", "3iB", "-1MiB", "0MiB", "1.5GiB", "3 GiB", "500K", "500Ki", "3gib", "65TiB", "9999999999TiB", "99999999999MiB"} {
		if got, err := forms.ParseSize(in); err == nil {
			t.Errorf("%q was accepted: %d", in, got)
		}
	}
}

// TestKubeletMaySet compares kubeletMaySet with the behaviour of kubelet v1.36.3 for
// --node-labels=KEY=1.
func TestKubeletMaySet(t *testing.T) {
	for key, want := range map[string]bool{
		"x": true, "example.com/x": true, "notkubernetes.io/x": true,
		"node.kubernetes.io/x": true, "sub.node.kubernetes.io/x": true, "node.kubernetes.io/instance-type": true,
		"kubelet.kubernetes.io/x": true, "a.kubelet.kubernetes.io/x": true,
		"kubernetes.io/hostname": true, "kubernetes.io/os": true,
		"beta.kubernetes.io/arch": true, "beta.kubernetes.io/instance-type": true,
		"topology.kubernetes.io/zone": true, "topology.kubernetes.io/region": true, "failure-domain.beta.kubernetes.io/zone": true,
		"topology.kubernetes.io/rack": false, "node-role.kubernetes.io/worker": false,
		"node-restriction.kubernetes.io/x": false, "x.node-restriction.kubernetes.io/y": false,
		"a.k8s.io/x": false, "kubernetes.io/x": false,
	} {
		if got := kubeletMaySet(key); got != want {
			t.Errorf("%s: %t, kubelet says %t", key, got, want)
		}
	}
}

// TestSSHKeys checks that all types of keys that sshd accepts are valid, with and without options.
func TestSSHKeys(t *testing.T) {
	key := func(kind string) string {
		blob := binary.BigEndian.AppendUint32(nil, uint32(len(kind)))
		blob = append(blob, kind...)
		blob = binary.BigEndian.AppendUint32(blob, 32)
		return kind + " " + base64.StdEncoding.EncodeToString(append(blob, make([]byte, 32)...))
	}
	for _, good := range []string{
		key("ssh-ed25519"), key("ssh-rsa") + " a comment", key("ecdsa-sha2-nistp256"),
		key("sk-ssh-ed25519@openssh.com"), `from="10.0.0.0/8",no-pty ` + key("ssh-ed25519") + " x",
		`command="echo ssh-rsa" ` + key("ssh-ed25519"),
	} {
		if bad := forms.BadSSHKey(good); bad != "" {
			t.Errorf("%s: %s", good, bad)
		}
	}
	whole := key("ssh-ed25519")
	for _, bad := range []string{whole[:len(whole)-4], whole[:40], "ssh-ed25519", "ssh-dss " + strings.Fields(whole)[1]} {
		if forms.BadSSHKey(bad) == "" {
			t.Errorf("%s was accepted", bad)
		}
	}
}

// FuzzParse checks that no document makes a parser panic, that every problem has a position, and
// that an accepted document can be encoded for the slot and parsed again.
func FuzzParse(f *testing.F) {
	f.Add([]byte(examples.Image))
	f.Add([]byte(examples.Site))
	cases, err := filepath.Glob("testdata/bad/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range cases {
		ar, err := txtar.ParseFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(ar.Files[0].Data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		v, err := parseAny("doc", data)
		if err != nil {
			var probs Problems
			if !errors.As(err, &probs) || len(probs) == 0 {
				t.Fatalf("an error without problems: %v", err)
			}
			for _, p := range probs {
				if p.File == "" || p.Msg == "" {
					t.Fatalf("a problem without position or message: %+v", p)
				}
			}
			return
		}
		site, ok := v.(*Site)
		if !ok {
			return
		}
		slot, err := EncodeSlot(site)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseSite("slot", slot)
		if err != nil {
			t.Fatalf("accepted, but not after a round trip through the slot: %v\n%s", err, slot)
		}
		if !reflect.DeepEqual(site, again) {
			t.Fatalf("the round trip changed the document:\n%s", slot)
		}
	})
}

// FuzzIgnition checks that no Ignition config makes package ignition panic.
func FuzzIgnition(f *testing.F) {
	f.Add([]byte(`{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/a","contents":{"source":"data:,x"}}]}}`))
	f.Add([]byte(`{"ignition":{"version":"3.0.0"},"systemd":{"units":[{"name":"a.service","enabled":true}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg, _, probs := ignition.Parse("a.ign", data)
		if (cfg == nil) == (probs == nil) {
			t.Fatalf("neither accepted nor rejected: %v", probs)
		}
	})
}

// TestIgnitionIsJSON checks that the error for a Butane config, or for another file, names the
// cause.
func TestIgnitionIsJSON(t *testing.T) {
	const tail = "; a Butane config must be translated first (butane --strict)"
	for text, want := range map[string]string{
		"# A config\nvariant: fcos\n":  "a.ign:1:2: not an Ignition config, which is JSON: invalid character '#' looking for beginning of value" + tail,
		`{"ignition":{"version":"9"}}`: "a.ign: ignition.version 9 is not supported: use 3.0.0 to 3.6.0",
		`{"variant":"fcos"}`:           "a.ign: ignition.version is missing: give 3.0.0 to 3.6.0" + tail,
	} {
		if _, _, probs := ignition.Parse("a.ign", []byte(text)); probs == nil || probs.Error() != want {
			t.Errorf("%v\nwant %s", probs, want)
		}
	}
}

// TestAccepted checks that unusual but valid documents are accepted.
func TestAccepted(t *testing.T) {
	for name, more := range map[string]string{
		"the default VIP, said":              "vip: 10.103.97.2\n",
		"a VIP in a routed network":          "network: {dns: [10.1.0.1], interfaces: [{name: eth0, addresses: [192.168.7.20/24], routes: [{to: 10.0.0.0/8, via: 192.168.7.1}]}]}\n",
		"a VIP in a network without IPVS":    "ipvs: {disabled: true}\nnetwork: {interfaces: [{name: eth0, addresses: [10.1.2.3/8], gateway: 10.0.0.1}]}\n",
		"a gateway at the end of a /31":      "network: {interfaces: [{name: eth0, addresses: [192.168.7.20/31], gateway: 192.168.7.21}]}\n",
		"an IPv6 router's anycast address":   "network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24, 'fd00:7::20/64'], gateway: 'fd00:7::'}]}\n",
		"a link-local router":                "network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24, 'fd00:7::20/64'], gateway: 'fe80::1'}]}\n",
		"a default route as a route":         "network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24], routes: [{to: 0.0.0.0/0, via: 192.168.7.1}]}]}\n",
		"default routes of both families":    "network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24, 'fd00:7::20/64'], gateway: 192.168.7.1, routes: [{to: '::/0', via: 'fd00:7::1'}]}]}\n",
		"a DNS server behind one interface":  "network: {dns: ['fe80::1%eth0']}\n",
		"the least and the greatest numbers": "ipvs: {rise: 1, fall: 100}\nnetwork: {interfaces: [{name: eth0, dhcp: true, mtu: 576, vlans: [{id: 1, dhcp: true}, {id: 4094, dhcp: true}]}]}\n",
		"a number that is left out":          "ipvs: {rise: , fall: ~}\n",
		"names that only begin so":           "endpoint: localhost-1.example.com\nnodeName: localhost1\n",
		"a name that ends in a number":       "endpoint: api.cluster-1\n",
	} {
		if _, err := ParseSite("site.yaml", []byte(smallSite+more)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, more := range map[string]string{
		"a small network of pods":   "cni: {podCIDR: 10.244.0.0/28}\n",
		"an IPv6 network of pods":   "cni: {podCIDR: 'fd00:10:244::/64'}\n",
		"the nobody of old systems": "files: [{path: /etc/a, contents: x, uid: 4294967294, mode: '0400'}]\n",
		"a template of all kinds":   "files: [{path: /etc/a, contents: \"{{if .Yurthub}}{{.Yurthub.Version}}{{end}}{{len .Images}}{{range .Registries}}{{.Host}}{{end}}\\n\", template: true}]\n",
	} {
		if _, err := parseImage("image.yaml", []byte(smallImage+more)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// parseAny parses an Image, a Site or an Inventory.
func parseAny(name string, data []byte) (any, error) {
	d, err := Read(name, data)
	if err != nil {
		return nil, err
	}
	switch d.Kind {
	case KindImage:
		return d.Images()
	case KindInventory:
		return d.Inventory(Secret{}, false)
	}
	return d.Site(Secret{}, false)
}

// parseImage parses an Image for the first of its architectures.
func parseImage(name string, data []byte) (*Image, error) {
	all, err := ParseImages(name, data)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}
