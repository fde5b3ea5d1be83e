package worldtest

import (
	"fmt"
	"net/http"
)

// UpdateLease is the Lease for updates of control-plane nodes.
type UpdateLease struct {
	Holder  string
	version int
}

const leasesPath = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"

// leaseRoutes returns the handlers for that Lease.
func (c *Cluster) leaseRoutes() map[string]http.HandlerFunc {
	return map[string]http.HandlerFunc{
		"/apis/coordination.k8s.io/v1":             c.fixed(resources(resource{"leases", "Lease", true})),
		"POST " + leasesPath:                       c.createUpdateLease,
		"GET " + leasesPath + "/edgebake-update":   c.getUpdateLease,
		"PATCH " + leasesPath + "/edgebake-update": c.patchUpdateLease,
	}
}

func (c *Cluster) createUpdateLease(w http.ResponseWriter, _ *http.Request) {
	if c.UpdateLease != nil {
		reject(w, http.StatusConflict, "already exists")
		return
	}
	c.UpdateLease = &UpdateLease{version: 1}
	c.created(w)
}

func (c *Cluster) getUpdateLease(w http.ResponseWriter, r *http.Request) {
	if c.UpdateLease == nil {
		http.NotFound(w, r)
		return
	}
	spec := object{}
	if h := c.UpdateLease.Holder; h != "" {
		spec = object{"holderIdentity": h, "acquireTime": "2026-11-20T09:00:00.000000Z"}
	}
	c.answer(w, object{"metadata": object{"resourceVersion": fmt.Sprint(c.UpdateLease.version)}, "spec": spec})
	if c.LeaseRace != nil { // another client writes between this read and the caller's write
		race := c.LeaseRace
		c.LeaseRace = nil
		race(c.UpdateLease)
		c.UpdateLease.version++
	}
}

func (c *Cluster) patchUpdateLease(w http.ResponseWriter, r *http.Request) {
	var patch struct {
		Metadata struct{ ResourceVersion string }
		Spec     struct{ HolderIdentity, AcquireTime *string }
	}
	c.decode(r, &patch)
	l, s := c.UpdateLease, patch.Spec
	switch {
	case l == nil:
		http.NotFound(w, r)
		return
	case patch.Metadata.ResourceVersion != fmt.Sprint(l.version):
		reject(w, http.StatusConflict, "the object has been modified")
		return
	case (s.HolderIdentity == nil) != (s.AcquireTime == nil) || s.HolderIdentity != nil && *s.HolderIdentity == "":
		c.T.Errorf("the Lease must have both holder and acquireTime or neither: %+v", s)
	}
	if l.Holder = ""; s.HolderIdentity != nil {
		l.Holder = *s.HolderIdentity
	}
	l.version++
	c.answer(w, object{})
}
