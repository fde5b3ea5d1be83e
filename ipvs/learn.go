package ipvs

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
	"github.com/edgebake/edgebake/ondisk"
)

// The cluster's own list of API servers: a ConfigMap that every node may read.
// Its key masters holds host:port, one a line; # begins a comment.
const (
	learnPath = "/api/v1/namespaces/kube-public/configmaps/edgebake-masters"
	learnKey  = "masters"
	// kubeletCert is the node's own client certificate and key.
	kubeletCert = KubeletPKI + "/kubelet-client-current.pem"
)

// KubeletPKI is where kubelet keeps its certificates.
const KubeletPKI = "/var/lib/kubelet/pki"

// parseList reads the text of the ConfigMap's key.
func parseList(text string) []string {
	var list []string
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		list = append(list, strings.Fields(line)...)
	}
	return list
}

// parseConfigMap takes the list out of the API's answer.
func parseConfigMap(vip netip.AddrPort, body []byte) ([]Master, error) {
	var cm struct {
		Kind string            `json:"kind"`
		Data map[string]string `json:"data"`
	}
	if err := json.Unmarshal(body, &cm); err != nil {
		return nil, fmt.Errorf("it is not JSON: %w", err)
	}
	if cm.Kind != "ConfigMap" {
		return nil, fmt.Errorf("it is a %q, not a ConfigMap", cm.Kind)
	}
	text, ok := cm.Data[learnKey]
	if !ok {
		return nil, fmt.Errorf("it has no key %q", learnKey)
	}
	return parseLearned(vip, parseList(text))
}

func texts(masters []Master) []string {
	var s []string
	for _, m := range masters {
		s = append(s, m.String())
	}
	return s
}

// loadLearned reads what was learned in an earlier life.
func (g *group) loadLearned() {
	if g.d.opt.StateDir == "" {
		return
	}
	doc, err := g.d.readLearned()
	if err != nil {
		g.d.logf("%v; using the configured API servers", err)
		return
	}
	i := slices.IndexFunc(doc.Servers, func(s ondisk.IPVSLearnedVirtual) bool { return s.VIP == g.vip.String() })
	if i < 0 {
		return
	}
	s := doc.Servers[i]
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list.names = make(map[string][]netip.Addr)
	for name, addrs := range s.Names {
		if addrs = usable(g.vip.Addr(), addrs); len(addrs) > 0 {
			g.list.names[name] = addrs
		}
	}
	g.list.storedNames = maps.Clone(g.list.names)
	if len(s.Masters) == 0 {
		return
	}
	if !g.server.Learn || !slices.Equal(s.Configured, texts(g.server.Masters)) {
		g.list.dropped = true // the configuration changed while nobody looked
		poke(g.list.learnNow)
		return
	}
	masters, err := parseLearned(g.vip, s.Masters)
	if err != nil {
		g.d.logf("%s: the learned list is unusable, using the configured one: %v", g.vip, err)
		return
	}
	g.list.learned = masters
	g.d.logf("%s: using the API servers learned from the cluster: %v", g.vip, masters)
}

func (d *Daemon) learnedPath() string {
	return filepath.Join(d.opt.StateDir, filepath.Base(ondisk.IPVSLearned))
}

func (d *Daemon) readLearned() (ondisk.IPVSLearnedList, error) {
	var doc ondisk.IPVSLearnedList
	data, err := os.ReadFile(d.learnedPath())
	if errors.Is(err, fs.ErrNotExist) {
		return doc, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &doc)
	}
	if err == nil && doc.Version != ondisk.IPVSLearnedVersion {
		err = fmt.Errorf("version %d is not known", doc.Version)
	}
	if err != nil {
		return ondisk.IPVSLearnedList{}, fmt.Errorf("reading %s: %w", d.learnedPath(), err)
	}
	return doc, nil
}

// storeLearned changes what the file says of one virtual server.
func (d *Daemon) storeLearned(vip netip.AddrPort, change func(*ondisk.IPVSLearnedVirtual)) error {
	if d.opt.StateDir == "" {
		return nil
	}
	d.learnMu.Lock()
	defer d.learnMu.Unlock()
	doc, _ := d.readLearned() // an unreadable file is replaced
	doc.Version = ondisk.IPVSLearnedVersion
	i := slices.IndexFunc(doc.Servers, func(s ondisk.IPVSLearnedVirtual) bool { return s.VIP == vip.String() })
	if i < 0 {
		i = len(doc.Servers)
		doc.Servers = append(doc.Servers, ondisk.IPVSLearnedVirtual{VIP: vip.String()})
	}
	change(&doc.Servers[i])
	data, err := json.MarshalIndent(doc, "", "  ")
	if err == nil {
		err = os.MkdirAll(d.opt.StateDir, 0o700)
	}
	if err == nil {
		err = replaceFile(d.learnedPath(), append(data, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("storing what was learned in %s: %w", d.learnedPath(), err)
	}
	return nil
}

// Limits of what is learned: a slip in the ConfigMap or in a zone, or a
// hostile name server, cannot have a node watch thousands of API servers.
const (
	maxLearned = 64
	maxPerName = 16
)

// parseLearned checks a list of API servers that no person gave to this node.
func parseLearned(vip netip.AddrPort, list []string) ([]Master, error) {
	if len(list) > maxLearned {
		return nil, fmt.Errorf("it lists %d API servers, more than %d", len(list), maxLearned)
	}
	return parseMasters(vip, list)
}

// learner reads the cluster's list now and then.
func (g *group) learner(ctx context.Context) {
	wait := g.profile().Retry // soon after the start, when API servers are up
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.list.learnNow:
		case <-time.After(jitter(wait)):
		}
		subject := fmt.Sprintf("%s: the cluster's list of API servers", g.vip)
		// Here, where lists are stored: one that was being read when the
		// configuration changed is on the disk by now.
		err := g.dropStored()
		g.d.say(fmt.Sprintf("%s: dropping the learned list", g.vip), err)
		if !g.learns() {
			g.d.unsay(subject)
			wait = g.profile().Learn
			if err != nil {
				wait = min(wait, time.Minute)
			}
			continue
		}
		err = g.learn(ctx)
		// Before the node has joined, or while nobody is there to ask, nothing is
		// wrong with the list, and nothing that was is right.
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errNobody) {
			g.d.say(subject, err)
		}
		wait = g.profile().Learn
		if err != nil {
			wait = min(wait, time.Minute)
		}
		if g.d.opt.LearnEvery > 0 {
			wait = g.d.opt.LearnEvery
		}
	}
}

// dropStored removes a list from the disk that counts no more: with the same
// configuration as before, it would count again after the next boot.
func (g *group) dropStored() error {
	g.mu.Lock()
	dropped := g.list.dropped
	g.list.dropped = false
	g.mu.Unlock()
	if !dropped {
		return nil
	}
	doc, err := g.d.readLearned()
	if err == nil && !slices.ContainsFunc(doc.Servers, func(s ondisk.IPVSLearnedVirtual) bool { return s.VIP == g.vip.String() && len(s.Masters) > 0 }) {
		return nil
	}
	err = g.d.storeLearned(g.vip, func(l *ondisk.IPVSLearnedVirtual) { l.Configured, l.Masters = nil, nil })
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list.dropped = g.list.dropped || err != nil
	g.list.unstored = true
	return err
}

// errNobody means that nobody was asked: no API server is up, or none can be
// verified yet.
var errNobody = errors.New("no API server to ask is up and verified")

// learns reports whether the cluster's list is wanted.
func (g *group) learns() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.server.Learn
}

// learn reads the list once and takes it if it passes the guard.
func (g *group) learn(ctx context.Context) error {
	file := g.d.opt.ClientCert
	if file == "" {
		file = kubeletCert
	}
	cert, err := tls.LoadX509KeyPair(file, file)
	if err != nil {
		return fmt.Errorf("reading the node's certificate: %w", err)
	}
	from, configured := g.askTeacher()
	if !from.Addr.IsValid() || from.Roots == nil {
		return errNobody
	}
	from.Client = &cert
	masters, err := g.readList(ctx, from)
	if err != nil {
		return err
	}
	news := g.compare(masters, configured)
	if news.same && news.stored {
		return nil
	}
	if !news.safe && !g.provable(ctx, masters) {
		return fmt.Errorf("none of the API servers that the cluster lists (%v) answers as one; keeping the list", masters)
	}
	// First to the disk: whoever sees the new list served finds it after a power
	// cut too. A full disk does not keep it on the old API servers; it is
	// tried again with the next reading.
	err = g.d.storeLearned(g.vip, func(l *ondisk.IPVSLearnedVirtual) { l.Configured, l.Masters = texts(configured), texts(masters) })
	if g.take(masters, configured, !news.same, err == nil) {
		g.d.logf("%s: the cluster's list of API servers is now %v", g.vip, masters)
		poke(g.renew)
	}
	return err
}

// askTeacher picks the API server whose list is read, and returns the configured
// ones beside it. It stays the same one as long as it is up: a fault that all of
// them have is then said once. Without any that is up, the target has no address;
// without authorities it has no roots. Then the next reading is due once there are.
func (g *group) askTeacher() (from probe.Target, configured []Master) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m := g.members[g.list.teacher]; m == nil || m.health.State != Up {
		g.list.teacher = netip.AddrPort{}
		for a, m := range g.members {
			if m.health.State == Up {
				g.list.teacher = a
				break
			}
		}
	}
	if m := g.members[g.list.teacher]; m != nil {
		from = g.target(g.list.teacher, m.name)
	}
	g.list.unasked = from.Roots == nil
	return from, g.server.Masters
}

// askAgain has the cluster's list read now if nobody could be asked before. g.mu
// is held.
func (g *group) askAgain() {
	if g.list.unasked {
		g.list.unasked = false
		poke(g.list.learnNow)
	}
}

// readList reads the cluster's list from one API server.
func (g *group) readList(ctx context.Context, from probe.Target) ([]Master, error) {
	from.Probe = probe.Spec{Method: "GET", Path: learnPath}
	e, _, err := fetch(ctx, from, 20*time.Second)
	if err != nil {
		return nil, fmt.Errorf("reading %s from %s: %w", learnPath, from.Addr, err)
	}
	switch e.Status {
	case 200:
	case 404:
		return nil, errors.New("there is no ConfigMap kube-public/edgebake-masters: make it, or turn learnMasters off; keeping the list")
	default:
		return nil, fmt.Errorf("%s answered with status %d to %s; keeping the list", from.Addr, e.Status, learnPath)
	}
	if len(e.Body) >= probe.BodyLimitLong {
		return nil, fmt.Errorf("ConfigMap kube-public/edgebake-masters is larger than %d KiB; keeping the list", probe.BodyLimitLong>>10)
	}
	masters, err := parseConfigMap(g.vip, e.Body)
	if err != nil {
		return nil, fmt.Errorf("ConfigMap kube-public/edgebake-masters: %w; keeping the list", err)
	}
	return masters, nil
}

// news is what a list that was read means.
type news struct {
	same   bool // as the present one
	stored bool // the present one is on the disk
	safe   bool // one of its API servers is known to be up
}

func (g *group) compare(masters, configured []Master) news {
	g.mu.Lock()
	defer g.mu.Unlock()
	present := g.list.learned
	if present == nil {
		present = configured
	}
	return news{same: slices.Equal(present, masters), stored: !g.list.unstored, safe: g.anyUp(masters)}
}

// take notes whether the list is on the disk and, where it differs, has it kept
// from now on, unless the configuration changed meanwhile.
func (g *group) take(masters, configured []Master, differs, stored bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list.unstored = !stored
	if !differs || !g.server.Learn || !slices.Equal(g.server.Masters, configured) {
		return false
	}
	g.list.learned = masters
	return true
}

// anyUp reports whether one of the API servers is known to be up. g.mu is held.
func (g *group) anyUp(masters []Master) bool {
	for _, m := range masters {
		for a, known := range g.members {
			if known.health.State == Up && a.Port() == m.Port && (known.name == m.Host || a.Addr().String() == m.Host) {
				return true
			}
		}
	}
	return false
}

// provable dials API servers that are not watched yet and reports whether one
// of them proves to be an API server that is ready.
func (g *group) provable(ctx context.Context, masters []Master) bool {
	for _, m := range masters {
		a, ok := m.addr()
		if !ok {
			addrs, err := g.d.lookup(ctx, g.vip.Addr(), m.Host)
			if err != nil {
				continue
			}
			a = netip.AddrPortFrom(addrs[0], m.Port)
		}
		g.mu.Lock()
		t := g.target(a, m.Host)
		g.mu.Unlock()
		if e, skew, err := fetch(ctx, t, 3*time.Second); err == nil && t.Probe.Judge(e, skew).Alive() {
			return true
		}
	}
	return false
}

// fetch makes one request on a connection of its own.
func fetch(ctx context.Context, t probe.Target, timeout time.Duration) (probe.Event, probe.Skew, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	l, err := probe.Dial(ctx, t, probe.BodyLimitLong)
	if err != nil {
		return probe.Event{}, probe.Skew{}, err
	}
	defer l.Close()
	if err := l.Ask(); err != nil {
		return probe.Event{}, probe.Skew{}, err
	}
	for {
		select {
		case <-ctx.Done():
			return probe.Event{}, probe.Skew{}, ctx.Err()
		case e := <-l.Events:
			switch e.Kind {
			case probe.EventResponse:
				return e, l.Skew, nil
			case probe.EventClosed:
				return probe.Event{}, probe.Skew{}, fmt.Errorf("the connection broke: %w", e.Err)
			}
		}
	}
}
