package siteconf

import (
	"io/fs"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
)

// files is a Root. A path that ends in / is a directory, and content that begins with -> is the
// target of a link.
type files map[string]string

func (f files) Lstat(p string) (FileInfo, error) {
	if _, ok := f[p+"/"]; ok {
		return FileInfo{Mode: fs.ModeDir}, nil
	}
	text, ok := f[p]
	if !ok {
		return FileInfo{}, fs.ErrNotExist
	}
	if to, ok := strings.CutPrefix(text, "-> "); ok {
		return FileInfo{Mode: fs.ModeSymlink, Link: to}, nil
	}
	return FileInfo{}, nil
}

func (f files) ReadFile(p string) ([]byte, error) {
	text, ok := f[p]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return []byte(text), nil
}

var smallRoot = files{
	"/etc/passwd":                           "root:x:0:0:root:/root:/bin/bash\nold:x:1000:1000::/home/old:/bin/sh\n",
	"/etc/group":                            "root:x:0:\nsudo:x:27:\nold:x:1000:\n",
	"/etc/localtime":                        "-> /usr/share/zoneinfo/Etc/UTC",
	"/etc/motd":                             "hello\n",
	"/opt/":                                 "",
	"/opt/tree/":                            "",
	"/opt/tree/a":                           "a",
	"/usr/lib/systemd/system/":              "",
	"/usr/lib/systemd/system/plain.service": "",
	"/usr/lib/systemd/system/echo@.service": "",
}

func TestCheckSite(t *testing.T) {
	const key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
	with := func(more ...string) files {
		f := files{}
		for p, text := range smallRoot {
			f[p] = text
		}
		for _, p := range more {
			f[p] = "x"
		}
		return f
	}
	status := with()
	status["/var/lib/dpkg/status"] = "Package: openssh-server\nStatus: install ok installed\nVersion: 1\n\nPackage: wpasupplicant\nStatus: deinstall ok config-files\n"
	ign := func(body string) string {
		return "ignition: '{\"ignition\":{\"version\":\"3.6.0\"}," + body + "}'\n"
	}
	wifi := "network: {interfaces: [{name: wlan0, dhcp: true, wifi: {ssid: a}}]}\n"
	for name, tc := range map[string]struct {
		site string
		root files
		want []string // empty: the Site is accepted
	}{
		"nothing asked for":      {"", smallRoot, nil},
		"keys without a server":  {"users: [{name: admin, sshAuthorizedKeys: ['" + key + "']}]\n", smallRoot, []string{"users[0].sshAuthorizedKeys: the image has no SSH server: add the package openssh-server"}},
		"keys with one":          {"users: [{name: admin, sshAuthorizedKeys: ['" + key + "']}]\n", with("/usr/sbin/sshd"), nil},
		"keys with its package":  {"users: [{name: admin, sshAuthorizedKeys: ['" + key + "']}]\n", status, nil},
		"keys by Ignition":       {ign(`"passwd":{"users":[{"name":"core","sshAuthorizedKeys":["k"]}]}`), smallRoot, []string{"ignition: passwd.users.0.sshAuthorizedKeys: the image has no SSH server"}},
		"Wi-Fi without":          {wifi, smallRoot, []string{"network.interfaces[0].wifi: the image has no wpa_supplicant: add the package wpasupplicant"}},
		"Wi-Fi, removed":         {wifi, status, []string{"wpa_supplicant"}},
		"Wi-Fi with":             {wifi, with("/usr/sbin/wpa_supplicant"), nil},
		"an unknown group":       {"users: [{name: admin, groups: [sudo, docker]}]\n", smallRoot, []string{"users[0].groups[1]: the image has no group docker: add it to passwd.groups"}},
		"a group of one's own":   {"users: [{name: admin, groups: [ops, other]}, {name: other}]\n" + ign(`"passwd":{"groups":[{"name":"ops"}],"users":[{"name":"other"}]}`), smallRoot, []string{"has no group other"}},
		"another uid":            {ign(`"passwd":{"users":[{"name":"old","uid":7},{"name":"new","uid":1000}]}`), smallRoot, []string{"passwd.users.0.uid: user old already exists in the image with uid 1000", "passwd.users.1.uid: uid 1000 belongs to old"}},
		"another gid":            {ign(`"passwd":{"groups":[{"name":"sudo","gid":7},{"name":"new","gid":27}]}`), smallRoot, []string{"passwd.groups.0.gid: group sudo already exists in the image with gid 27", "passwd.groups.1.gid: gid 27 belongs to sudo"}},
		"another home":           {ign(`"passwd":{"users":[{"name":"old","homeDir":"/srv"}]}`), smallRoot, []string{"homeDir: user old already exists in the image with the home /home/old"}},
		"another primary group":  {ign(`"passwd":{"users":[{"name":"old","primaryGroup":"sudo"}]}`), smallRoot, []string{"primaryGroup: user old already exists in the image with the primary group old"}},
		"a group of that name":   {"users: [{name: sudo}]\n", smallRoot, []string{"users[0]: group sudo already exists: add primaryGroup: sudo"}},
		"a group in use":         {ign(`"passwd":{"groups":[{"name":"old","shouldExist":false}]}`), smallRoot, []string{"cannot be removed: it is the primary group of user old"}},
		"unknown owners":         {ign(`"storage":{"files":[{"path":"/a","user":{"name":"www"},"group":{"name":"www"}}]}`), smallRoot, []string{"storage.files.0.user.name: the image has no user www", "storage.files.0.group.name: the image has no group www"}},
		"owners that come":       {ign(`"passwd":{"users":[{"name":"www"}]},"storage":{"files":[{"path":"/a","user":{"name":"www"},"group":{"name":"www"}}]}`), smallRoot, nil},
		"an existing file":       {ign(`"storage":{"files":[{"path":"/etc/motd","contents":{"source":"data:,x"}}]}`), smallRoot, []string{"ignition: storage.files.0: /etc/motd already exists in the image (a file): add overwrite: true"}},
		"an existing link":       {ign(`"storage":{"links":[{"path":"/etc/localtime","target":"/usr/share/zoneinfo/Europe/Berlin"}]}`), smallRoot, []string{"storage.links.0: /etc/localtime already exists in the image (a link): add overwrite: true"}},
		"a file as a directory":  {ign(`"storage":{"directories":[{"path":"/etc/motd"}],"files":[{"path":"/opt/tree"}]}`), smallRoot, []string{"storage.directories.0: /etc/motd", "storage.files.0: /opt/tree already exists in the image (a directory)"}},
		"what may be there":      {ign(`"storage":{"directories":[{"path":"/opt"},{"path":"/opt/tree","overwrite":true}],"files":[{"path":"/opt/tree/a","contents":{"source":"data:,x"}},{"path":"/etc/motd","append":[{"source":"data:,x"}]}],"links":[{"path":"/etc/localtime","target":"/usr/share/zoneinfo/Etc/UTC"}]}`), smallRoot, nil},
		"units":                  {ign(`"systemd":{"units":[{"name":"plain.service","enabled":true},{"name":"echo@a.service","enabled":true},{"name":"docker.service","enabled":true},{"name":"off.service","enabled":false}]}`), smallRoot, []string{"systemd.units.2: the image has no unit docker.service to enable"}},
		"a VIP among pods":       {"vip: 10.244.7.7\n", smallRoot, []string{"vip: 10.244.7.7 is in the image's pod network (cni.podCIDR 10.244.0.0/16)"}},
		"a network among pods":   {"masters: ['10.244.0.9:6443']\nnetwork: {dns: [10.244.0.1], interfaces: [{name: eth0, addresses: [10.244.0.5/24]}]}\n", smallRoot, []string{"masters[0]: 10.244.0.9", "network.dns[0]", "network.interfaces[0].addresses[0]: 10.244.0.5/24 overlaps"}},
		"another type and arch":  {"nodeType: edge\nnodePool: a\narch: arm64\n", smallRoot, []string{`nodeType: the image does not support nodes of type "edge", only native`, "arch: the Site is for arm64"}},
		"no root to be seen":     {wifi, nil, nil},
		"a system without users": {"users: [{name: admin, groups: [docker], sshAuthorizedKeys: ['" + key + "']}]\n", files{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			doc := "apiVersion: edgebake.io/v1alpha1\nkind: Site\n"
			if !strings.Contains(tc.site, "masters:") {
				doc += "masters: [192.168.7.11:6443]\n"
			}
			doc += "credentials: {token: abcdef.0123456789abcdef}\nunsafeSkipCAVerification: true\n" + tc.site
			site, err := configs.ParseSite("site.yaml", []byte(doc))
			if err != nil {
				t.Fatal(err)
			}
			img := Image{Info: ondisk.ImageInfo{Arch: "amd64", NodeTypes: []string{"native"}, PodCIDR: "10.244.0.0/16"}, Strict: true}
			if tc.root != nil {
				img.Root = tc.root
			}
			got := CheckSite(img, site, nil)
			if len(got) != len(tc.want) {
				t.Errorf("%d problems, want %d: %v", len(got), len(tc.want), got)
			}
			for _, w := range tc.want {
				if !strings.Contains(got.Error(), w) {
					t.Errorf("problems lack %q:\n%v", w, got)
				}
			}
		})
	}
}
