package lab

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Labels of OpenYurt's nodes.
const (
	LabelEdgeWorker = "openyurt.io/is-edge-worker"
	LabelNodePool   = "apps.openyurt.io/nodepool"
)

// API versions of NodePools. Each release of yurthub uses one of them.
const (
	NodePools         = "v1beta2"
	NodePoolsBefore17 = "v1beta1"
)

// nodePoolCRD returns the parts of the real CRD that yurthub needs. yurthub lists and watches node
// pools, and of an edge pool it reads only fields that have defaults.
func nodePoolCRD(version string) map[string]any {
	return map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "nodepools.apps.openyurt.io"},
		"spec": map[string]any{
			"group": "apps.openyurt.io", "scope": "Cluster",
			"names": map[string]any{"kind": "NodePool", "listKind": "NodePoolList", "plural": "nodepools", "singular": "nodepool"},
			"versions": []any{map[string]any{
				"name": version, "served": true, "storage": true,
				"subresources": map[string]any{"status": map[string]any{}},
				"schema": map[string]any{"openAPIV3Schema": map[string]any{
					"type": "object", "x-kubernetes-preserve-unknown-fields": true,
				}},
			}},
		},
	}
}

// hubRole has the rights that docs/openyurt.md grants to every node: those rights in OpenYurt's
// yurthub chart that yurthub uses.
var hubRole = map[string]any{
	"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
	"metadata": map[string]any{"name": "yurt-hub"},
	"rules": []any{
		map[string]any{"apiGroups": []string{""}, "resources": []string{"configmaps"}, "verbs": []string{"get", "list", "watch"}},
		map[string]any{"apiGroups": []string{"apps.openyurt.io"}, "resources": []string{"nodepools"}, "verbs": []string{"list", "watch"}},
		map[string]any{"apiGroups": []string{"discovery.k8s.io"}, "resources": []string{"endpointslices"}, "verbs": []string{"list", "watch"}},
	},
}

var hubBinding = map[string]any{
	"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
	"metadata": map[string]any{"name": "yurt-hub"},
	"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "yurt-hub"},
	"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}},
}

const (
	crdPath     = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	rolesPath   = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
	bindingPath = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
	csrsPath    = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
)

// GrantHub gives nodes the rights that yurthub needs.
func (c *Cluster) GrantHub(ctx context.Context) error {
	if err := c.Create(ctx, rolesPath, hubRole); err != nil {
		return err
	}
	return c.Create(ctx, bindingPath, hubBinding)
}

// nodeRules imitates the rules of OpenYurt's webhook for Nodes' labels: a node's pool cannot be
// changed directly, and only nodes may change whether they are edge workers.
var nodeRules = map[string]any{
	"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
	"metadata": map[string]any{"name": "openyurt-nodes"},
	"spec": map[string]any{
		"failurePolicy": "Fail",
		"matchConstraints": map[string]any{"resourceRules": []any{map[string]any{
			"apiGroups": []string{""}, "apiVersions": []string{"v1"}, "resources": []string{"nodes"}, "operations": []string{"UPDATE"},
		}}},
		"variables": []any{
			labelVariable("wasPool", "oldObject", LabelNodePool), labelVariable("pool", "object", LabelNodePool),
			labelVariable("wasEdge", "oldObject", LabelEdgeWorker), labelVariable("edge", "object", LabelEdgeWorker),
		},
		"validations": []any{
			map[string]any{
				"expression": "variables.wasPool == '' || variables.pool == '' || variables.wasPool == variables.pool",
				"message":    LabelNodePool + " can only be added or removed",
			},
			map[string]any{
				"expression": "variables.wasEdge == variables.edge || request.userInfo.username.startsWith('system:node:')",
				"message":    LabelEdgeWorker + " can only be changed by nodes",
			},
		},
	},
}

func labelVariable(name, object, label string) map[string]any {
	labels := object + ".metadata.labels"
	return map[string]any{"name": name, "expression": fmt.Sprintf("has(%s) && '%s' in %s ? %s['%s'] : ''", labels, label, labels, labels, label)}
}

var nodeRulesBinding = map[string]any{
	"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
	"metadata": map[string]any{"name": "openyurt-nodes"},
	"spec":     map[string]any{"policyName": "openyurt-nodes", "validationActions": []string{"Deny"}},
}

// GuardNodes makes the API servers reject all changes that OpenYurt's webhook would reject.
func (c *Cluster) GuardNodes(ctx context.Context) error {
	const path = "/apis/admissionregistration.k8s.io/v1/"
	if err := c.Create(ctx, path+"validatingadmissionpolicies", nodeRules); err != nil {
		return err
	}
	return c.Create(ctx, path+"validatingadmissionpolicybindings", nodeRulesBinding)
}

// NodePool is a node pool of OpenYurt.
type NodePool struct {
	Name, Type string // Type is Edge or Cloud
}

// AddNodePools creates the kind NodePool, in this version only, and these pools.
func (c *Cluster) AddNodePools(ctx context.Context, version string, pools ...NodePool) error {
	if err := c.Create(ctx, crdPath, nodePoolCRD(version)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for _, pool := range pools {
		// The API server serves a new kind only after some time.
		err := c.lab.poll(ctx, "the kind NodePool", c.other, func(ctx context.Context) (bool, error) {
			err := c.Create(ctx, "/apis/apps.openyurt.io/"+version+"/nodepools", map[string]any{
				"apiVersion": "apps.openyurt.io/" + version, "kind": "NodePool",
				"metadata": map[string]any{"name": pool.Name}, "spec": map[string]any{"type": pool.Type},
			})
			return err == nil, err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Verdict is an Approver's decision about requests.
type Verdict string

// The verdicts. Hold leaves a request pending.
const (
	Approve Verdict = "approve"
	Deny    Verdict = "deny"
	Hold    Verdict = "hold"
)

// Approver imitates the certificate approver of OpenYurt's yurt-manager: it approves yurthub's
// requests, and no others. The controller manager does not approve them, so without an Approver no
// yurthub becomes ready.
type Approver struct {
	c    *Cluster
	stop context.CancelFunc
	done chan struct{}

	mu      sync.Mutex
	verdict Verdict
	judged  []Judged
}

// Judged is a request with an Approver's verdict.
type Judged struct {
	Name, Signer, User, CommonName string
	Verdict                        Verdict
}

// StartApprover runs an approver until the lab closes.
func (c *Cluster) StartApprover(v Verdict) *Approver {
	ctx, cancel := context.WithCancel(context.Background())
	a := &Approver{c: c, stop: cancel, done: make(chan struct{}), verdict: v}
	go a.run(ctx)
	c.lab.onClose(func() error { a.Stop(); return nil })
	return a
}

// Stop ends the approver.
func (a *Approver) Stop() { a.stop(); <-a.done }

// Set changes the verdict for later requests.
func (a *Approver) Set(v Verdict) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.verdict = v
}

// Judged returns the requests for which the approver has a verdict so far.
func (a *Approver) Judged() []Judged {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.judged)
}

func (a *Approver) run(ctx context.Context) {
	defer close(a.done)
	last := ""
	for {
		a.mu.Lock()
		v := a.verdict
		a.mu.Unlock()
		// Log each error only once, because tests stop and start masters.
		if err := a.judge(ctx, v); err != nil && ctx.Err() == nil && err.Error() != last {
			last = err.Error()
			a.c.lab.say("approver: %v", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}

// csr has the fields of a certificate request that judge reads.
type csr struct {
	Metadata struct{ Name string }
	Spec     struct {
		Request    []byte
		SignerName string
		Usages     []string
		Username   string
	}
	Status struct {
		Conditions []struct{ Type string }
	}
}

func (a *Approver) judge(ctx context.Context, v Verdict) error {
	if v == Hold {
		return nil
	}
	var list struct{ Items []json.RawMessage }
	if err := a.c.Get(ctx, csrsPath, &list); err != nil {
		return err
	}
	var errs []error
	for _, raw := range list.Items {
		var r csr
		if err := json.Unmarshal(raw, &r); err != nil {
			errs = append(errs, err)
			continue
		}
		if len(r.Status.Conditions) > 0 {
			continue
		}
		cn, ours := hubRequest(r.Spec.Request, r.Spec.SignerName, r.Spec.Usages)
		if !ours {
			continue
		}
		if err := a.decide(ctx, raw, r.Metadata.Name, v); err != nil {
			errs = append(errs, err)
			continue
		}
		a.mu.Lock()
		a.judged = append(a.judged, Judged{r.Metadata.Name, r.Spec.SignerName, r.Spec.Username, cn, v})
		a.mu.Unlock()
	}
	return errors.Join(errs...)
}

func (a *Approver) decide(ctx context.Context, raw json.RawMessage, name string, v Verdict) error {
	var whole map[string]any
	if err := json.Unmarshal(raw, &whole); err != nil {
		return err
	}
	condition := map[Verdict]string{Approve: "Approved", Deny: "Denied"}[v]
	whole["status"] = map[string]any{"conditions": []any{map[string]any{
		"type": condition, "status": "True", "reason": "Lab", "message": "by the lab's approver",
	}}}
	return a.c.do(ctx, http.MethodPut, csrsPath+"/"+name+"/approval", "application/json", whole, nil)
}

// hubRequest reports whether a request is one of the two that yurt-manager approves for yurthub:
// for its client certificate (only in token mode) or for its server certificate. As in yurt-manager
// 1.7.0, the usages must be exactly those below, and no other organizations may occur.
func hubRequest(request []byte, signer string, usages []string) (commonName string, ours bool) {
	block, _ := pem.Decode(request)
	if block == nil {
		return "", false
	}
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil || !strings.HasPrefix(r.Subject.CommonName, "system:node:") {
		return "", false
	}
	orgs := r.Subject.Organization
	purpose := ""
	switch signer {
	case "kubernetes.io/kube-apiserver-client":
		purpose = "client auth"
		for _, o := range orgs {
			if o != "openyurt:yurthub" && o != "system:nodes" && !strings.HasPrefix(o, "openyurt:tenant:") {
				return "", false
			}
		}
		ours = len(orgs) >= 2
	case "kubernetes.io/kubelet-serving":
		purpose = "server auth"
		ours = len(orgs) == 1 && orgs[0] == "system:nodes" && len(r.DNSNames)+len(r.IPAddresses) > 0
	}
	want := []string{"digital signature", "key encipherment", purpose}
	usages = slices.Sorted(slices.Values(usages))
	slices.Sort(want)
	return r.Subject.CommonName, ours && slices.Equal(slices.Compact(usages), want)
}

// managerRole has the rights that yurt-manager's chart grants to its approver, which has its own
// service account.
var managerRole = map[string]any{
	"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
	"metadata": map[string]any{"name": managerAccount},
	"rules": []any{
		map[string]any{"apiGroups": []string{"certificates.k8s.io"}, "resources": []string{"certificatesigningrequests"}, "verbs": []string{"get", "list", "watch"}},
		map[string]any{"apiGroups": []string{"certificates.k8s.io"}, "resources": []string{"certificatesigningrequests/approval"}, "verbs": []string{"update"}},
		map[string]any{"apiGroups": []string{"certificates.k8s.io"}, "resources": []string{"signers"}, "verbs": []string{"approve"},
			"resourceNames": []string{"kubernetes.io/kube-apiserver-client", "kubernetes.io/kubelet-serving"}},
	},
}

var managerBinding = map[string]any{
	"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
	"metadata": map[string]any{"name": managerAccount},
	"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": managerAccount},
	"subjects": []any{map[string]any{"kind": "ServiceAccount", "namespace": "kube-system", "name": managerAccount}},
}

const managerAccount = "yurt-manager-csr-approver-controller"

// StartYurtManager runs a real yurt-manager, with only its certificate approver enabled, in place
// of an Approver. CI has no yurt-manager.
func (c *Cluster) StartYurtManager(ctx context.Context, program string) (*Process, error) {
	if err := c.Create(ctx, rolesPath, managerRole); err != nil {
		return nil, err
	}
	if err := c.Create(ctx, bindingPath, managerBinding); err != nil {
		return nil, err
	}
	p, err := c.start("yurt-manager", program, "--controllers=csrapprover", "--disable-independent-webhooks=*",
		"--leader-elect=false", "--kubeconfig="+c.Kubeconfig)
	if err != nil {
		return nil, err
	}
	c.other = append(c.other, p)
	return p, nil
}

// auditPolicy logs only the creation of Nodes.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Request
  verbs: [create]
  resources:
  - {group: "", resources: [nodes]}
- level: None
`

// AuditLog returns the path of the nth API server's audit log.
func (c *Cluster) AuditLog(n int) string {
	return filepath.Join(c.dir, fmt.Sprintf("audit%d.json", n+1))
}

// auditArgs makes the nth API server log every creation of a Node, or the requests that the
// tuning's policy selects.
func (c *Cluster) auditArgs(n int) ([]string, error) {
	// Use one policy file per API server, because an API server that starts must not read a partly
	// written file.
	policy := filepath.Join(c.dir, fmt.Sprintf("audit-policy%d.yaml", n+1))
	if err := os.WriteFile(policy, []byte(cmp.Or(c.tuning.AuditPolicy, auditPolicy)), 0o600); err != nil {
		return nil, fmt.Errorf("writing the audit policy: %w", err)
	}
	// Keep one log file: by default it is rotated at 100 MB, and readers would miss the earlier
	// part.
	return []string{"--audit-policy-file", policy, "--audit-log-path", c.AuditLog(n), "--audit-log-maxsize=100000"}, nil
}

// NodePost is one request to create a Node, as an API server logged it.
type NodePost struct {
	At           time.Time
	Master       int // index of the API server in Masters
	User, Client string
	Name         string
	Labels       map[string]string
	Code         int // HTTP status of the response
}

// NodePosts returns all requests to create a Node, earliest first.
func (c *Cluster) NodePosts() ([]NodePost, error) {
	var posts []NodePost
	for n := range c.hosts {
		b, err := os.ReadFile(c.AuditLog(n))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading the audit log of API server %d: %w", n+1, err)
		}
		some, err := nodePosts(b, n)
		if err != nil {
			return nil, fmt.Errorf("reading the audit log of API server %d: %w", n+1, err)
		}
		posts = append(posts, some...)
	}
	slices.SortFunc(posts, func(a, b NodePost) int { return a.At.Compare(b.At) })
	return posts, nil
}

func nodePosts(log []byte, master int) ([]NodePost, error) {
	var posts []NodePost
	in := bufio.NewScanner(bytes.NewReader(log))
	in.Buffer(nil, 4<<20)
	for in.Scan() {
		var e struct {
			RequestReceivedTimestamp time.Time
			User                     struct{ Username string }
			UserAgent                string
			ObjectRef                struct{ Subresource string }
			RequestObject            struct {
				Metadata struct {
					Name   string
					Labels map[string]string
				}
			}
			ResponseStatus struct{ Code int }
		}
		if err := json.Unmarshal(in.Bytes(), &e); err != nil {
			return nil, err
		}
		if e.ObjectRef.Subresource != "" {
			continue
		}
		m := e.RequestObject.Metadata
		posts = append(posts, NodePost{e.RequestReceivedTimestamp, master, e.User.Username, e.UserAgent, m.Name, m.Labels, e.ResponseStatus.Code})
	}
	return posts, in.Err()
}

// SetLink plugs in or unplugs the machine's network cable. Without it, the guest's card has no
// carrier. The state survives Reset, but not a new On.
func (vm *VM) SetLink(ctx context.Context, up bool) error {
	return vm.commandWith(ctx, "set_link", map[string]any{"name": "net0", "up": up})
}
