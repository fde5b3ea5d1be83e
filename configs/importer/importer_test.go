package importer

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
)

const importTemplate = `apiVersion: edgebake.io/v1alpha1
kind: Site
masters: [192.0.2.11:6443]
caCertHashes: [sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef]
network:
  interfaces: [{name: en*, addresses: [192.0.2.9/24], mtu: 1400}]
`

// importing returns the imported Inventory, or the problems.
func importing(table string, columns map[string]string) (*configs.Inventory, error) {
	out, _, err := CSV("t.csv", []byte(table), "site.yaml", []byte(importTemplate), Options{Map: columns})
	if err != nil {
		return nil, err
	}
	return configs.ParsePublicInventory("i", out)
}

// TestImportNamesNodes checks that nodes get the names in the table, even if the template sets
// nodeName. A column nodeName takes precedence over both.
func TestImportNamesNodes(t *testing.T) {
	for _, c := range []struct {
		table, template, want string
		warned                bool
	}{
		{"name,serial\nshop-1,SN1\n", "nodeName: shop-{{.MAC}}\n", "shop-1", true},
		{"name,serial\nshop-1,SN1\n", "", "shop-1", false},
		{"name,serial,nodeName\nshop-1,SN1,till-1\n", "nodeName: shop-{{.MAC}}\n", "till-1", false},
	} {
		var said []string
		out, _, err := CSV("t.csv", []byte(c.table), "site.yaml", []byte(strings.ReplaceAll(importTemplate, "addresses: [192.0.2.9/24]", "dhcp: true")+c.template),
			Options{Warn: func(s string) { said = append(said, s) }})
		if err != nil {
			t.Fatal(err)
		}
		inv, err := configs.ParsePublicInventory("i.yaml", out)
		if err != nil || inv.Sites[0].NodeName != c.want || c.warned != (len(said) == 1) {
			t.Errorf("%q, %q: %v, %v\n%s", c.table, c.template, err, said, out)
		}
	}
}

// TestImport imports one table in each format in which spreadsheets save tables.
func TestImport(t *testing.T) {
	const plain = "Name,Serial Number,MAC,address,gateway,labels.example.com/region,nodePool,nodeType,network.dns,Manager\n" +
		"shop-1,SN1,52-54-00-00-00-01 52-54-00-00-00-02,10.1.1.10/24,10.1.1.1,\"north, \"\"new\"\"\",p,edge,10.1.1.1 10.1.1.2,Anna\n" +
		"\n" +
		"shop-2,SN2,,,,south,p,edge,,\n"
	semi := strings.NewReplacer(",", ";", "north, ", "north; ").Replace(plain)
	clean := func(s string) string {
		return strings.NewReplacer(`"north, ""new"""`, "north", `"north; ""new"""`, "north").Replace(s)
	}
	for name, table := range map[string]string{
		"comma": clean(plain), "semicolon": clean(semi), "BOM and CRLF": "\ufeff" + strings.ReplaceAll(clean(semi), "\n", "\r\n"),
		"tab":  strings.ReplaceAll(clean(plain), ",", "\t"),
		"sep=": "sep=;\r\n" + clean(semi), "no last line end": strings.TrimSuffix(clean(plain), "\n"),
		"quoted": strings.ReplaceAll(clean(plain), "SN1", `"SN1"`), "blank lines at the end": clean(plain) + "\n,,,,,,,,,\n",
	} {
		inv, err := importing(table, map[string]string{"Manager": "-"})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		one, two := inv.Sites[0], inv.Sites[1]
		if len(inv.Sites) != 2 || one.Name != "shop-1" || one.Match.Serial != "SN1" || len(one.Match.MACs) != 2 || one.Labels["example.com/region"] != "north" ||
			one.Network.Interfaces[0].Addresses[0] != "10.1.1.10/24" || one.Network.Interfaces[0].MTU != 1400 || one.Network.Interfaces[0].Gateway != "10.1.1.1" ||
			len(one.Network.DNS) != 2 || one.NodePool != "p" {
			t.Errorf("%s: %+v", name, one)
		}
		if two.Network.Interfaces[0].Addresses[0] != "192.0.2.9/24" || two.Match.MACs != nil {
			t.Errorf("%s: %+v", name, two)
		}
	}
}

// TestImportSaysOnce checks that a mistake is reported only once.
func TestImportSaysOnce(t *testing.T) {
	for table, want := range map[string]string{
		"name,serial\nBad Name,SN1\n": `t.csv:2: column "name": "bad name" must be lower-case letters, digits, - and ., beginning and ending with a letter or digit, at most 63`,
		"name,serial\n#8,#Y7\n":       `t.csv:2: column "name": "#8" must be lower-case letters, digits, - and ., beginning and ending with a letter or digit, at most 63`,
	} {
		if _, err := importing(table, nil); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", table, err, want)
		}
	}
	_, _, err := CSV("t.csv", []byte("name,serial\na,SN1\nb,SN2\nc,SN3\n"), "site.yaml", []byte(strings.ReplaceAll(importTemplate, "addresses: [192.0.2.9/24]", "dhcp: true")+"nodeName: till\n"), Options{})
	if want := "site.yaml: nodeName: gives 3 machines the node name till: remove it, so that each node gets the name of its site, or use a template, e.g. shop-{{.MAC}}"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// TestImportWithAWrongTemplate checks that a problem of the template is reported for the template,
// but not for all rows.
func TestImportWithAWrongTemplate(t *testing.T) {
	for template, want := range map[string]string{
		strings.ReplaceAll(importTemplate, "masters:", "mastres:"):                                  `site.yaml:3:1: mastres: unknown field; did you mean "masters"?`,
		"apiVersion: edgebake.io/v1alpha1\nkind: Image\nname: a\n":                                  "site.yaml:2:7: kind: expected a document of kind Site, got one of kind Image",
		strings.ReplaceAll(importTemplate, "masters: [192.0.2.11:6443]", "masters: [192.0.2.11]\n"): "site.yaml:3:11: masters[0]: ",
	} {
		_, _, err := CSV("t.csv", []byte("name,serial\na,SN1\n"), "site.yaml", []byte(template), Options{})
		if err == nil || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v, want %s alone", err, want)
		}
	}
	// A row with an empty cell must still be reported.
	_, _, err := CSV("t.csv", []byte("name,serial,masters\na,SN1,192.0.2.11:6443\nb,SN2,\n"), "site.yaml", []byte(strings.ReplaceAll(importTemplate, "masters: [192.0.2.11:6443]", "colour: red")), Options{})
	if err == nil || !strings.Contains(err.Error(), "site.yaml:3:1: colour: unknown field") || !strings.Contains(err.Error(), `t.csv:3: column "masters": is required`) {
		t.Error(err)
	}
	for _, c := range []struct{ name, table, template, want string }{
		// A template does not contain the names of sites.
		{"no names", "serial\nSN1\n", strings.ReplaceAll(importTemplate, "masters:", "mastres:") + "nodeName: shop-{{.MAC}}\n",
			`site.yaml:3:1: mastres: unknown field; did you mean "masters"?` + "\nt.csv:2: name: is required, since nodeName is a template: files made for the Site have this name"},
		// Only the wrong kind is reported, not the interface that the column address lacks.
		{"another kind", "name,serial,address\na,SN1,192.0.2.9/24\n", "apiVersion: edgebake.io/v1alpha1\nkind: Image\nname: a\n",
			"site.yaml:2:7: kind: expected a document of kind Site, got one of kind Image"},
		// The columns are unknown, so one of them may contain the address.
		{"a spreadsheet", "PK\x03\x04", strings.ReplaceAll(importTemplate, ", addresses: [192.0.2.9/24]", "") + "colour: red\n",
			"site.yaml:7:1: colour: unknown field; known here: apiVersion, kind, masters, endpoint, vip, credentials, caCertHashes, caCert, caFile, unsafeSkipCAVerification, nodeName, match, nodeType, arch, nodePool, nodeIP, labels, taints, organizations, criSocket, skipPhases, ignorePreflightErrors, kubeletExtraArgs, controlPlane, spreadSeconds, ipvs, yurthub, network, users, ignition, ignitionFile, report, updates\nt.csv:1: is a spreadsheet file, not CSV: save it as CSV UTF-8"},
		{"swapped", importTemplate, "name,serial\na,SN1\n",
			"site.yaml:1:1: the document must be a mapping that begins with apiVersion: edgebake.io/v1alpha1\nt.csv:1: is an edgebake document, not a table: name the table here, and the Site with --template"},
		{"swapped, with a comment", "# A site.\n\n" + importTemplate, importTemplate,
			"t.csv:3: is an edgebake document, not a table: name the table here, and the Site with --template"},
	} {
		if _, _, err := CSV("t.csv", []byte(c.table), "site.yaml", []byte(c.template), Options{}); err == nil || err.Error() != c.want {
			t.Errorf("%s:\n%v\nwant\n%s", c.name, err, c.want)
		}
	}
	if _, err := importing("name,S/N\na,SN1\n", map[string]string{"S/N": "seriall"}); err == nil || !strings.Contains(err.Error(), `column "S/N": "seriall" is not a field of a Site; did you mean "serial"?`) {
		t.Error(err)
	}
}

// TestImportNamesRowAndColumn checks that problems name the row and the column.
func TestImportNamesRowAndColumn(t *testing.T) {
	for _, c := range []struct {
		table string
		want  []string
	}{
		{"", []string{"t.csv:1: is empty"}},
		{"name,serial\n", []string{"t.csv:1: has no rows"}},
		{"name,serail\na,SN1\n", []string{`t.csv:1: column "serail": "serail" is not a field of a Site; did you mean "serial"? Name the field that it sets (--map "serail"=FIELD)`}},
		{"name,Serial numbr\na,SN1\n", []string{`column "Serial numbr": "Serial numbr" is not a field of a Site; did you mean "serialnumber"?`}},
		{"name,serial,labels.kubernetes.io/foo,labels.a.b/c\na,SN1,x,y z\n", []string{`t.csv:2: column "labels.kubernetes.io/foo": a kubelet may not set`, `t.csv:2: column "labels.a.b/c": `}},
		{"name,serial,serial\na,SN1,SN2\n", []string{`t.csv:1: column "serial": sets match.serial, which column "serial" sets already`}},
		{"name,,serial\na,b,SN1\n", []string{`t.csv:1: column "2": has no name`}},
		{"name,network\na,b\n", []string{`column "network": "network" consists of several fields, so it does not fit into a cell`}},
		{"name,masters[x]\na,b\n", []string{`column "masters[x]": "masters[x]" is not a field`}},
		{"name,vip[0]\na,b\n", []string{`column "vip[0]": "vip[0]": vip is not a list`}},
		{"name,serial\na,SN1\nb\n", []string{"t.csv:3: has 1 cell, but the first line names 2 columns"}},
		{"name,serial\na,SN1\nb,\"x\ny\",z\n", []string{"t.csv:3: has 3 cells"}},
		{"name,serial\na,SN1\nb,S\"N2\n", []string{"t.csv:3: cannot be read as CSV: a cell without quotes around it contains a quote (byte 4): put quotes"}},
		{"sep=;\nname;serial\na;=\"0012\"\n", []string{"t.csv:3: cannot be read as CSV: a cell without quotes around it contains a quote"}},
		{"name,serial\na,\"SN1\nb,SN2\n", []string{"t.csv:2: cannot be read as CSV: a cell in quotes does not end, or continues after its closing quote (byte 7 of line 3)"}},
		{"name,serial\na,\"=\"\"0012\"\"\"\nb,=A1\nc,#REF!\nd,#N/A\ne,Err:502\nf,1.23457E+11\ng,\"1,23E+5\"\n", []string{`t.csv:2: column "serial": "=\"0012\"" is a formula`, `t.csv:3: column "serial": "=A1" is a formula`, `t.csv:4: column "serial": "#REF!" is the error of a formula`, `"#N/A" is the error of a formula`, `"Err:502" is the error of a formula`, `t.csv:7: column "serial": "1.23457E+11" is a long number`, `"1,23E+5" is a long number`}},
		{"name,serial\na,SN\u200b1\nb,SN\u00a02\n", []string{`t.csv:2: column "serial": contains an invisible character (U+200B)`, `t.csv:3: column "serial": contains an invisible character (U+00A0)`}},
		{"name,match\na,b\n", []string{`column "match": "match" consists of several fields, so it does not fit into a cell: name the field that it sets (--map "match"=FIELD)`}},
		{"name,serial\na,SN1\n\n\nb,SN1\n", []string{`t.csv:5: column "serial": serial number sn1 is also used by line 2 (a)`}},
		{"name,serial,ip\na,SN1,10.1.1.300/24\n", []string{`t.csv:2: column "ip": `, "10.1.1.300/24"}},
		{"name,serial,nodeType\na,SN1,edge\n", []string{"t.csv:2: nodePool: is required for nodeType edge"}},
		{"name,serial,ipvs.disabled,ipvs.rise\na,SN1,maybe,many\n", []string{`column "ipvs.disabled": must be true or false`, `column "ipvs.rise": must be a whole number`}},
		{"name,serial\nA B,To be filled by O.E.M.\n", []string{`t.csv:2: column "name": `, `t.csv:2: column "serial": "To be filled by O.E.M." never matches`}},
		{"name,serial\nM\xfcnchen,SN1\n", []string{"t.csv:2: is not UTF-8"}},
		{"PK\x03\x04\x00", []string{"is a spreadsheet file"}},
		{"name,serial\na\x00,SN1\n", []string{`t.csv:2: column "name": "a\x00" must be`}},
		{"name,serial,network.interfaces[2].name\na,SN1,eth0\n", []string{`t.csv:2: column "network.interfaces[2].name": sets item 2 of interfaces, but there is no item 1`}},
		{"name,serial,credentials.token\na,SN1,hunter2\n", []string{`column "credentials.token": is not a bootstrap token`}},
	} {
		_, err := importing(c.table, nil)
		for _, w := range c.want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%q lacks %q: %v", c.table, w, err)
			}
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("a secret is quoted: %v", err)
		}
	}
	if _, err := importing("name,serial\na,SN1\n", map[string]string{"S/N": "serial"}); err == nil || !strings.Contains(err.Error(), `column "S/N": is mapped to serial, but the table has no such column`) {
		t.Error(err)
	}
	_, _, err := CSV("t.csv", []byte("name,serial\na,SN1\n"), "site.yaml", []byte(importTemplate+"colour: red\n"), Options{})
	if err == nil || !strings.Contains(err.Error(), "site.yaml:7:1: colour: unknown field") {
		t.Error(err)
	}
}

// TestImportOfFreeText checks that passwords and names of wireless networks may look like formulas.
// Quoted formulas and error values of spreadsheets are rejected. Messages never quote a secret.
func TestImportOfFreeText(t *testing.T) {
	const wifi = "network.interfaces[0].wifi."
	columns := map[string]string{"if": "network.interfaces[0].name", "dhcp": "network.interfaces[0].dhcp", "ssid": wifi + "ssid", "psk": wifi + "psk", "hash": "users[0].passwordHash", "user": "users[0].name"}
	template := strings.ReplaceAll(importTemplate, "{name: en*, addresses: [192.0.2.9/24], mtu: 1400}", "{name: wlan0, dhcp: true}")
	table := func(head, cells string) error {
		m := map[string]string{}
		for h, f := range columns {
			if strings.Contains(","+head+",", ","+h+",") {
				m[h] = f
			}
		}
		out, _, err := CSV("t.csv", []byte("name,serial,"+head+"\na,SN1,"+cells+"\n"), "site.yaml", []byte(template), Options{Map: m})
		if err != nil {
			return err
		}
		inv, err := configs.ParsePublicInventory("i", out)
		if err != nil {
			return err
		}
		w := inv.Sites[0].Network.Interfaces[0].WiFi
		if ssid, psk, _ := strings.Cut(cells, ","); head == "ssid,psk" && (w.SSID != ssid || w.PSK.Reveal() != psk) {
			t.Errorf("%s became %q and %q", cells, w.SSID, w.PSK.Reveal())
		}
		return nil
	}
	for _, cells := range []string{"=shop=,=SUM(A1:hunter2)", "#1!,#HUNTER2!", "#N/A-guests,=A1+hunter2", "1.2E+5,1.23457E+11"} {
		if err := table("ssid,psk", cells); err != nil {
			t.Errorf("%s: %v", cells, err)
		}
	}
	for _, c := range []struct{ head, cells, want string }{
		{"ssid,psk", `shop,"=""hunter2hunter2"""`, `t.csv:2: column "psk": is a formula; write its value`},
		{"ssid,psk", "shop,#DIV/0!", `t.csv:2: column "psk": "#DIV/0!" is the error of a formula`},
		{"ssid,psk", "#REF!,hunter2hunter2", `t.csv:2: column "ssid": "#REF!" is the error of a formula`},
		{"ssid,psk", `"=""shop""",hunter2hunter2`, `t.csv:2: column "ssid": "=\"shop\"" is a formula`},
		{"token", "=hunter2", `t.csv:2: column "token": is a formula; write its value`},
		{"user,hash", "anna,=hunter2", `t.csv:2: column "hash": is a formula; write its value`},
		{"token", "#HUNTER2!", `t.csv:2: column "token": is not a bootstrap token`},
		{"ip", "=A1", `t.csv:2: column "ip": "=A1" is a formula`},
	} {
		err := table(c.head, c.cells)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(strings.ToLower(err.Error()), "hunter2") {
			t.Errorf("%s: %v, want %s", c.cells, err, c.want)
		}
	}
}

// TestImportOfAddresses checks that the table may contain addresses of an interface that the
// template names.
func TestImportOfAddresses(t *testing.T) {
	const site = `apiVersion: edgebake.io/v1alpha1
kind: Site
masters: [192.0.2.11:6443]
caCertHashes: [sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef]
`
	const named = site + "network:\n  interfaces: [{name: en*}]\n"
	table := func(second string) string {
		rows := "name,serial,address,gateway\n"
		for i := 1; i <= 200; i++ {
			cells := fmt.Sprintf("10.0.%d.10/24,10.0.%d.1", i, i)
			if i > 1 && second != "" {
				cells = second
			}
			rows += fmt.Sprintf("shop-%d,PF3X%05d,%s\n", i, i, cells)
		}
		return rows
	}
	run := func(template, table string) (*configs.Inventory, string) {
		out, _, err := CSV("t.csv", []byte(table), "site.yaml", []byte(template), Options{})
		if err != nil {
			return nil, err.Error()
		}
		inv, err := configs.ParsePublicInventory("i", out)
		return inv, fmt.Sprint(err)
	}
	if inv, err := run(named, table("")); inv == nil || len(inv.Sites) != 200 || inv.Sites[6].Network.Interfaces[0].Name != "en*" ||
		inv.Sites[6].Network.Interfaces[0].Addresses[0] != "10.0.7.10/24" {
		t.Errorf("a template that names the interface: %+v %s", inv, err)
	}
	for _, c := range []struct{ template, table, want string }{
		{site, table(""), `t.csv:1: column "address": sets network.interfaces[0].addresses, but neither the table nor the template names that interface: ` +
			`add a column interface to the table`},
		{named, table(","), "site.yaml: network.interfaces[0]: has neither dhcp: true nor addresses nor vlans (in 199 of 200 Sites, the first is line 3)"},
		{named, table("10.0.0.1/24,10.9.9.9"), `t.csv:3: column "gateway": 10.9.9.9 is in none of the interface's networks (10.0.0.1/24); to reach a router outside of them, write single addresses (10.0.0.1/32) (also in lines 4-201)`},
		{named, table("10.0.0.1/24"), `t.csv:3: has 3 cells, but the first line names 4 columns: add the empty cells (also in lines 4-201)`},
		{named, table("a,b,c"), `t.csv:3: has 5 cells, but the first line names 4 columns: put quotes around cells that contain the separator (also in lines 4-201)`},
		{named + "nodeNam: x\n", "name,serail\nshop-1,PF3X1\n", "nodeNam: unknown field; did you mean \"nodeName\"?\n" + `t.csv:1: column "serail"`},
		{named + "nodeNam: x\n", "name,macs,address\nshop-1,52:54:00:00:00:0z,10.0.0.300/24\n", "nodeNam: unknown field; did you mean \"nodeName\"?\n" +
			`t.csv:2: column "macs": "52:54:00:00:00:0z" is not the MAC address of one network card, e.g. 52:54:00:12:34:56` + "\n" +
			`t.csv:2: column "address": "10.0.0.300/24" is not an address with prefix length, e.g. 192.168.1.20/24`},
		{named + "users: [{name: a, groups: [x y]}]\n", table("a,b"), "site.yaml:7:28: users[0].groups[0]: \"x y\" is not a group's name\n" + `t.csv:3: column "address": "a" is`},
	} {
		if _, err := run(c.template, c.table); !strings.Contains(err, c.want) || strings.Count(err, "PF3X") > 3 {
			t.Errorf("want %s\ngot %.2000s", c.want, err)
		}
	}
}

// TestHostileTables puts unusual texts into each place of a table. The table must be imported, or
// rejected with problems that have positions.
func TestHostileTables(t *testing.T) {
	pieces := []string{"", " ", "\"", "\"\"", "'", ";", ",", "\t", "|", "\r", "\n", "\r\n", "\x00", "\xff", "\ufeff", "\u200b", "=cmd()", "- a", "{", "[", "&a", "*a", "!!str",
		"#", ": ", "null", "~", "true", "0x10", "1e9", "2026-01-01", "{{.Serial}}", "{{", "../../etc", "\x1b[31m", strings.Repeat("9", 5000), "<<", "a: b", "\u202e", "%s"}
	n := 0
	for _, p := range pieces {
		for place, table := range map[string]string{
			"header":   "name,serial" + p + "\na,SN1\n",
			"cell":     "name,serial\na,SN1\nb," + p + "\n",
			"name":     "name,serial\n" + p + ",SN1\n",
			"before":   p + "name,serial\na,SN1\n",
			"quoted":   "name,serial\na,\"" + p + "\"\n",
			"separate": strings.Join([]string{"name", "serial\na", "SN1\n"}, cmpOr(p, ",")),
		} {
			n++
			inv, err := importing(table, nil)
			if err == nil && len(inv.Sites) == 0 {
				t.Errorf("%q in %s: no sites and no error", p, place)
			}
			if err != nil && !strings.HasPrefix(err.Error(), "t.csv") {
				t.Errorf("%q in %s: %v", p, place, err)
			}
		}
	}
	if n < 200 {
		t.Errorf("only %d tables", n)
	}
}

func cmpOr(a, b string) string {
	if a == "" {
		return b
	}
	return a
}

func FuzzImport(f *testing.F) {
	f.Add("name,serial\na,SN1\n")
	f.Add("sep=;\nname;ip\n\"a\";10.0.0.1/8\n")
	f.Add("name,network.interfaces[1].vlans[0].id\na,7\n")
	f.Fuzz(func(t *testing.T, table string) { importing(table, nil) })
}

// TestImportOfThousands checks that importing 5,000 rows needs at most 256 MiB.
func TestImportOfThousands(t *testing.T) {
	var b strings.Builder
	b.WriteString("name;serial;mac;address;gateway;labels.example.com/shop\n")
	for i := range 5000 {
		fmt.Fprintf(&b, "shop-%d;SN%05d;52:54:00:00:%02x:%02x;10.%d.%d.2/24;10.%d.%d.1;%d\n", i, i, i>>8, i&255, 1+i/250, i%250, 1+i/250, i%250, i)
	}
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, n, err := CSV("t.csv", []byte(b.String()), "site.yaml", []byte(importTemplate), Options{})
	runtime.ReadMemStats(&after)
	if err != nil || n != 5000 {
		t.Fatal(n, err)
	}
	t.Logf("%d MiB taken from the system", (after.Sys-before.Sys)>>20)
	if after.Sys-before.Sys > 256<<20 {
		t.Errorf("5,000 rows take %d MiB", (after.Sys-before.Sys)>>20)
	}
}
