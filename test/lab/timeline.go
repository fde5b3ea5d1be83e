package lab

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/template"
	"time"
)

// Event is an event on a machine, with the time since power-on.
type Event struct {
	At   time.Duration
	What string
}

// milestones are console lines that mark stages of a boot. Some may be missing, for example with a
// quiet kernel.
var milestones = []struct {
	line *regexp.Regexp
	what string
}{
	{regexp.MustCompile(`BdsDxe: starting Boot`), "firmware starts the loader"},
	{regexp.MustCompile(`EFI stub: `), "loader starts the kernel"},
	{regexp.MustCompile(`Linux version `), "kernel"},
	{regexp.MustCompile(`Welcome to `), "systemd"},
	{regexp.MustCompile(`edgebake: \[1(?:/\d+)?\] `), "first boot starts"},
	{regexp.MustCompile(`edgebake: up for .*\((.*)\)`), "since the kernel started: %s"},
	{FirstBootDone, "first boot is done"},
}

// FirstBootDone matches the last line that first boot prints.
var FirstBootDone = regexp.MustCompile(`edgebake: node \S+ is Ready`)

// WaitsForAPIServer matches the line that first boot prints on a node while there is no cluster.
var WaitsForAPIServer = regexp.MustCompile(`edgebake: .* waiting for an API server to answer`)

// phaseDone matches the line that first boot prints at the end of a phase.
var phaseDone = regexp.MustCompile(`edgebake: \[\d+(?:/\d+)?\] (\S+): (done in .*|as it should be)`)

// Events returns the milestones that the console has shown.
func (s *Serial) Events() []Event {
	var events []Event
	seen := map[string]bool{}
	add := func(at time.Duration, what string) {
		if !seen[what] {
			seen[what] = true
			events = append(events, Event{at, what})
		}
	}
	for _, l := range s.Lines(0) {
		for _, m := range milestones {
			if found := m.line.FindStringSubmatch(l.Text); len(found) > 1 {
				add(l.At, fmt.Sprintf(m.what, found[1]))
			} else if found != nil {
				add(l.At, m.what)
			}
		}
		if m := phaseDone.FindStringSubmatch(l.Text); m != nil {
			add(l.At, m[1]+": "+m[2])
		}
	}
	return events
}

// Note returns an event that was not seen on the console, with the current time.
func (s *Serial) Note(what string) Event { return Event{time.Since(s.start), what} }

// PrintTimeline prints events in order of time, with the time since power-on and since the previous
// event.
func PrintTimeline(w io.Writer, events []Event) {
	events = slices.SortedStableFunc(slices.Values(events), func(a, b Event) int { return cmp.Compare(a.At, b.At) })
	last := time.Duration(0)
	for _, e := range events {
		fmt.Fprintf(w, "  %7.1f s  %+6.1f  %s\n", e.At.Seconds(), (e.At - last).Seconds(), e.What)
		last = e.At
	}
}

// Evidence returns the last lines of every process and console of the lab, for a person who
// examines a failure later.
func (l *Lab) Evidence() string {
	var b strings.Builder
	for _, pattern := range []string{"*.log", "*.serial"} {
		files, err := filepath.Glob(filepath.Join(l.Dir, pattern))
		if err != nil {
			continue
		}
		for _, f := range files {
			fmt.Fprintf(&b, "==== %s\n%s\n", filepath.Base(f), tailFile(f, 4<<10))
		}
	}
	return b.String()
}

// Site is the configuration of a machine for one of the lab's clusters.
type Site struct {
	Cluster  *Cluster
	NodeName string
	// Address is the address with prefix length, for a network without DHCP; empty: DHCP.
	Address string
	Gateway string
	// Address2 is another address, of the other family.
	Address2 string
	Masters  []string // empty: all masters of the cluster
	Token    string   // empty: the cluster's token
	// NodeType and NodePool are those of an OpenYurt node; empty: a native node.
	NodeType, NodePool string
	// KubeletArgs are further flags for the node's kubelet, by name without dashes.
	KubeletArgs map[string]string
}

var siteYAML = template.Must(template.New("").Parse(`apiVersion: edgebake.io/v1alpha1
kind: Site
masters:
{{- range .Masters}}
  - "{{.}}"
{{- end}}
endpoint: {{.Endpoint}}
vip: "{{.VIP}}"
credentials:
  token: {{.Token}}
caCertHashes:
  - {{.Cluster.CAHash}}
nodeName: {{.NodeName}}
{{- if .NodeType}}
nodeType: {{.NodeType}}
nodePool: {{.NodePool}}
{{- end}}
labels:
  edgebake.test/lab: "yes"
{{- with .KubeletArgs}}
kubeletExtraArgs:
{{- range $name, $value := .}}
  {{$name}}: {{printf "%q" $value}}
{{- end}}
{{- end}}
{{- if .Address}}
network:
  interfaces:
    - name: e*
      addresses: ["{{.Address}}"{{with .Address2}}, "{{.}}"{{end}}]
      gateway: "{{.Gateway}}"
{{- end}}
`))

// YAML renders the Site document.
func (s Site) YAML() (string, error) {
	if len(s.Masters) == 0 {
		s.Masters = s.Cluster.Masters
	}
	if s.Token == "" {
		s.Token = s.Cluster.Token
	}
	var b strings.Builder
	err := siteYAML.Execute(&b, struct {
		Site
		Endpoint, VIP string
	}{s, Endpoint, s.Cluster.VIP()})
	return b.String(), err
}
