package siteconf

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	ign35 "github.com/coreos/ignition/v2/config/v3_5"
	ign "github.com/coreos/ignition/v2/config/v3_6"
	"github.com/coreos/ignition/v2/config/v3_6/types"
	ignvalidate "github.com/coreos/ignition/v2/config/validate"
	"github.com/coreos/vcontext/report"
	"github.com/coreos/vcontext/validate"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/vincent-petithory/dataurl"
)

// Render returns Config as JSON.
func Render(site *configs.Site, m Machine, userIgnition []byte) ([]byte, error) {
	cfg, err := Config(site, m, userIgnition)
	if err != nil {
		return nil, err
	}
	return encode(*cfg)
}

// Config returns the operating system settings of a Site on a machine as an Ignition config, merged
// with the Site's inline config and with userIgnition (config.ign of the slot, or nil). A setting
// in two of these is an error. A node name that depends on the machine is omitted for the zero
// Machine.
func Config(site *configs.Site, m Machine, userIgnition []byte) (*types.Config, error) {
	cfg := types.Config{Ignition: types.Ignition{Version: types.MaxVersion.String()}}
	name, err := NodeName(site, m)
	if m.isZero() && strings.Contains(site.NodeName, "{{") {
		err = nil // ParseSite has validated the template
	}
	if err != nil {
		return nil, fmt.Errorf("rendering the Site: %w", err)
	}
	if name != "" {
		addFile(&cfg, "/etc/hostname", 0o644, name+"\n")
	}
	if err := renderNetwork(&cfg, &site.Network, site.ServicesAreV4()); err != nil {
		return nil, err
	}
	renderProxy(&cfg, site)
	for _, u := range site.Users {
		cfg.Passwd.Users = append(cfg.Passwd.Users, renderUser(u))
	}

	if !site.Ignition.IsZero() {
		if cfg, err = merge(cfg, "the Site's ignition", []byte(site.Ignition.Reveal())); err != nil {
			return nil, err
		}
	}
	if len(userIgnition) > 0 {
		if cfg, err = merge(cfg, "config.ign", userIgnition); err != nil {
			return nil, err
		}
	}
	rep := validate.Validate(cfg, "json")
	rep.Merge(validate.ValidateCustom(cfg, "json", ignvalidate.ValidateDups))
	if rep.IsFatal() {
		return nil, fmt.Errorf("checking the rendered Ignition config: %s", rep.String())
	}
	return &cfg, nil
}

const spec35 = "3.5.0"

// specVersion returns the older of two spec versions if cfg needs nothing newer, because Ignition
// on other systems is often a year old.
func specVersion(cfg *types.Config) string {
	special := func(mode *int) bool { return mode != nil && *mode&0o7000 != 0 }
	if slices.ContainsFunc(cfg.Storage.Files, func(f types.File) bool { return special(f.Mode) }) ||
		slices.ContainsFunc(cfg.Storage.Directories, func(d types.Directory) bool { return special(d.Mode) }) {
		return "3.6.0" // earlier versions drop setuid, setgid and sticky bits
	}
	return spec35
}

func encode(cfg types.Config) ([]byte, error) {
	cfg.Ignition.Version = specVersion(&cfg)
	raw, err := json.Marshal(cfg)
	if err != nil {
		return nil, fmt.Errorf("encoding the Ignition config: %w", err)
	}
	// The library's types encode every empty section; omit them for human readers.
	var tree any
	if err := json.Unmarshal(raw, &tree); err != nil {
		return nil, fmt.Errorf("encoding the Ignition config: %w", err)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(prune(tree)); err != nil {
		return nil, fmt.Errorf("encoding the Ignition config: %w", err)
	}
	// Validate the result with the parser of this spec version.
	var rep report.Report
	if cfg.Ignition.Version == spec35 {
		_, rep, err = ign35.Parse(b.Bytes())
	} else {
		_, rep, err = ign.Parse(b.Bytes())
	}
	if err != nil {
		return nil, fmt.Errorf("checking the rendered Ignition config: %w\n%s", err, rep.String())
	}
	return b.Bytes(), nil
}

// prune removes empty objects and lists.
func prune(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			e = prune(e)
			if m, ok := e.(map[string]any); ok && len(m) == 0 {
				delete(v, k)
				continue
			}
			if l, ok := e.([]any); ok && len(l) == 0 {
				delete(v, k)
				continue
			}
			v[k] = e
		}
	case []any:
		for i := range v {
			v[i] = prune(v[i])
		}
	}
	return v
}

func ptr[T any](v T) *T { return &v }

func dataURL(s string) *string { return ptr("data:," + dataurl.EscapeString(s)) }

func addFile(cfg *types.Config, path string, mode int, contents string) {
	cfg.Storage.Files = append(cfg.Storage.Files, types.File{
		Node:          types.Node{Path: path, Overwrite: ptr(true)},
		FileEmbedded1: types.FileEmbedded1{Mode: ptr(mode), Contents: types.Resource{Source: dataURL(contents)}},
	})
}

func addDropin(cfg *types.Config, unit, name, contents string) {
	cfg.Systemd.Units = append(cfg.Systemd.Units, types.Unit{
		Name:    unit,
		Dropins: []types.Dropin{{Name: name, Contents: ptr(contents)}},
	})
}

func renderUser(u configs.User) types.PasswdUser {
	out := types.PasswdUser{Name: u.Name}
	for _, k := range u.SSHAuthorizedKeys {
		out.SSHAuthorizedKeys = append(out.SSHAuthorizedKeys, types.SSHAuthorizedKey(k))
	}
	for _, g := range u.Groups {
		out.Groups = append(out.Groups, types.Group(g))
	}
	if h := u.PasswordHash.Reveal(); h != "" {
		out.PasswordHash = &h
	}
	if u.Shell != "" {
		out.Shell = &u.Shell
	}
	return out
}

// ProxyEnv returns the proxy variables ("NAME=value") of the Site, or nil if it has no proxy.
// NO_PROXY contains the API servers, the VIP and the endpoint.
func ProxyEnv(site *configs.Site) []string { return proxyEnv(site, nil) }

// privateNetworks lists the networks that are not routed on the internet: RFC 1918, RFC 6598, RFC
// 4193 and link-local.
var privateNetworks = []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "fc00::/7", "fe80::/10"}

// ControlPlaneProxyEnv returns the proxy variables for the control plane's static pods. NO_PROXY
// also contains private networks: the API server connects to pods, Services, and nodes not in the
// Site.
func ControlPlaneProxyEnv(site *configs.Site) []string {
	return proxyEnv(site, slices.Concat(site.ControlPlane.Documents().Inside(), privateNetworks))
}

func proxyEnv(site *configs.Site, also []string) []string {
	p := site.Network.Proxy
	if p.HTTP.IsZero() && p.HTTPS.IsZero() {
		return nil
	}
	direct := []string{"localhost", "127.0.0.1", "::1", ".svc", ".cluster.local", site.Endpoint, site.VIP}
	for _, m := range site.Masters {
		direct = append(direct, strings.Trim(m[:strings.LastIndexByte(m, ':')], "[]"))
	}
	direct = slices.Concat(direct, also, p.NoProxy)
	var env []string
	for _, v := range []struct{ name, value string }{{"HTTP_PROXY", p.HTTP.Reveal()}, {"HTTPS_PROXY", p.HTTPS.Reveal()}, {"NO_PROXY", strings.Join(direct, ",")}} {
		if v.value != "" {
			env = append(env, v.name+"="+v.value)
		}
	}
	return env
}

func renderProxy(cfg *types.Config, site *configs.Site) {
	env := ProxyEnv(site)
	if env == nil {
		return
	}
	// EnvironmentFile= hides the values: systemd shows Environment= to every user, and the proxy's
	// URL may contain a password.
	var b strings.Builder
	b.WriteString(header)
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		fmt.Fprintf(&b, "%s=\"%s\"\n", name, value)
	}
	addFile(cfg, ondisk.ProxyEnv, 0o600, b.String())
	for _, unit := range []string{ondisk.UnitContainerd, ondisk.UnitKubelet} {
		addDropin(cfg, unit, "20-edgebake-proxy.conf", header+"[Service]\nEnvironmentFile=-"+ondisk.ProxyEnv+"\n")
	}
}

// merge merges the user's config into cfg. It rejects conflicts, because Ignition's own merge would
// silently use the later value.
func merge(cfg types.Config, name string, data []byte) (types.Config, error) {
	user, _, probs := ignition.Parse(name, data)
	if probs != nil {
		return cfg, fmt.Errorf("reading %s: %w", name, probs)
	}
	if both := conflicts(&cfg, user); len(both) > 0 {
		return cfg, fmt.Errorf("merging %s: %s; keep only one of them", name, strings.Join(both, "; "))
	}
	return ign.Merge(cfg, *user), nil
}

func conflicts(ours, user *types.Config) []string {
	var both []string
	paths := map[string]bool{}
	for _, p := range allPaths(ours) {
		paths[p] = true
	}
	for _, p := range allPaths(user) {
		if paths[p] {
			both = append(both, p+" is also set by the Site")
		}
	}
	both = append(both, userConflicts(ours.Passwd.Users, user.Passwd.Users)...)
	return append(both, unitConflicts(ours.Systemd.Units, user.Systemd.Units)...)
}

func userConflicts(ours, theirs []types.PasswdUser) (both []string) {
	users := map[string]types.PasswdUser{}
	for _, u := range ours {
		users[u.Name] = u
	}
	for _, u := range theirs {
		o, ok := users[u.Name]
		if !ok {
			continue
		}
		// Keys and groups are combined, but a user has only one of these values.
		if o.PasswordHash != nil && u.PasswordHash != nil {
			both = append(both, "user "+u.Name+" also has a passwordHash in the Site")
		}
		if o.Shell != nil && u.Shell != nil && *o.Shell != *u.Shell {
			both = append(both, "user "+u.Name+" also has a shell in the Site")
		}
		if u.ShouldExist != nil && !*u.ShouldExist {
			both = append(both, "user "+u.Name+" is removed, but the Site creates it")
		}
	}
	return both
}

func unitConflicts(ours, theirs []types.Unit) (both []string) {
	units := map[string]types.Unit{}
	for _, u := range ours {
		units[u.Name] = u
	}
	for _, u := range theirs {
		o, ok := units[u.Name]
		if !ok {
			continue
		}
		if o.Enabled != nil && (u.Enabled != nil && *o.Enabled != *u.Enabled || u.Mask != nil && *u.Mask) {
			both = append(both, "unit "+u.Name+" is disabled, but the Site needs it")
		}
		if o.Contents != nil && u.Contents != nil {
			both = append(both, "unit "+u.Name+" also has contents from the Site")
		}
		for _, d := range u.Dropins {
			if slices.ContainsFunc(o.Dropins, func(e types.Dropin) bool { return e.Name == d.Name }) {
				both = append(both, "drop-in "+d.Name+" of "+u.Name+" is also set by the Site")
			}
		}
	}
	return both
}

func allPaths(cfg *types.Config) []string {
	var paths []string
	for _, f := range cfg.Storage.Files {
		paths = append(paths, f.Path)
	}
	for _, l := range cfg.Storage.Links {
		paths = append(paths, l.Path)
	}
	for _, d := range cfg.Storage.Directories {
		paths = append(paths, d.Path)
	}
	return paths
}
