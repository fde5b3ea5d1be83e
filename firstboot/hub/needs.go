package hub

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/openyurt"
)

// If objects or rights are missing in the cluster, yurthub waits without reporting that. First boot
// checks for them, and reports the missing ones.

// csrList contains the fields of a list of CertificateSigningRequests that are used here.
type csrList struct {
	Metadata struct {
		Continue string `json:"continue"`
	} `json:"metadata"`
	Items []csr `json:"items"`
}

type csr struct {
	Metadata struct {
		Name              string `json:"name"`
		CreationTimestamp string `json:"creationTimestamp"`
	} `json:"metadata"`
	Spec struct {
		Username   string `json:"username"`
		SignerName string `json:"signerName"`
		Request    []byte `json:"request"`
	} `json:"spec"`
	Status struct {
		Conditions []struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		} `json:"conditions"`
	} `json:"status"`
}

// maxCSRPages limits the length of a list: yurthub sends a request every four minutes until one is
// approved, and the cluster keeps each for a day.
const maxCSRPages = 50

// listCSRs lists the certificate requests for a signer.
func listCSRs(ctx context.Context, c *kubeapi.Client, signer string) ([]csr, error) {
	path := "/apis/certificates.k8s.io/v1/certificatesigningrequests?limit=200&fieldSelector=" + url.QueryEscape("spec.signerName="+signer)
	var all []csr
	next := ""
	for range maxCSRPages {
		var page csrList
		if err := c.Get(ctx, path+next, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Items...)
		if page.Metadata.Continue == "" {
			break
		}
		next = "&continue=" + url.QueryEscape(page.Metadata.Continue)
	}
	return all, nil
}

// nodePool contains the field of a NodePool that is used here.
type nodePool struct {
	Spec struct {
		Type string `json:"type"` // Edge or Cloud
	} `json:"spec"`
}

// poolOf returns the Need for h's NodePool.
func poolOf(h hub) openyurt.Need {
	for _, n := range h.Needs() {
		if n.Kind == openyurt.NeedPool {
			return n
		}
	}
	return openyurt.Need{}
}

// poolFits checks with the node's own rights whether the node may be in its pool. If the pool cannot
// be read, it returns nil.
func poolFits(ctx context.Context, e *machine.Env, h hub) error {
	c, err := member.NodeClient(e)
	if err != nil {
		return nil // the node has no certificate yet
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var pools struct {
		Items []nodePool `json:"items"`
	}
	need := poolOf(h)
	if err := c.Get(ctx, need.Resource.Path()+"?fieldSelector="+url.QueryEscape("metadata.name="+h.Pool), &pools); err != nil {
		return nil // missingRight reports the cause
	}
	if len(pools.Items) == 0 {
		return run.Advise(fmt.Errorf("the cluster has no NodePool %s, and OpenYurt's webhook rejects a Node whose pool does not exist", h.Pool), need.Fix)
	}
	switch what, fix := openyurt.PoolProblem(pools.Items[0].Spec.Type, h.Cloud); {
	case what == "":
	case h.Cloud:
		return run.NeedsPerson(fmt.Errorf("NodePool %s %s", h.Pool, what), fix)
	default: // the node works anyway
		e.Note("NodePool %s %s: %s", h.Pool, what, fix)
	}
	return nil
}

// missingForHub checks with the node's own rights whether the cluster has everything that yurthub
// needs. It returns an error for each missing thing, or nil if none is known.
func missingForHub(ctx context.Context, e *machine.Env, h hub) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	if h.IsPod() && member.Enrolled(e) != nil {
		return missingIdentity(ctx, e, h) // other requests need a certificate
	}
	c, err := member.NodeClient(e)
	if err != nil {
		return err
	}
	approval := missingApproval(ctx, c, h)
	if errors.Is(approval, errNobodyAnswers) {
		return approval
	}
	var errs []error
	for _, n := range h.Needs() {
		switch {
		case !n.Awaited:
		case n.Kind == openyurt.NeedRight:
			errs = append(errs, missingRight(n, c.Get(ctx, n.Path+"?limit=1", nil), h.Namespace))
		case n.Kind == openyurt.NeedApprover:
			errs = append(errs, approval)
		case n.Kind == openyurt.NeedPool:
			errs = append(errs, poolFits(ctx, e, h))
		}
	}
	return errors.Join(errs...)
}

var errNobodyAnswers = errors.New("no API server answers the node")

// missingApproval returns an error if yurthub's request for its server certificate is not approved.
// kubelet's requests, with the same user name, do not count.
func missingApproval(ctx context.Context, c *kubeapi.Client, h hub) error {
	csrs, err := listCSRs(ctx, c, openyurt.ServerSigner)
	switch {
	case err == nil:
		return judgeCSRs(csrs, "server", openyurt.ServerSigner, func(r csr) bool {
			return r.Spec.Username == member.NodeUser+h.Node && slices.Contains(requestOf(r).DNSNames, openyurt.ServerName)
		})
	case kubeapi.Code(err) == 0:
		return run.Advise(fmt.Errorf("%w: %w", errNobodyAnswers, err), "check the network between this node and the API servers")
	}
	return nil
}

// missingRight returns an error if err, the result of a list request, shows that the node lacks a
// right or the cluster lacks a CRD.
func missingRight(n openyurt.Need, err error, namespace string) error {
	code, kind := kubeapi.Code(err), n.Resource.Kind
	if n.Resource.Version == "" { // a built-in kind, which always exists
		if code == 403 {
			return run.Advise(fmt.Errorf("nodes may not list %ss in %s, which yurthub needs", kind, namespace), n.Fix)
		}
		return nil
	}
	switch crd := n.Resource.CRD(); {
	case code == 403:
		return run.Advise(fmt.Errorf("nodes may not list %ss (%s), which yurthub needs", kind, crd), n.Fix)
	case code == 404:
		return run.Advise(fmt.Errorf("the cluster has no %s CRD (%s)", kind, crd), openyurt.InstallManager+"; other releases may not serve version "+n.Resource.Version)
	case code >= 500:
		return run.Advise(fmt.Errorf("the API server fails to list %ss (%s), which yurthub needs: %w", kind, crd, err),
			"check that "+openyurt.Manager+" runs: its webhook converts NodePools between versions")
	}
	return nil
}

// judgeCSRs returns an error if yurthub's latest request for a certificate of this kind is not
// approved. The error also mentions a denied earlier request, because yurthub soon sends another.
func judgeCSRs(csrs []csr, kind, signer string, mine func(csr) bool) error {
	var newest, denied csr
	for _, r := range csrs {
		if r.Spec.SignerName != signer || !mine(r) {
			continue
		}
		if !r.before(newest) {
			newest = r
		}
		if state, _ := r.state(); (state == "Denied" || state == "Failed") && !r.before(denied) {
			denied = r
		}
	}
	what := func(r csr) string {
		return fmt.Sprintf("yurthub's request for its %s certificate (CSR %s, signer %s)", kind, r.Metadata.Name, signer)
	}
	state, _ := newest.state()
	switch {
	case newest.Metadata.Name == "", state == "Approved":
		return nil
	case denied.Metadata.Name == "":
		return run.Advise(errors.New(what(newest)+" is not approved yet"),
			"start OpenYurt's csrapprover, or: kubectl certificate approve "+newest.Metadata.Name)
	}
	state, why := denied.state()
	if why != "" {
		why = ": " + machine.OneLine(errors.New(why))
	}
	err := fmt.Errorf("%s was %s%s", what(denied), strings.ToLower(state), why)
	if newest.Metadata.Name == denied.Metadata.Name {
		return run.Advise(err, "find out who denies it; yurthub sends another request, which must be approved")
	}
	return run.Advise(fmt.Errorf("%w; the next request (CSR %s) is not approved yet", err, newest.Metadata.Name),
		"find out who denied it, or: kubectl certificate approve "+newest.Metadata.Name)
}

// requestOf returns the certificate request in r, or an empty one if r has no valid request.
func requestOf(r csr) *x509.CertificateRequest {
	if block, _ := pem.Decode(r.Spec.Request); block != nil {
		if req, err := x509.ParseCertificateRequest(block.Bytes); err == nil {
			return req
		}
	}
	return &x509.CertificateRequest{}
}

// state returns the latest decision with its message, or "pending" if there is none.
func (r csr) state() (state, why string) {
	state = "pending"
	for _, cond := range r.Status.Conditions {
		state, why = cond.Type, cond.Message
	}
	return state, why
}

func (r csr) before(o csr) bool {
	return r.Metadata.CreationTimestamp < o.Metadata.CreationTimestamp
}
