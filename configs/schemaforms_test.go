package configs_test

import (
	"encoding/json"
	"errors"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/examples"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/starter"
	"github.com/invopop/jsonschema"
)

// These are the rules for schemas that struct tags cannot express. A rule must accept everything
// that validate accepts. test/oracle checks all documents of testdata/bad and all examples with a
// schema validator.

func form(r *regexp.Regexp) func(*jsonschema.Schema) { return pattern(r.String()) }

func pattern(p string) func(*jsonschema.Schema) {
	return func(s *jsonschema.Schema) { s.Pattern = p }
}

// each applies rules to each item of a list.
func each(forms ...func(*jsonschema.Schema)) func(*jsonschema.Schema) {
	return func(s *jsonschema.Schema) { both(forms...)(s.Items) }
}

// items applies rules to each item of a list, and forbids repeated items.
func items(forms ...func(*jsonschema.Schema)) func(*jsonschema.Schema) {
	return func(s *jsonschema.Schema) {
		s.UniqueItems = true
		each(forms...)(s)
	}
}

// mapOf applies patterns to the keys and the values of a map of strings.
func mapOf(names, values string) func(*jsonschema.Schema) {
	return func(s *jsonschema.Schema) {
		s.PropertyNames = &jsonschema.Schema{Pattern: names}
		if values != "" {
			s.AdditionalProperties.Pattern = values
		}
	}
}

func length(low, high uint64) func(*jsonschema.Schema) {
	return func(s *jsonschema.Schema) {
		if low > 0 {
			s.MinItems = &low
		}
		if high > 0 {
			s.MaxItems = &high
		}
	}
}

func both(forms ...func(*jsonschema.Schema)) func(*jsonschema.Schema) {
	return func(s *jsonschema.Schema) {
		for _, f := range forms {
			f(s)
		}
	}
}

func except(p string) func(*jsonschema.Schema) {
	return func(s *jsonschema.Schema) { s.Not = &jsonschema.Schema{Pattern: p} }
}

// orList makes the schema also accept a list of values.
func orList(s *jsonschema.Schema) {
	one := &jsonschema.Schema{Type: s.Type, Enum: s.Enum}
	least := uint64(1)
	s.AnyOf = []*jsonschema.Schema{one, {Type: "array", Items: one, MinItems: &least, UniqueItems: true}}
	s.Type, s.Enum = "", nil
}

// orNull makes the schema also accept a field without a value.
func orNull(s *jsonschema.Schema) {
	s.AnyOf = []*jsonschema.Schema{{Ref: s.Ref}, {Type: "null"}}
	s.Ref = ""
}

// Patterns for rules that are Go functions in validate.
const (
	ipForm       = `^[0-9A-Fa-f:.]+$`
	nodeIPForm   = `^[0-9A-Fa-f:.]+(/[0-9]{1,3})?( *, *[0-9A-Fa-f:.]+(/[0-9]{1,3})?)?$`
	cidrForm     = `^[0-9A-Fa-f:.]+/[0-9]{1,3}$`
	hostPortForm = `^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):([1-9][0-9]{0,4})$`
	dnsForm      = `^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$`
	labelKeyForm = `^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`
	labelForm    = `^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$`
	nodeNameForm = `\{\{|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$`
	refForm      = `^([a-z0-9.-]*[.:][a-z0-9.:-]*|localhost)/[a-z0-9._/-]+(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?$`
	keyForm      = `(^|\s)(ssh-|ecdsa-|sk-)[a-z0-9@.-]+\s+AAAA[A-Za-z0-9+/]+={0,2}(\s|$)`
	hubArgForm   = `^--[a-z0-9][a-z0-9-]*(=.*)?$`
	noVIP        = `^(0\.|127\.|169\.254\.|2[2-5][0-9]\.|::1$|::$|::ffff:|fe80:|ff|10\.96\.0\.10?$)`
	everyName    = `^([lL][oO][cC][aA][lL][hH][oO][sS][tT]|.*\.localhost|localhost\.localdomain)$`
)

// schemaForms returns the rule for each field, as "Type.field".
func schemaForms() map[string]func(*jsonschema.Schema) {
	return map[string]func(*jsonschema.Schema){
		"Site.masters":               both(length(1, 0), items(pattern(hostPortForm))),
		"Site.endpoint":              both(pattern(dnsForm), except(everyName)),
		"Site.vip":                   both(pattern(ipForm), except(noVIP)),
		"Site.caCertHashes":          items(form(forms.CAHash)),
		"Site.nodeName":              both(pattern(nodeNameForm), except(everyName)),
		"Site.nodeIP":                pattern(nodeIPForm),
		"Site.nodePool":              pattern(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`),
		"Site.labels":                mapOf(labelKeyForm, labelForm),
		"Site.organizations":         items(pattern(`^[^\s,]+$`), except(`^system:`)),
		"Site.criSocket":             pattern(`^unix:///[^\s"'\\]+$`),
		"Site.skipPhases":            items(form(configs.SkipPhase), except(`^kubelet-start$`)),
		"Site.ignorePreflightErrors": items(pattern(`^[^\s,]+$`)),
		"Site.kubeletExtraArgs":      mapOf(configs.FlagName.String(), `^[^\s"'\\]*$`),
		"Credentials.token":          form(forms.Token),
		"Taint.key":                  pattern(labelKeyForm),
		"Taint.value":                pattern(labelForm),
		"IPVS.probePath":             pattern(`^/\S*$`),
		"SiteYurthub.namespace":      form(forms.DNSLabel),
		"SiteYurthub.extraArgs":      each(pattern(hubArgForm)),
		"Network.dns":                items(except(`^(127\.|0\.0\.0\.0$|255\.255\.255\.255$|::1?$)`)),
		"Network.ntp":                items(except(everyName)),
		"Interface.name":             both(form(configs.IfacePattern), except(`^(lo|\.\.?)$`)),
		"Interface.addresses":        each(pattern(cidrForm)),
		"VLAN.addresses":             each(pattern(cidrForm)),
		"WiFi.country":               form(configs.CountryCode),
		"WiFi.psk":                   pattern(`^[ -~]{8,64}$`),
		"Proxy.http":                 pattern(`^https?://[^\s/]+`),
		"Proxy.https":                pattern(`^https?://[^\s/]+`),
		"Proxy.noProxy":              each(pattern(`^[^\s,"']+$`), except(`://`)),
		"User.name":                  form(configs.UserName),
		"User.groups":                items(form(configs.UserName)),
		"User.shell":                 pattern(`^/[^\x00-\x1f]*$`),
		"User.passwordHash":          form(configs.HashedPasswd),
		"User.sshAuthorizedKeys":     each(pattern(keyForm)),
		"Report.url":                 pattern(`^https://[^\s/]+`),
		"Image.name":                 form(configs.ImageName),
		"Image.arch":                 orList,
		"Image.sourceDate":           pattern(`^(19[89][0-9]|20[0-9]{2}|210[0-7])-[0-9]{2}-[0-9]{2}T`),
		"Image.nodeTypes":            items(),
		"Sites.keys":                 each(pattern(`^RW[A-Za-z0-9+/]{54}$`)),
		"Base.debian":                orNull,
		"Source.goModule":            orNull,
		"DebianBase.suite":           form(configs.SuiteName),
		"DebianBase.sources":         each(pattern(`^deb(-src)? \S`)),
		"DebianBase.packages":        items(form(configs.PackageSpec)),
		"OCISource.ref":              pattern(refForm),
		"OCISource.digest":           pattern(`^sha256:[0-9a-f]{64}$`),
		"FileSource.sha256":          form(configs.Sha256Hex),
		"FileSource.url":             pattern(`^https?://`),
		"URLSource.base":             pattern(`^https?://`),
		"URLSource.sha256":           mapOf(configs.SumName.String(), configs.Sha256Hex.String()),
		"DirSource.sha256":           mapOf(configs.SumName.String(), configs.Sha256Hex.String()),
		"Kubernetes.version":         pattern(`^v1\.(3[0-9]|[4-9][0-9]|[1-9][0-9]{2,})\.[0-9]+(-(alpha|beta|rc)\.[0-9]+)?$`),
		"Containerd.version":         pattern(`^(1\.([7-9]|[1-9][0-9]+)|2\.[0-9]+)\.[0-9]+(-(alpha|beta|rc)\.[0-9]+)?$`),
		"Containerd.sandbox":         pattern(refForm),
		"Crictl.version":             form(configs.CrictlVersion),
		"CNI.podCIDR":                both(pattern(`^([0-9.]+/([89]|1[0-9]|2[0-8])|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*/(1[6-9]|[2-9][0-9]|1[01][0-9]|12[0-4]))$`), except(`^(0\.|127\.|169\.254\.|2[2-5][0-9]\.)`)),
		"Yurthub.version":            pattern(`^v1\.[67]\.[0-9]+$`),
		"Yurthub.extraArgs":          each(pattern(hubArgForm)),
		"ContainerImage.ref":         pattern(refForm),
		"ContainerImage.digest":      pattern(`^sha256:[0-9a-f]{64}$`),
		"ImageStore.maxLayerSize":    form(forms.SizeForm),
		"File.path":                  pattern(`^/`),
		"File.mode":                  form(configs.OctalMode),
		"Kernel.args":                items(except(`^(single|emergency|rescue|s|S|1)$|^systemd\.unit=(emergency|rescue)\.target$`)),
		"Kernel.consoles":            items(form(configs.ConsoleForm)),
		"Kernel.modules":             each(form(configs.ModuleName)),
		"Disk.root":                  form(forms.SizeForm),
		"Disk.data":                  form(forms.SizeForm),
		"Inventory.sites":            length(1, 0),
		"Cluster.masters":            length(1, 0),
		"Cluster.kubernetesVersion":  pattern(`^v1\.(3[1-9]|[4-9][0-9]|[1-9][0-9]{2,})\.[0-9]+(-(alpha|beta|rc)\.[0-9]+)?$`),
		"Cluster.vip":                pattern(ipForm),
		"Cluster.podCIDRs":           both(length(0, 2), items(pattern(cidrForm))),
		"Cluster.serviceCIDRs":       both(length(0, 2), items(pattern(cidrForm))),
		"ControlPlaneNode.address":   pattern(ipForm),
		"Node.nodeIP":                pattern(nodeIPForm),
		"Node.nodePool":              pattern(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`),
		"Node.labels":                mapOf(labelKeyForm, labelForm),
		"KubeProxy.bindAddress":      pattern(ipForm),
	}
}

// has returns a schema that requires a field. If there are values, the field must have one of them.
func has(field string, values ...any) *jsonschema.Schema {
	s := &jsonschema.Schema{Required: []string{field}}
	if len(values) > 0 {
		s.Properties = jsonschema.NewProperties()
		s.Properties.Set(field, &jsonschema.Schema{Enum: values})
	}
	return s
}

// oneOf returns a rule that requires exactly one of the fields.
func oneOf(fields ...string) func(*jsonschema.Schema) {
	return func(s *jsonschema.Schema) {
		for _, f := range fields {
			s.OneOf = append(s.OneOf, has(f))
		}
	}
}

// needs returns a schema that requires one of others if the schema field matches.
func needs(field *jsonschema.Schema, others ...*jsonschema.Schema) *jsonschema.Schema {
	return &jsonschema.Schema{If: field, Then: &jsonschema.Schema{AnyOf: others}}
}

// schemaRules returns the rules about several fields, for each type.
func schemaRules() map[string]func(*jsonschema.Schema) {
	return map[string]func(*jsonschema.Schema){
		"Base":      oneOf("debian", "oci", "tar"),
		"Source":    oneOf("goModule", "url", "file"),
		"OCISource": oneOf("ref", "layout", "archive"),
		"File":      oneOf("contents", "source", "link"),
		"URLSource": func(s *jsonschema.Schema) {
			s.AnyOf = []*jsonschema.Schema{has("sha256"), has("sha256FromServer", true)}
		},
		"Sites": func(s *jsonschema.Schema) {
			s.AllOf = append(s.AllOf, needs(has("removable", "signed"), has("keys")), needs(has("keys"), has("removable", "untilEnrolled", "repair", "signed", "always"), &jsonschema.Schema{Not: has("removable")}))
		},
	}
}

// siteRules adds the rules for a Site document. They do not apply to the sites of an Inventory,
// which are completed by defaults.
func siteRules(s *jsonschema.Schema) {
	s.AnyOf = []*jsonschema.Schema{has("caCertHashes"), has("caCert"), has("caFile"), has("unsafeSkipCAVerification", true)}
	s.AllOf = append(s.AllOf,
		needs(has("nodeType", "edge"), has("nodePool")),
		needs(has("nodePool"), has("nodeType", "edge", "cloud")),
		needs(has("organizations"), has("nodeType", "edge", "cloud")),
		needs(has("nodeType", "control-plane"), has("controlPlane")),
		&jsonschema.Schema{If: has("ignition"), Then: &jsonschema.Schema{Not: has("ignitionFile")}},
	)
	s.Definitions["Proxy"].AllOf = append(s.Definitions["Proxy"].AllOf, needs(has("noProxy"), has("http"), has("https")))
}

// where returns a schema that requires a field. Its value must match the schema in of.
func where(field string, of *jsonschema.Schema) *jsonschema.Schema {
	s := has(field)
	s.Properties = jsonschema.NewProperties()
	s.Properties.Set(field, of)
	return s
}

// inside returns a schema that requires the field sub inside field, and that sub matches a pattern.
func inside(field, sub, form string) *jsonschema.Schema {
	inner := has(sub)
	inner.Properties = jsonschema.NewProperties()
	inner.Properties.Set(sub, &jsonschema.Schema{Pattern: form})
	return where(field, inner)
}

// imageRules adds the rules for an Image document.
func imageRules(s *jsonschema.Schema) {
	hub := where("nodeTypes", &jsonschema.Schema{Contains: &jsonschema.Schema{Enum: []any{"edge", "cloud"}}})
	pi := has("hardware", "raspberry-pi")
	arm := &jsonschema.Schema{Enum: []any{"arm64"}}
	sector := &jsonschema.Schema{Properties: jsonschema.NewProperties()}
	sector.Properties.Set("sector", &jsonschema.Schema{Enum: []any{512}})
	disk := &jsonschema.Schema{Properties: jsonschema.NewProperties()}
	disk.Properties.Set("disk", sector)
	s.AllOf = append(s.AllOf,
		needs(pi, where("arch", &jsonschema.Schema{AnyOf: []*jsonschema.Schema{arm, {Type: "array", Items: arm}}})),
		needs(pi, disk),
		needs(hub, has("yurthub")),
		needs(inside("kubernetes", "version", `^v1\.30\.`), where("containerd", has("crictl"))),
		needs(inside("yurthub", "version", `^v1\.6\.`), inside("kubernetes", "version", `^v1\.30\.`)),
	)
}

// constrained adds to a schema the rules of validate that a schema can express.
func constrained(t *testing.T, s *jsonschema.Schema, kind string, used map[string]bool) {
	t.Helper()
	root := strings.ToUpper(kind[:1]) + kind[1:]
	all := maps.Clone(s.Definitions)
	all[root] = s
	// A site of an Inventory also has the fields of a Site.
	typeOf := func(name string) []string {
		if name == "InventorySite" {
			return []string{name, "Site"}
		}
		return []string{name}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for _, typ := range typeOf(name) {
			for field, constrain := range schemaForms() {
				of, f, _ := strings.Cut(field, ".")
				if p, ok := all[name].Properties.Get(f); ok && of == typ {
					constrain(p)
					used[field] = true
				}
			}
		}
		if rule, ok := schemaRules()[name]; ok {
			rule(all[name])
			used[name] = true
		}
	}
	switch kind {
	case "site":
		siteRules(s)
	case "image":
		imageRules(s)
	}
	if _, err := json.Marshal(s); err != nil {
		t.Fatal(err)
	}
}

// TestTypoIsOneProblem checks that a misspelt field is not reported as missing as well.
func TestTypoIsOneProblem(t *testing.T) {
	image := examples.Image
	site := string((&starter.Input{Masters: []string{"192.168.7.11:6443"}, Token: "bcdefa.0123456789abcdef", CAHashes: []string{"sha256:" + strings.Repeat("ab", 32)}, SSHKey: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE0Y2vFLE7fQ2HHmGEUQGTqWn4Ri9GJMn1T9AeeQkMi+ admin@example.com"}).Site())
	for _, c := range []struct {
		doc, old, typo string
		more           []string
	}{
		{image, "containerd:\n", "containered:\n", nil},
		{image, "\nname: ", "\nnam: ", nil},
		{image, "  version: v1.37.2", "  verison: v1.37.2", nil},
		{image, "containerd:\n", "containerd: {version: 2.3.7}\ncontainered:\n", []string{"containerd.source: exactly one"}},
		{site, "masters:\n", "mastres:\n", nil},
		{site, "caCertHashes:", "caCertHashs:", nil},
	} {
		doc := strings.Replace(c.doc, c.old, c.typo, 1)
		_, err := parse("x.yaml", []byte(doc))
		var probs configs.Problems
		if !errors.As(err, &probs) || len(probs) != 1+len(c.more) || !strings.Contains(err.Error(), "unknown field; did you mean") {
			t.Errorf("%q: %v", c.typo, err)
		}
		for _, want := range c.more {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: no %q: %v", c.typo, want, err)
			}
		}
	}
	_, err := configs.ParseInventory("x.yaml", []byte(inventoryTypo))
	if err == nil || strings.Count(err.Error(), "\n") > 0 || !strings.Contains(err.Error(), "defaults.mastres: unknown field") {
		t.Errorf("Inventory: %v", err)
	}
}

const inventoryTypo = `apiVersion: edgebake.io/v1alpha1
kind: Inventory
defaults:
  mastres: [192.168.7.11:6443]
  credentials: {token: bcdefa.0123456789abcdef}
  caCertHashes: ["sha256:abababababababababababababababababababababababababababababababab"]
sites:
  - {name: shop-1, match: {serial: A1}}
  - {name: shop-2, match: {serial: A2}}
`
