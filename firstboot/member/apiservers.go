package member

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// A new list of API servers in a Site may be a mistake that nobody on site can correct. So the last
// verified list stays in use until an API server of the new list is verified.

const (
	// ProvenFile contains the last verified list, as a Proven.
	ProvenFile = ondisk.StateDir + "/masters.json"
	// ReportedFormer contains the last list that was reported as unverified. A reboot removes it.
	ReportedFormer = ondisk.RunMark + "former-masters"
)

// Proven is a list of API servers of which at least one has shown a certificate of the cluster's
// CA.
type Proven struct {
	Masters []string `json:"masters"`
	// CA contains the pins of that CA. If the current cluster's CA has none of them, the list
	// is ignored.
	CA []string `json:"ca"`
	// Learned lists the API servers that ipvscare had learned in addition to Masters before the
	// Site's list changed. ipvscare drops them at the change, although they may have replaced all
	// of Masters.
	Learned []string `json:"learned,omitempty"`
}

// former returns the API servers of the list, and those that ipvscare has learned in addition.
func (p *Proven) former(e *machine.Env) []string {
	all := slices.Clone(p.Masters)
	for _, m := range slices.Concat(p.Learned, learnedBeside(e, func(s ondisk.IPVSLearnedVirtual) bool { return slices.EqualFunc(s.Configured, p.Masters, sameMaster) })) {
		if !slices.ContainsFunc(all, func(other string) bool { return sameMaster(m, other) }) {
			all = append(all, m)
		}
	}
	return all
}

func readProven(e *machine.Env) (*Proven, bool) {
	p := new(Proven)
	if err := json.Unmarshal(e.Contents(ProvenFile), p); err != nil {
		return p, false
	}
	return p, slices.ContainsFunc(CAPins(e.Contents(ondisk.KubeCA)), func(pin string) bool { return slices.Contains(p.CA, pin) })
}

// FormerMasters returns the API servers that this member of the cluster still uses although its
// Site does not name them.
func FormerMasters(e *machine.Env, site *configs.Site) []string {
	p, ok := readProven(e)
	if !ok || slices.Equal(p.Masters, site.Masters) || !HasCredentials(e) {
		return nil
	}
	return slices.DeleteFunc(p.former(e), func(m string) bool {
		named := slices.ContainsFunc(site.Masters, func(s string) bool { return configs.PlainMaster(s) == configs.PlainMaster(m) })
		return named || !fitsVIP(site, m)
	})
}

// fitsVIP reports whether the Site's VIP can forward to an API server, which requires the same
// address family.
func fitsVIP(site *configs.Site, master string) bool {
	vip, err := netip.ParseAddr(site.VIP)
	if err != nil || site.IPVS.Disabled {
		return true
	}
	host, _, err := net.SplitHostPort(master)
	if err != nil {
		return false
	}
	addr, err := netip.ParseAddr(host)
	return err != nil || addr.Unmap().Is4() == vip.Is4() // a DNS name is resolved in the VIP's family
}

// configuredMasters returns ipvscare's list: the Site's API servers and, as long as they are
// needed, the former ones.
func configuredMasters(e *machine.Env, site *configs.Site) []string {
	return slices.Concat(site.Masters, FormerMasters(e, site))
}

// maxLearned is the maximum number of API servers that ipvscare learns.
const maxLearned = 64

// LearnedMasters returns the API servers that ipvscare has learned in addition to the configured
// ones. It ignores those learned with another configured list or in another cluster.
func LearnedMasters(e *machine.Env, site *configs.Site) []string {
	if site.IPVS.Disabled || !site.IPVS.LearnMasters || !HasCredentials(e) {
		return nil
	}
	configured := configuredMasters(e, site)
	learned := learnedBeside(e, func(s ondisk.IPVSLearnedVirtual) bool {
		return sameMaster(s.VIP, site.VIPHostPort()) && slices.EqualFunc(s.Configured, configured, sameMaster)
	})
	var out []string
	for _, m := range learned {
		known := func(other string) bool { return sameMaster(m, other) }
		if fitsVIP(site, m) && !slices.ContainsFunc(configured, known) && !slices.ContainsFunc(out, known) {
			out = append(out, m)
		}
	}
	return out
}

// learnedBeside returns the additional API servers that ipvscare has learned for the virtual
// servers for which like returns true.
func learnedBeside(e *machine.Env, like func(ondisk.IPVSLearnedVirtual) bool) []string {
	b := e.Contents(ondisk.IPVSLearned)
	if b == nil {
		return nil
	}
	var doc ondisk.IPVSLearnedList
	err := json.Unmarshal(b, &doc)
	if err == nil && doc.Version != ondisk.IPVSLearnedVersion {
		err = fmt.Errorf("version %d is not supported (this program supports %d)", doc.Version, ondisk.IPVSLearnedVersion)
	}
	if err != nil {
		e.Log.Warn("the list of API servers that ipvscare has learned is unusable", "file", ondisk.IPVSLearned, "error", err)
		return nil
	}
	var out []string
	for _, s := range doc.Servers {
		if len(s.Masters) > maxLearned || !like(s) {
			continue
		}
		for _, m := range s.Masters {
			if _, _, err := net.SplitHostPort(m); err == nil {
				out = append(out, m)
			}
		}
	}
	return out
}

// sameMaster compares two API servers ("host:port"), which may be spelled differently.
func sameMaster(a, b string) bool {
	x, errX := netip.ParseAddrPort(a)
	y, errY := netip.ParseAddrPort(b)
	if errX == nil && errY == nil {
		return x.Port() == y.Port() && x.Addr().Unmap() == y.Addr().Unmap()
	}
	return strings.EqualFold(a, b)
}

// MastersOf returns all API servers of the cluster, configured and learned.
func MastersOf(e *machine.Env, site *configs.Site) []string {
	return slices.Concat(configuredMasters(e, site), LearnedMasters(e, site))
}

// WithFormerMasters returns a copy of the Site whose masters are configuredMasters.
func WithFormerMasters(e *machine.Env, site *configs.Site) *configs.Site {
	s := *site
	s.Masters = configuredMasters(e, site)
	return &s
}

// SaveMasters records the Site's list as verified.
func SaveMasters(e *machine.Env, site *configs.Site, ca []byte) error {
	return writeProven(e, &Proven{Masters: site.Masters, CA: CAPins(ca)})
}

func writeProven(e *machine.Env, p *Proven) error {
	b, err := json.Marshal(p)
	if err == nil {
		_, err = e.Write(ProvenFile, b, machine.Mode(0o600))
	}
	if err != nil {
		return fmt.Errorf("recording the verified API servers: %w", err)
	}
	return nil
}

// saveLearned records the API servers that ipvscare has learned in addition to the former list,
// before ipvscare gets another list.
func saveLearned(e *machine.Env, site *configs.Site) error {
	if len(FormerMasters(e, site)) == 0 {
		return nil
	}
	p, _ := readProven(e)
	p.Learned = p.former(e)[len(p.Masters):]
	return writeProven(e, p)
}

// mastersProven reports whether the Site's list is verified: it is recorded, or one of its API
// servers proves its identity now.
func mastersProven(ctx context.Context, e *machine.Env, site *configs.Site) bool {
	if p, ok := readProven(e); ok && slices.Equal(p.Masters, site.Masters) {
		return true
	}
	return oneProves(ctx, e, site, e.Contents(ondisk.KubeCA))
}

func oneProves(ctx context.Context, e *machine.Env, site *configs.Site, ca []byte) bool {
	// A certificate with only the host's own name proves nothing: it may be a kubelet's serving
	// certificate, signed by the same CA.
	errs := CheckServerNames(ctx, e, site.Masters, ca, kubeapi.SharedName, site.Endpoint)
	return slices.Contains(errs, nil)
}

// MastersSaved reports whether SaveProvenMasters has nothing to do: the machine is not enrolled,
// the list is recorded, or it is unverified and either no former API server is in use or this was
// reported already.
func MastersSaved(ctx context.Context, e *machine.Env, site *configs.Site) bool {
	if Enrolled(e) != nil {
		return true
	}
	if p, ok := readProven(e); ok && slices.Equal(p.Masters, site.Masters) {
		return true
	}
	return !mastersProven(ctx, e, site) && (len(FormerMasters(e, site)) == 0 || e.Text(ReportedFormer) == strings.Join(site.Masters, ","))
}

// SaveProvenMasters records the Site's list once it is verified. Until then, it reports that the
// former API servers stay in use, if there are any.
func SaveProvenMasters(ctx context.Context, e *machine.Env, site *configs.Site) error {
	if err := saveLearned(e, site); err != nil {
		return err
	}
	if Enrolled(e) != nil {
		return nil
	}
	if mastersProven(ctx, e, site) {
		return SaveMasters(e, site, e.Contents(ondisk.KubeCA))
	}
	former := FormerMasters(e, site)
	if len(former) == 0 {
		return nil
	}
	line := fmt.Sprintf("no API server of the Site could be verified (%s): the previous ones stay in use too (%s); if masters in site.yaml is wrong, correct it",
		strings.Join(site.Masters, ", "), strings.Join(former, ", "))
	e.Log.Warn(line)
	e.Console(line)
	return e.WriteFile(ReportedFormer, []byte(strings.Join(site.Masters, ",")), machine.Mode(0o600))
}
