package openyurt

// NeedKind is the kind of a Need. It determines how to check the Need.
type NeedKind int

const (
	NeedCRD      NeedKind = iota // Resource is defined in the cluster
	NeedRight                    // the group system:nodes has the right in Rule
	NeedApprover                 // Manager runs, and approves yurthub's certificates
	NeedPool                     // the node's own pool exists, and has the right type
)

// Need is one requirement of yurthub in a cluster, with the fix if it is missing.
type Need struct {
	Kind     NeedKind
	Resource Resource
	Rule     Rule
	// Path is the API path with which a node can check whether it has the right.
	Path string
	Fix  string
	// Awaited is set if yurthub does not become ready without it. First boot checks it while it
	// waits for yurthub.
	Awaited bool
}

// Needs returns all requirements. Every check of a cluster uses this list: `edgebake preflight`,
// `edgebake cluster prepare` and `verify`, and first boot while it waits for yurthub.
func (h Hub) Needs() []Need {
	pools := h.pools()
	all := []Need{{Kind: NeedCRD, Resource: pools, Fix: InstallManager}}
	source, listed := h.PoolSource()
	for _, n := range []Need{
		{Resource: Resource{Kind: "ConfigMap"}, Rule: Rule{"", []string{"configmaps"}, []string{"get", "list", "watch"}}, Path: h.SettingsPath(), Awaited: true},
		{Resource: pools, Rule: listRule(pools), Path: pools.Path(), Awaited: listed && source == pools},
		// kube-proxy needs this, and uses the node's rights.
		{Resource: Resource{Kind: "EndpointSlice"}, Rule: Rule{"discovery.k8s.io", []string{"endpointslices"}, []string{"list", "watch"}}, Path: "/apis/discovery.k8s.io/v1/endpointslices"},
	} {
		n.Kind, n.Fix = NeedRight, GrantHubRole
		all = append(all, n)
	}
	if listed && source != pools { // HubRole does not grant this right
		all = append(all, Need{Kind: NeedRight, Resource: source, Rule: listRule(source), Path: source.Path(), Awaited: true,
			Fix: "OpenYurt's charts do not grant it: give system:nodes list and watch of " + source.plural() + "." + Group + ", or take " + bucketsFlag + " out of yurthub's arguments"})
	}
	return append(all, Need{Kind: NeedApprover, Fix: InstallManager, Awaited: true},
		Need{Kind: NeedPool, Resource: pools, Fix: "make it, or choose one that exists (kubectl get " + pools.plural() + ")", Awaited: true})
}

// Rule is a rule of RBAC.
type Rule struct {
	Group            string
	Resources, Verbs []string
}

func listRule(r Resource) Rule { return Rule{Group, []string{r.plural()}, []string{"list", "watch"}} }

// HubRules returns the rules of HubRole: the rights that yurthub needs from its node.
func HubRules() []Rule {
	var all []Rule
	for _, n := range (Hub{}).Needs() {
		if n.Kind == NeedRight {
			all = append(all, n.Rule)
		}
	}
	return all
}
