package ipvs

import (
	"context"
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

	"github.com/edgebake/edgebake/ipvs/files"
	"github.com/edgebake/edgebake/ipvs/probe"
	"github.com/edgebake/edgebake/ondisk"
)

// The cluster's own list of API servers is a ConfigMap that every node may read. Its key masters
// has one host:port per line; # starts a comment.
const (
	learnPath = "/api/v1/namespaces/kube-public/configmaps/edgebake-masters"
	learnKey  = "masters"
	// kubeletCert is the file with the node's client certificate and key.
	kubeletCert = KubeletPKI + "/kubelet-client-current.pem"
)

// KubeletPKI is the directory of kubelet's certificates.
const KubeletPKI = "/var/lib/kubelet/pki"

// parseList parses the value of the ConfigMap's key.
func parseList(text string) []string {
	var list []string
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		list = append(list, strings.Fields(line)...)
	}
	return list
}

// parseConfigMap returns the list of API servers from the ConfigMap in an API server's answer.
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

// loadLearned reads the list and addresses stored by an earlier process.
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
		g.list.dropped = true // the configuration has changed since the list was stored
		wake(g.list.learnNow)
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
		err = fmt.Errorf("version %d is not supported", doc.Version)
	}
	if err != nil {
		return ondisk.IPVSLearnedList{}, fmt.Errorf("reading %s: %w", d.learnedPath(), err)
	}
	return doc, nil
}

// storeLearned changes the entry of one virtual server in the file.
func (d *Daemon) storeLearned(vip netip.AddrPort, change func(*ondisk.IPVSLearnedVirtual)) error {
	if d.opt.StateDir == "" {
		return nil
	}
	d.learnMu.Lock()
	defer d.learnMu.Unlock()
	doc, _ := d.readLearned() // a file that cannot be read is replaced
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
		err = files.Replace(d.learnedPath(), append(data, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("storing learned addresses in %s: %w", d.learnedPath(), err)
	}
	return nil
}

// Limits for the ConfigMap and for DNS answers, so that an error in them does not make a node watch
// thousands of API servers.
const (
	maxLearned = 64
	maxPerName = 16
)

// parseLearned validates a learned list of API servers.
func parseLearned(vip netip.AddrPort, list []string) ([]Master, error) {
	if len(list) > maxLearned {
		return nil, fmt.Errorf("it lists %d API servers, more than %d", len(list), maxLearned)
	}
	return parseMasters(vip, list)
}

// learnRetry is the pause after the first failed read. It doubles with each further failure, up to
// Profile.Learn.
const learnRetry = time.Minute

// learner reads the cluster's list periodically.
func (g *group) learner(ctx context.Context) {
	wait := g.config().Profile.Retry // short, so that the list is read as soon as API servers are up
	retry := learnRetry
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.list.learnNow:
		case <-time.After(jitter(wait)):
		}
		subject := fmt.Sprintf("%s: the cluster's list of API servers", g.vip)
		// Drop the list here, not in update: a list read under the old configuration may be stored
		// after update has run.
		err := g.dropStored()
		g.d.logChange(fmt.Sprintf("%s: dropping the learned list", g.vip), err)
		if !g.config().Learn {
			g.d.forgetLogged(subject)
			wait = g.config().Profile.Learn
			if err != nil {
				wait = min(wait, learnRetry)
			}
			continue
		}
		err = g.learn(ctx)
		// Before the node has joined, or while no API server is up, the list cannot be read. That
		// is not an error to log.
		asked := !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errNobody)
		if asked {
			g.d.logChange(subject, err)
		}
		wait = g.config().Profile.Learn
		switch {
		case err == nil:
			retry = learnRetry
		case asked: // the failed read cost a connection, so the pause grows
			wait, retry = min(wait, retry), min(2*retry, wait)
		default:
			wait = min(wait, learnRetry)
		}
		if g.d.opt.LearnEvery > 0 {
			wait = g.d.opt.LearnEvery
		}
	}
}

// dropStored removes an outdated list from the disk. Otherwise the list would be used again if the
// old configuration came back.
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

// errNobody means that no API server is up, or that none can be verified yet.
var errNobody = errors.New("no API server is up and verified")

// learn reads the list once, and uses it if one of its API servers is up or
// answers a probe.
func (g *group) learn(ctx context.Context) error {
	cert, err := g.client()
	if err != nil {
		return fmt.Errorf("reading the node's certificate: %w", err)
	}
	source, name, configured := g.pickSource()
	if !source.IsValid() {
		return errNobody
	}
	from := g.bareTarget(source, name)
	if from.Roots == nil {
		return errNobody
	}
	from.Client = cert
	masters, err := g.readList(ctx, from)
	if err != nil {
		return err
	}
	news := g.compare(masters, configured)
	if news.same && news.stored {
		return nil
	}
	if !news.safe && !g.anyProves(ctx, masters) {
		return fmt.Errorf("none of the API servers that the cluster lists (%v) is up; keeping the previous list", masters)
	}
	// Store the list before using it, so that it survives a power cut. If the disk is full, the
	// list is used anyway, and stored after the next read.
	err = g.d.storeLearned(g.vip, func(l *ondisk.IPVSLearnedVirtual) { l.Configured, l.Masters = texts(configured), texts(masters) })
	if g.accept(masters, configured, !news.same, err == nil) {
		g.d.logf("%s: the cluster's list of API servers is now %v", g.vip, masters)
		wake(g.renew)
	}
	return err
}

// pickSource returns the API server from which to read the list, its name, and the configured list.
// It keeps the same API server while that is up, so that an error is logged once. If none is up,
// source is invalid. In that case, and without a CA, retryLearning triggers the next read.
func (g *group) pickSource() (source netip.AddrPort, name string, configured []Master) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if srv := g.apiServers[g.list.source]; srv == nil || srv.health.State != Up {
		g.list.source = netip.AddrPort{}
		for a, srv := range g.apiServers {
			if srv.health.State == Up {
				g.list.source = a
				break
			}
		}
	}
	srv := g.apiServers[g.list.source]
	if g.list.noSource = srv == nil || g.roots.Load() == nil; srv != nil {
		name = srv.name
	}
	return g.list.source, name, g.server.Masters
}

// retryLearning triggers a read of the list if the last one found no API server to read from. g.mu
// must be held.
func (g *group) retryLearning() {
	if g.list.noSource {
		g.list.noSource = false
		wake(g.list.learnNow)
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
		return nil, errors.New("there is no ConfigMap kube-public/edgebake-masters: create it, or turn learnMasters off; keeping the list")
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

// listChange compares a new list with the current one.
type listChange struct {
	same   bool // both lists are equal
	stored bool // the current one is on disk
	safe   bool // an API server of the new one is up
}

func (g *group) compare(masters, configured []Master) listChange {
	g.mu.Lock()
	defer g.mu.Unlock()
	present := g.list.learned
	if present == nil {
		present = configured
	}
	return listChange{same: slices.Equal(present, masters), stored: !g.list.unstored, safe: g.anyUp(masters)}
}

// accept records whether the list is on disk, and uses the list if it differs. It does nothing if
// the configuration has changed since the list was read. It reports whether the list is used from
// now on.
func (g *group) accept(masters, configured []Master, differs, stored bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list.unstored = !stored
	if !differs || !g.server.Learn || !slices.Equal(g.server.Masters, configured) {
		return false
	}
	g.list.learned = masters
	return true
}

// checkLearned sets allDown if all learned API servers have been down for allDownAfter, and reports
// whether allDown changed. lastUp is when one of them was last up. Configured API servers do not
// count: otherwise allDown would end as soon as one of them is up.
func (g *group) checkLearned(lastUp *time.Time, now time.Time) (changed bool) {
	if g.list.learned == nil || g.anyUp(g.list.learned) {
		*lastUp = now
	}
	was := g.list.allDown
	g.list.allDown = g.list.learned != nil && now.Sub(*lastUp) > allDownAfter
	return g.list.allDown != was
}

// anyUp reports whether one of the API servers is known to be up. g.mu must be
// held.
func (g *group) anyUp(masters []Master) bool {
	for _, m := range masters {
		for a, known := range g.apiServers {
			if known.health.State == Up && a.Port() == m.Port && (known.name == m.Host || a.Addr().String() == m.Host) {
				return true
			}
		}
	}
	return false
}

// anyProves probes API servers that have no watcher, and reports whether one of them is alive.
func (g *group) anyProves(ctx context.Context, masters []Master) bool {
	for _, m := range masters {
		a, ok := m.addr()
		if !ok {
			addrs, err := g.d.lookup(ctx, g.vip.Addr(), m.Host)
			if err != nil {
				continue
			}
			a = netip.AddrPortFrom(addrs[0], m.Port)
		}
		t := g.target(a, m.Host)
		if e, skew, err := fetch(ctx, t, 3*time.Second); err == nil && t.Probe.Judge(e, skew).Alive() {
			return true
		}
	}
	return false
}

// fetch makes one request over a new connection.
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
