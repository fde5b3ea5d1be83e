package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// TestFlagsWithoutEffect: where a flag has no effect in the way that a command is
// used, the command says so and what to do, of all such flags at once, before it
// reads anything: who gives a new token must not get a machine with the old one.
func TestFlagsWithoutEffect(t *testing.T) {
	c := newCLI(t)
	for _, tc := range []struct {
		args string
		want []string
	}{
		{"stamp g.raw --slot paris.slot -o paris.raw --ignition no.ign --token-file no-token --identity no-key", []string{
			"--identity, --ignition and --token-file are for documents, and paris.slot is a slot, with its Site's token and Ignition config: ",
			"make the slot again: edgebake stamp g.raw INVENTORY --slots --output DIR"}},
		{"stamp g.raw --slot paris.slot --each --slots --token-file -", []string{"--each, --slots and --token-file are for documents, and paris.slot is a slot"}},
		{"stamp g.raw site.yaml --slot paris.slot --token-file t", []string{"give either site.yaml or --slot", "--token-file is for documents"}},
		{"stamp g.raw --each", []string{"requires an image and a Site or Inventory document", "--each requires a directory to write to: --output DIR"}},

		{"flash g.raw disk --site site.yaml --disk smallest --then reboot --reinstall --cache c", []string{"--cache, --disk, --reinstall and --then are for --installer STICK"}},
		{"flash g.raw --installer stick --log l --no-verify", []string{"--log and --no-verify are for disks, not for --installer"}},
		{"flash g.raw disk --token-file t --identity k --ignition i", []string{
			"--identity, --ignition and --token-file are for --site or --inventory, without which the image's slot stays as it is: name the document, e.g. --site site.yaml"}},
		{"flash g.raw --installer stick --token-file - --log l", []string{"--token-file is for --site or --inventory", "--log is for disks"}},
		{"installer g.raw --iso i.iso --token-file t", []string{"--token-file is for --site or --inventory"}},
		{"installer g.raw --netboot www --url http://10.0.0.1/ --ignition i", []string{"--ignition is for --site or --inventory"}},

		{"preflight site.yaml --offline --kubeconfig k --context x --ship-within 14d", []string{
			"--context, --kubeconfig and --ship-within are for questions to the cluster, and --offline asks none: leave --offline out"}},
		{"preflight site.yaml --context x", []string{"--context is for --kubeconfig FILE"}},
		{"cluster sites shops --inventory i.yaml --output out --birth 48h --absent m1 --continue-from m2 --restore s.db", []string{
			"--absent, --birth, --continue-from and --restore are for control-plane nodes, and an Inventory has none: leave --inventory out",
			"--output is for Sites, and --inventory writes one Inventory to the file that it names: choose one"}},
		{"init --cluster --join x", []string{"--join is for a machine of a cluster that lives, and --cluster for a new one: choose one"}},
	} {
		c.run(2, strings.Fields(tc.args)...)
		c.want(c.err, tc.want...)
		if n := strings.Count(c.err, "edgebake: "); n != strings.Count(c.err, "\n") || strings.Contains(c.err, "no such file") {
			t.Errorf("%s: %s", tc.args, c.err)
		}
	}
	if left := names(t, c.dir); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
	// A script's variable that is empty names nothing, and false is what they are
	// without the flag.
	c.run(1, "stamp", "g.raw", "site.yaml", "--slot", "", "--slots=false")
	c.want(c.err, "site.yaml: no such file")
	c.run(1, "flash", "g.raw", "disk", "--token-file", "", "--then", "", "--reinstall=false")
	c.want(c.err, "flashing disk: file does not exist")
}

// TestStampModes: no flag of stamp is without effect in all of its modes, and what
// a mode names is a flag.
func TestStampModes(t *testing.T) {
	stamp := newStamp(streams{In: strings.NewReader(""), Out: os.Stdout, Err: os.Stderr})
	var known []string
	for _, m := range stampModes() {
		for _, name := range m.flags {
			if stamp.Flags().Lookup(name) == nil {
				t.Errorf("mode %s: there is no flag --%s", m.name, name)
			}
		}
		known = append(known, m.flags...)
	}
	stamp.Flags().VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(known, f.Name) {
			t.Errorf("--%s has no effect in any mode", f.Name)
		}
	})
}
