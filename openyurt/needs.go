package openyurt

// NeedKind says what is needed, and so how to look for it.
type NeedKind int

const (
	NeedCRD      NeedKind = iota // Resource is defined in the cluster
	NeedRight                    // system:nodes may do what Rule says
	NeedApprover                 // Manager runs, and approves certificates
	NeedPool                     // the node's own pool is there, of its type
)

// Need is one thing that yurthub needs of a cluster, and what to do where it is
// missing.
type Need struct {
	Kind     NeedKind
	Resource Resource
	Rule     Rule
	// Path is where a node finds out by itself whether it has the right.
	Path string
	Fix  string
	// Awaited: yurthub is not ready without it, so whoever waits for yurthub looks
	// for it.
	Awaited bool
}

// Needs are all of them. Whoever looks at a cluster goes through this list:
// `edgebake preflight`, `edgebake cluster prepare` and `verify`, and first boot
// while it waits for yurthub.
func (h Hub) Needs() []Need {
	pools := h.pools()
	all := []Need{{Kind: NeedCRD, Resource: pools, Fix: InstallManager}}
	source, listed := h.PoolSource()
	for _, n := range []Need{
		{Resource: Resource{Kind: "ConfigMap"}, Rule: Rule{"", []string{"configmaps"}, []string{"get", "list", "watch"}}, Path: h.SettingsPath(), Awaited: true},
		{Resource: pools, Rule: listRule(pools), Path: pools.Path(), Awaited: listed && source == pools},
		// For kube-proxy, in the node's name.
		{Resource: Resource{Kind: "EndpointSlice"}, Rule: Rule{"discovery.k8s.io", []string{"endpointslices"}, []string{"list", "watch"}}, Path: "/apis/discovery.k8s.io/v1/endpointslices"},
	} {
		n.Kind, n.Fix = NeedRight, GrantHubRole
		all = append(all, n)
	}
	if listed && source != pools { // HubRole does not have it
		all = append(all, Need{Kind: NeedRight, Resource: source, Rule: listRule(source), Path: source.Path(), Awaited: true,
			Fix: "OpenYurt's charts do not grant it: give system:nodes list and watch of " + source.plural() + "." + Group + ", or take " + bucketsFlag + " out of yurthub's arguments"})
	}
	return append(all, Need{Kind: NeedApprover, Fix: InstallManager, Awaited: true},
		Need{Kind: NeedPool, Resource: pools, Fix: "make it, or choose one that exists (kubectl get " + pools.plural() + ")", Awaited: true})
}

// Rule is one of RBAC's.
type Rule struct {
	Group            string
	Resources, Verbs []string
}

func listRule(r Resource) Rule { return Rule{Group, []string{r.plural()}, []string{"list", "watch"}} }

// HubRules are the rules of HubRole: what yurthub asks for with its node's rights.
func HubRules() []Rule {
	var all []Rule
	for _, n := range (Hub{}).Needs() {
		if n.Kind == NeedRight {
			all = append(all, n.Rule)
		}
	}
	return all
}
