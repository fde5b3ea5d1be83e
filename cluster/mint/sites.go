package mint

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/configs/yamltree"
)

func digest(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// NodeSite is the complete Site of one machine.
type NodeSite struct {
	Name string
	// Expires is when the Site's token expires. For a control-plane node it is the time until which
	// the Site may bootstrap the cluster; zero: it may not.
	Expires time.Time
	Site    *configs.Site
}

// opened is a minted directory whose contents have been read and checked.
type opened struct {
	dir     string
	record  *Record
	cluster *clusterdoc.File
	id      sealed.Identity
}

func open(dir string, id sealed.Identity, now time.Time) (*opened, error) {
	dir, err := realDir(dir)
	if err != nil {
		return nil, err
	}
	record, err := Load(dir)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(checkModes(dir, os.Geteuid()), complete(dir, record), record.checkClock(dir, now)); err != nil {
		return nil, err
	}
	text, err := readFile(dir, fileDocument, id)
	if err != nil {
		return nil, err
	}
	// If a run was interrupted by a power cut, the document may be newer than the record.
	if digest(text) != record.Document {
		return nil, fmt.Errorf("reading %s: %s is not the document that the last `edgebake cluster new` recorded: run `edgebake cluster new` again, with the current document", dir, fileDocument)
	}
	c, err := clusterdoc.Parse(fileDocument, text)
	if err != nil {
		return nil, err
	}
	return &opened{dir, record, c, id}, nil
}

// Sites returns the Sites of all workers of a directory. A worker's Site has the worker's own
// token, the CA's hash, the API servers and the VIP, but no key.
func Sites(dir string, id sealed.Identity, now time.Time) ([]NodeSite, error) {
	o, err := open(dir, id, now)
	if err != nil {
		return nil, err
	}
	var out []NodeSite
	var errs []error
	for i := range o.cluster.Nodes {
		n := &o.cluster.Nodes[i]
		site, err := nodeSite(o.dir, o.record, o.cluster.Cluster, n, id, now)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, *site)
	}
	return out, errors.Join(errs...)
}

func nodeSite(dir string, record *Record, c *clusterdoc.Cluster, n *clusterdoc.Node, id sealed.Identity, now time.Time) (*NodeSite, error) {
	for _, t := range record.Tokens {
		if t.Node != n.Name {
			continue
		}
		if !now.Before(t.Expires) {
			return nil, fmt.Errorf("writing the Site of %s: its token expired at %s; if the cluster runs, make one with `edgebake cluster token mint`; if it was never initialized, add --bootstrap TIME", n.Name, t.Expires.Format(time.RFC3339))
		}
		_, token, err := readToken(dir, t, id)
		if err != nil {
			return nil, fmt.Errorf("writing the Site of %s: %w", n.Name, err)
		}
		site := c.NodeSite(n, configs.NewSecret(token), record.CAHash)
		if probs := site.Validate(); len(probs) > 0 {
			return nil, fmt.Errorf("writing the Site of %s: %w", n.Name, probs)
		}
		return &NodeSite{n.Name, t.Expires, site}, nil
	}
	return nil, fmt.Errorf("writing the Site of %s: the node has no token; run `edgebake cluster new` again with the document that names the node", n.Name)
}

// readToken reads a node's token. text is the YAML of the token's Secret.
func readToken(dir string, t Token, id sealed.Identity) (text []byte, token string, err error) {
	if text, err = readFile(dir, tokenFile(t.Node), id); err != nil {
		return nil, "", err
	}
	var s tokenSecret
	if err := yamltree.Unmarshal(text, &s); err != nil {
		return nil, "", fmt.Errorf("%s is damaged: restore the directory from your copy of it", tokenFile(t.Node))
	}
	if s.StringData["token-id"] != t.ID {
		return nil, "", fmt.Errorf("%s is not the token that was minted (%s): restore the directory from your copy of it", tokenFile(t.Node), t.ID)
	}
	return text, t.ID + "." + s.StringData["token-secret"], nil
}

// checkClock rejects a directory that was made in the future: its CAs would not be valid yet, and
// the cluster could be bootstrapped for too long.
func (r *Record) checkClock(dir string, now time.Time) error {
	if now.Before(r.Created.Add(-skew)) {
		return fmt.Errorf("reading %s: it was minted at %s, but this computer's time is %s; correct the clock, or, if the clock was wrong when it was minted, mint into another directory",
			dir, r.Created.Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return nil
}

// workerHeader is the first line of the file of a worker's Site.
const workerHeader = "# The Site of node %s of cluster %s."

// headerNode returns the worker named in the header of a Site's file; "" if the file is not the
// Site of a worker of this cluster.
func headerNode(text []byte, cluster string) string {
	line, _, _ := bytes.Cut(text, []byte("\n"))
	before, after, _ := strings.Cut(fmt.Sprintf(workerHeader, "\x00", cluster), "\x00")
	name, begins := strings.CutPrefix(string(line), before)
	name, ends := strings.CutSuffix(name, after)
	if !begins || !ends {
		return ""
	}
	return name
}

// Header returns the comment at the top of a Site's file.
func (s *NodeSite) Header(cluster string) string {
	if s.Site.NodeType == configs.NodeControlPlane {
		effect := "With it the machine only joins an existing cluster."
		if from := s.Site.ControlPlane.ContinueFrom; from != "" {
			effect = "With it etcd continues with the data of " + from + "; all other nodes join it."
		} else if !s.Expires.IsZero() {
			effect = "Until " + s.Expires.Format(time.RFC3339) + " it may initialize the cluster, with an empty etcd."
		}
		return strings.Join([]string{
			"# The Site of control-plane node " + s.Name + " of cluster " + cluster + ".",
			"# It contains the cluster's keys: anyone who has it controls the cluster.",
			"# " + effect,
			"",
		}, "\n")
	}
	return strings.Join([]string{
		fmt.Sprintf(workerHeader, s.Name, cluster),
		"# It holds the node's join token, valid until " + s.Expires.Format(time.RFC3339) + ": keep it secret.",
		"",
	}, "\n")
}

// Inventory returns one Inventory with all workers' Sites. Each Site is for the machine that its
// match selects.
func Inventory(sites []NodeSite) ([]byte, error) {
	var errs []error
	var each, matches []*yaml.Node
	for _, s := range sites {
		if s.Site.Match.IsZero() {
			errs = append(errs, fmt.Errorf("writing the Inventory: node %s has no match: add one to its entry in the Cluster document (nodes)", s.Name))
			continue
		}
		site := *s.Site
		if site.SpreadSeconds == configs.DefaultSpread(len(sites)) {
			site.SpreadSeconds = 0 // already the Inventory's default
		}
		node := configs.SlotNode(&site)
		matches = append(matches, yamltree.Value(node, "match"))
		each = append(each, yamltree.Without(node, "apiVersion", "kind", "match"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if len(each) == 0 {
		return nil, errors.New("writing the Inventory: the Cluster has no nodes: add them to its document and run `edgebake cluster new` again")
	}
	defaults := takeCommon(each)
	for i, s := range sites {
		each[i].Content = append([]*yaml.Node{yamltree.String("name"), yamltree.String(s.Name), yamltree.String("match"), matches[i]}, each[i].Content...)
	}
	doc := &yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{
		yamltree.String("apiVersion"), yamltree.String(configs.APIVersion), yamltree.String("kind"), yamltree.String(configs.KindInventory),
		yamltree.String("defaults"), defaults, yamltree.String("sites"), {Kind: yaml.SequenceNode, Content: each},
	}}
	var b bytes.Buffer
	b.WriteString("# The workers' Sites of a cluster, with their join tokens: keep it secret.\n")
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(doc), enc.Close()); err != nil {
		return nil, fmt.Errorf("writing the Inventory: %w", err)
	}
	if _, err := configs.ParseInventory("inventory", b.Bytes()); err != nil {
		return nil, fmt.Errorf("writing the Inventory: %w", err)
	}
	return b.Bytes(), nil
}

// takeCommon moves the fields that are the same in all Sites into one mapping, except credentials
// and nodeName. The URLs in the field report differ; of report, it moves only the
// fields that are the same.
func takeCommon(each []*yaml.Node) *yaml.Node {
	common := &yaml.Node{Kind: yaml.MappingNode}
	for i := 0; i < len(each[0].Content); {
		key, value := each[0].Content[i], each[0].Content[i+1]
		same := key.Value != "credentials" && key.Value != "nodeName"
		inner := []*yaml.Node{value}
		for _, n := range each[1:] {
			same = same && sameField(n, key.Value, value)
			inner = append(inner, yamltree.Value(n, key.Value))
		}
		if !same {
			if key.Value == "report" && !slices.Contains(inner, nil) {
				if in := takeCommon(inner); len(in.Content) > 0 {
					common.Content = append(common.Content, key, in)
				}
			}
			i += 2
			continue
		}
		common.Content = append(common.Content, key, value)
		for _, n := range each {
			yamltree.Remove(n, key.Value)
		}
	}
	return common
}

func sameField(m *yaml.Node, key string, value *yaml.Node) bool {
	has := yamltree.Value(m, key)
	if has == nil {
		return false
	}
	a, errA := yaml.Marshal(has)
	b, errB := yaml.Marshal(value)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}
